"""compact where several runs have checkpoints: each is read from the new shards, and stays as new or old as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.log import CommitLog
from tests.support.archives import identical
from tests.support.compactions import fetched


def test_several_runs(tmp_path: Path) -> None:
    """Each run's newest checkpoint is read from the new shards, and stays its newest."""
    arc = archive.create(tmp_path / "a")
    writers = {run: arc.writer(run=run) for run in ("left", "right")}
    kept: dict[str, Any] = {}
    for i, (run, w) in enumerate(writers.items()):
        w.append({"k": np.arange(i * 1000, i * 1000 + 1000)}, env_ids=0, last=True)
        w.evict(0, positions=np.flatnonzero(np.arange(1000) % 7))
        kept[run] = w.checkpoint(i, name=f"of-{run}").result()
    cost = {run: fetched(ck) for run, ck in kept.items()}
    resharding.compact(arc)
    now = archive.open(arc.url)
    for run, ck in kept.items():
        latest = now.checkpoints.of(run).latest
        assert latest.name == f"of-{run}"
        assert latest.number > kept["right"].number
        assert latest.live.equals(ck.live)
        assert identical(latest.episodes.read(), ck.episodes.read())
        assert fetched(latest) < cost[run]
    assert resharding.compact(arc).commit is None
    for w in writers.values():
        w.close()


def thinned(arc: archive.Archive, run: str, start: int) -> tuple[Any, Any]:
    """A run's writer, whose buffer lost most of its steps, and its checkpoint."""
    w = arc.writer(run=run)
    w.append({"k": np.arange(start, start + 1000)}, env_ids=0, last=True)
    w.evict(0, positions=np.flatnonzero(np.arange(1000) % 7))
    return w, w.checkpoint(start, name=f"of-{run}").result()


@pytest.mark.parametrize("last", ["left", "right"])
def test_several_runs_of_which_the_newest_checkpoint_has_no_replay_data(tmp_path: Path, last: str) -> None:
    """Each run is read from the new shards, and stays as new or old as it was, with replay data and without."""
    arc = archive.create(tmp_path / "a")
    runs = {run: thinned(arc, run, 1000 * i) for i, run in enumerate(("left", "right"))}
    runs[last][0].checkpoint(9, name="light", state={"step": 9}, save_replay=False).result()
    cost = {run: fetched(ck) for run, (_, ck) in runs.items()}
    resharding.compact(arc)
    now = archive.open(arc.url)
    light = now.checkpoints.of(last).latest
    assert (light.name, light.replay_saved) == ("light", False)
    assert light.state(0) == {"step": 9}
    assert light(replay=True).name == f"of-{last}"
    for run, (w, ck) in runs.items():
        latest = now.checkpoints.newest(run=run, replay=True)
        assert (latest.name, latest.live.equals(ck.live)) == (ck.name, True)
        assert identical(latest.episodes.read(), ck.episodes.read())
        assert fetched(latest) < cost[run]
        assert now.checkpoints.newest(run=run).name == ("light" if run == last else ck.name)
        w.append({"k": np.arange(5)}, env_ids=0)
        assert w.checkpoint(10, name=f"later-{run}").result().episodes[-1].length == 5
    assert resharding.compact(arc.refresh()).commit is None
    for w, _ in runs.values():
        w.close()


def test_a_checkpoint_while_others_are_published_again_stays_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc = archive.create(tmp_path / "a")
    runs = {run: thinned(arc, run, 1000 * i) for i, run in enumerate(("left", "right"))}
    commit, seen = CommitLog.commit, []

    def late(self: CommitLog, transaction: str, *what: Any) -> Any:
        if transaction.startswith("compact/") and transaction.count("/") == 2 and not seen:
            seen.append(runs["left"][0].checkpoint(5, name="meanwhile").result())
        return commit(self, transaction, *what)

    monkeypatch.setattr(CommitLog, "commit", late)
    resharding.compact(archive.open(arc.url))
    now = archive.open(arc.url)
    assert seen
    assert now.checkpoints.of("left").latest.name == "meanwhile"
    assert now.checkpoints.of("right").latest.name == "of-right"
    for run, (w, _) in runs.items():
        got = np.concatenate([d["k"] for d in now.checkpoints.of(run).latest.episodes.read("k")])
        assert len(got) == np.count_nonzero(np.arange(1000) % 7 == 0)
        w.close()
