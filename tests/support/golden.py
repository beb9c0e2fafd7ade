"""The archives that tests/golden keeps, two of each version of the format, as a writer of that version made them.

python -m tests.support.golden regenerate            # those of the newest version, which is not released yet
python -m tests.support.golden write FOLDER LAYOUT   # the same content anywhere
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.places import GOLDEN

LAYOUTS = ("packed", "directory")
ARCHIVES = tuple(f"format-2-{layout}" for layout in LAYOUTS)
MAX_BYTES = 200_000  # of one
Nest = dict[str, Any]


def texts(*values: str) -> Any:
    return np.array(values, object)


OBS = np.arange(10, dtype=np.float32).reshape(5, 2)
KINDS: Nest = {
    "obs": OBS[:4],
    "next": {"obs": OBS[1:]},
    "tokens": [np.arange(n, dtype=np.int32) for n in (2, 0, 3, 1)],
    "state": np.linspace(-1, 1, 15).reshape(5, 3).astype(ml_dtypes.bfloat16),
    "small": np.array([0.5, -1.5, 448, 0], ml_dtypes.float8_e4m3fn),
    "seed": np.array(7),
    "goal": np.array([1.5, -0.0, np.nan]),
    "info": [{"a": 1}, [None, True], "text", 2.5],
    "text": texts("one", "", "drei, 三", "4"),
    "label": np.array(["ab", "c", "", "defg"]),
    "raw": np.array([b"x", b"yz", b"", b"w"]),
    "flag": np.array([True, False, True, True]),
    "big": np.array([1, -2, 300, 4], ">i2"),
    "when": np.array(["2026-01-01", "1969-12-31", "NaT", "2026-01-04"], "M8[D]"),
    "é/._ key": np.arange(4, dtype=np.uint8),
    "reward": np.array([1, 2, 3, 4], np.float64),
    "nothing": None,
    "empty": {},
}


def stream(env: int, start: int, stop: int) -> Nest:
    """Steps of an env row: obs is the step's number, and next/obs the following one."""
    steps = np.arange(start, stop)
    obs = np.stack([steps, steps * 0 + env], axis=1).astype(np.float32)
    return {"obs": obs, "next": {"obs": obs + np.array([1, 0], np.float32)}, "reward": steps * 0.5}


EPISODES: dict[str, Nest] = {
    "kinds": KINDS,
    "without steps": stream(6, 0, 0),
    "one step": stream(9, 0, 1),
    "revised": stream(5, 0, 3),
    "env 0": stream(0, 0, 4),
    "env 1": stream(1, 0, 7),
    "headless": stream(2, 3, 6),
}
SUMMARIES: dict[str, Nest] = {
    "kinds": {"terminated": True, "return": 10.0, "weights": ["w1"], "metadata": {"task": "push", "n": 3}},
    "without steps": {"return": 0.0, "weights": ["w1"]},
    "one step": {"return": 0.0, "weights": ["w1"]},
    "revised": {"return": 1.5, "weights": ["w3"]},
    "env 0": {"terminated": True, "return": 3.0, "weights": ["w2"]},
    "env 1": {"return": 10.5, "weights": ["w2", "w3"]},
    "headless": {"complete": False, "return": 6.0, "weights": ["w3"]},
}
DEFAULTS: Nest = {"complete": True, "terminated": None, "metadata": None}
PRIORITIES = np.arange(7) / 8
CHECKPOINTS: dict[str, Nest] = {
    "step-10": {
        "step": 10,
        "live": [[0, "replay", 0, p, "env 0", p] for p in range(1, 4)]
        + [[0, "replay", 1, p, "env 1", p] for p in range(4)],
        "priority": PRIORITIES,
        "attributes": {"staleness": {"env 1": 2}},
        "progress": {"samples": 7},
    },
    "step-20": {
        "step": 20,
        "live": [[0, "replay", 1, p, "env 1", p] for p in range(2, 7)],
        "priority": PRIORITIES[:5],
        "attributes": {},
        "progress": {"samples": 12},
    },
}
STATE: Nest = {"cursor": 3, "random": np.arange(4, dtype=np.uint32), "best": float("inf"), "names": ("a", "b")}


LABELS: dict[str, Nest] = {"kinds": {"note": "drei, 三", "quality": 0.9}, "env 1": {"quality": [1, None]}}
TAGS: dict[str, Nest] = {
    "paper": {"commit": 16, "checkpoint": "step-10", "run": "main", "by": "anna"},
    "all of it": {"commit": 18, "checkpoint": None, "run": None, "by": None},
}
ADDED: dict[str, Nest] = {
    "kinds": {
        "judge": {"score": np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)},
        "mark": texts("a", "", "ü", "b"),
    },
    "env 1": {"reward": -stream(1, 0, 7)["reward"]},
}
PROVENANCE: Nest = {"function": "judge", "version": 3}


def write(root: str, layout: str) -> None:
    """Steps on every kind of axis in two sessions; a checkpoint and an episode that were forgotten, brought back,
    forgotten again and pruned; labels, some of them of a tail and a revision that others took the place of; late
    fields, one of them over a field of the steps, one dropped; tags."""
    import archive

    arc = archive.create(root, layout=layout)
    with arc.writer(session="zeroth") as w:
        w.add_episode(stream(7, 0, 2), episode_id="gone")
        w.checkpoint(5, columns={"priority": PRIORITIES[:2]}, progress={}, wait=True)
    _write_first(arc)
    _say(arc)
    _let_go(arc)


def _write_first(arc: Any) -> None:
    """Two sessions: the second resumes from a checkpoint of the first, whose later steps are superseded."""
    import archive

    schema = archive.Schema(
        next_of={"next/obs": "obs"},
        axes={"tokens": "ragged", "state": "offset", "seed": "free", "goal": "free"},
        json=["info"],
    )
    with arc.writer(session="first", schema=schema) as w:
        _first_session(w)
    tail, revision = {"env 1": {"seen": 1}}, {"revised": {"seen": 2}}
    arc.refresh().label(tail | revision | {"kinds": {"success": True, "note": LABELS["kinds"]["note"]}}, by="anna")
    with arc.writer(session="second", schema=schema, resume=arc.checkpoints["step-10"]) as w:
        _second_session(w)


def _first_session(w: Any) -> None:
    w.weights("w1", 1)
    w.add_episode(KINDS, episode_id="kinds", terminated=True, metadata=SUMMARIES["kinds"]["metadata"])
    w.add_episode(EPISODES["one step"], episode_id="one step")
    w.add_episode(EPISODES["without steps"], episode_id="without steps")
    w.add_episode(stream(4, 0, 2), episode_id="revised")
    w.clear()
    w.weights("w2", 2)
    _append(w, 0, 2)
    w.flush()
    _append(w, 2, 4)
    w.evict(0, before=1)
    columns, attributes = {"priority": PRIORITIES}, {"staleness": {"env 1": 2}}
    w.checkpoint(10, columns=columns, attributes=attributes, state=STATE, progress={"samples": 7}, wait=True)
    w.append(stream(8, 4, 6), env_ids=1)


def _say(arc: Any) -> None:
    said = {"kinds": {"success": None, "quality": 0.9}, "env 1": {"quality": [1, None]}, "gone": {"quality": 0}}
    arc.refresh().label(said)
    arc.add_fields({"reward": {"env 1": np.zeros(7), "gone": np.ones(2)}, "wrong": {"one step": np.zeros(1)}})
    added = {
        "judge/score": {"kinds": ADDED["kinds"]["judge"]["score"]}, "mark": {"kinds": ADDED["kinds"]["mark"]},
        "reward": {"env 1": ADDED["env 1"]["reward"]},
    }  # fmt: skip
    arc.add_fields(added, provenance=PROVENANCE, by="anna")
    arc.drop_fields(["wrong"])


def _let_go(arc: Any) -> None:
    import archive

    forget = partial(arc.forget, archive.Keep(last=2), ids=["gone"], dry_run=False)
    forget()
    arc.undo()
    forget()
    arc.tag("paper", arc.refresh().checkpoints["step-10"], by="anna")
    arc.prune(older_than="0s", force=True, dry_run=False)
    arc.tag("all of it")


def _append(w: Any, start: int, stop: int) -> None:
    for env in (0, 1):
        w.append(
            stream(env, start, stop), env_ids=env, first=start == 0, terminated=env == 0 and stop == 4,
            episode_ids=f"env {env}"
        )  # fmt: skip


def _second_session(w: Any) -> None:
    w.weights("w3", 5)
    w.append(stream(1, 4, 7), env_ids=1)
    w.evict(0, before=4)
    w.evict(1, before=2)
    w.checkpoint(20, columns={"priority": PRIORITIES[:5]}, progress={"samples": 12}, wait=True)
    w.close_episodes([1], truncated=True, reason="time limit")
    w.add_episode(EPISODES["revised"], episode_id="revised", replace=True)
    w.add_episode(EPISODES["headless"], episode_id="headless", first=False)


def added(name: str, steps: Nest) -> Nest:
    """What an episode holds with its late fields."""
    return steps | ADDED.get(name, {})


def differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Places where two nests differ, bit for bit."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if found.keys() != wanted.keys():
            yield f"{where}: keys {sorted(found)}, not {sorted(wanted)}"
        for key in wanted.keys() & found.keys():
            yield from differences(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(a, b, f"{where}[{i}]")
    elif isinstance(wanted, np.ndarray) and isinstance(found, np.ndarray) and wanted.dtype != object:
        if (found.dtype, found.shape, found.tobytes()) != (wanted.dtype, wanted.shape, wanted.tobytes()):
            yield f"{where}: {found!r}, not {wanted!r}"
    elif isinstance(wanted, np.ndarray):
        if found.dtype != object or found.tolist() != wanted.tolist():
            yield f"{where}: {found!r}, not {wanted!r}"
    elif type(found) is not type(wanted) or found != wanted:
        yield f"{where}: {found!r}, not {wanted!r}"


def regenerate() -> None:
    for name in ARCHIVES:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        write(str(GOLDEN / name), name.rpartition("-")[2])


if __name__ == "__main__":
    if sys.argv[1:] == ["regenerate"]:
        regenerate()
    elif sys.argv[1:2] == ["write"] and len(sys.argv) == 4:
        write(sys.argv[2], sys.argv[3])
    else:
        sys.exit(__doc__)
