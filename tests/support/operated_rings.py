"""What is done to an archive of a ring's checkpoints, to be interrupted anywhere: see `operations`."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
import resharding
from archive.base import CorruptCommitError, layout
from archive.maintain import repair as repaired
from archive.testing import assert_whole
from resharding import compactable
from resharding.compaction import MANY
from tests.support.backends import Backend
from tests.support.checkpoints import serials
from tests.support.letting_go import Ring
from tests.support.pruning import NOW, left_behind
from tests.support.said import Said

TURNS, HELD, KEPT = 5, 3, 2
KEEP = archive.Keep(last=KEPT)


def ring(root: Backend, held: int = HELD) -> None:
    """A checkpoint after each episode, of the newest ones."""
    made = Ring(root.create(), held)
    made.turns(TURNS)
    made.w.close()


def check_ring(root: Backend, *may_be: range, held: int = HELD) -> archive.Archive:
    """The archive has the checkpoints of one of these ranges of steps, and each holds what it did."""
    arc = root.open()
    assert_whole(arc)
    found = [ck.step for ck in arc.checkpoints]
    assert found in [list(one) for one in may_be or (range(TURNS),)]
    for ck in arc.checkpoints:
        live = serials(ck)
        assert live == list(range(10 * max(0, ck.step + 1 - held), 10 * (ck.step + 1)))
        np.testing.assert_array_equal(ck.column("p", 0), np.arange(len(live)) * 0.5 + ck.step)
        assert ck.state(0) == {"k": ck.step}
    newest = arc.checkpoints[f"step-{found[-1]}"].episodes.table["episode_id"].to_pylist()
    assert set(newest) <= set(_ids(arc))
    for data in arc.episodes.read():
        assert len(data["serial"]) == 10
        assert (data["reward"] == data["serial"] * 0.5).all()
    return arc


def _ids(arc: archive.Archive) -> list[str]:
    return [str(name) for name in arc.episodes.table["episode_id"].to_pylist()]


def scatter(root: Backend) -> None:
    """A ring that holds so many small shards that they are joined."""
    ring(root, MANY)
    assert compactable(root.open()).shards == MANY


def compact(root: Backend, said: Said) -> None:
    """Its small shards are joined."""
    resharding.compact(root.open())
    said("compacted")


def check_compacted(root: Backend, said: Said) -> None:
    arc = check_ring(root, held=MANY)
    assert "compacted" not in said or compactable(arc).shards == 0


def damage(root: Backend) -> None:
    """A ring whose newest commit is damaged."""
    ring(root)
    root.plant(layout.commit_key(root.open().head.number), b"damaged")


def repair(root: Backend, said: Said) -> None:
    """The archive opens as of the commit before."""
    try:
        root.open()
    except CorruptCommitError:
        repaired(root.connect())
    said("repaired")


def check_repaired(root: Backend, said: Said) -> None:
    try:
        check_ring(root, range(TURNS - 1))
    except CorruptCommitError:
        assert "repaired" not in said


def forget(root: Backend, said: Said) -> None:
    """All but the newest checkpoints."""
    plan = root.open().forget(keep=KEEP)
    if not plan.empty:
        plan.commit()
    said("forgotten")


def check_forgotten(root: Backend, said: Said) -> None:
    kept = range(TURNS - KEPT, TURNS)
    check_ring(root, *((kept,) if "forgotten" in said else (kept, range(TURNS))))


def leave_behind(root: Backend) -> None:
    """A ring of which most is forgotten, and what a crash has left."""
    ring(root)
    arc = root.open()
    arc.forget(keep=KEEP, episodes="unreferenced", dry_run=False)
    left_behind(arc)


def prune(root: Backend, said: Said) -> None:
    """What nothing needs goes; what could not be deleted, with the next prune."""
    pruned = root.open().prune(**NOW).commit()
    if pruned.errors:
        pruned = root.open().prune(**NOW).commit()
    if not pruned.errors:
        said("pruned")


def check_pruned(root: Backend, said: Said) -> None:
    arc = check_ring(root, range(TURNS - KEPT, TURNS))
    assert "pruned" not in said or arc.prune(**NOW).empty


def label(root: Backend, said: Said) -> None:
    """Of the first episode that it is good, of the last what it is worth."""
    arc = root.open()
    first, *_, last = _ids(arc)
    arc.label({first: {"good": True}})
    said("good")
    arc.episodes[last].label(worth=3)
    said("worth")


def check_labelled(root: Backend, said: Said) -> None:
    arc = check_ring(root)
    first, *_, last = _ids(arc)
    good = _ids_where(arc, "label.good = true") if "good" in arc.labels["key"].to_pylist() else []
    worth = _ids_where(arc, "label.worth = 3") if "worth" in arc.labels["key"].to_pylist() else []
    assert (good, worth) in (([], []), ([first], []), ([first], [last]))
    assert bool(good) >= ("good" in said)
    assert bool(worth) >= ("worth" in said)


def _ids_where(arc: archive.Archive, where: str) -> list[str]:
    return [str(name) for name in arc.episodes.filter(where=where).table["episode_id"].to_pylist()]


def add_fields(root: Backend, said: Said) -> None:
    """One more field of all steps."""
    arc = root.open()
    read = arc.episodes.read(["serial"])
    rows = {name: _late(data["serial"]) for name, data in zip(_ids(arc), read, strict=True)}
    arc.add_fields({"late": rows})
    said("added")


def _late(serial: Any) -> Any:
    return serial * 3 + 1


def check_added(root: Backend, said: Said) -> None:
    arc = check_ring(root)
    added = arc.late_fields.num_rows > 0
    assert added or "added" not in said
    for data in arc.episodes.read(["late", "serial"]) if added else []:
        np.testing.assert_array_equal(data["late"], _late(data["serial"]))
