"""An archive in which all that can be named is named to do harm, and all that can be large is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

import archive
from archive.base import jsontree

SCRIPT = "<script>window.hacked = 1</script>"
PICTURE = "<img src=x onerror='window.hacked = 2'>"
LINK = "javascript:window.hacked = 3"
ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\x00\x7f"
TURNED = "\u202egnp.exe\u2066"
EVIL = f"\"'{SCRIPT}{PICTURE}{LINK}{ESCAPES}{TURNED}\u2028{{{{token}}}}"
FIELD = f"<img onerror=window.hacked=4>\x1b[2J\x00{TURNED}'"  # names of fields are short
LONG = "a long text " * 90_000  # more than 1 MB
MANY = 10_000
DEEP = 500
OBJECT_NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty")


def nested(depth: int) -> Any:
    """Metadata so deep."""
    found: Any = EVIL
    for _ in range(depth):
        found = {"in": found}
    return found


def hostile(url: str, fields: int = MANY) -> archive.Archive:
    """Of each kind of harm an episode: evil, long, empty, one, infinite, deep, wide (fields), talk (a rollout)."""
    arc = archive.create(url)
    about = {"model_weights_uuid": f"w{EVIL}", "update_count": 3}
    with _deeper(), arc.writer(run=EVIL, schema=archive.Schema(json=["messages"])) as w:
        w.add_episode(_steps(4), episode_id=f"evil{EVIL}", terminated=True, metadata={EVIL: EVIL}, **about)
        w.add_episode({"text": [LONG, "b"], "x": np.ones(2)}, episode_id="long", metadata={"text": LONG}, **about)
        w.add_episode({"x": np.zeros(0)}, episode_id="empty")
        w.add_episode({"image": np.zeros((1, 8, 8, 3), np.uint8), "reward": np.ones(1)}, episode_id="one")
        w.add_episode({"reward": np.array([np.nan, np.inf, -np.inf, 1e308])}, episode_id="infinite")
        w.add_episode({"reward": np.array([1e308, 1e308]), "x": np.full((2, 3), np.nan)}, episode_id="overflow")
        w.add_episode({"x": np.zeros(2)}, episode_id="deep", metadata=nested(DEEP))
        w.add_episode({"x": np.zeros(2)}, episode_id="many", metadata={f"{EVIL}{n}": n for n in range(MANY)})
        w.add_episode({"x": np.zeros(2)}, episode_id="names", metadata={name: name for name in OBJECT_NAMES})
        w.add_episode({"group_id": [0, 0], **_talk()}, episode_id="talk", metadata={"prompt": EVIL})
        w.add_episode(_talk(LONG[:200_000]), episode_id="long talk")
        w.add_episode({f"f{n}": np.zeros(2, np.float32) for n in range(fields)}, episode_id="wide")
        w.checkpoint(1, metrics={EVIL: float("nan"), "loss": 1.0}, name="first").result()
        w.add_episode({"x": np.zeros(2)}, episode_id="last")
        w.checkpoint(2, state={EVIL: [EVIL, LONG[:1000]]}, metrics={"loss": float("inf")}).result()
    said = {f"evil{EVIL}": {"quality": EVIL, "note": LONG[:10_000]}, "one": {"success": True}, "deep": {"score": 0.5}}
    arc.label(said, by=EVIL)
    return arc


@contextmanager
def _deeper() -> Iterator[None]:
    """Write what the library itself would refuse to write."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100 * DEEP)
    try:
        with patch.object(jsontree, "MAX_DEPTH", 2 * DEEP):
            yield
    finally:
        sys.setrecursionlimit(before)


def _steps(count: int) -> dict[str, Any]:
    return {
        "obs": {FIELD: np.arange(float(count)), "image": np.zeros((count, 8, 8, 3), np.uint8)},
        "text": [EVIL] * count, "reward": np.ones(count, np.float32),
    }  # fmt: skip


def _talk(text: str = EVIL) -> dict[str, Any]:
    call = f'tool_calls: [{{"name": "{SCRIPT}", "arguments": {"[" * 300 + "]" * 300}}}]'
    said = [{"role": EVIL, "content": text}, {"role": "assistant", "content": call}]
    return {"messages": [said, said], "reward": np.ones(2)}
