"""Processes that write, read, merge and prune one archive at once, and what each must find."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import archive
import resharding
from archive import Keep
from archive.errors import ExpiredError, MissingObjectError
from tests.support import servers

WAIT_S = 3  # of the prunes: who reads for longer may miss something
LENGTH = 6


def opened(where: Mapping[str, Any], **how: Any) -> archive.Archive:
    servers.set_environment()
    return archive.open(where["url"], storage_options=where["options"], **how)


def serial(run: int, step: int) -> Any:
    """What the steps of a run's episode say."""
    return np.arange(LENGTH) + LENGTH * step + 1_000_000 * run


def goes_on(until: float, log: str) -> bool:
    """True until that time, and until something is logged: on a busy machine nothing may have come to its end."""
    return time.time() < until or not Path(log).exists()


def write(where: Mapping[str, Any], run: int, log: str, until: float) -> None:
    """A run of checkpoints whose buffer holds two episodes, resumed from the newest; each is logged once it is made."""
    arc = opened(where)
    ck = arc.checkpoints.of(f"run-{run}").latest
    share = None if ck is None else resharding.plan(ck, world_size=1).share(0)
    step = 0 if ck is None else ck.step + 1
    who: dict[str, Any] = {"run": f"run-{run}"} if share is None else {"resume": share}
    w = arc.writer(**who, keep=Keep(last=1), forget="unreferenced")
    while goes_on(until, log):
        w.append({"serial": serial(run, step)}, env_ids=0, last=[i == LENGTH - 1 for i in range(LENGTH)])
        ends = w.live["position"].to_numpy() + w.live["length"].to_numpy()
        w.evict(0, before=max(0, int(ends.max()) - 2 * LENGTH))
        columns = {"p": np.arange(int(w.live["length"].to_numpy().sum())) * 1.0 + step}
        w.checkpoint(step, columns=columns, state={"step": step}).result()
        with Path(log).open("a") as file:
            file.write(f"{step}\n")
            file.flush()
            os.fsync(file.fileno())
        step += 1
    w.close()


def check(ck: Any, run: int) -> None:
    """A checkpoint of a run is whole: its steps, column and state."""
    expected = np.concatenate([serial(run, step) for step in range(max(0, ck.step - 1), ck.step + 1)])
    read = [data["serial"] for data in ck.episodes.read()]
    np.testing.assert_array_equal(np.sort(np.concatenate(read)), expected)
    assert ck.state(0)["step"] == ck.step
    np.testing.assert_array_equal(ck.column("p", 0), np.arange(len(expected)) + ck.step)


def read(where: Mapping[str, Any], until: float) -> None:
    """Read the newest checkpoint of each run, again and again."""
    while time.time() < until:
        began = time.monotonic()
        try:
            arc = opened(where)
            for run in range(where["runs"]):
                ck = arc.checkpoints.of(f"run-{run}").latest
                if ck is not None:
                    check(ck, run)
        except MissingObjectError:
            if time.monotonic() - began < WAIT_S - 1:  # stores tell times in whole seconds
                raise


def merge(where: Mapping[str, Any], folder: str, until: float) -> None:
    """Refer to all episodes from one new archive after the other."""
    for number in range(10_000):
        began = time.monotonic()
        if not goes_on(until, where["merged"]):
            return
        target = f"{folder}/{number}"
        try:
            arc = resharding.merge([opened(where)], to=target, copy=False, storage_options=where["options"])
        except ExpiredError:
            continue
        except MissingObjectError:
            if time.monotonic() - began < WAIT_S - 1:
                raise
            continue
        names = sorted(arc.episodes.table["episode_id"].to_pylist())
        with Path(where["merged"]).open("a") as file:
            file.write(json.dumps([target, names]) + "\n")


def prune(where: Mapping[str, Any], log: str, until: float) -> None:
    """Delete what writers let go of, again and again; how much it was is logged."""
    while goes_on(until, log):
        done = opened(where).prune(f"{WAIT_S}s", dry_run=False, force=True)
        with Path(log).open("a") as file:
            file.write(f"{done.deleted}\n")
