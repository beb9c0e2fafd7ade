"""An import as a job: the checkpoint of any workers, after any interruption, is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli, tables
from archive.adapters import lerobot, npz
from archive.checkpoint import assembly
from archive.errors import FieldError, JobError, UsageError
from archive.fields import Schema
from archive.log import Place
from archive.testing import assert_whole
from archive.write import Staging, end_to_end
from tests.support.broken_jobs import broken_off, interrupted, interrupted_at_each
from tests.support.dataset_files import flat, write_flat, write_lerobot
from tests.support.verbs import LENGTHS, imported, one_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_flat(tmp_path / "hopper.npz", flat(LENGTHS))


def written(root: Any) -> archive.Checkpoint:
    """The checkpoint of a writer that is given the episodes of that file."""
    arrays, arc = flat(LENGTHS), archive.create(root)
    ends = np.cumsum(LENGTHS)
    with arc.writer(0, 1) as w:
        for i, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            names = ("observations", "actions", "rewards")
            steps: dict[str, Any] = {name: arrays[name][start:stop] for name in names}
            steps["infos"] = {"qpos": arrays["infos/qpos"][start:stop]}
            whole: dict[str, Any] = {"terminated": i == 0, "truncated": i > 0}
            w.add_episode(steps, metadata={}, **(whole if i < 5 else {"last": False}))
        return w.checkpoint(0, "several", progress={"npz": {"left_out": ["metadata"]}}).result()


@pytest.mark.parametrize("how", [{}, {"workers": 2, "job": "in"}])
def test_the_checkpoint_is_that_of_one_process(tmp_path: Path, how: dict[str, Any]) -> None:
    several = one_file(tmp_path)
    plain = npz.import_dataset(several, archive.create(tmp_path / "plain"))
    seen: list[tuple[int, int]] = []
    arc = archive.create(tmp_path / "made")
    made = npz.import_dataset(several, arc, progress=lambda *now: seen.append(now), **how)
    np.testing.assert_equal(imported(made), imported(plain))
    assert len(seen) == (1 if not how else len(made.episodes)) + 1
    assert len(arc.episodes) == len(LENGTHS)
    assert [one.kind for one in arc.commits] == ["session", "checkpoint"]
    assert all(job.finished for job in arc.jobs.values())
    assert_whole(arc)
    with arc.writer(resume=made) as w:  # a run goes on from it
        w.add_episode({"x": np.arange(3)})
        w.checkpoint(1).result()
    assert len(archive.open(arc.url).checkpoints["step-1"].episodes) == len(LENGTHS) + 1


def test_it_is_the_checkpoint_of_a_writer(tmp_path: Path) -> None:
    wanted = written(tmp_path / "plain")
    found = npz.import_dataset(one_file(tmp_path), archive.create(tmp_path / "made"), job="in")
    np.testing.assert_equal(imported(found), imported(wanted))


def test_interrupted_at_each_batch_beside_writers_and_a_prune(tmp_path: Path) -> None:
    several, root = one_file(tmp_path), tmp_path / "made"
    plain = npz.import_dataset(several, archive.create(tmp_path / "plain"), run="demo")
    archive.create(root)
    call = lambda: npz.import_dataset(several, archive.open(root), run="demo", job="in")  # noqa: E731
    interrupted(call, 0)
    arc = archive.open(root)
    with arc.writer() as w:
        w.add_episode({"x": np.arange(3)})
    arc.refresh().prune("0s", force=True, dry_run=False)
    assert [one.key for one in arc.storage.scan("shards")]
    made = interrupted_at_each(call, lambda: arc.jobs["in"].done, len(LENGTHS))
    np.testing.assert_equal(imported(made), imported(plain))
    assert len(archive.open(root).episodes) == len(LENGTHS) + 1
    with archive.open(root).writer(run="demo"):  # the session of the import has ended, then
        pass
    archive.open(root).prune("0s", force=True, dry_run=False)  # what interrupted batches had put goes
    assert_whole(archive.open(root))
    keys = {one.key for one in arc.storage.scan("shards")}
    assert len(keys) == len(LENGTHS) + 1


@pytest.mark.parametrize("where", ["claimed", "opened", "staged", "committed"])
def test_killed_between_the_last_batch_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    several = one_file(tmp_path)
    plain = npz.import_dataset(several, archive.create(tmp_path / "plain"))
    root = tmp_path / "made"
    archive.create(root)
    call = lambda: npz.import_dataset(several, archive.open(root), job="in")  # noqa: E731

    def killed(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    def after(real: Callable[..., Any]) -> Callable[..., Any]:
        def then(*args: Any, **more: Any) -> Any:
            real(*args, **more)
            raise KeyboardInterrupt

        return then

    with monkeypatch.context() as patch:
        if where == "claimed":
            patch.setattr("archive.log.sessions._say", killed)
        elif where == "opened":
            patch.setattr("archive.adapters.sources.stage", killed)
        else:
            patch.setattr(assembly, "commit", killed if where == "staged" else after(assembly.commit))
        with pytest.raises(KeyboardInterrupt):
            call()
    with broken_off() as stop:
        made = call()
    assert stop.put == []
    np.testing.assert_equal(imported(made), imported(plain))
    assert [one.kind for one in archive.open(root).commits].count("checkpoint") == 1
    assert archive.open(root).jobs["in"].finished
    assert_whole(archive.open(root))


@pytest.mark.parametrize("how", [{"job": "in"}, pytest.param({"workers": 2}, marks=pytest.mark.soak)])
def test_other_files(tmp_path: Path, how: dict[str, Any]) -> None:
    source = str(write_lerobot(tmp_path / "pusht"))
    plain = lerobot.import_dataset(source, archive.create(tmp_path / "plain"))
    made = lerobot.import_dataset(source, archive.create(tmp_path / "made"), **how)
    np.testing.assert_equal(imported(made), imported(plain))
    flat_file = npz.import_dataset(one_file(tmp_path), archive.create(tmp_path / "flat"))
    npz.export_dataset(flat_file.episodes, tmp_path / "by.h5")
    several = npz.import_dataset(tmp_path / "by.h5", archive.create(tmp_path / "again"), **how)
    wanted = npz.import_dataset(tmp_path / "by.h5", archive.create(tmp_path / "again-plain"))
    np.testing.assert_equal(imported(several), imported(wanted))


def test_a_damaged_episode_commits_nothing(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"columns": ["observations", "actions", "rewards"], "num_episodes": 3}
    for i in range(3):
        arrays |= {f"{name}_{i}": np.zeros((2, 1)) for name in ("observations", "actions", "rewards")}
    del arrays["actions_2"]
    file, arc = write_flat(tmp_path / "by.npz", arrays), archive.create(tmp_path / "a")
    for job in (None, "in"):
        with pytest.raises(archive.ArchiveError, match="episode 2 of the file has no actions"):
            npz.import_dataset(file, arc, job=job)
        assert arc.refresh().head.number == 0
    arc.jobs["in"].cancel()
    arc.prune("0s", force=True, dry_run=False)
    assert [*arc.storage.scan("shards")] == []


def test_what_cannot_be(tmp_path: Path, file: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with pytest.raises(UsageError, match="engine='spark'"):
        npz.import_dataset(file, arc, engine="spark")
    with pytest.raises(UsageError, match="in the memory of this process"):
        npz.import_dataset(file, archive.open("memory://imported", create=True), workers=2)
    with pytest.raises(FieldError, match="has no 'actions'"):
        npz.import_dataset(write_flat(tmp_path / "no.npz", {"observations": np.zeros(3)}), arc, job="in")
    assert len(arc.jobs) == 0
    interrupted(lambda: npz.import_dataset(file, arc, job="in"))
    with pytest.raises(UsageError, match="begun with run='main', not 'demo'"):
        npz.import_dataset(file, arc, run="demo", job="in")
    arc.jobs["in"].cancel()
    assert len(npz.import_dataset(file, arc, job="in").episodes) == 3


def test_a_job_that_is_finished_imports_nothing_again(tmp_path: Path) -> None:
    several, root = one_file(tmp_path), tmp_path / "a"
    made = npz.import_dataset(several, archive.create(root), job="in")
    for i in range(4):
        with archive.open(root).writer(run="other") as w:
            w.add_episode({"x": np.arange(i + 1)})
    archive.open(root).prune("0s", force=True, dry_run=False)  # its plan and results are gone
    arc = archive.open(root)
    again = npz.import_dataset(several, arc, job="in")
    assert again.number == made.number
    assert len(arc.episodes) == len(LENGTHS) + 4
    with pytest.raises(UsageError, match="begun with run='main', not 'other'"):
        npz.import_dataset(several, arc, job="in", run="other")
    assert npz.import_dataset(several, arc, job="again").number > made.number


def test_a_session_that_was_opened_meanwhile_ends_as_with_any_import(tmp_path: Path) -> None:
    several, arc, run = one_file(tmp_path), archive.create(tmp_path / "a"), CliRunner()
    interrupted(lambda: npz.import_dataset(str(several), arc, run="imported", job="in"), 1)
    with archive.open(arc.url).writer(run="imported") as w:
        w.add_episode({"x": np.arange(3)})
        asked = run.invoke(cli.main, ["import", arc.url, str(several), "-f", "d3rlpy", "--job", "in"])
        assert asked.exit_code == 2
        assert "add --yes" in asked.output
        w.commit()
        stale = archive.open(arc.url, commit=1)
        with pytest.raises(UsageError, match="read only"):
            npz.import_dataset(str(several), stale, run="imported", job="in")
    made = npz.import_dataset(str(several), archive.open(arc.url), run="imported", job="in")
    assert archive.open(arc.url).head.runs["imported"].session == made.session


def test_a_job_that_is_cancelled_meanwhile_commits_nothing(tmp_path: Path) -> None:
    several, arc = one_file(tmp_path), archive.create(tmp_path / "a")

    def cancel(done: int, total: int) -> None:
        if done == total:
            arc.jobs["in"].cancel()

    with pytest.raises(JobError, match="cancelled by another process"):
        npz.import_dataset(several, arc, job="in", progress=cancel)
    assert archive.open(arc.url).head.number == 0


def test_the_command(tmp_path: Path) -> None:
    several, root, run = one_file(tmp_path), str(tmp_path / "made"), CliRunner()
    archive.create(root)
    given = ["import", root, str(several), "-f", "d3rlpy", "--job", "in"]
    interrupted(lambda: npz.import_dataset(str(several), archive.open(root), run="imported", job="in"), 2)
    done = run.invoke(cli.main, given)
    assert done.exit_code == 0, done.output
    assert f"has {len(LENGTHS)} episodes" in done.output
    refused = run.invoke(cli.main, ["import", root, str(several), "-f", "rlinf", "--job", "in"])
    assert refused.exit_code == 2
    assert "--job" in refused.output


def test_rows_of_several_tasks_are_numbered_as_those_of_one(tmp_path: Path) -> None:
    arc, parts = archive.create(tmp_path / "a"), []
    for count in (2, 1, 2):
        staging = Staging(arc.storage, arc.layout, Place(0, 1, "main", "s"), "replay", Schema(), None)
        for _ in range(count):
            staging.buffer.add_episode({"x": np.arange(3)})
        rows = staging.rows()
        staging.close()
        before = [None, *(f"s:0:{i}" for i in range(count - 1))]
        column = tables.from_columns("segments", {"predecessor": before})["predecessor"]
        place = rows.segments.schema.get_field_index("predecessor")
        field = rows.segments.schema.field(place)
        parts.append((rows._replace(segments=rows.segments.set_column(place, field, column)), 3 * count))
    found = end_to_end(parts).segments
    assert found["sequence"].to_pylist() == [0, 1, 2, 3, 4]
    assert found["position"].to_pylist() == [0, 3, 6, 9, 12]
    assert found["predecessor"].to_pylist() == [None, "s:0:0", None, None, "s:0:3"]
