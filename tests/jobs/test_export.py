"""An export as a job: the files of any workers, after any interruption, are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import archive
import resharding
from archive import cli
from archive.errors import AccessDeniedError, UsageError
from archive.testing import faults
from tests.support.broken_jobs import interrupted, interrupted_at_each
from tests.support.verbs import same


def filled(root: Path, count: int = 10) -> archive.Archive:
    arc = archive.create(root)
    with arc.writer() as w:
        for i in range(count):
            turns = [np.arange(i + j) for j in range(3)]
            w.add_episode({"x": np.arange(3.0) + i, "turns": turns, "note": ["é"] * 3}, episode_id=f"e{i}")
        w.checkpoint(1).result()
    with arc.writer():  # which begins another session, so that the earlier episodes may go
        pass
    return arc.refresh()


@pytest.mark.parametrize(
    ("format", "how"), [("npz", {"job": "out"}), ("parquet", {"workers": 2, "job": "out"}), ("npz", {"workers": 2})]
)
def test_the_files_are_those_of_one_process(tmp_path: Path, format: str, how: dict[str, Any]) -> None:
    arc, seen = filled(tmp_path / "a"), list[tuple[int, int]]()
    chosen = arc.episodes[::-1]
    plain = resharding.export(chosen, tmp_path / "plain", format=format, episodes_per_file=3)
    names = resharding.export(
        chosen, tmp_path / "made", format=format, episodes_per_file=3, progress=lambda *now: seen.append(now), **how
    )
    assert names == plain == [f"part-{i:06d}.{format}" for i in range(4)]
    assert same(tmp_path / "plain", tmp_path / "made")
    assert seen == [(i, 4) for i in range(5)]
    assert all(job.finished for job in arc.jobs.values())


def test_interrupted_at_each_file_beside_a_forget_and_a_prune(tmp_path: Path) -> None:
    arc = filled(tmp_path / "a")
    chosen = archive.open(arc.url).episodes.filter(where="length = 3")[[7, 2, 9, 0, 4]]
    resharding.export(chosen, tmp_path / "plain", episodes_per_file=2)
    call = lambda: resharding.export(chosen, tmp_path / "made", episodes_per_file=2, job="out")  # noqa: E731
    interrupted(call)
    other = archive.open(arc.url)
    other.forget(ids=["e7", "e4"], keep=archive.Keep(last=1), dry_run=False)
    other.prune("0s", force=True, dry_run=False)
    interrupted_at_each(call, lambda: arc.jobs["out"].done, 3)
    assert same(tmp_path / "plain", tmp_path / "made")


def test_live_steps_of_a_checkpoint_and_files_that_are_finished_are_not_written_again(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        w.append({"x": np.arange(10.0)}, env_ids=[0] * 10, first=np.arange(10) % 5 == 0)
        w.evict(env_id=0, before=2)
        w.checkpoint(step=1).result()
    found = arc.refresh().checkpoints.latest
    assert found is not None
    resharding.export(found.episodes, tmp_path / "plain", episodes_per_file=1)
    call = lambda: resharding.export(found.episodes, tmp_path / "made", episodes_per_file=1, job="out")  # noqa: E731
    interrupted(call, 1)
    first = tmp_path / "made" / "part-000000.npz"
    first.write_bytes(b"kept")
    call()
    assert first.read_bytes() == b"kept"
    first.unlink()
    (tmp_path / "plain" / "part-000000.npz").unlink()
    assert same(tmp_path / "plain", tmp_path / "made")


def test_an_archive_without_episodes(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    assert resharding.export(arc, tmp_path / "out", job="out") == []
    assert arc.jobs["out"].finished


def test_what_cannot_be(tmp_path: Path) -> None:
    arc = filled(tmp_path / "a")
    with pytest.raises(UsageError, match="in the memory of this process"):
        resharding.export(arc, "memory://exported", workers=2)
    with pytest.raises(UsageError, match="workers=0"):
        resharding.export(arc, tmp_path / "out", workers=0, job="out")
    with faults.at(arc.url, op="any", key="jobs/", what="deny", times=None):
        refused = archive.open(arc.url)
        with pytest.raises(AccessDeniedError, match="jobs/"):
            resharding.export(refused, tmp_path / "out", job="out")
    assert list(arc.jobs) == []
    interrupted(lambda: resharding.export(arc, tmp_path / "out", episodes_per_file=2, job="out"), 1)
    with pytest.raises(UsageError, match="begun with format='npz', not 'parquet'"):
        resharding.export(arc, tmp_path / "out", episodes_per_file=2, job="out", format="parquet")


def test_the_command(tmp_path: Path) -> None:
    arc, run = filled(tmp_path / "a"), CliRunner()
    out = str(tmp_path / "out")
    interrupted(lambda: resharding.export(arc, out, job="out"), 0)
    done = run.invoke(cli.main, ["export", arc.url, out, "--job", "out"])
    assert done.exit_code == 0, done.output
    assert "10 episodes are in 1 files" in done.output
    refused = run.invoke(cli.main, ["export", arc.url, out, "--job", "out", "-f", "minari"])
    assert refused.exit_code == 2
    assert "--job" in refused.output
