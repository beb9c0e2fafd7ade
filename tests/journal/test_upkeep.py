"""Objects of journals in usage, prune, verify, copies and commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import archive
import resharding
from archive.base import layout
from archive.journal import Durable
from archive.maintain import verify
from archive.testing import steps
from tests.support.archives import fresh
from tests.support.commands import call as run
from tests.support.journals import die
from tests.support.ticks import NEVER_S


def journaled(url: str | None = None) -> tuple[archive.Archive, Durable]:
    """An archive with a checkpoint and, beyond it, two objects of a journal; how far it was durable."""
    arc = fresh() if url is None else archive.create(url)
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(steps(4), episode_id="a")
    w.sync()
    w.journal(columns={"p": {"a": np.zeros(4)}})
    w.sync()
    w.checkpoint(1, wait=True)
    w.add_episode(steps(3), episode_id="b")
    w.sync()
    w.journal(progress=3)
    durable = w.sync()
    die(w)
    return arc.refresh(), durable


def newest(arc: archive.Archive, number: int) -> str:
    return layout.journal_key(arc.head.runs["main"].session, 0, number)


def test_usage_counts_what_may_be_recovered_as_live() -> None:
    arc, durable = journaled()
    key = newest(arc, durable.number - 1)
    before = arc.usage
    size = len(arc.storage.get(key))
    arc.storage.delete([key])
    after = arc.usage
    assert before.live.bytes - after.live.bytes == size
    assert before.live.objects - after.live.objects == 1
    assert before.other == after.other


def test_what_is_sound_and_what_is_damaged_is_told_by_verify(tmp_path: Path) -> None:
    arc, durable = journaled(str(tmp_path))
    report = verify(arc, deep=True)
    assert report.sound
    assert not report.warnings
    assert report.journaled == 2
    key = newest(arc, durable.number - 1)
    (tmp_path / key).write_bytes((tmp_path / key).read_bytes()[:-30])
    report = verify(arc)
    assert report.sound
    (warning,) = report.warnings
    assert "are lost" in warning.problem
    result = run("verify", str(tmp_path))
    assert result.exit_code == 0
    assert "cannot all be recovered" in result.output
    assert "all sound" in result.output


def test_recovered_checkpoints_are_verified_and_damage_found(tmp_path: Path) -> None:
    arc, _ = journaled(str(tmp_path))
    made = arc.recover()
    assert verify(arc, deep=True).sound
    key = made.record.ranks[0].key
    data = bytearray((tmp_path / key).read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / key).write_bytes(data)
    assert not verify(arc, deep=True).sound


def test_copies_have_episodes_that_lie_in_journals() -> None:
    arc, _ = journaled()
    arc.recover()
    other = f"{arc.url}-copy"
    resharding.merge([arc.url], to=other, copy=True)
    copied = archive.open(other)
    assert any(key.startswith("journal/") for key in copied.shards)
    assert copied.episodes["b"].read()["obs"].tolist() == arc.episodes["b"].read()["obs"].tolist()
    resharding.merge([arc.url], to=other, copy=True)


def test_tails_and_recover_on_the_command_line(tmp_path: Path) -> None:
    arc, _ = journaled(str(tmp_path))
    result = run("tails", str(tmp_path), "--json")
    assert json.loads(result.output)["total"]["episodes"] == 1
    dry = run("recover", str(tmp_path), "--dry-run")
    assert "nothing is recovered yet" in dry.output
    assert arc.refresh().checkpoints.latest.name == "step-1"
    done = run("recover", str(tmp_path))
    assert "has it" in done.output
    assert arc.refresh().checkpoints.latest.name.startswith("step-1+tail-")
    again = json.loads(run("recover", str(tmp_path), "--json").output)
    assert again["commit"] is None
    assert again["tails"]["total"]["objects"] == 0
    assert run("tails", str(tmp_path), "--run", "none").exit_code == 1


@pytest.mark.parametrize("recovered", [False, True])
def test_prune_keeps_what_may_be_recovered(tmp_path: Path, recovered: bool) -> None:
    arc, _ = journaled(str(tmp_path))
    if recovered:
        arc.recover()
    before = {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "journal").rglob("*.zip")}
    columns_alone = newest(arc, 1)
    assert columns_alone in before
    arc.prune("0s", dry_run=False, force=True)
    after = {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "journal").rglob("*.zip")}
    tail = {key for key in before if key > columns_alone}
    assert columns_alone not in after
    with_steps = {key for key in tail if recovered and key in set(arc.refresh().shards)}
    assert after >= (with_steps if recovered else tail)
    if not recovered:
        assert arc.tails().total.objects == 2
        arc.recover()
    assert archive.open(str(tmp_path)).episodes["b"].read()["obs"].shape[0] == 3
