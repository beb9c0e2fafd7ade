"""Rules of commits, checkpoints and ticks of journals; and of operations that fail while they go on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import archive
from archive.testing import faults
from tests.support.model.adding import chosen
from tests.support.model.checking import check_live, look
from tests.support.model.perfect import MAIN, Places, Rank, Saved, Session, priority
from tests.support.model.world import World

SURVIVED = ("lose_answer", "throttle", "reset")


def commit(world: World, rng: random.Random) -> None:
    """One rank commits, or uploads, what is pending."""
    if (at := chosen(world, rng)) is None:
        return
    session, rank = at
    world.settle()
    writer = world.writer(session, rank)
    if rng.random() < 0.3:
        writer.flush()
    else:
        with maybe_faulty(world, rng):
            writer.commit()
        rank.stamp(next(world.stamps), session.run)
    ticked(session, rank)


def ticked(session: Session, rank: Rank) -> None:
    """All that the rank has is in its journal, if it keeps one."""
    if session.journal:
        rank.ticked()


def maybe_ticked(session: Session, rank: Rank) -> None:
    """Nobody knows whether its last tick came to be."""
    if session.journal:
        rank.maybe_ticked()


def sync(world: World, rng: random.Random) -> None:
    """A rank's journal ticks."""
    if (at := chosen(world, rng)) is None or not at[0].journal:
        return
    world.settle()
    with maybe_faulty(world, rng):
        assert world.writer(*at).sync().seconds_behind == 0.0
    ticked(*at)


def maybe_faulty(world: World, rng: random.Random) -> Any:
    """Now and then an operation fails in a way that the library must get over."""
    if rng.random() < 0.8:
        return contextlib.nullcontext()
    return faults.at(world.url, what=rng.choice(SURVIVED), k=rng.randint(1, 6))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint(world: World, rng: random.Random) -> None:
    """All ranks that are alive make a checkpoint; partial ones, if some are dead."""
    if (at := chosen(world, rng)) is None:
        return
    session = at[0]
    world.settle()
    asked = Asked(world, session, rng)
    if len(session.alive) < len(session.ranks):
        for rank in session.alive:
            asked.start(rank, partial=True).result(60)
            asked.note(rank)
            world.saved.append(asked.saved())
    elif rng.random() < 0.4:
        world.pendings.append((session, [asked.start(rank) for rank in session.alive]))
        asked.done()
        return
    else:
        with maybe_faulty(world, rng):
            for one in [asked.start(rank) for rank in session.alive]:
                one.result(60)
        asked.done()
    check_live(world, session)
    look(world, rng)


class Asked:
    """A checkpoint that is made of a session."""

    def __init__(self, world: World, session: Session, rng: random.Random) -> None:
        self.world, self.session = world, session
        self.name, self.step = world.new_name("c"), session.saved + 1
        session.saved += 1
        self.replay = rng.random() < 0.85
        self.columns = {name: rng.randint(1, 2) for name in ("p", "q") if rng.random() < 0.6}
        self.attributes = {rank.number: self._attributes(rank, rng) for rank in session.ranks}
        self.drops = self.replay and session.drops and rng.random() < 0.7
        self.whole = len(session.alive) == len(session.ranks)
        self.left_out: dict[int, Places] = {}  # of each rank that is in it
        self.left_ids: set[str] = set()
        self.discarded: dict[str, dict[str, int]] = {}
        self.taken: list[int] = []

    def _attributes(self, rank: Rank, rng: random.Random) -> dict[str, int]:
        if MAIN not in rank.buffers or not self.replay:
            return {}
        names = [name for name, _ in rank.buffers[MAIN].episodes(self.world.owner)]
        return {name: rng.randint(0, 9) for name in names if rng.random() < 0.5}

    def start(self, rank: Rank, partial: bool = False, timeout_s: float = 60.0) -> Any:
        """The call of one rank."""
        given = {name: {"columns": self._columns(rank, name)} for name in rank.buffers if name != MAIN}
        return self.world.writer(self.session, rank).checkpoint(
            self.step, self.name, columns=self._columns(rank, MAIN) if MAIN in rank.buffers else {},
            attributes={"staleness": self.attributes[rank.number]}, buffers=given,
            state={"at": self.step, "rank": rank.number, "array": [rank.number, self.step]},
            progress={"at": self.step}, save_replay=self.replay, partial=partial, timeout_s=timeout_s,
            incomplete="drop" if self.drops else "keep",
        )  # fmt: skip

    def _columns(self, rank: Rank, buffer: str) -> dict[str, Any]:
        if not self.replay:
            return {}
        values = priority(rank.buffers[buffer].serials())
        return {name: values * factor for name, factor in self.columns.items()}

    def note(self, rank: Rank, stamp: int | None = None) -> None:
        """The rank is in it."""
        self.taken.append(rank.number)
        if self.replay:
            self.left_out[rank.number] = self._left_out(rank)
            if self.whole:
                rank.left_out, rank.left_ids = self.left_out[rank.number], self.left_ids
            rank.stamp(next(self.world.stamps) if stamp is None else stamp, self.session.run)
        ticked(self.session, rank)

    def _left_out(self, rank: Rank) -> Places:
        """Where what is not complete stands; it is counted."""
        out: Places = {}
        for name, buffer in rank.buffers.items() if self.drops else ():
            found = buffer.incomplete(self.world.owner, self.session.base | rank.known)
            for reason, episodes in found.items():
                self.left_ids |= episodes.keys()
                counts = self.discarded.setdefault(reason, {"episodes": 0, "steps": 0})
                counts["episodes"] += len(episodes)
                counts["steps"] += sum(map(len, episodes.values()))
            out[name] = buffer.places([one for of in found.values() for one in of], self.world.owner)
        return out

    def saved(self) -> Saved:
        """As it is committed, with the ranks so far."""
        session, ranks = self.session, [r for r in self.session.ranks if r.number in self.taken]
        buffers = {r.number: r.without(self.left_out.get(r.number, {})) for r in ranks}
        return Saved(
            self.name, session.name, session.run, session.tree, self.step, len(session.ranks), self.replay,
            buffers, session.seen(), dict(self.columns),
            {r.number: self.attributes[r.number] for r in ranks}, journal=session.journal,
            discarded=copy.deepcopy(self.discarded),
        )  # fmt: skip

    def done(self) -> None:
        """It was committed by all ranks."""
        stamp = next(self.world.stamps)
        for rank in self.session.alive:
            self.note(rank, stamp)
        self.world.saved.append(self.saved())


# -- what fails --------------------------------------------------------------------------------------------------------


def fail(world: World, rng: random.Random) -> None:
    """One operation of a commit fails for good; the next try makes it."""
    if (at := chosen(world, rng)) is None:
        return
    session, rank = at
    world.settle()
    writer = world.writer(session, rank)
    op = rng.choice(["any", "create", "put", "get"])
    world.idle()
    with faults.at(world.url, what="fail", k=rng.randint(1, 6), op=op), contextlib.suppress(archive.ArchiveError):
        writer.commit()
    writer.commit()
    rank.stamp(next(world.stamps), session.run)
    ticked(session, rank)


def kill(world: World, rng: random.Random) -> None:
    """A rank, or a whole session, dies at some operation of what it does, or between two."""
    if (at := chosen(world, rng)) is None:
        return
    session, rank = at
    world.settle()
    how = rng.choice(["idle", "all idle", "commit", "checkpoint"])
    if how in ("idle", "all idle"):
        for one in [rank] if how == "idle" else list(session.alive):
            world.die(session, one)
    elif how == "commit":
        before = len(world.arc.refresh().commits)
        _dying(world, rng, lambda: world.writer(session, rank).commit(), session, [rank])
        maybe_ticked(session, rank)
        if _since(world, before, "commit"):
            rank.stamp(next(world.stamps), session.run)
            ticked(session, rank)
    elif len(session.alive) == len(session.ranks):
        _die_in_checkpoint(world, rng, session)
    look(world, rng)


def _die_in_checkpoint(world: World, rng: random.Random, session: Session) -> None:
    asked = Asked(world, session, rng)
    before = len(world.arc.refresh().commits)
    ranks = list(session.alive)

    def save() -> None:
        for one in [asked.start(rank, timeout_s=0.2) for rank in ranks]:
            one.result(60)

    _dying(world, rng, save, session, ranks)
    if _since(world, before, "checkpoint"):
        stamp = next(world.stamps)
        for rank in ranks:
            asked.note(rank, stamp)
        world.saved.append(asked.saved())
        return
    for rank in ranks:
        maybe_ticked(session, rank)


def _dying(world: World, rng: random.Random, call: Callable[[], Any], session: Session, ranks: list[Rank]) -> None:
    """From some operation on all fail, and then these ranks are dead. What was acknowledged is there."""
    before = len(world.arc.refresh().commits)
    pending = any(not known.same_but_for_stamps(r.committed.get(n)) for r in ranks for n, known in r.known.items())
    world.idle()
    with faults.at(world.url, what="fail", k=rng.randint(1, 12), times=None):
        try:
            call()
            acknowledged = True
        except archive.ArchiveError:
            acknowledged = False
        for rank in ranks:
            world.die(session, rank)
    if acknowledged and pending:
        assert len(world.arc.refresh().commits) > before, "what was acknowledged is gone"


def _since(world: World, before: int, kind: str) -> bool:
    """Whether a commit of this kind came since there were so many."""
    made = [one.kind for one in world.arc.refresh().commits][before:]
    assert made in ([], [kind]), made
    return bool(made)
