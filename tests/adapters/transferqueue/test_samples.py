"""Samples as episodes and back: dtypes, shapes, texts and trees, and what is refused."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the adapter needs torch")

import torch

import archive
from archive.adapters.transferqueue import stored
from archive.base.errors import CorruptStateError, FieldError, IntegrityError, StateError, UpgradeError
from tests.support.transferqueue_systems import plain

WHERE = "sample 'a' of partition 'p'"
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (5,), (1, 1), (2, 0), (3, 4), (2, 3, 4)]


def through_an_archive(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    encoded = [stored.encode(i, one, where=WHERE) for i, one in enumerate(values)]
    with arc.writer() as w:
        for one in encoded:
            w.add_episode(one.fields, episode_id=one.episode_id, metadata=one.metadata, schema=one.schema)
    found = [arc.episodes[one.episode_id] for one in encoded]
    return [stored.decode(episode.read(), episode.metadata, where=WHERE) for episode in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype: Any) -> None:
    bits = torch.arange(512, dtype=torch.int32).remainder(2 if dtype is torch.bool else 100)
    values = [{f"x{shape}": bits[: int(np.prod(shape))].reshape(shape).to(dtype) for shape in SHAPES}]
    assert plain(through_an_archive(values)) == plain(values)


def test_tensors_of_any_strides_and_with_gradients() -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    made = torch.ones(3, requires_grad=True) * 2
    values = [
        {"t": whole.T, "every": whole[:, ::2], "one": whole[:1, 3:], "expanded": whole[0, :1].expand(4), "g": made}
    ]
    back = through_an_archive(values)
    assert plain(back) == plain([{name: value.detach() for name, value in values[0].items()}])
    assert all(value.flatten().view(torch.uint8).numel() for value in back[0].values())  # as TransferQueue sends them


@pytest.mark.parametrize(
    "value",
    [
        "", "caf\u00e9", "\ud800", None, True, 7, 2**80, float("nan"), float("-inf"), b"\x00\xff", [], {}, (1, (2, 3)),
        {"a": {"b": [1, None, "x"]}, 3: "of a number", "$tag": 1}, np.arange(6).reshape(2, 3), np.float32(1.5),
        {"pixel_values": torch.ones(5, 3), "grid": [torch.tensor(2), torch.zeros(0, dtype=torch.int16)]},
        [np.array(["a", "bc"]), np.datetime64("2020-01-01")],
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_other_values(value: Any) -> None:
    back = through_an_archive([{"v": value, "tokens": torch.arange(3)}])[0]["v"]
    assert type(back) is type(value)
    assert repr(plain(back)) == repr(plain(value))


def test_names_of_fields_are_any() -> None:
    values = [{"a/b": torch.ones(1), "": "empty", "a.b": torch.zeros(2), "index": torch.tensor(3), "\u00e9 \n": 1}]
    assert plain(through_an_archive(values)) == plain(values)


def test_a_sample_without_fields() -> None:
    assert through_an_archive([{}]) == [{}]


def test_kinds_may_differ_from_sample_to_sample() -> None:
    values = [{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}, {"x": "text"}, {"x": {"a": 1}}, {"x": torch.tensor(1)}, {}]
    assert plain(through_an_archive(values)) == plain(values)


def test_the_id_says_what_is_in_it() -> None:
    def of(values: dict[str, Any], index: int = 0) -> str:
        return stored.encode(index, values, where=WHERE).episode_id

    one = {"x": torch.ones(2), "t": "a", "d": {"m": torch.ones(2)}}
    assert of(one) == of({name: one[name] for name in reversed(one)})
    others = [
        of(one, 1), of(one | {"x": torch.ones(1, 2)}), of(one | {"x": torch.ones(2, dtype=torch.float64)}),
        of(one | {"t": "b"}), of(one | {"d": {"m": torch.zeros(2)}}), of(one | {"t": ["a"]}), of(one | {"u": "a"}),
        of(one | {"x": torch.ones(1)}), of({"x": torch.tensor(1.0)}), of({"x": torch.tensor([1.0])}), of({}), of({}, 1),
    ]  # fmt: skip
    assert len({of(one), *others}) == 1 + len(others)
    assert all(stored.is_ours(name) for name in others)


@pytest.mark.parametrize(
    "value",
    [object(), {"deep": [threading.Lock()]}, {1, 2}, torch.ones(2).to_sparse(), lambda: 1],
    ids=["object", "deep lock", "set", "sparse", "function"],
)
def test_what_would_take_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises((FieldError, StateError), match="field 'odd' of sample 'a' of partition 'p'"):
        stored.encode(0, {"fine": torch.ones(1), "odd": value}, where=WHERE)


def test_a_tag_is_json() -> None:
    assert stored.check_tag({"score": np.float32(0.5), "t": (1, 2)}, where=WHERE) == {"score": 0.5, "t": (1, 2)}
    with pytest.raises(StateError, match=r"tag of sample 'a' of partition 'p'\.model"):
        stored.check_tag({"model": object()}, where=WHERE)


def test_our_own_name_is_refused() -> None:
    with pytest.raises(FieldError, match="rename it"):
        stored.encode(0, {stored.SYSTEM: torch.ones(1)}, where=WHERE)


def test_what_is_no_sample() -> None:
    with pytest.raises(CorruptStateError, match="no sample"):
        stored.decode({"x": np.ones(1)}, {}, where=WHERE)
    with pytest.raises(UpgradeError, match="upgrade"):
        stored.decode({}, {stored.SYSTEM: {"format": 2, "kinds": {}}}, where=WHERE)
    with pytest.raises(CorruptStateError, match="kind 'pickle'"):
        stored.decode({"x": ["gASV"]}, {stored.SYSTEM: {"format": 1, "kinds": {"x": "pickle"}}}, where=WHERE)


@pytest.mark.parametrize("about", [{}, [1], {"format": "1", "kinds": {}}, {"format": 1, "kinds": {"gone": "tensor"}}])
def test_metadata_that_is_damaged_is_no_sample(about: Any) -> None:
    with pytest.raises(IntegrityError, match="no readable sample"):
        stored.decode({}, {stored.SYSTEM: about}, where=WHERE)
