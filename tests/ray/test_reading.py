"""Rows of episodes, steps and windows come out of Ray Data as they are read without it; what is pushed is not read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import archive.ray
from archive import FieldError, UsageError
from archive.fields import derived
from tests.support import ray_rows
from tests.support.backends import make_backend, s3_options
from tests.support.documents import DOCS, run_page
from tests.support.proxy import FaultProxy

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LENGTHS = [5, 1, 7, 4, 9, 2, 0, 6, 3, 8, 4, 4]


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    return ray_rows.made(str(tmp_path_factory.mktemp("a") / "root"), LENGTHS, commits=3)


def rows(dataset: Any, by: str = "episode_id") -> list[dict[str, Any]]:
    return sorted(dataset.take_all(), key=lambda row: (row[by], row.get("step", 0)))


def test_a_row_an_episode_has_its_fields_bit_for_bit(arc: archive.Archive) -> None:
    found = rows(archive.ray.read(arc.url, missing="skip"))
    assert [row["episode_id"] for row in found] == sorted(f"e{i}" for i in range(len(LENGTHS)))
    for row in found:
        ep = arc.episodes[row["episode_id"]]
        steps = ep.read()
        for name, value in (("obs/image", steps["obs"]["image"]), ("state", steps["state"]), ("goal", steps["goal"])):
            ray_rows.same(row[name], value)
        ray_rows.same(row["text"], steps["text"])
        ray_rows.same(row["tokens"], steps["tokens"])
        assert [json.loads(one) for one in row["info"]] == steps["info"]
        assert row["level"] == steps["level"]
        assert (row["reward"] is None) == ("reward" not in steps)
        if "reward" in steps:
            assert row["reward"] == steps["reward"].tolist()
        facts = (row["length"], row["return"], row["update_count"], row["label.success"], row["metadata.task"])
        assert facts == (
            ep.length, ep.total_reward, ep.update_count, ep.labels.get("success"), ep.metadata.get("task"),
        )  # fmt: skip


def test_a_row_a_step_has_its_fields_bit_for_bit(arc: archive.Archive) -> None:
    dataset = archive.ray.read(arc, unit="step", columns=["return", "update_count"])
    assert dataset.count() == sum(LENGTHS)
    found = rows(dataset)
    at = 0
    for ep in sorted(arc.episodes, key=lambda ep: ep.id):
        steps, mine = ep.read(), found[at : at + ep.length]
        at += ep.length
        assert [(row["episode_id"], row["step"]) for row in mine] == [(ep.id, i) for i in range(ep.length)]
        for i, row in enumerate(mine):
            ray_rows.same(row["obs/image"], steps["obs"]["image"][i])
            ray_rows.same(row["tokens"], steps["tokens"][i])
            ray_rows.same(row["state"], steps["state"][i])
            assert (row["text"], row["return"]) == (steps["text"][i], ep.total_reward)
            assert row["reward"] == (steps["reward"][i] if "reward" in steps else None)
            assert (row["goal"] or []) == ([] if i else steps["goal"].tolist())
            assert row["level"] == (None if i else steps["level"])
            assert (row["state.after"] or []) == (steps["state"][-1:].tolist() if i == ep.length - 1 else [])


@pytest.mark.parametrize("windows", [3, (3, 2), {"length": 4, "stride": 3, "pad": True}])
def test_windows_are_those_of_torch(arc: archive.Archive, windows: Any) -> None:
    from archive.torch import WindowDataset

    fields = ["obs", "done", "text"]
    given = (
        windows if isinstance(windows, dict) else dict(zip(("length", "stride"), np.atleast_1d(windows), strict=False))
    )
    theirs = WindowDataset(arc, fields=fields, **given)
    numbers, starts, _ = theirs.places(np.arange(len(theirs)))
    found = {(row["episode_id"], row["step"]): row for row in archive.ray.read(arc, fields, windows=windows).take_all()}
    assert len(found) == len(theirs)
    for item, number, start in zip(theirs, numbers.tolist(), starts.tolist(), strict=True):
        row = found[arc.episodes[number].id, start]
        ray_rows.same(row["obs/image"], item["obs"]["image"].numpy())
        ray_rows.same(row["obs/pos"], item["obs"]["pos"].numpy())
        ray_rows.same(row["done"], item["done"].numpy())
        assert ("mask" in row) == ("mask" in item)
        if "mask" in row:
            ray_rows.same(row["mask"], item["mask"].numpy())
        assert [one or None for one in row["text"]] == [one or None for one in item["text"]]


def predicates() -> list[Any]:
    from ray.data.expressions import col

    return [
        col("return") > 2, ~(col("return") > 2), col("update_count") != 3, col("update_count").is_null(),
        (col("length") >= 4) & (col("label.success") == True), col("label.success").is_not_null(),  # noqa: E712
        (col("metadata.task") == "push") | (col("return") < 1), col("episode_id").is_in(["e3", "e9", "none"]),
        col("complete") == False, (col("return") > 1) & (col("level") > 4), col("level") * 2 > col("length"),  # noqa: E712
    ]  # fmt: skip


def test_a_filter_that_is_pushed_keeps_what_one_that_is_not_keeps(arc: archive.Archive) -> None:
    whole = archive.ray.read(arc).materialize()
    for predicate in predicates():
        pushed = archive.ray.read(arc).filter(expr=predicate)
        names = [row["episode_id"] for row in rows(pushed.select_columns(["episode_id"]))]
        assert names == [row["episode_id"] for row in rows(whole.filter(expr=predicate))], predicate
        assert pushed.count() == len(names)


def test_a_filter_over_steps_keeps_what_one_that_is_not_pushed_keeps(arc: archive.Archive) -> None:
    from ray.data.expressions import col

    whole = archive.ray.read(arc, unit="step", columns=["return"]).materialize()
    for predicate in (
        col("reward") > 0.5, ~(col("reward") > 0.5), (col("done") == True) & (col("return") > 1),  # noqa: E712
        col("step") < 2, col("reward").is_null(), (col("level") > 3) & (col("step") == 0), col("reward") > 9,
    ):  # fmt: skip
        pushed = rows(archive.ray.read(arc, unit="step", columns=["return"]).filter(expr=predicate))
        kept = rows(whole.filter(expr=predicate))
        assert [(row["episode_id"], row["step"], row["text"]) for row in pushed] == [
            (row["episode_id"], row["step"], row["text"]) for row in kept
        ], predicate


def test_a_filter_over_derived_fields(arc: archive.Archive) -> None:
    from ray.data.expressions import col

    def read() -> Any:
        return archive.ray.read(arc, ["done", "text"], unit="step", derive=["has_next", "next_obs/pos"])

    whole = read().materialize()
    for predicate in (col("has_next") == False, (col("step") > 1) & (col("done") == False)):  # noqa: E712
        kept, pushed = rows(whole.filter(expr=predicate)), rows(read().filter(expr=predicate))
        assert [(row["episode_id"], row["step"], row["text"]) for row in pushed] == [
            (row["episode_id"], row["step"], row["text"]) for row in kept
        ]
        for one, other in zip(pushed, kept, strict=True):
            ray_rows.same(one["next_obs/pos"], other["next_obs/pos"])
    assert rows(read().select_columns(["has_next", "episode_id"]))[0] == {"has_next": True, "episode_id": "e0"}


def test_a_value_stands_in_for_what_is_missing(arc: archive.Archive) -> None:
    dataset = archive.ray.read(arc, ["reward", "text"], unit="step", missing=-1, override_num_blocks=12)
    assert str(dataset.schema().base_schema.field("reward").type) == "float"
    for row in rows(dataset):
        steps = arc.episodes[row["episode_id"]].read()
        assert row["reward"] == (steps["reward"][row["step"]] if "reward" in steps else -1)


def test_a_filter_by_a_function_and_one_over_what_is_not_there_are_rays(arc: archive.Archive) -> None:
    from ray.data.expressions import col

    with pytest.warns(UserWarning, match="expr"):
        kept = archive.ray.read(arc, ["done"]).filter(lambda row: row["length"] > 6)
    assert kept.count() == sum(length > 6 for length in LENGTHS)
    with pytest.raises(Exception, match="nothing"):
        archive.ray.read(arc, ["done"]).filter(expr=col("nothing") > 6).take_all()


def test_only_what_is_asked_for_is_read(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from ray.data.expressions import col

    direct = make_backend(request, "moto", tmp_path)
    with FaultProxy(direct.endpoint) as proxy:
        arc = archive.create(direct.url, storage_options=s3_options(direct.name, proxy.endpoint))
        with arc.writer() as w:
            for i in range(8):
                image = np.random.default_rng(i).integers(0, 255, (50, 4000), dtype=np.uint8)
                w.add_episode({"image": image, "reward": np.full(50, i, np.float32)}, update_count=i)
                w.commit()
        arc = arc.refresh()

        def bytes_of(dataset: Any, requests: int = 100) -> int:
            proxy.reset()
            dataset.take_all()
            found = [seen for seen in proxy.log if "/shards/" in seen.path and seen.method == "GET"]
            assert len(found) <= requests
            return sum(seen.bytes_out for seen in found)

        def read() -> Any:
            return archive.ray.read(arc, unit="step", columns=["update_count"], override_num_blocks=2)

        whole = bytes_of(read())
        assert whole > 8 * 200_000
        assert bytes_of(read().select_columns(["reward", "step"]), 16) < whole / 50
        assert bytes_of(read().filter(expr=col("update_count") == 3), 3) < whole / 6
        assert bytes_of(read().filter(expr=(col("update_count") < 4) & (col("reward") == 2))) < whole / 6
        assert bytes_of(read().filter(expr=col("reward") == 2)) < whole / 6
        assert bytes_of(read().filter(expr=col("update_count") > 99), 0) == 0


def test_a_killed_task_is_done_again_and_each_row_is_there_once(arc: archive.Archive, tmp_path: Path) -> None:
    dies = derived.Derivation(("again",), _dying_once(tmp_path / "died"), (("done",),))
    found = rows(archive.ray.read(arc, ["done", "level"], unit="step", derive=[dies], override_num_blocks=4))
    assert (tmp_path / "died").exists()
    assert len({(row["episode_id"], row["step"]) for row in found}) == len(found) == sum(LENGTHS)
    assert all(row["again"] == row["done"] for row in found)


def _dying_once(marker: Path) -> Callable[[Any, Any], Any]:
    driver = os.getpid()

    def compute(values: Any, at: Any) -> Any:
        if os.getpid() != driver and not marker.exists():
            marker.touch()
            os._exit(1)
        (done,) = values.values()
        return done[at.at]

    return compute


def test_the_commit_is_that_of_the_call(tmp_path: Path) -> None:
    arc = ray_rows.made(str(tmp_path / "root"), [3, 4])
    dataset, tagged = archive.ray.read(arc, ["done"]), arc.head.number
    with arc.writer() as w:
        w.add_episode(ray_rows.steps_of(9, 3), episode_id="later", schema=ray_rows.SCHEMA)
    arc.label({"e1": {"success": False}})
    arc.forget(ids=["e1"], dry_run=False)
    found = rows(dataset)
    assert [(row["episode_id"], row["label.success"]) for row in found] == [("e0", True), ("e1", None)]
    assert archive.ray.read(arc.url, ["done"]).count() == 2
    assert archive.ray.read(arc.url, ["done"], commit=tagged).count() == 2
    assert archive.ray.read([arc.url], ["done"], where="length > 3").count() == 0


def test_what_was_pruned_meanwhile_is_said(tmp_path: Path) -> None:
    arc = ray_rows.made(str(tmp_path / "root"), [3, 4])
    dataset = archive.ray.read(arc, ["done"])
    for path in (tmp_path / "root" / "shards").iterdir():
        path.unlink()
    with pytest.raises(archive.errors.MissingObjectError, match="shards/"):
        dataset.take_all()


def test_live_steps_of_a_checkpoint(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    with arc.writer() as w:
        w.append({"x": np.arange(12)}, env_ids=0, last=np.arange(12) % 4 == 3)
        w.evict(0, before=6)
        w.checkpoint(step=1, wait=True)
        w.append({"x": np.arange(12, 20)}, env_ids=0)
    ck = arc.refresh().checkpoints.of("main").latest
    for given in (ck, ck.episodes):
        found = sorted(int(row["x"]) for row in archive.ray.read(given, unit="step").take_all())
        assert found == list(range(6, 12))


def test_ray_data_has_it_once_it_is_registered(arc: archive.Archive) -> None:
    import ray.data

    archive.ray.register()
    archive.ray.register()
    found = ray.data.read_archive([arc.url], fields=["done"])
    assert found.count() == len(LENGTHS)


def test_parquet_beside(arc: archive.Archive, tmp_path: Path) -> None:
    import ray.data

    archive.ray.read(arc, ["obs", "done"], unit="step").write_parquet(str(tmp_path / "p"))
    back = rows(ray.data.read_parquet(str(tmp_path / "p")))
    ours = rows(archive.ray.read(arc, ["obs", "done"], unit="step"))
    assert len(back) == len(ours)
    for one, other in zip(back, ours, strict=True):
        ray_rows.same(one["obs/image"], other["obs/image"])


def test_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "how-to" / "ray-data.md", {})


def test_an_empty_archive_has_no_rows(tmp_path: Path) -> None:
    archive.create(str(tmp_path / "root"))
    assert archive.ray.read(str(tmp_path / "root")).count() == 0


def test_tasks_are_small_and_each_has_whole_shards(tmp_path: Path) -> None:
    from ray import cloudpickle

    from archive.ray import source

    arc = archive.create(str(tmp_path / "root"))
    with arc.writer() as w:
        for _ in range(10):
            w.append({"x": np.zeros(10_000, np.float32)}, env_ids=0, last=np.ones(10_000, bool))
            w.commit()
    made = source.of(
        arc.refresh(), None, None, None, "step", None, columns=None, missing="error", derive=(),
        storage_options=None, allow_bases=(),
    )  # fmt: skip
    assert len(arc.episodes) == 100_000
    tasks = made.get_read_tasks(5)
    assert [task.metadata.num_rows for task in tasks] == [20_000] * 5
    assert max(len(cloudpickle.dumps(task)) for task in tasks) < 10_000
    assert len(cloudpickle.dumps(made)) < 20_000
    assert (
        sum(task.metadata.num_rows for task in cloudpickle.loads(cloudpickle.dumps(made)).get_read_tasks(3)) == 100_000
    )
    some = arc.episodes[np.random.default_rng(0).permutation(100_000)[:20_000]]
    (scattered,) = source.ArchiveDatasource(some, made._reading).get_read_tasks(1)
    assert len(cloudpickle.dumps(scattered)) < 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "rollout"}, "'episode' or 'step'"),
        ({"unit": "step", "windows": 3}, "windows= alone"),
        ({"windows": (0, 1)}, "at least 1"),
        ({"windows": {"len": 3}}, "give a length"),
        ({"windows": (3, 1, 2)}, "give a length"),
        ({"columns": ["nothing"]}, "no column 'nothing'"),
        ({"where": "nothing > 1"}, "does not exist"),
    ],
)
def test_what_cannot_be_read_is_said_at_once(arc: archive.Archive, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        archive.ray.read(arc, **options)


def test_memory_is_not_seen_by_workers() -> None:
    archive.create("memory://rays")
    with pytest.raises(UsageError, match=r"memory://rays is in the memory of this process"):
        archive.ray.read("memory://rays")


def test_a_field_of_two_kinds_is_refused(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    with arc.writer() as w:
        w.add_episode({"x": np.zeros(3), "y": np.zeros(3)})
        w.add_episode({"x": np.zeros((3, 2)), "y": np.zeros(3)})
    with pytest.raises(FieldError, match=r"field 'x' is .* in some episodes"):
        archive.ray.read(arc.refresh())
    assert archive.ray.read(arc, ["y"], unit="step").count() == 6


@pytest.mark.parametrize("missing", ["error", "skip", 0])
def test_an_episode_without_steps_has_fields_of_any_kind(tmp_path: Path, missing: Any) -> None:
    arc = archive.create(str(tmp_path / "root"))
    with arc.writer() as w:
        w.add_episode({"text": [], "image": np.zeros(0), "tokens": np.zeros(0)}, episode_id="a")
        steps = {"text": ["x", "y"], "image": np.ones((2, 3), np.uint8), "tokens": [np.arange(1), np.arange(2)]}
        w.add_episode(steps, episode_id="b")
    empty, other = rows(archive.ray.read(arc.refresh(), missing=missing))
    assert [len(empty[name]) for name in steps] == [0, 0, 0]
    assert list(other["text"]) == ["x", "y"]
    ray_rows.same(other["image"], steps["image"])
    assert [list(one) for one in other["tokens"]] == [[0], [0, 1]]
    assert [row["text"] for row in rows(archive.ray.read(arc, ["text"], unit="step", missing=missing))] == ["x", "y"]
    assert len(rows(archive.ray.read(arc, where="length == 0"))) == 1
    with arc.writer(schema=archive.Schema(axes={"goal": "free"})) as w:
        w.add_episode({"text": [], "goal": np.zeros(3)}, episode_id="c")
        w.add_episode({"text": ["z"], "goal": np.zeros(3, np.int32)}, episode_id="d")
    with pytest.raises(FieldError, match=r"field 'goal' is .* in some episodes"):
        archive.ray.read(arc.refresh(), ["goal"], missing="skip")


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    for call in (archive.ray.register, lambda: archive.ray.read("a"), lambda: archive.ray.write(None, "a")):
        with pytest.raises(archive.errors.MissingPackageError, match=r"pip install 'trajectory-archive\[ray\]'"):
            call()


def test_two_urls_are_refused(arc: archive.Archive) -> None:
    with pytest.raises(UsageError, match="2 URLs"):
        archive.ray.read([arc.url, arc.url])
