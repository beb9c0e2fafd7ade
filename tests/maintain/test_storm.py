"""Prunes in a loop beside four writers that resume, two readers and merges by reference, all of which are killed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import archive
from tests.support import prune_storm
from tests.support.backends import make_backend
from tests.support.processes import FORKSERVER, answers_in_processes, end
from tests.support.pruning import sound
from tests.support.sampling import few_of

RUNS = 4
QUICK_S, LONG_S = 12, 150


class Job:
    """A process that is begun again when it was killed; one that ends by itself must have ended well."""

    def __init__(self, function: Any, *arguments: Any, mortal: bool = True) -> None:
        self._call = (function, arguments)
        self.mortal = mortal
        self._begin()

    def _begin(self) -> None:
        function, arguments = self._call
        self.child = FORKSERVER.Process(target=function, args=arguments)
        self.child.start()

    def kill(self) -> None:
        if self.child.is_alive():
            end(self.child)
            self._begin()

    def finish(self, timeout_s: float) -> int | None:
        self.child.join(timeout_s)
        code = self.child.exitcode
        end(self.child)
        return code


QUICK = (QUICK_S, "seaweedfs")  # it keeps all cores busy
LONG = (LONG_S, "seaweedfs"), (QUICK_S, "local"), (LONG_S, "local")


@pytest.mark.parametrize(("seconds", "name"), few_of([QUICK, *LONG], 1))
def test_storm(request: pytest.FixtureRequest, tmp_path: Path, name: str, seconds: int) -> None:
    backend = make_backend(request, name, tmp_path)
    url, options = backend.url, backend.storage_options
    archive.create(url, storage_options=options)
    merged = tmp_path / "merged"
    where = {"url": url, "options": options, "runs": RUNS, "merged": str(merged)}
    targets = f"{url}-targets"
    answers_in_processes(int, [()])  # the server that forks is there, and takes nothing of these seconds
    until = time.time() + seconds
    logs = [tmp_path / f"run-{run}" for run in range(RUNS)]
    pruned = tmp_path / "pruned"
    jobs = [Job(prune_storm.write, where, run, str(log), until) for run, log in enumerate(logs)]
    jobs += [Job(prune_storm.read, where, until, mortal=False) for _ in range(2)]
    jobs += [Job(prune_storm.merge, where, targets, until, mortal=False)]
    jobs += [Job(prune_storm.prune, where, str(pruned), until)]
    dice = random.Random(seconds)
    while (left := until - time.time()) > 0:
        time.sleep(min(left, seconds / 8))
        dice.choice([job for job in jobs if job.mortal]).kill()
    assert [job.finish(90) for job in jobs] == [0] * len(jobs)
    check(where, logs, pruned, merged)


def check(where: dict[str, Any], logs: list[Path], pruned: Path, merged: Path) -> None:
    """What was acknowledged is there, what was merged is read in full, and all verifies; something was deleted."""
    arc = prune_storm.opened(where)
    for run, log in enumerate(logs):
        acknowledged = [int(line) for line in log.read_text().split()]
        ck = arc.checkpoints.of(f"run-{run}").latest
        assert ck is not None
        assert ck.step >= max(acknowledged)
        for one in arc.checkpoints.of(f"run-{run}"):
            prune_storm.check(one, run)
    for line in merged.read_text().splitlines():
        target, names = json.loads(line)
        other = archive.open(target, storage_options=where["options"], allow_bases=True)
        assert sorted(ep.id for ep in other.episodes) == names
        assert len(other.episodes.read()) == len(names)
    last = prune_storm.opened(where).prune("1s", dry_run=False, force=True)
    assert last.deleted + sum(int(line) for line in pruned.read_text().split()) > 0
    assert sound(prune_storm.opened(where))
