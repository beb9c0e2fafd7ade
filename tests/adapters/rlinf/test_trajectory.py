"""The mapping of RLinf's Trajectory: any tree comes back to the bit, and what is not stored twice is not."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archive
from archive.adapters.rlinf import folders
from archive.adapters.rlinf import trajectory as trajectories
from archive.base.errors import IntegrityError
from archive.fields import trees
from archive.fields.schema import Schema
from tests.support.sampling import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
objects = pytest.importorskip("tests.support.rlinf_objects")
T, B = 4, 2

ODD: dict[str, dict[str, Any]] = {
    "absent, None and empty": {"rewards": torch.ones(T, B, 1), "actions": None, "curr_obs": {}, "next_obs": None},
    "no step at all": {"rewards": torch.zeros(0, B, 1), "dones": torch.zeros(1, B, 1)},
    "no tensor": {"max_episode_length": 3, "forward_inputs": {"task": "push"}},
    "nothing": {},
    "empty tensors": {"rewards": torch.zeros(T, B, 0), "versions": torch.zeros(0, 3), "actions": torch.zeros(T, 0)},
    "numbers": {
        "rewards": torch.ones(T, B), "forward_inputs": {"a": torch.tensor(2.5), "b": torch.tensor(1).bfloat16()},
    },
    "other rows": {
        "rewards": torch.ones(T, B), "prev_values": torch.ones(T + 1, B), "forward_inputs": {"x": torch.ones(3)},
    },
    "small floats": {"rewards": torch.ones(T, B).to(torch.float8_e5m2), "actions": torch.ones(T, B).to(torch.uint16)},
    "not tensors": {
        "rewards": torch.ones(T, B), "curr_obs": {"task": ["push", ("a", 1)], "n": np.arange(3), "r": 2**70},
        "forward_inputs": {"many": [torch.ones(2), torch.ones(3)], "by number": {1: torch.ones(2), "two": None}},
    },
    "odd names": {"rewards": torch.ones(T, B), "x/y.z": torch.ones(T, B), "": torch.ones(T), "%rest": torch.ones(T)},
    "odd scalars": {"rewards": torch.ones(T, B), "max_episode_length": torch.tensor(3), "model_weights_id": None},
    "not a number": {"rewards": torch.full((T, B), torch.nan), "actions": -torch.zeros(T, B)},
    "a view": {"rewards": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[:, :, ::2]},
}  # fmt: skip


def back(tree: Any, number: int | None = None, schema: Schema | None = None) -> tuple[dict[str, Any], archive.Episode]:
    """Through an archive."""
    arc = archive.create(f"memory://mapping-{np.random.default_rng().integers(2**60)}")
    with arc.writer(0, 1) as w:
        trajectories.to_steps(tree, number, schema=schema).add(w)
    ep = arc.episodes[0]
    return trajectories.from_steps(ep.read(), ep.metadata), ep


@pytest.mark.parametrize("name", ODD)
def test_odd_trees_come_back_to_the_bit(name: str) -> None:
    found, _ = back(ODD[name])
    objects.assert_same(ODD[name], found)


def test_a_whole_tree_and_what_is_known_of_it() -> None:
    tree = objects.tree(3, steps=5, envs=3, done_rows=1, update=77)
    found, ep = back(tree, 12)
    objects.assert_same(tree, found)
    assert list(found) == [key for key in (*trajectories.SCALARS, *trajectories.FIELDS) if key in tree]
    assert ep.metadata == {
        "trajectory_id": 12, "T": 5, "B": 3, "shape": [5, 3, 3], "max_episode_length": 50, "absent": [],
        "model_weights_id": "0b5aa3e2-0000-5000-8000-000000000003_77",
    }  # fmt: skip
    assert (ep.model_weights_uuid, ep.update_count) == ("0b5aa3e2-0000-5000-8000-000000000003", 77)
    assert (ep.complete, ep.length) == (True, 5)
    assert {name for name, text in ep.fields.items() if text.endswith("free")} == {"dones", "prev_values"}
    assert trajectories.index_entry(ep.metadata, 4) == {
        "num_samples": 15, "trajectory_id": 4, "max_episode_length": 50, "shape": (5, 3, 3),
        "model_weights_id": "0b5aa3e2-0000-5000-8000-000000000003_77",
    }  # fmt: skip


def test_an_object_an_ordered_dict_and_a_dict_are_the_same() -> None:
    tree = objects.tree(1)

    class Plain:
        def __init__(self) -> None:
            self.__dict__.update(tree)

    for given_as in (Plain(), OrderedDict(tree)):
        objects.assert_same(tree, back(given_as)[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", (None, None)), ("a-b_7", ("a-b", 7)), ("a_b", ("a_b", None)), ("a_b_007", ("a_b", 7)), ("_5", ("_5", None))],
)
def test_weights_of(text: str, expected: tuple[str | None, int | None]) -> None:
    assert trajectories.weights_of(text) == expected


def test_images_are_stored_once() -> None:
    images = torch.randint(0, 255, (65, 1, 64, 64, 3), dtype=torch.uint8)
    tree = {"rewards": torch.ones(64, 1), "curr_obs": {"i": images[:-1]}, "next_obs": {"i": images[1:]}}
    arc = archive.create("memory://mapping-once")
    before = arc.io_stats().bytes_out
    with arc.writer(0, 1) as w:
        trajectories.to_steps(tree).add(w)
    assert arc.io_stats().bytes_out - before < 1.1 * images.numel()
    ep = arc.episodes[0]
    objects.assert_same(tree, trajectories.from_steps(ep.read(), ep.metadata))


def test_what_the_writer_was_told_stays() -> None:
    told = Schema(env_id=["forward_inputs/env"], axes={"extra": "free", "dones": "step"})
    tree = {"rewards": torch.ones(T, B), "extra": torch.ones(9), "dones": torch.ones(T + 1, B)}
    tree["forward_inputs"] = {"env": torch.zeros(T, dtype=torch.int64)}
    made = trajectories.to_steps(tree, schema=told)
    assert made.schema.env_id == told.env_id
    assert made.schema.axes == {("extra",): "free", ("dones",): "free"}


def test_a_damaged_rest_is_an_error() -> None:
    _, ep = back(ODD["not tensors"])
    data = ep.read()
    data[trajectories.REST]["skeleton"] = np.array(["{"], object)
    with pytest.raises(IntegrityError, match="%rest"):
        trajectories.from_steps(data, ep.metadata)


DTYPES = st.sampled_from(
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
PLAIN = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just({}))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = [draw(st.sampled_from([T, T, T + 1, 1])), *draw(SHAPES)] if draw(st.booleans()) else draw(SHAPES)
    count = int(np.prod(shape))
    raw = draw(st.binary(min_size=16 * count, max_size=16 * count))
    values = torch.frombuffer(bytearray(raw or b"\0" * 16), dtype=torch.uint8)[: count * 16]
    dtype = draw(DTYPES)
    if dtype == torch.bool:
        return (values[:count] > 99).reshape(shape)
    return values.view(dtype)[:count].clone().reshape(shape)


NESTS = st.recursive(
    st.one_of(tensors(), PLAIN), lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
)
KEYS = st.sampled_from([*trajectories.FIELDS, *trajectories.SCALARS, "more"])


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(KEYS, NESTS, max_size=6))
def test_any_tree_comes_back(tree: dict[str, Any]) -> None:
    tree = {key: trees.unflatten(*trees.flatten(value)) for key, value in tree.items()}
    objects.assert_same(tree, back(tree)[0])


# -- pickles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_of_plain_values_is_read(protocol: int) -> None:
    tree = objects.tree(5) | {
        "curr_obs": {"n": np.arange(3), "s": np.float32(2), "t": ("a", 1.5, None), "d": torch.int8}
    }
    data = pickle.dumps(tree, protocol)
    objects.assert_same(tree, folders.load("trajectory_0_a.pkl", data, pickled=True))
    with pytest.raises(IntegrityError):
        folders.load("trajectory_0_a.pkl", data, pickled=False)


class Harmful:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


def test_a_pickle_with_anything_else_is_refused() -> None:
    data = pickle.dumps({"rewards": Harmful()})
    with pytest.raises(IntegrityError, match=r"it needs builtins\.setattr"):
        folders.load("trajectory_0_a.pkl", data, pickled=True)
    assert not Harmful.ran
