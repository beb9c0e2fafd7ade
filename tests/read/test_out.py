"""Reading into memory of the caller's: the values are those of a plain read, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archive
import resharding
from archive import Schema
from archive.base.errors import FieldError, UsageError
from archive.read.spans import Spans
from archive.torch import ring
from tests.support.archives import fresh, identical, reopened

SCHEMA = Schema(axes={"obs": "offset", "tokens": "ragged", "goal": "free"}, next_of={"next": "x"}, env_id=["env"])
LENGTHS = (3, 1, 40, 7, 12)


def episode(steps: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, 6)).astype(np.float32)
    return {
        "x": x,
        "next": np.concatenate([x[1:], x[:1] + 1]),
        "obs": rng.integers(0, 9, (steps + 1, 2)),
        "nested": {"time": np.arange(steps).astype("M8[s]"), "flag": np.arange(steps) % 2 == 0},
        "brain": torch.arange(steps, dtype=torch.bfloat16),
        "env": np.full(steps, seed),
        "tokens": [np.arange(i % 3) for i in range(steps)],
        "name": np.array([f"n{i}" for i in range(steps)], object),
        "goal": np.arange(2.0),
    }


@pytest.fixture(scope="module", params=[None, "zstd:1", "gzip:1"])
def arc(request: pytest.FixtureRequest) -> archive.Archive:
    arc = fresh()
    with arc.writer(schema=SCHEMA, compression=request.param) as w:
        for seed, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, seed))
            if seed == 2:
                w.commit()
    return reopened(arc)


def memory(rows: int, extra: int = 0) -> dict[str, Any]:
    return {
        "x": np.empty((rows, 6), np.float32),
        "next": torch.empty((rows, 6)),
        "obs": np.empty((rows + extra, 2), np.int64),
        "nested": {"time": np.empty(rows, "M8[s]"), "flag": np.empty(rows, bool)},
        "brain": torch.empty(rows, dtype=torch.bfloat16),
    }


def test_all_steps_come_end_to_end(arc: archive.Archive) -> None:
    out = memory(sum(LENGTHS), len(LENGTHS))
    plain, got = arc.episodes.read(), arc.episodes.read(out=out)
    assert identical(got, plain)
    for name in ("x", "obs"):
        np.testing.assert_array_equal(out[name], np.concatenate([data[name] for data in plain]))
    np.testing.assert_array_equal(out["nested"]["time"], np.concatenate([data["nested"]["time"] for data in plain]))
    np.testing.assert_array_equal(out["next"].numpy(), np.concatenate([data["next"] for data in plain]))
    assert out["brain"].tolist() == [float(i) for n in LENGTHS for i in range(n)]
    assert np.shares_memory(got[2]["x"], out["x"])
    assert np.shares_memory(got[2]["next"], out["next"].numpy())


def test_one_episode_and_a_part_of_it(arc: archive.Archive) -> None:
    out = memory(25, 1)
    got = arc.episodes[2].read(start=10, stop=35, out=out)
    assert identical(got, arc.episodes[2].read(start=10, stop=35))
    np.testing.assert_array_equal(out["x"], got["x"])
    assert np.shares_memory(out["obs"], got["obs"])


def test_memory_that_is_not_contiguous(arc: archive.Archive) -> None:
    wide = np.zeros((sum(LENGTHS), 8), np.float32)
    arc.episodes.read(["x"], out={"x": wide[:, 1:7]})
    np.testing.assert_array_equal(wide[:, 1:7], np.concatenate([data["x"] for data in arc.episodes.read(["x"])]))
    assert not wide[:, [0, 7]].any()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"x": np.empty((sum(LENGTHS) - 1, 6), np.float32)}, "62 rows, the episodes have 63"),
        ({"x": np.empty((sum(LENGTHS), 5), np.float32)}, r"float32\[5\], the field float32\[6\]"),
        ({"x": np.empty((sum(LENGTHS), 6))}, r"float64\[6\], the field float32"),
        ({"y": np.empty(sum(LENGTHS))}, "'y'"),
        ({"tokens": np.empty(sum(LENGTHS), np.int64)}, "not rows of numbers"),
        ({"name": np.empty(sum(LENGTHS), object)}, "not rows of numbers"),
        ({"x": [0.0] * sum(LENGTHS)}, "no array"),
        ({"x": torch.empty((6, sum(LENGTHS))).T}, "not contiguous"),
        ({"x": np.broadcast_to(np.float32(0), (sum(LENGTHS), 6))}, "written to"),
    ],
)
def test_what_does_not_fit_is_refused(arc: archive.Archive, out: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        arc.episodes.read(out=out)


def test_derived_fields_are_not_read_into_memory_of_the_callers(arc: archive.Archive) -> None:
    with pytest.raises(UsageError, match="out="):
        arc.episodes.read(out=memory(1), derive="next_obs")
    with pytest.raises(UsageError, match="out="):
        arc.episodes[0].read(out=memory(1), derive="next_obs")


def test_spans_are_split_where_memory_is() -> None:
    whole = Spans(np.array([0, 2, 2, 3]), np.array([5, 6, 7]), np.array([0, 2, 1]), np.array([3, 4, 9]))
    split = whole.split(np.array([0, 2, 3, 6, 11, 13, 40]))
    assert split.offsets.tolist() == [0, 3, 3, 6]
    found = zip(split.rows.tolist(), split.lo.tolist(), split.hi.tolist(), strict=True)
    assert list(found) == [(5, 0, 2), (5, 2, 3), (6, 2, 4), (7, 1, 2), (7, 2, 7), (7, 7, 9)]


def test_a_ring_filled_in_place_is_one_filled_from_nests(tmp_path: Path) -> None:
    """Rows that go around the ring's end, ids that are renumbered, fields that follow others."""
    rng = np.random.default_rng(0)
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=Schema(env_id=["env"], next_of={"y": "x"}), compression=None) as w:
        for t in range(30):
            x = rng.random((4, 3))
            steps = {"x": x, "y": rng.random((4, 3)), "env": np.arange(4), "node": None}
            w.append(steps, env_ids=np.arange(4), last=(t + np.arange(4)) % 7 == 6)
        for env in range(4):
            w.evict(env, before=13)
        w.checkpoint(1).result()
    ck = archive.open(tmp_path / "a").checkpoints.latest
    assert ck is not None
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            share = resharding.plan(ck, world_size=world_size).share(rank)
            assert share.row_specs() is not None
            filled = ring.fill(share, num_envs=4, max_length=20)
            plain = ring.fill(_Nests(share), num_envs=4, max_length=20)
            for name in ("x", "y", "env"):
                assert torch.equal(filled.buffers[name], plain.buffers[name])
            assert filled.buffers["node"] is None


class _Nests:
    """A share that is read as nests."""

    def __init__(self, share: resharding.Share) -> None:
        self.layout = share.layout
        self.columns = share.columns
        self.next_positions = share.next_positions
        self.read = share.read
