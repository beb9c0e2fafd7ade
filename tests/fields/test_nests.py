"""What users hand in: nests of any kind, tensors of any kind; and nothing that they do to it afterwards matters."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

from archive import Ragged, Schema
from archive.base.errors import FieldError, UsageError
from tests.support.archives import fresh, identical, reopened, round_trip
from tests.support.sampling import examples

T = 3
LEAVES = st.sampled_from([np.arange(T), np.ones((T, 2), np.float32), np.zeros((T, 0)), None])
KEYS = st.text(max_size=4)
NESTS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=3), lambda n: st.dictionaries(KEYS, n | LEAVES, max_size=3), max_leaves=8
)


@settings(max_examples=examples(60), deadline=None)
@given(NESTS)
def test_any_nest_of_dicts_comes_back(nest: dict[str, Any]) -> None:
    assert identical(round_trip(nest), nest)


def test_empty_dicts_and_none_are_kept() -> None:
    nest = {"obs": np.arange(T), "info": {}, "extra": None, "deep": {"a": {}, "b": None, "c": {"d": {}}}}
    assert identical(round_trip(nest), nest)
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"a": {}, "b": None})
        w.add_episode({})
    first, second = reopened(arc).episodes
    assert (first.read(), second.read()) == ({"a": {}, "b": None}, {})
    assert (first.length, second.length) == (0, 0)


Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Inner:
    x: Any
    y: Any


class Model(pydantic.BaseModel, arbitrary_types_allowed=True):
    x: Any
    y: Any


class Leaf(namedtuple("Leaf", ["x"])):
    __slots__ = ()


@pytest.mark.parametrize("make", [Point, Inner, lambda x, y: Model(x=x, y=y),
                                  lambda x, y: MappingProxyType({"x": x, "y": y}),
                                  lambda x, y: OrderedDict(x=x, y=y)])  # fmt: skip
def test_records_of_every_kind_are_nests(make: Any) -> None:
    x, y = np.arange(T), {"z": np.ones((T, 2))}
    want = {"x": x, "y": y}
    assert identical(round_trip(make(x, y)), want)
    assert identical(round_trip({"steps": make(x, y), "leaf": Leaf(x)}), {"steps": want, "leaf": {"x": x}})


def test_tensordict_comes_back_with_what_is_no_tensor() -> None:
    nest = TensorDict(
        {
            "a": torch.arange(T),
            "next": {"obs": torch.ones(T, 2, dtype=torch.bfloat16)},
            "texts": NonTensorStack("x", "y", "z"),
            "same": NonTensorData("hello", batch_size=[T]),
        },
        batch_size=[T],
    )
    got = round_trip(nest)
    assert got["a"].tolist() == [0, 1, 2]
    assert got["next"]["obs"].dtype.name == "bfloat16"
    assert got["texts"].tolist() == ["x", "y", "z"]
    assert got["same"].tolist() == ["hello"] * 3


def test_tensordict_of_dicts_is_json() -> None:
    nest = TensorDict({"a": torch.arange(2), "info": NonTensorStack({"k": 1}, {"k": [2]})}, batch_size=[2])
    assert round_trip(nest, Schema(json=["info"]))["info"] == [{"k": 1}, {"k": [2]}]


@tensorclass
class Steps:
    a: torch.Tensor
    b: torch.Tensor


def test_tensorclass_and_nested_tensordict() -> None:
    steps = Steps(a=torch.arange(T), b=torch.ones(T, 2), batch_size=[T])  # type: ignore[call-arg]
    want = {"a": np.arange(T), "b": np.ones((T, 2), np.float32)}
    assert identical(round_trip(steps), want)
    assert identical(round_trip({"x": steps.to_tensordict()}), {"x": want})


TENSOR_DTYPES = [
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3 * width), np.uint8))
    tensor = bits.view(dtype)
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": tensor})
    back = reopened(arc).episodes[0].to_torch()["x"]
    assert back.dtype == dtype
    assert torch.equal(back.contiguous().view(torch.uint8), bits)


def test_tensors_with_strange_memory_come_back_as_they_look() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    conj = torch.tensor([1 + 2j, 3 - 4j]).conj()
    nest = {
        "transposed": base.t()[:2],
        "strided": base[::2, 1::3],
        "grad": base[:2].clone().requires_grad_(),
        "conj": conj,
        "negative": conj.imag,
        "expanded": torch.ones(1, 3).expand(2, 3),
        "bf16": base.bfloat16().t()[:2],
    }
    got = round_trip(nest)
    assert got["transposed"].tolist() == base.t()[:2].tolist()
    assert got["strided"].tolist() == base[::2, 1::3].tolist()
    assert got["grad"].tolist() == base[:2].tolist()
    assert got["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert got["negative"].tolist() == [-2.0, 4.0]
    assert got["expanded"].tolist() == [[1.0] * 3] * 2
    assert got["bf16"].astype(np.float32).tolist() == base.t()[:2].tolist()


@pytest.mark.parametrize(
    "bad",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
    ids=["sparse", "meta", "float4"],
)
def test_tensors_without_plain_values_are_refused(bad: torch.Tensor) -> None:
    arc = fresh()
    with arc.writer() as w, pytest.raises(FieldError, match="'deep/x'"):
        w.add_episode({"deep": {"x": bad}})


def test_lists_of_tensors() -> None:
    got = round_trip({
        "ragged": [torch.ones(2), torch.ones(0), torch.ones(1)],
        "scalars": [torch.tensor(1.0), torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)],
        "bf16": [torch.tensor(1.0, dtype=torch.bfloat16)] * 3,
    })  # fmt: skip
    assert [len(piece) for piece in got["ragged"]] == [2, 0, 1]
    assert got["scalars"].tolist() == [1.0, 2.0, 3.0]
    assert got["bf16"].dtype.name == "bfloat16"


def test_memory_order_and_views_do_not_matter() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    nest = {
        "fortran": np.asfortranarray(base),
        "reversed": base[::-1, ::-1],
        "every": base[:, ::2],
        "scalar": np.broadcast_to(7, 4),
    }
    assert identical(round_trip(nest), {name: np.ascontiguousarray(value) for name, value in nest.items()})
    matrix = np.arange(4).reshape(2, 2).view(np.matrix)  # a subclass whose rows are not like an array's
    assert identical(round_trip({"m": matrix}), {"m": np.arange(4).reshape(2, 2)})


def test_nothing_done_afterwards_changes_what_is_stored() -> None:
    arc = fresh()
    obs, words, info, metadata = np.arange(T), np.array(["a", "b", "c"], object), [{"k": [1]}, 2, 3], {"tags": ["x"]}
    tensor, pieces = torch.ones(T), [np.arange(2), np.arange(1), np.arange(0)]
    uuids, updates = ["u", "v", "w"], np.arange(T)
    nest = {"obs": obs, "words": words, "info": info, "t": tensor, "pieces": pieces}
    with arc.writer(schema=Schema(json=["info"])) as w:
        w.add_episode(nest, metadata=metadata, model_weights_uuid=uuids, update_count=updates)
        obs[:], words[:], tensor[:], updates[:] = 9, "z", 9, 9
        info[0]["k"].append(5)  # type: ignore[index]
        metadata["tags"].append("y")
        uuids[0], pieces[0][:] = "z", 9
        nest["obs"] = np.zeros(T)
    episode = reopened(arc).episodes[0]
    got = episode.read()
    assert got["obs"].tolist() == [0, 1, 2]
    assert got["words"].tolist() == ["a", "b", "c"]
    assert got["info"] == [{"k": [1]}, 2, 3]
    assert got["t"].tolist() == [1, 1, 1]
    assert [p.tolist() for p in got["pieces"]] == [[0, 1], [0], []]
    assert episode.metadata == {"tags": ["x"]}
    assert (episode.model_weights_uuids, episode.update_counts) == (["u", "v", "w"], (0, 3))


def test_nothing_done_to_appended_rows_or_their_positions_matters() -> None:
    arc = fresh()
    obs, envs, last, positions = np.arange(4), np.array([0, 1, 0, 1]), np.array([False] * 4), np.array([5, 0, 6, 1])
    with arc.writer() as w:
        got = w.append({"obs": obs}, env_ids=envs, last=last, positions=positions)
        assert got.tolist() == [5, 0, 6, 1]
        got %= 2  # the slot in a ring, say
        obs[:], envs[:], last[:], positions[:] = 9, 9, True, 9
        assert w.live.column("position").to_pylist() == [5, 0]
    assert [e.read()["obs"].tolist() for e in reopened(arc).episodes] == [[0, 2], [1, 3]]


def test_what_is_read_belongs_to_the_reader() -> None:
    arc = fresh()
    with arc.writer() as w:
        for _ in range(2):
            w.add_episode({"obs": np.zeros(T), "bytes": np.zeros(T, "S3"), "half": np.zeros(T, np.float16)})
    first, second = arc.episodes.read()
    for value in first.values():
        value[:] = 7  # writable, and nobody else's
    assert all(not value.any() for value in (second["obs"], second["half"]))
    assert not arc.episodes[0].read()["obs"].any()


@pytest.mark.parametrize(
    "bad", [None, 3, "text", [1, 2], np.zeros(3), torch.zeros(3), {1: np.zeros(3)}, {"a": {("b",): np.zeros(3)}}]
)
def test_what_is_no_nest_is_refused(bad: Any) -> None:
    arc = fresh()
    with arc.writer() as w, pytest.raises(FieldError, match=r"steps must be a nest|field names are strings"):
        w.add_episode(bad)


def test_step_counts_must_agree() -> None:
    arc = fresh()
    with arc.writer() as w, pytest.raises(FieldError, match=r"a: 3, b: 4.*offset"):
        w.add_episode({"a": np.zeros(3), "b": np.zeros(4)})


@pytest.mark.parametrize("bad", [["list"], 3, {"a": object()}, {"a": np.zeros(100_000)}])
def test_metadata_that_cannot_be_stored_is_refused(bad: Any) -> None:
    arc = fresh()
    with arc.writer() as w:
        with pytest.raises(UsageError, match="metadata"):
            w.add_episode({"a": np.zeros(3)}, metadata=bad)
        with pytest.raises(UsageError, match="metadata"):
            w.append({"a": np.zeros(3)}, metadata=bad)
    assert len(reopened(arc).episodes) == 0


def test_ragged_may_be_given_as_values_and_lengths() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": Ragged(np.arange(5), [2, 0, 3])})
        for bad in (Ragged(np.arange(5), [2, 4]), Ragged(np.arange(5), [-1, 6])):
            with pytest.raises(FieldError, match="lengths add up"):
                w.add_episode({"x": bad})
    assert [p.tolist() for p in arc.episodes[0].read()["x"]] == [[0, 1], [], [2, 3, 4]]
