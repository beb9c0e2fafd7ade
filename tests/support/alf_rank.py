"""Run as a program by every rank of an ALF job: trains until it was asked for a checkpoint, then crashes.

Usage: python -m tests.support.alf_rank URL FOLDER RANK WORLD_SIZE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import archive
from archive.adapters import alf
from archive.checkpoint import requests, rounds
from tests.support.alf_buffer import ReplayBuffer, run


def main() -> None:
    url, folder, rank, world_size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    requests.POLL_S, rounds.AGREE_POLL_S = 0.1, 0.02
    rb = run(ReplayBuffer(2, 8), 5 + rank, seed=rank)
    w = archive.open(url, create=True).writer(rank, world_size, session="s")
    requests.listen()
    (folder / f"pid-{rank}.part").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.part").rename(folder / f"pid-{rank}")
    step = 0
    with requests.save_on_crash(lambda name: alf.save(rb, w, step=step, name=name, partial=True)):
        while True:
            step += 1
            if requests.requested():
                alf.save(rb, w, step=step, name="asked").result(60)
                rb.add(0, 9000 + rank, 0, 1.0)
                raise ZeroDivisionError("boom")
            time.sleep(0.002)


if __name__ == "__main__":
    main()
