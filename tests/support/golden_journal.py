"""The golden archive with a journal: a run with a ledger that died, was recovered, resumed, and died again.

python -m tests.support.golden_journal regenerate        # of the newest version, which is not released yet
python -m tests.support.golden_journal write FOLDER      # the same content anywhere
"""

from __future__ import annotations

import shutil
import sys
from typing import Any
from unittest import mock

import numpy as np

from tests.support.golden import Nest, stream
from tests.support.places import GOLDEN

NAME = "format-2-journal"
NEVER_S = 3600.0  # a journal that ticks when it is told to
LENGTHS = {"p/0": 3, "p/1": 2, "q/0": 4, "left": 2}
EPISODES: dict[str, Nest] = {name: stream(at, 0, LENGTHS[name]) for at, name in enumerate(LENGTHS)}
COMMITTED = ("p/0", "p/1", "left")  # what the newest commit has
BEYOND = ("q/0",)  # what lies in a tail that nobody has recovered
CHECKPOINTS: dict[str, Nest] = {
    "step-10": {"step": 10, "episodes": ["left", "p/0"], "priority": [0.0, 0.25, 0.5, 0.75, 1.0], "progress": {"n": 1}},
    "step-10+tail-": {"step": 10, "episodes": ["p/0", "p/1"], "priority": [5.0, 6.0, 7.0, np.nan, np.nan],
                      "progress": {"n": 2}},
}  # fmt: skip
STATE: Nest = {"cursor": 3, "random": np.arange(4, dtype=np.uint32)}
PROMPTS: Nest = {  # as the newest commit has it: what was trained after the checkpoint is not
    "p": {"round": 0, "state": "sealed", "siblings": {"0": ["sealed", "p/0"], "1": ["sealed", "p/1"]}},
    "q": {"round": 0, "state": "started", "siblings": {"0": ["started", None], "1": ["drawn", None]}},
    "r": {"round": 0, "state": "dropped", "siblings": {}},
}
TRAINED = {**PROMPTS, "p": {"round": 0, "state": "trained", "siblings": {}}}  # as the first session had it
CURSOR: Nest = {"row": 3}
TAIL_LEDGER = [["q", 0, "sealed", "q/0"]]  # rows of the tail


def write(root: str) -> None:
    """A run that died after a checkpoint, its recovery, and the session that went on from it, and died too."""
    import archive
    import resharding

    arc = archive.create(root)
    w = arc.writer(session="first", journal_s=NEVER_S)
    _first_session(w)
    _die(w)
    arc.refresh().recover()
    plan = resharding.plan(arc.refresh().checkpoints.latest, 1)
    with mock.patch.multiple("archive.journal.ticker", SOON_S=NEVER_S, QUIET_S=NEVER_S):  # all in one tick
        w = arc.writer(session="second", resume=plan.share(0), journal_s=NEVER_S)
        w.weights("w2", 5)
        with w.together():
            w.add_episode(EPISODES["q/0"], episode_id="q/0")
            w.ledger("prompts").seal("q", 0, episode_id="q/0")
        w.remove(["p/0"])
        w.sync()
    _die(w)


def _first_session(w: Any) -> None:
    prompts = w.ledger("prompts")
    prompts.draw(["p", "q", "r"], siblings=2, cursor=CURSOR)
    w.weights("w1", 1)
    w.add_episode(EPISODES["left"], episode_id="left")
    prompts.start(["p", "q"], 0)
    prompts.start("p", 1)
    _seal(w, "p/0")
    w.sync()
    w.checkpoint(10, columns={"priority": np.arange(5) / 4}, state=STATE, progress={"n": 1}, wait=True)
    _seal(w, "p/1")
    prompts.drop("r", "too long")
    w.remove(["left"])
    w.sync()
    prompts.train("p")
    w.journal(columns={"priority": {"p/0": np.arange(5.0, 8)}}, progress={"n": 2})
    w.sync()


def _seal(w: Any, name: str) -> None:
    key, _, sibling = name.partition("/")
    with w.together():
        w.add_episode(EPISODES[name], episode_id=name, terminated=True)
        w.ledger("prompts").seal(key, int(sibling), episode_id=name)


def _die(w: Any) -> None:
    """The process is gone."""
    w._journal = None
    w._end()


if __name__ == "__main__":
    if sys.argv[1:] == ["regenerate"]:
        shutil.rmtree(GOLDEN / NAME, ignore_errors=True)
        write(str(GOLDEN / NAME))
    elif sys.argv[1:2] == ["write"] and len(sys.argv) == 3:
        write(sys.argv[2])
    else:
        sys.exit(__doc__)
