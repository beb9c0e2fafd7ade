"""Late fields: rows of steps that come after the fact, read like any; what was written before stays as it is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

import archive
from archive import tables
from archive.base.errors import FieldError, NotFoundError, UsageError
from archive.log import CommitLog, tablefiles
from archive.read import Gather
from tests.support.archives import by_hand, fresh, identical, reopened
from tests.support.backends import Backend

stores = pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
LENGTHS = {"e0": 3, "e1": 5, "e2": 7}


def episode(number: int, length: int) -> dict[str, Any]:
    values = np.arange(length, dtype=np.float32) + 100 * number
    return {"obs": {"image": np.stack([values, -values], 1)}, "reward": values, "text": [f"s{v}" for v in values]}


def filled(arc: archive.Archive) -> archive.Archive:
    """Three episodes, of which the second came in two segments."""
    with arc.writer() as w:
        w.add_episode(episode(0, 3), episode_id="e0")
        w.append(episode(1, 2), env_ids=0, first=True, episode_ids="e1")
        w.commit()
        w.append(_tail(episode(1, 5), 2), env_ids=0, last=True)
        w.commit()
        w.add_episode(episode(2, 7), episode_id="e2")
    return arc


def _tail(nest: dict[str, Any], start: int) -> dict[str, Any]:
    return {k: _tail(v, start) if isinstance(v, dict) else v[start:] for k, v in nest.items()}


def advantages(*names: str) -> dict[str, Any]:
    return {name: np.arange(LENGTHS[name], dtype=np.float32) / 7 + int(name[1]) for name in names or LENGTHS}


def objects(backend: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in backend.rglob("*") if path.is_file()}


@stores
@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_a_late_field_is_read_like_any_other(backend: Backend, layout: str) -> None:
    options = backend.storage_options
    arc = filled(archive.create(backend.url, layout=layout, storage_options=options))
    given = advantages()
    arc.add_fields({"advantage": given, "judge/score": {"e1": np.arange(5) > 2}}, provenance={"gamma": 0.9}, by="anna")
    for one in (arc, archive.open(backend.url, storage_options=options)):
        assert {ep.id: ep.length for ep in one.episodes} == LENGTHS
        for number, ep in enumerate(one.episodes):
            wanted = episode(number, ep.length) | {"advantage": given[ep.id]}
            wanted |= {"judge": {"score": np.arange(5) > 2}} if ep.id == "e1" else {}
            data = ep.read()
            assert data.pop("text").tolist() == wanted.pop("text")
            assert identical(data, wanted)
        assert identical(one.episodes.read(["advantage"]), [{"advantage": rows} for rows in given.values()])
        (part,) = one.episodes[1:2].read("judge/score")
        assert part["judge"]["score"].tolist() == [False, False, False, True, True]
        assert one.episodes["e1"].read(["advantage"], 1, 4)["advantage"].tolist() == given["e1"][1:4].tolist()
        assert len(one.episodes["e1"].read(["advantage"], 2, 2)["advantage"]) == 0
        assert one.episodes.fields["advantage"] == "<f4[] step"
        assert one.episodes["e0"].fields.keys() == {"obs/image", "reward", "text", "advantage"}


def test_what_was_written_stays_as_it_is(tmp_path: Path) -> None:
    arc = filled(archive.create(str(tmp_path)))
    before = objects(tmp_path)
    arc.add_fields({"advantage": advantages()}, provenance={"gamma": 0.9}, by="anna")
    after = objects(tmp_path)
    assert {path: after[path] for path in before} == before
    assert sorted(Path(path).parent.name for path in after.keys() - before.keys()) == [
        "000000", "manifest", "manifest", "shards"
    ]  # fmt: skip
    assert (arc.head.kind, arc.commits[-2].files("segments")) == ("late", arc.head.files("segments"))
    told = arc.late_fields.to_pylist()
    assert {(row["provenance"], row["by"], *row["fields"]) for row in told} == {('{"gamma":0.9}', "anna", "advantage")}
    assert sum(row["length"] for row in told) == 15
    assert archive.open(str(tmp_path), commit=arc.head.number - 1).episodes.fields.keys() == {
        "obs/image", "reward", "text"
    }  # fmt: skip


def test_episodes_without_it_are_read_as_missing_says() -> None:
    arc = filled(fresh())
    arc.add_fields({"advantage": advantages("e1")})
    eps = arc.episodes
    with pytest.raises(FieldError, match=r"an episode has no field 'advantage' \(it has: obs/image, reward, text\)"):
        eps.read(["advantage"])
    assert [sorted(data) for data in eps.read(["advantage", "reward"], missing="skip")] == [
        ["reward"], ["advantage", "reward"], ["reward"]
    ]  # fmt: skip
    assert [data["advantage"].tolist() for data in eps.read(["advantage"], missing=-1)][::2] == [[-1] * 3, [-1] * 7]
    assert ["advantage" in data for data in eps.read()] == [False, True, False]


def test_a_half_filled_episode_is_read_as_missing_says() -> None:
    arc = fresh()
    w = arc.writer()
    w.append(episode(0, 2), env_ids=0, first=True, episode_ids="e")
    w.commit()
    arc.refresh().add_fields({"advantage": {"e": np.array([1.5, 2.5])}})
    w.append(episode(0, 3), env_ids=0, last=True)
    w.close()
    eps = arc.refresh().episodes
    with pytest.raises(FieldError, match="'advantage' was added to some steps of episode 'e' only"):
        eps.read(["advantage"])
    assert eps.read(["advantage"], missing="skip") == [{}]
    assert eps.read(["advantage"], missing=0)[0]["advantage"].tolist() == [1.5, 2.5, 0, 0, 0]
    assert eps["e"].read(["advantage"], 0, 2)["advantage"].tolist() == [1.5, 2.5]
    assert sorted(eps.read()[0]) == ["obs", "reward", "text"]
    assert np.isnan(eps.read(missing=np.nan)[0]["advantage"]).tolist() == [False, False, True, True, True]


def test_the_newest_rows_count_also_over_those_of_the_steps() -> None:
    arc = filled(fresh())
    arc.add_fields({"reward": {"e1": np.full(5, 7, np.float32)}, "advantage": advantages()})
    arc.add_fields({"advantage": {"e1": np.zeros(5, np.float32)}})
    eps = reopened(arc).episodes
    assert [data["reward"].tolist() for data in eps.read(["reward"])] == [
        episode(0, 3)["reward"].tolist(), [7] * 5, episode(2, 7)["reward"].tolist()
    ]  # fmt: skip
    assert eps["e1"].read(["advantage"])["advantage"].tolist() == [0] * 5
    assert eps["e2"].read(["advantage"])["advantage"].tolist() == advantages()["e2"].tolist()
    arc.drop_fields(["reward", "advantage"])
    eps = reopened(arc).episodes
    assert eps["e1"].read(["reward"])["reward"].tolist() == episode(1, 5)["reward"].tolist()
    assert "advantage" not in eps.fields
    with pytest.raises(FieldError, match="no field 'advantage' was added"):
        arc.drop_fields(["advantage"])
    arc.add_fields({"advantage": advantages("e0")})
    assert sorted(arc.episodes["e0"].read()) == ["advantage", "obs", "reward", "text"]


def test_part_of_an_episode_may_have_newer_rows() -> None:
    arc = fresh()
    w = arc.writer()
    w.append(episode(0, 2), env_ids=0, first=True, episode_ids="e")
    w.commit()
    arc.refresh().add_fields({"reward": {"e": np.array([1, 2], np.float32)}})
    w.append(episode(0, 3), env_ids=0, last=True)
    w.close()
    eps = arc.refresh().episodes
    assert eps["e"].read(["reward"])["reward"].tolist() == [1, 2, 0, 1, 2]
    assert eps["e"].read()["reward"].tolist() == [1, 2, 0, 1, 2]
    assert eps["e"].read(["reward"], 1, 3)["reward"].tolist() == [2, 0]


@pytest.mark.parametrize(
    "rows",
    [
        np.arange(3, dtype=np.int8), np.zeros((3, 2, 2)), np.array([True, False, True]), np.array(["a", "bc", ""]),
        np.arange(3).astype(ml_dtypes.bfloat16), np.arange(3) * 1j, np.array([1, 2, 3], "M8[s]"), [1.0, 2.0, 3.0],
    ],
)  # fmt: skip
def test_rows_of_any_dtype(rows: Any) -> None:
    arc = filled(fresh())
    arc.add_fields({("odd", "a/b"): {"e0": rows}})
    found = reopened(arc).episodes["e0"].read()["odd"]["a/b"]
    wanted = np.asarray(rows)
    assert identical(found, wanted.astype(object) if wanted.dtype.kind == "U" else wanted)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"a": {"e0": np.zeros(3), "nobody": np.zeros(3)}}, NotFoundError, "'nobody'; nothing was added to any"),
        ({"a": {"e0": np.zeros(3), "e1": np.zeros(4)}}, FieldError, "episode 'e1' has 4 rows, the episode 5 steps"),
        ({"a": {"e0": 3.0}}, FieldError, "no step axis"),
        ({"obs": {"e0": np.zeros(3)}}, FieldError, "within one another"),
        ({"reward/x": {"e0": np.zeros(3)}}, FieldError, "within one another"),
        ({"a": {"e0": np.zeros(3)}, "a/b": {"e0": np.zeros(3)}}, FieldError, "within one another"),
        ({}, UsageError, "no columns were given"),
        ({"a": {}}, UsageError, "no columns were given"),
    ],
)
def test_what_cannot_be_added_is_refused_before_anything_is_written(
    tmp_path: Path, fields: Any, error: type[Exception], words: str
) -> None:
    arc = filled(archive.create(str(tmp_path)))
    before = objects(tmp_path)
    with pytest.raises(error, match=words):
        arc.add_fields(fields)
    assert objects(tmp_path) == before


def test_who_opened_at_a_commit_adds_nothing() -> None:
    arc = filled(fresh())
    with pytest.raises(UsageError, match="read only"):
        reopened(arc, commit=2).add_fields({"advantage": advantages()})


def test_late_fields_go_into_memory_of_the_callers_and_pickle() -> None:
    arc = filled(fresh())
    arc.add_fields({"advantage": advantages()})
    rows = np.zeros(15, np.float32)
    arc.episodes.read(["advantage", "reward"], out={"advantage": rows})
    assert identical(rows, np.concatenate([*advantages().values()]))
    again = pickle.loads(pickle.dumps(reopened(arc).episodes))
    assert [data["advantage"].tolist() for data in again.read()] == [a.tolist() for a in advantages().values()]


def test_streams_and_sizes_count_it() -> None:
    arc = filled(fresh())
    before = arc.episodes.sizes()
    arc.add_fields({"advantage": advantages("e1", "e2")})
    streamed = {ep.id: data.get("advantage") for ep, data in arc.episodes.stream(max_bytes=200)}
    assert streamed["e0"] is None
    assert all(identical(streamed[name], rows) for name, rows in advantages("e1", "e2").items())
    assert (arc.episodes.sizes() - before).tolist() == [0, 20, 28]
    assert arc.episodes.sizes(["advantage"]).tolist() == [0, 20, 28]


def test_batches_have_it() -> None:
    arc = filled(fresh())
    arc.add_fields({"advantage": advantages(), "reward": {"e1": np.full(5, 7, np.float32)}})
    gather = Gather(arc.episodes, ["advantage", "reward", "obs/image"])
    numbers, steps = np.array([0, 1, 1, 2, 2]), np.array([2, 0, 4, 6, 0])
    found = gather.rows(numbers, steps)
    assert found["advantage"].tolist() == [advantages()[f"e{n}"][s] for n, s in zip(numbers, steps, strict=True)]
    assert found["reward"].tolist() == [2, 7, 7, 206, 200]
    windows = gather.windows(np.array([1, 2]), np.array([1, 3]), 3)
    assert identical(windows["advantage"], np.stack([advantages()["e1"][1:4], advantages()["e2"][3:6]]))
    gather.close()


def test_batches_of_episodes_that_lack_it_are_as_missing_says() -> None:
    arc = filled(fresh())
    arc.add_fields({"advantage": advantages("e1")})
    numbers, steps = np.array([0, 1]), np.array([1, 3])
    with pytest.raises(FieldError, match="some of these episodes have no field 'advantage'"):
        Gather(arc.episodes, ["advantage"]).rows(numbers, steps)
    assert Gather(arc.episodes, ["advantage"], missing="skip").rows(numbers, steps) == {}
    found = Gather(arc.episodes, ["advantage"], missing=-1).rows(numbers, steps)["advantage"]
    assert found.tolist() == [-1, advantages()["e1"][3]]


def test_no_request_more_where_there_is_none() -> None:
    arc = filled(fresh())
    one = reopened(arc)
    one.episodes.read()
    assert one.head.late is None
    assert "late" not in one.snapshot.annotations._tables


def returns(data: dict[str, Any]) -> dict[str, Any]:
    """Rewards to go."""
    return {"advantage": np.cumsum(data["reward"][::-1])[::-1]}


@pytest.mark.parametrize("max_bytes", [1, 2**28])
def test_a_function_of_the_steps_makes_a_field(max_bytes: int) -> None:
    arc = filled(fresh())
    eps = arc.episodes
    assert eps.map(returns, fields=["reward"], adds=["advantage"], max_bytes=max_bytes, by="anna") is eps
    for one in (eps, reopened(arc).episodes, arc.refresh().episodes):
        wanted = [returns(data)["advantage"].tolist() for data in one.read(["reward"])]
        assert [data["advantage"].tolist() for data in one.read(["advantage"])] == wanted
    (told,) = {row["provenance"] for row in arc.late_fields.to_pylist()}
    assert told.startswith('{"function":"tests.read.test_late_fields.returns"')
    assert '"source":' in told
    arc.episodes.filter(where="length > 5").map(lambda data: {"n": data["reward"] * 0}, provenance="zeros")
    assert [sorted(data) for data in arc.refresh().episodes.read(["n"], missing="skip")] == [[], [], ["n"]]


def test_a_function_that_does_not_do_what_it_should_adds_nothing() -> None:
    arc = filled(fresh())
    with pytest.raises(FieldError, match=r"gave \['advantage'\] for episode 'e0'; .* of \['return'\]"):
        arc.episodes.map(returns, adds=["return"])
    with pytest.raises(FieldError, match="gave no dict"):
        arc.episodes.map(lambda data: data["reward"])
    with pytest.raises(FieldError, match="episode 'e0' has 2 rows, the episode 3 steps"):
        arc.episodes.map(lambda data: {"a": data["reward"][1:]})
    assert arc.head.number == reopened(arc).head.number


def test_rows_that_take_the_place_of_others_are_of_their_kind() -> None:
    arc = filled(fresh())
    with pytest.raises(FieldError, match=r"'reward' is <f4.. step in these episodes, and <f8.. step in the new rows"):
        arc.add_fields({"reward": {"e0": np.zeros(3)}})


def test_it_costs_its_own_bytes_and_a_twentieth(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path))
    episodes, length = 100, 1000
    with arc.writer() as w:
        for k in range(episodes):
            w.add_episode({"reward": np.zeros(length, np.float32)}, episode_id=f"e{k}")
    before = objects(tmp_path)
    rng = np.random.default_rng(0)  # what does not shrink
    arc.refresh().add_fields({"advantage": {f"e{k}": rng.random(length) for k in range(episodes)}})
    after = objects(tmp_path)
    added = sum(len(after[path]) for path in after.keys() - before.keys())
    assert {path: after[path] for path in before} == before
    assert added <= 1.05 * 8 * episodes * length


def test_other_peoples_tools_open_the_shard(tmp_path: Path) -> None:
    import zarr

    arc = filled(archive.create(str(tmp_path)))
    arc.add_fields({"advantage": advantages()})
    (row, *_) = arc.snapshot.annotations.late.to_pylist()
    group = zarr.open_group(zarr.storage.ZipStore(tmp_path / row["shard"], mode="r"), mode="r")
    rows = group["advantage"][row["start"] : row["start"] + row["length"]]
    assert identical(np.asarray(rows), advantages()["e0"])


def test_beside_a_running_writer(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path))
    w = arc.writer()
    w.add_episode(episode(0, 3), episode_id="e0")
    w.commit()
    archive.open(str(tmp_path)).add_fields({"advantage": advantages("e0")})
    w.add_episode(episode(1, 5), episode_id="e1")
    w.close()
    eps = archive.open(str(tmp_path)).episodes
    assert [sorted(data) for data in eps.read(["advantage", "reward"], missing="skip")] == [
        ["advantage", "reward"], ["reward"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("start", 100), ("position", -3), ("position", 2**62), ("length", -1), ("length", 0), ("fields", ["b"]),
        ("fields", ["../x"]), ("shard", None), ("start", None), ("schema", None), ("chunks", None), ("schema", "{}"),
        ("shard", "shards/00000000-s-00000.zip"),
    ],
)  # fmt: skip
def test_nonsense_in_the_table_is_the_librarys_error(column: str, value: Any) -> None:
    arc = filled(fresh())
    arc.add_fields({"advantage": advantages()})
    rows = [row | {column: value} for row in arc.snapshot.annotations.late.to_pylist()]
    spoilt = pa.Table.from_pylist(rows, schema=tables.schema("late"))
    ref = tablefiles.write(arc.storage, "s", "late", spoilt)
    CommitLog(arc.storage, arc.id, arc.head).commit("x", by_hand("late", late=(ref,)))
    with pytest.raises(archive.ArchiveError):
        reopened(arc).episodes.read()


def test_derived_fields_are_made_of_it() -> None:
    arc = filled(fresh())
    arc.add_fields({"reward": {"e2": np.ones(7, np.float32)}, "value": {"e2": np.arange(7, dtype=np.float32)}})
    derive = [archive.fields.derived.discounted_return(1.0), archive.fields.derived.frame_stack("value", 2)]
    found = arc.episodes["e2"].read(["reward"], 2, 5, derive=derive)
    assert found["discounted_return"].tolist() == [5, 4, 3]
    assert found["value_stack"].tolist() == [[1, 2], [2, 3], [3, 4]]


def test_datasets_and_samplers_have_it() -> None:
    torch = pytest.importorskip("torch")
    from archive.torch import EpisodeDataset, Sampler, StepDataset, WindowDataset

    arc = filled(fresh())
    arc.add_fields({"advantage": {name: np.arange(n, dtype=np.float32) + 10 for name, n in LENGTHS.items()}})
    fields = ["advantage", "reward"]
    for kind in (EpisodeDataset, StepDataset):
        for item in kind(arc.episodes, fields=fields):
            assert torch.equal(item["advantage"], item["reward"] % 100 + 10)
    for item in WindowDataset(arc.episodes, 2, fields=fields):
        assert torch.equal(item["advantage"], item["reward"] % 100 + 10)
    sampler = Sampler(arc.episodes, fields, batch_size=8)
    for _ in range(3):
        batch = sampler.sample(8)
        assert torch.equal(batch["advantage"], batch["reward"] % 100 + 10)
    sampler.close()
