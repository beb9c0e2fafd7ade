"""Datasets of Ray's become episodes by one commit or none, whatever becomes of tasks; what is left over is garbage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import archive.ray
from archive import DuplicateEpisodeError, FieldError, Schema, UsageError
from archive.testing import assert_whole
from tests.support import ray_rows
from tests.support.backends import make_backend

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LENGTHS = [5, 1, 7, 4, 9, 2, 6, 3]
FIELD = [[1.0], [2.0]]  # of two episodes
FIELDS = ["obs/image", "obs/pos", "reward", "done", "text", "info", "tokens", "state", "goal", "level"]


def dataset(names: list[str], blocks: int = 2) -> Any:
    """Episodes of these ids, of one to three steps, in some blocks."""
    import ray.data

    items = [{"episode_id": name, "x": np.arange(1 + i % 3)} for i, name in enumerate(names)]
    return ray.data.from_items(items, override_num_blocks=blocks)


def same_episodes(ours: archive.Archive, theirs: archive.Archive) -> None:
    assert {ep.id for ep in ours.episodes} == {ep.id for ep in theirs.episodes}
    for ep in theirs.episodes:
        own, steps = ours.episodes[ep.id].read(), ep.read()
        assert (ours.episodes[ep.id].fields, own.keys()) == (ep.fields, steps.keys())
        assert (ours.episodes[ep.id].update_count, ours.episodes[ep.id].total_reward) == (
            ep.update_count,
            ep.total_reward,
        )
        for name in steps.keys() - {"obs", "tokens", "text", "info"}:
            ray_rows.same(own[name], steps[name])
        for name in steps["obs"]:
            ray_rows.same(own["obs"][name], steps["obs"][name])
        assert (own["info"], list(own["text"])) == (steps["info"], list(steps["text"]))
        for one, other in zip(own["tokens"], steps["tokens"], strict=True):
            ray_rows.same(one, other)


@pytest.mark.parametrize(
    ("store", "unit"), [("local", "episode"), ("local", "step"), ("moto", "episode"), ("seaweedfs", "step")]
)
def test_round_trip_bit_for_bit(request: pytest.FixtureRequest, tmp_path: Path, store: str, unit: str) -> None:
    there = make_backend(request, store, tmp_path)
    source = ray_rows.made(f"{there.url}/from", LENGTHS, commits=2, storage_options=there.storage_options)
    more = {"columns": ["update_count"]} if unit == "step" else {}
    made = archive.ray.write(
        archive.ray.read(source, unit=unit, **more), f"{there.url}/to", unit=unit, fields=FIELDS,
        schema=ray_rows.SCHEMA, update_count="update_count", metadata=["metadata"] if unit == "episode" else (),
        storage_options=there.storage_options,
    )  # fmt: skip
    target = archive.open(f"{there.url}/to", storage_options=there.storage_options)
    assert (made.number, target.head.number, made.kind) == (1, 1, "merge")
    same_episodes(target, source)
    assert set(target.episodes.table["run"].to_pylist()) == {"ray"}
    if unit == "episode":
        assert all(target.episodes[ep.id].metadata == ep.metadata for ep in source.episodes)
    assert_whole(target)
    assert archive.ray.read(target, unit="step").count() == sum(LENGTHS)


def test_columns_are_found_by_themselves(tmp_path: Path) -> None:
    import ray.data

    rows = [
        {"id": i, "obs/pos": np.full((3, 2), i, np.float32), "act": np.arange(3), "score": i / 2, "over": i % 2 == 0}
        for i in range(4)
    ]
    archive.ray.write(
        ray.data.from_items(rows), str(tmp_path / "a"), "id", metadata=["score"], terminated="over", run="collected"
    )
    arc = archive.open(tmp_path / "a")
    assert sorted(ep.id for ep in arc.episodes) == ["0", "1", "2", "3"]
    one = arc.episodes["2"]
    assert one.fields.keys() == {"obs/pos", "act"}
    assert (one.metadata, one.terminated, one.run) == ({"score": 1.0}, True, "collected")
    ray_rows.same(one.read()["obs"]["pos"], np.full((3, 2), 2, np.float32))


def test_steps_come_together_wherever_they_are(tmp_path: Path) -> None:
    import ray.data

    rows = [{"episode_id": f"e{i % 5}", "step": i // 5, "x": i, "weights": f"w{i // 10}"} for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    given = ray.data.from_items([rows[i] for i in order.tolist()], override_num_blocks=5)
    given.context.target_max_block_size, strategy = 100, given.context.shuffle_strategy  # no block holds an episode
    archive.ray.write(given, str(tmp_path / "a"), unit="step", model_weights_uuid="weights")
    assert given.context.shuffle_strategy == strategy
    arc = archive.open(tmp_path / "a")
    for i in range(5):
        one = arc.episodes[f"e{i}"]
        assert one.read()["x"].tolist() == list(range(i, 40, 5))
        assert one.model_weights_uuids == ["w0", "w1", "w2", "w3"]


def test_ids_may_be_made_up(tmp_path: Path) -> None:
    archive.ray.write(dataset(["a", "b", "c"]), str(tmp_path / "a"), None, fields=["x"])
    arc = archive.open(tmp_path / "a")
    assert len({ep.id for ep in arc.episodes}) == 3
    assert_whole(arc)


@pytest.mark.parametrize("there", [[], ["c"]])
def test_a_taken_id_commits_nothing(tmp_path: Path, there: list[str]) -> None:
    arc = archive.create(str(tmp_path / "a"))
    with arc.writer() as w:
        for name in there:
            w.add_episode({"x": np.arange(2)}, episode_id=name)
    before = arc.refresh().head.number
    with pytest.raises(DuplicateEpisodeError, match="'c'"):
        archive.ray.write(dataset(["a", "b", "c", "d"] if there else ["c", "a", "b", "c"]), arc)
    assert arc.refresh().head.number == before
    if there:
        archive.ray.write(dataset(["a", "c"]), arc, replace=True)
        assert {ep.id for ep in arc.refresh().episodes} == {"a", "c"}


def test_a_writer_goes_on_beside(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "a"))
    with arc.writer(run="ray") as w:
        w.add_episode({"x": np.arange(2)}, episode_id="first")
        w.commit()
        archive.ray.write(dataset(["a", "b"]), str(tmp_path / "a"))
        w.add_episode({"x": np.arange(2)}, episode_id="last")
    assert {ep.id for ep in arc.refresh().episodes} == {"first", "a", "b", "last"}


def sink_of(arc: archive.Archive, kind: Any) -> Any:
    from archive.ray import sink

    columns = sink.DatasetColumns("episode_id", None, False, None, (), {}, Schema())
    return kind(arc, columns, "ray", replace=False, compression=None)


def test_a_killed_task_is_done_again_and_its_first_shards_are_garbage(tmp_path: Path) -> None:
    from archive.ray import sink

    arc, marker = archive.create(str(tmp_path / "a")), tmp_path / "died"
    driver = os.getpid()

    class Dying(sink.ArchiveDatasink):  # type: ignore[misc, name-defined]
        min_bytes_per_write = None  # a task a block

        def write(self, blocks: Any, ctx: Any) -> Any:
            rows = super().write(blocks, ctx)
            if os.getpid() != driver and not marker.exists():
                marker.touch()
                os._exit(1)
            return rows

    names = [f"e{i}" for i in range(20)]
    dataset(names, 4).write_datasink(sink_of(arc, Dying))
    assert marker.exists()
    assert sorted(ep.id for ep in arc.refresh().episodes) == sorted(names)
    assert_whole(arc)
    named = set(arc.shards)
    there = {f"shards/{path.name}" for path in (tmp_path / "a" / "shards").iterdir()}
    assert len(there - named) >= 1
    plan = arc.prune("0s", force=True)
    assert {one.key for one in plan.going} == there - named
    plan.commit()
    assert_whole(arc.refresh())


def test_a_failing_task_commits_nothing(tmp_path: Path) -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        if row["episode_id"] == "e7":
            raise ValueError("the judge is out")
        return row

    arc = archive.create(str(tmp_path / "a"))
    given = dataset([f"e{i}" for i in range(12)], 6).map(broken)
    with pytest.raises(Exception, match="the judge is out"):
        archive.ray.write(given, arc)
    assert arc.refresh().head.number == 0


def test_a_sink_begins_with_and_without_a_schema(tmp_path: Path) -> None:
    import pyarrow as pa

    from archive.ray import sink

    made = sink_of(archive.create(str(tmp_path / "a")), sink.ArchiveDatasink)
    made.on_write_start()
    made.on_write_start(pa.schema([("episode_id", pa.string()), ("x", pa.list_(pa.int64()))]))
    with pytest.raises(UsageError, match="no column 'episode_id'"):
        made.on_write_start(pa.schema([("x", pa.list_(pa.int64()))]))


def test_nothing_to_write_is_no_commit(tmp_path: Path) -> None:
    import ray.data

    made = archive.ray.write(ray.data.from_items([{"episode_id": "a", "x": [1]}]).limit(0), str(tmp_path / "a"))
    assert made.number == 0


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    import ray.data

    url = str(tmp_path / "a")
    with pytest.raises(UsageError, match="is in the memory of this process"):
        archive.ray.write(dataset(["a"]), "memory://rays")
    with pytest.raises(UsageError, match="unit='rollout'"):
        archive.ray.write(dataset(["a"]), url, unit="rollout")
    with pytest.raises(UsageError, match="unit='step', episode_id=None"):
        archive.ray.write(dataset(["a"]), url, None, unit="step")
    with pytest.raises(UsageError, match="no column 'name'; it has: episode_id, x"):
        archive.ray.write(dataset(["a"]), url, "name")
    with pytest.raises(UsageError, match="a row has no 'episode_id'"):
        archive.ray.write(ray.data.from_items([{"episode_id": None, "x": [1]}, {"episode_id": "a", "x": [1]}]), url)
    rows = [{"episode_id": "a", "step": step, "x": 1} for step in (0, 1, 1)]
    with pytest.raises(UsageError, match="no column 'judge'"):
        archive.ray.write(ray.data.from_items(rows), url, unit="step", metadata=["judge"])
    with pytest.raises(UsageError, match="episode 'a' has step 1 twice"):
        archive.ray.write(ray.data.from_items(rows), url, unit="step")
    rows = [{"episode_id": "a", "step": step, "x": None if step else 1.5} for step in range(3)]
    with pytest.raises(FieldError, match="column 'x' is no field of episodes: 2 of 3 of its steps have no value"):
        archive.ray.write(ray.data.from_items(rows), url, unit="step")
    assert len(archive.open(url).episodes) == 0


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_an_id_that_the_dataset_has_twice_commits_nothing(tmp_path: Path, replace: bool, blocks: int) -> None:
    arc = archive.create(str(tmp_path / "a"))
    with pytest.raises(DuplicateEpisodeError, match="the dataset has the episode 'a' twice"):
        archive.ray.write(dataset(["a", "b", "a"], blocks), arc, replace=replace)
    assert arc.refresh().head.number == 0


def test_blocks_whose_rows_are_all_filtered_out_are_nothing(tmp_path: Path) -> None:
    import ray.data

    rows = [{"episode_id": f"e{i % 4}", "step": i // 4, "x": i} for i in range(40)]
    given = ray.data.from_items(rows, override_num_blocks=4)
    assert archive.ray.write(given.flat_map(lambda row: []), str(tmp_path / "none"), unit="step").number == 0
    archive.ray.write(given.flat_map(lambda row: [row][: row["step"] // 5]), str(tmp_path / "a"), unit="step")
    arc = archive.open(tmp_path / "a")
    assert {ep.id: ep.read()["x"].tolist() for ep in arc.episodes} == {
        f"e{i}": list(range(20 + i, 40, 4)) for i in range(4)
    }


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["0", "10", "2"], "the steps of episode 'a' are string, not numbers"),
        ([1, None, 0], "episode 'a' has a row without a number"),
        ([1.0, float("nan"), 0.0], "episode 'a' has a row without a number"),
        ([4, 0, 1, 3], "episode 'a' has no step between 1 and 3"),
        ([0, 2, 4], "episode 'a' has no step between 0 and 2"),
    ],
)
def test_steps_are_numbers_without_gaps(steps: list[Any], message: str) -> None:
    import pyarrow as pa

    from archive.ray import sink

    columns = sink.columns("step", "episode_id", "step", None, (), None)
    block = pa.table({"episode_id": ["a"] * len(steps), "step": steps, "x": range(len(steps))})
    with pytest.raises(UsageError, match=message):
        sink.together(columns, block)


@pytest.mark.parametrize(
    ("columns", "metadata", "message"),
    [
        ({"reward": [1.0, 2.0], "obs": [2, 3]}, (), "no column has lists or tensors, .*: reward, obs; did you mean"),
        ({"a": FIELD, "a/b": FIELD}, (), "column 'a' is a field, and cannot have the field 'a/b' within it"),
        ({"a/b": FIELD, "a": FIELD}, (), "column 'a' is a field, and cannot have the field 'a/b' within it"),
        ({"a b": FIELD, "a%20b": FIELD}, (), "columns 'a b' and 'a%20b' are the same field"),
        ({"a": FIELD, "metadata": ["{}", "{bad"]}, ["metadata"], "column 'metadata' of episode 'e1' .* no JSON"),
        ({"a": FIELD, "metadata": ["null", "{}"]}, ["metadata"], "'metadata' of episode 'e0' is JSON of NoneType"),
        ({"a": FIELD, "metadata": ["{}", "[1]"]}, ["metadata"], "'metadata' of episode 'e1' is JSON of list"),
    ],
)
def test_a_column_that_cannot_be_taken_is_named(columns: Any, metadata: Any, message: str) -> None:
    import pyarrow as pa

    from archive.ray import sink

    given = sink.columns("episode", "episode_id", None, None, metadata, None)
    block = pa.table({"episode_id": ["e0", "e1"], **columns})
    with pytest.raises(UsageError, match=message):
        [sink._metadata(one) for one in sink._episodes(given, block)]


def test_lists_of_nulls_and_texts_that_are_no_json_are_named() -> None:
    import pyarrow as pa

    from archive.ray import sink

    rows = {"episode_id": ["a"] * 2, "step": [0, 1]}
    nulls = pa.table({**rows, "x": pa.array([[None, None]] * 2, pa.list_(pa.int64(), 2))})
    texts = pa.table({**rows, "x": ["{}", "{bad"]})
    for block, message in ((nulls, "column 'x' .* nulls alone"), (texts, "column 'x' has a value that is no JSON")):
        columns = sink.columns("step", "episode_id", "step", None, (), Schema(json=["x"]))
        with pytest.raises(FieldError, match=message):
            list(sink._episodes(columns, sink.together(columns, block)))
