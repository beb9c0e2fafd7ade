"""Run as a program by every rank: steps until it was asked for so many checkpoints, and says at which steps it was.

Usage: python -m tests.support.checkpoint_requests
  '{"url": ..., "options": {}, "folder": ..., "count": 3, "rank": 0, "world_size": 3}'
Without rank, in a process group of torch.distributed. `folder` gets rank-N.log, one JSON line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import archive
from archive.checkpoint import joining, requests


def main() -> None:
    given = json.loads(sys.argv[1])
    requests.POLL_S, requests.AGREE_POLL_S, joining.STEP_IN_S = 0.1, 0.02, 0.1
    grouped = "rank" not in given
    if grouped:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    arc = archive.open(given["url"], create=True, storage_options=given["options"])
    w = arc.writer() if grouped else arc.writer(given["rank"], given["world_size"], session="s")
    log = Path(given["folder"]) / f"rank-{w.rank}.log"
    endpoint = requests.serve()

    def say(**what: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    requests.listen()
    say(pid=os.getpid(), url=endpoint.url, token=endpoint.token, session=w.session)
    step = acted = 0
    while acted < given["count"]:
        step += 1
        w.append({"serial": [w.rank * 1_000_000 + step]}, env_ids=0)
        if requests.requested():
            acted += 1
            ck = w.checkpoint(step).result(60)
            say(step=step, number=ck.number)
        time.sleep(0.002 * (1 + w.rank))
    endpoint.close()
    w.close()
    if grouped:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
