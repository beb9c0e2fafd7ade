"""Run as a program: the driver of a job, which others kill, or start twice.

Usage: python -m tests.support.job_driver '{"url": ..., "options": {...}, "folder": ..., "engine": ..., "workers": ...,
"ray": address or null, ...}' Prints "ready" once it has opened the archive, then "done", or the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import archive
from archive import opening
from tests.support.places import ROOT

EPISODES, STEPS, BATCH, WORKERS = 48, 3, 2, 4
WINDOW = 2 * WORKERS * BATCH  # episodes that may be under way at once


def filled(url: str, options: Mapping[str, Any] | None = None, first: int = 0) -> archive.Archive:
    arc = opening.open(url, create=True, storage_options=dict(options or {}))
    with arc.writer() as w:
        for i in range(first, first + EPISODES):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"e{i}")
    with arc.writer():  # a session of its own: what an earlier one wrote may be forgotten
        pass
    return arc.refresh()


def score(folder: str, slow_s: float, steps: Mapping[str, Any]) -> dict[str, Any]:
    """The column of an episode, and a file for each call. A file "die-<i>" in the folder is taken away, and ends the
    process; a file "fail-<i>" makes it fail."""
    first = int(steps["reward"][0])
    with contextlib.suppress(FileNotFoundError):
        (Path(folder) / f"die-{first}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (Path(folder) / f"always-{first}").exists():
        os._exit(7)
    if (Path(folder) / f"fail-{first}").exists():
        raise ValueError(f"no {first}")
    time.sleep(slow_s)
    (Path(folder) / f"call-{first}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return {"twice": 2 * steps["reward"]}


def calls(folder: Path) -> list[int]:
    """The episodes that were computed, each as often as it was."""
    return sorted(int(one.name.split("-")[1]) for one in folder.glob("call-*"))


def work(arc: archive.Archive, folder: Path, slow_s: float = 0.0, **how: Any) -> None:
    how = {"engine": "local", "workers": WORKERS, "commit_every": "0s", "batch_size": BATCH, "job": "score"} | how
    arc.episodes.map(partial(score, str(folder), slow_s), ["reward"], ["twice"], **how)


def check(arc: archive.Archive, folder: Path, killed: int = 0, episodes: int = EPISODES) -> None:
    """Each episode has its column once; nothing was computed twice but what was under way at kills of drivers."""
    arc = arc.refresh()
    assert len(arc.episodes) == episodes
    for ep, steps in arc.episodes.stream(["reward", "twice"]):
        assert (steps["twice"] == 2 * steps["reward"]).all(), ep.id
    late = arc.late_fields
    assert sum(late["length"].to_pylist()) == STEPS * episodes, "a row twice, or lost"
    made = calls(folder)
    assert {*made} == {*range(episodes)}
    assert len(made) <= episodes + killed * WINDOW, made
    assert arc.jobs["score"].finished


@contextlib.contextmanager
def driver(url: str, folder: Path, **given: Any) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own, which has opened the archive."""
    given = {"url": url, "folder": str(folder), "options": {}, "ray": None} | given
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.job_driver", json.dumps(given)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], timeout_s: float = 120) -> str:
    """The last line of a driver that has come to its end."""
    out, err = process.communicate(timeout=timeout_s)
    assert out, err
    return out.splitlines()[-1]


def kill_after(process: subprocess.Popen[str], jobs: Path, objects: int, timeout_s: float = 60) -> bool:
    """Kill a driver once a job has so many objects; False if it ended before."""
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        if sum(not one.name.startswith(".") for one in jobs.glob("*/*")) >= objects:
            process.kill()
            process.wait()
            return True
        time.sleep(0.001)
    assert process.poll() is not None, "it hangs"
    return False


def main() -> None:
    given = json.loads(sys.argv[1])
    url, folder, options, address = (given.pop(name) for name in ("url", "folder", "options", "ray"))
    arc = opening.open(url, storage_options=options)
    if address is not None:
        import ray

        ray.init(**address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    print("ready", flush=True)
    try:
        work(arc, Path(folder), **given)
    except Exception as e:
        print(f"{type(e).__name__}: {e} {getattr(e, '__notes__', '')}".replace("\n", " "), flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    main()
