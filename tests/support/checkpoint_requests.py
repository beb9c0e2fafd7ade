"""Run as a program by every rank: steps until the job is told to end, and says at which steps it was asked for what.

Usage: python -m tests.support.checkpoint_requests
  '{"url": ..., "options": {}, "folder": ..., "rank": 0, "world_size": 3}'
Without rank, in a process group of torch.distributed. `folder` gets rank-N.log, one JSON line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import archive
from archive.checkpoint import assembly, requests, rounds


def main() -> None:
    given = json.loads(sys.argv[1])
    requests.POLL_S, rounds.AGREE_POLL_S, assembly.STEP_IN_S = 0.1, 0.02, 0.1
    grouped = "rank" not in given
    if grouped:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    arc = archive.open(given["url"], create=True, storage_options=given["options"])
    w = arc.writer() if grouped else arc.writer(given["rank"], given["world_size"], session="s")
    log = Path(given["folder"]) / f"rank-{w.rank}.log"

    def say(**what: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    requests.listen()
    say(pid=os.getpid(), session=w.session)
    step = 0
    while not requests.terminating():
        step += 1
        w.append({"serial": [w.rank * 1_000_000 + step]}, env_ids=0)
        if requests.requested():
            ck = w.checkpoint(step).result(60)
            say(step=step, number=ck.number, ends=requests.terminating())
        time.sleep(0.002 * (1 + w.rank))
    w.close()
    if grouped:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
