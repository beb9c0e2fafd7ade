"""Run as a program: a job that keeps a journal of RLinf's buffer kills itself at its k-th storage operation, for one k
in every so many; then another loads what is there.

Usage: python -m tests.support.buffer_kill FOLDER ONE_IN. Prints a JSON line for each kill.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from archive.base.errors import NothingThereError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.kills import code_of, die_at, forked, killed, of_blocks
from tests.support.processes import import_core
from tests.support.ticks import NEVER_S
from tests.support.trajectories import everything, make

MOST = 6  # in the buffer
ADDED, SAVED_AT = 16, 8


def made(folder: Path, session: str) -> TrajectoryReplayBuffer:
    """One of the job's buffers."""
    return TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=f"{folder}/rank_0", world_size=1, session=session, cache_size=2,
        sample_window_size=0, max_trajectories=MOST, journal_s=NEVER_S,
    )  # fmt: skip


def job(folder: Path, k: int) -> None:
    """Two trajectories at a time, which are said to be durable once they are; a checkpoint in the middle."""
    with (folder / "said").open("w") as said:
        die_at(k)
        with made(folder, "one") as buffer:
            for first in range(0, ADDED, 2):
                if first == SAVED_AT:
                    buffer.save_checkpoint(f"{folder}/rank_0").result()
                    print("saved", file=said, flush=True)
                (_, last) = buffer.add_trajectories([make(first), make(first + 1)])
                buffer.sync()
                print(last, file=said, flush=True)


def come_back(folder: Path) -> None:
    """All that was said to be durable is there, what was evicted is not, and ids go on."""
    lines = (folder / "said").read_text().split()
    said = max([int(line) for line in lines if line != "saved"], default=-1)
    with made(folder, "two") as buffer:
        try:
            buffer.load_checkpoint(f"{folder}/rank_0")
        except NothingThereError:
            assert said == -1, lines
        ids = buffer.trajectory_ids
        newest = ids[-1] if ids else -1
        assert newest >= said, (ids, lines)
        assert ids == list(range(max(0, newest + 1 - MOST), newest + 1)), ids
        assert not ids or everything(buffer) == set(ids)
        assert buffer._added == newest + 1
        (new,) = buffer.add_trajectories([make(newest + 1)])
        assert new == newest + 1
        buffer.save_checkpoint(f"{folder}/rank_0").result()


def once(folder: Path, k: int) -> bool:
    """Whether the job was killed there; raises if the next one does not find what it should."""
    folder.mkdir()
    was_killed = killed(lambda: job(folder, k))
    found = code_of(forked(lambda: come_back(folder)))
    assert found == 0, (k, found)
    return was_killed


def main() -> None:
    root, one_in = Path(sys.argv[1]), int(sys.argv[2])
    import_core()
    torch.set_num_threads(1)
    for k in of_blocks(one_in):
        if not once(root / f"{k}", k):
            return
        saved = "saved" in (root / f"{k}" / "said").read_text()
        print(json.dumps({"k": k, "saved": saved}), flush=True)


if __name__ == "__main__":
    main()
