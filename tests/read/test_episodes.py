"""Looking at episodes: fields chosen and missing, schemas that change, the past, tables, other processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archive
from archive import Ragged, Schema
from archive.base.errors import FieldError, NotFoundError, UsageError
from archive.index.episodes import COLUMNS
from tests.support.archives import fresh, identical, reopened
from tests.support.processes import FORKSERVER


def nested(n: int = 3) -> dict[str, Any]:
    return {
        "obs": {"image": np.zeros((n, 2), np.uint8), "state": np.ones(n)},
        "obs2": np.arange(n),
        "a/b": np.arange(n),
    }


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        (None, {"obs/image", "obs/state", "obs2", "a/b"}),
        ([], set()),
        ("obs", {"obs/image", "obs/state"}),
        (["obs/image"], {"obs/image"}),
        ([("obs", "state"), "obs2"], {"obs/state", "obs2"}),
        ([("obs",)], {"obs/image", "obs/state"}),
        ([("a/b",)], {"a/b"}),
        (["a/b", "obs/state"], {"a/b", "obs/state"}),
    ],
)
def test_fields_are_chosen_by_name_prefix_and_keys(fields: Any, want: set[str]) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(nested())
    got = reopened(arc).episodes[0].read(fields)
    assert {
        f"{k}/{n}" if isinstance(v, dict) else k for k, v in got.items() for n in (v if isinstance(v, dict) else [k])
    } == want


def test_only_what_is_chosen_is_fetched() -> None:
    arc = fresh()
    with arc.writer(compression=None) as w:
        w.add_episode(
            {"large": np.random.default_rng(0).integers(0, 256, (64, 4096), np.uint8), "small": np.arange(64)}
        )
    arc = reopened(arc)
    len(arc.episodes)
    before = arc.io_stats()
    arc.episodes[0].read("small")
    assert (arc.io_stats() - before).bytes_in < 30_000


def evolved() -> archive.Archive:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": np.zeros(2, np.float32)}, episode_id="old")
        w.add_episode(
            {"x": np.zeros(3, np.float32), "mask": np.ones((3, 2), np.int8), "word": ["a"] * 3}, episode_id="new"
        )
        w.add_episode({"x": np.zeros((4, 5))}, episode_id="other shape")
    return reopened(arc)


def test_a_later_field_is_an_error_where_it_lacks_or_as_told() -> None:
    arc = evolved()
    with pytest.raises(FieldError, match=r"no field 'mask' \(it has: x\).*missing='skip'"):
        arc.episodes.read(["mask"])
    with pytest.raises(FieldError, match="no field"):
        arc.episodes["old"].read("mask")
    old, new = (arc.episodes[name] for name in ("old", "new"))
    assert identical(old.read(["x", "mask"], missing="skip"), {"x": np.zeros(2, np.float32)})
    by_id = dict(zip([e.id for e in arc.episodes], arc.episodes.read(["mask", "word"], missing=7), strict=True))
    assert identical(by_id["old"]["mask"], np.full((2, 2), 7, np.int8))  # as other episodes of this read have it
    assert identical(by_id["new"]["mask"], new.read()["mask"])
    assert by_id["old"]["word"].tolist() == [7, 7]
    assert old.read("mask", missing=0.5)["mask"].tolist() == [0.5, 0.5]
    assert old.read([("deep", "mask")], 1, 2, missing=None)["deep"]["mask"].tolist() == [None]


@pytest.mark.parametrize("fill", [np.nan, 1.5, "x", 300, np.int64(300), [1, 2, 3]])
def test_a_stand_in_that_does_not_fit_is_refused(fill: Any) -> None:
    with pytest.raises(FieldError, match=r"missing=.* cannot stand in for field 'mask'"):
        evolved().episodes.filter(episode_id=["old", "new"]).read("mask", missing=fill)


def test_dtypes_and_shapes_may_change_between_episodes() -> None:
    got = {e.id: e.read("x")["x"] for e in evolved().episodes}
    assert {k: (v.dtype.str, v.shape) for k, v in got.items()} == {
        "old": ("<f4", (2,)), "new": ("<f4", (3,)), "other shape": ("<f8", (4, 5)),
    }  # fmt: skip


def test_fields_are_described_without_reading() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"t": "ragged", "o": "offset"}, json=["j"])) as w:
        w.append({"t": [np.zeros((1, 2))] * 2, "j": [1, 2], "o": np.zeros(3), "n": None, "d": {"e": {}}}, env_ids=0)
        w.commit()
        w.close_episodes()
    assert reopened(arc).episodes[0].fields == {
        "t": "<f8[2] ragged", "j": "json[] step", "o": "<f8[] offset", "n": "none", "d/e": "dict",
    }  # fmt: skip


def test_ragged_is_listed_or_flat() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": Ragged(np.arange(3), np.array([1, 2]))})
    episodes = reopened(arc).episodes
    assert isinstance(episodes.read(ragged="flat")[0]["x"], Ragged)
    assert [p.tolist() for p in episodes.read()[0]["x"]] == [[0], [1, 2]]
    with pytest.raises(FieldError, match="give 'list' or 'flat'"):
        episodes.read(ragged="no")


def test_time_travel() -> None:
    arc = fresh()
    numbers = []
    with arc.writer() as w:
        for n in range(3):
            w.add_episode({"x": np.arange(n + 1)}, episode_id=str(n))
            numbers.append(w.commit(message=f"number {n}").number)
    for n, number in enumerate(numbers):
        then = reopened(arc, commit=number)
        assert [e.id for e in then.episodes] == [str(i) for i in range(n + 1)]
        assert then.commits[-1].message == f"number {n}"
        with pytest.raises(UsageError, match=r"read only"):
            then.writer()
        with pytest.raises(UsageError, match=r"without commit="):
            then.refresh()
    assert len(reopened(arc, commit=0).episodes) == 0
    for number in (99, -1):
        with pytest.raises(NotFoundError, match=f"no commit {number}"):
            reopened(arc, commit=number)


def test_a_reader_follows_when_told() -> None:
    arc = fresh()
    reader = reopened(arc)
    old = reader.episodes
    with arc.writer() as w:
        w.add_episode({"x": np.zeros(2)})
    assert (len(reader.episodes), len(arc.episodes)) == (0, 1)
    assert len(reader.refresh().episodes) == 1
    assert len(old) == 0  # as it was


def test_table_and_pandas() -> None:
    arc = fresh()
    with arc.writer(session="s") as w:
        w.add_episode(
            {"reward": np.ones(2)}, metadata={"k": [1]}, model_weights_uuid="u", update_count=3, terminated=False
        )
        w.add_episode({"x": np.zeros(0)}, env_id=5, first=False)
    arc = reopened(arc)
    assert tuple(arc.episodes.table.column_names) == (*COLUMNS, "metadata.k")
    table = arc.episodes.to_pandas()
    assert list(table.columns) == [*COLUMNS, "metadata.k"]
    assert table.pop("metadata.k").fillna("").tolist() == ["[1]", ""]
    first = table[table["length"] == 2].iloc[0].to_dict()
    for name in ("episode_id", "created_at"):
        first.pop(name)
    assert first["env_id"] is None or np.isnan(first.pop("env_id"))
    assert list(first.pop("model_weights_uuids")) == ["u"]
    assert {k: v for k, v in first.items() if v is not None and v == v} == {
        "length": 2, "return": 2.0, "complete": True, "update_count_min": 3.0, "update_count_max": 3.0,
        "terminated": False, "rank": 0, "session": "s", "run": "main", "buffer": "replay", "metadata": '{"k":[1]}',
        "commit": 2,
    }  # fmt: skip
    assert arc.episodes.table["env_id"].to_pylist() in ([None, 5], [5, None])
    assert fresh().episodes.table.num_rows == len(fresh().episodes.to_pandas()) == 0
    assert tuple(fresh().episodes.table.column_names) == COLUMNS


def test_what_an_episode_tells() -> None:
    arc = fresh()
    with arc.writer(session="s") as w:
        w.append({"x": np.zeros(3), "reward": [1, 2, 3]}, env_ids=4, episode_ids="e", update_count=[7, 8, 8],
                 model_weights_uuid=["u", "v", "v"], metadata={"k": 1})  # fmt: skip
        w.commit()
        w.close_episodes(terminated=True, truncated=False, reason="done")
    e = reopened(arc).episodes["e"]
    assert (e.id, e.length, e.complete, e.total_reward) == ("e", 3, True, 6.0)
    assert (e.update_count, e.update_counts, e.model_weights_uuid, e.model_weights_uuids) == (
        8,
        (7, 9),
        "v",
        ["u", "v"],
    )
    assert (e.terminated, e.truncated, e.reason, e.metadata) == (True, False, "done", {"k": 1})
    assert (e.env_id, e.rank, e.session, e.buffer, e.commit, e.attributes) == (4, 0, "s", "replay", 3, {})
    assert e.created_at.tzinfo is not None
    assert repr(e) == "<Episode 'e' length=3 weights='v' update=8>"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = e.nothing
    assert repr(arc.episodes) == f"<1 episodes at {arc.url}, commit 3>"


def test_repr_of_an_incomplete_episode() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"x": np.zeros(1)}, env_ids=0, episode_ids="e")
    assert repr(arc.episodes[0]) == "<Episode 'e' length=1 incomplete weights=None update=None>"


def test_tensors() -> None:
    arc = fresh()
    import ml_dtypes

    nest = {
        "f": np.arange(3, dtype=">f4"), "b": np.ones(3, ml_dtypes.bfloat16), "s": ["a", "b", "c"],
        "t": [np.arange(2)] * 3, "when": np.zeros(3, "M8[s]"), "j": [1, None, "x"],
        "deep": {"none": None, "flag": np.array([True, False, True])},
    }  # fmt: skip
    with arc.writer(schema=Schema(json=["j"])) as w:
        w.add_episode(nest)
    got = reopened(arc).episodes[0].to_torch(start=1)
    assert (got["f"].tolist(), got["b"].dtype, got["deep"]["flag"].dtype) == ([1.0, 2.0], torch.bfloat16, torch.bool)
    assert [p.tolist() for p in got["t"]] == [[0, 1]] * 2
    assert (got["s"].tolist(), got["j"], got["deep"]["none"]) == (["b", "c"], [None, "x"], None)
    assert got["when"].dtype.kind == "M"  # torch has none


def read_elsewhere(arc: archive.Archive, episodes: archive.Episodes, episode: archive.Episode) -> dict[str, Any]:
    return {
        "ids": [e.id for e in arc.episodes],
        "all": episodes.read(),
        "one": episode.read(start=1),
        "repr": repr(episode),
    }


def test_archive_episodes_and_episode_pickle_to_another_process(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "arc"))
    with arc.writer() as w:
        for i in range(3):
            w.append({"x": np.arange(i, i + 4)}, env_ids=0, episode_ids=str(i), first=True)
            w.commit()
    chosen = arc.episodes.filter(where="env_id = 0")[1:]
    chosen.read()  # with what it keeps in memory
    args = (arc, chosen, chosen[0])
    want = read_elsewhere(*args)
    with FORKSERVER.Pool(1) as pool:
        assert identical(pool.apply(read_elsewhere, args), want)
    assert len(pickle.dumps(args[0])) < 20_000


def test_a_writer_does_not_pickle() -> None:
    with fresh().writer() as w, pytest.raises(UsageError, match="does not pickle"):
        pickle.dumps(w)
