"""Run as a program: a job of XTuner's shape is killed at its k-th storage operation, the next one too; a third ends it.

Usage: python -m tests.support.xtuner_kill '{"url": ..., "options": {}, "kills": [[3, 5], ...], "skip": true}'
Prints one JSON line: what each pair of kills led to. Processes are forked off this one, which has only imported things.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 (imported once, ahead of all forks)
import pyarrow.parquet  # noqa: F401
import zarr  # noqa: F401

from archive.adapters import xtuner
from tests.support.checkpoint_kill import die_at
from tests.support.xtuner_jobs import TASK, Loop, generate, job, resumed, trained
from tests.support.xtuner_models import Status

PROMPTS = 10
BATCH = 2


class Log:
    """What a process said before it was killed, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def say(self, *words: Any) -> None:
        self._file.write(json.dumps(words) + "\n")


async def run(url: str, options: dict[str, Any], log: Log, skip: bool, k: int | None) -> None:
    """Train on each prompt of the epoch once; with k, die at the k-th storage operation."""
    loop = Loop()
    m = job(PROMPTS, loop)
    if k is not None:
        die_at(k)
    w, _, known = await resumed(url, m, journal_s=0.01, **options)
    step = len(known) // BATCH
    while await _produced(m, w, loop, log):
        known += await trained(m, BATCH)
        step += 1
        if step % 2 == 0:
            progress = {"trained": known}
            pending = await xtuner.save(m, w, step=step, no_save_replay_buffer=skip, progress=progress)
            pending.result()
    log.say("ended", known)
    w.close()


async def _produced(m: Any, w: Any, loop: Loop, log: Log) -> bool:
    """Make groups until there is more than a batch, and say which rollouts are durable; whether there is any."""
    sampler, buffer = m.task_runners[0].sampler, m.replay_buffer
    while await buffer.count(TASK, Status.COMPLETED) < 2 * BATCH:
        waiting = await buffer.count(TASK, Status.ABORTED)
        left = PROMPTS - sampler._consumed_samples
        if not waiting + left:
            break
        await asyncio.gather(*(generate(m) for _ in range(min(2, waiting + left))))
        w.sync()
        log.say("durable", list(loop.made))
    return bool(await buffer.count(TASK, Status.COMPLETED))


def child(url: str, options: dict[str, Any], path: Path, skip: bool, k: int | None) -> bool:
    """Run it in a process of its own; whether it ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(run(url, options, Log(path), skip, k))
        except BaseException:
            Log(path).say("failed", traceback.format_exc())
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1]) != signal.SIGKILL


def outcome(url: str, options: dict[str, Any], kills: list[int], skip: bool) -> dict[str, Any]:
    """Killed at each of these operations, one after the other; then let go on to its end."""
    lines: list[list[list[Any]]] = []
    ended = False
    with tempfile.TemporaryDirectory() as folder:
        for at, k in enumerate([*kills, None]):
            path = Path(folder) / str(at)
            ended = child(url, options, path, skip, k)
            lines.append([json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")])
            if ended:
                break
    said = [words for one in lines for words in one]
    made_twice = Counter(
        name for one in lines for name in {tuple(n) for w, names in one if w == "durable" for n in names}
    )
    return {
        "kills": kills,
        "failed": [words[1] for words in said if words[0] == "failed"],
        "trained": next((words[1] for words in said if words[0] == "ended"), None),
        "made_twice": sorted(name for name, count in made_twice.items() if count > 1),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    out = [
        outcome(f"{given['url']}/{i}", given["options"], kills, given["skip"]) for i, kills in enumerate(given["kills"])
    ]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
