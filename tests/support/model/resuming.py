"""Rules of how sessions begin: anew, from a checkpoint on as many ranks or on others, as a fork, after a recovery."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

import archive
import resharding
from tests.support.model.checking import check_all, check_live, look, refused
from tests.support.model.perfect import SCHEMA, Buffer, Buffers, Episodes, Rank, Saved, Session, copied, priority
from tests.support.model.world import NEVER_S, World

ENDS = ("close", "die", "die", "zombie")
MOST_RANKS = 3
JOURNALS = 0.4  # of the sessions keep one
DROPS = 0.2
MAX_SAVED = 12


def begin(world: World, rng: random.Random) -> None:
    """A session that takes over nothing."""
    run = rng.choice(["main", "main", "other"])
    before = world.active.get(run)
    if before is not None and rng.random() < 0.7:
        return
    _end(world, before, rng)
    world_size = rng.randint(1, MOST_RANKS)
    name = world.new_name("s")
    ranks = [Rank(r, {}) for r in range(world_size)]
    session = Session(name, run, name, ranks, {}, rng.random() < JOURNALS, rng.random() < DROPS)
    _opened(world, session, [None] * world_size)
    if before is not None and before.journal:
        note_recovered(world, before)
    check_live(world, session)


def _opened(world: World, session: Session, sources: list[Any], *, fork: bool = False) -> None:
    """Open the writers of a session. sources: what each rank goes on from."""
    journal_s = NEVER_S if session.journal else None
    key = "fork_from" if fork else "resume"
    run = session.run if sources[0] is None or fork else None
    writers = []
    for rank, source in enumerate(sources):
        said = source is None or isinstance(source, archive.Checkpoint)
        place = (rank, len(sources)) if said else (None, None)
        how = {key: source, "journal_s": journal_s}
        writers.append(world.reopened().writer(*place, run, session.name, SCHEMA, **how))
    world.begin(session, writers, end="die")
    for rank in session.ranks if session.journal else ():
        rank.durable = [({}, {})]
        if sources[0] is not None:  # which it journals at once, but in the background
            world.writer(session, rank).sync()
            rank.ticked()


def _end(world: World, session: Session | None, rng: random.Random) -> None:
    """What becomes of the session that had the run."""
    if session is None:
        return
    world.settle()
    how = rng.choice(ENDS)
    if how == "close":
        for rank in session.alive:
            world.writer(session, rank).close()
            rank.stamp(next(world.stamps), session.run)
            if session.journal:
                rank.ticked()
            rank.dead = True
            world.writers.pop((session.name, rank.number))
    else:
        world.leave(session, how)


def resume(world: World, rng: random.Random) -> None:
    """A session that goes on from a checkpoint: its run, or a fork of it, on as many ranks or on others."""
    world.settle()
    able = [s for s in world.standing if s.replay and s.buffers]
    if not able:
        return
    saved = able[-1] if rng.random() < 0.6 else rng.choice(able)
    fork = rng.random() < 0.15 and not any(s.run == f"fork-{saved.run}" for s in world.sessions)
    run = f"fork-{saved.run}" if fork else saved.run
    _end(world, world.active.get(run), rng)
    point = _point(world, saved)
    size = saved.world if rng.random() < 0.5 else rng.randint(1, MOST_RANKS)
    name, journal = world.new_name("s"), rng.random() < JOURNALS
    session = Session(name, run, saved.tree, [], dict(saved.seen), journal, rng.random() < DROPS, origin=saved)
    if size == saved.world and saved.whole:
        session.ranks = [Rank.of(r, saved.buffers[r], saved.seen) for r in range(size)]
        plan = resharding.plan(point, size, tails="ignore")
        assert plan.is_identity
        by_plan = rng.random() < 0.5
        _opened(world, session, [plan.share(r) if by_plan else point for r in range(size)], fork=fork)
    else:
        plan = resharding.plan(point, size, allow_missing=True, tails="ignore")
        shares = [plan.share(r) for r in range(size)]
        session.ranks = dealt(world, saved, shares)
        _opened(world, session, shares, fork=fork)
    check_live(world, session)
    if rng.random() < 0.3:
        check_all(world)
    else:
        look(world, rng, newest=2)


def _point(world: World, saved: Saved) -> Any:
    with world.looked_at() as arc:
        points = list(arc.checkpoints)
    return points[world.standing.index(saved)]


def dealt(world: World, saved: Saved, shares: list[Any]) -> list[Rank]:
    """The ranks of a plan. Each live step is on one of them, in canonical order, with its column; whole episodes."""
    ranks = [Rank(number, {}) for number in range(len(shares))]
    names = sorted({name for buffers in saved.buffers.values() for name in buffers})
    for name in names:
        want = [
            (episode, serial)
            for _, buffers in sorted(saved.buffers.items())
            if name in buffers
            for episode, serials in buffers[name].episodes(world.owner)
            for serial in serials or [-1]
        ]
        got: list[tuple[str, int]] = []
        for rank, share in zip(ranks, shares, strict=True):
            got += _taken(world, saved, rank, share, name)
        assert sorted(got) == sorted(want), (sorted(got), sorted(want))
    return ranks


def _taken(world: World, saved: Saved, rank: Rank, share: Any, name: str) -> list[tuple[str, int]]:
    """What one rank gets of a buffer."""
    of, buffer = share.buffer(name), Buffer()
    rank.buffers[name] = buffer
    got: list[tuple[str, int]] = []
    order: list[tuple[int, int, list[int]]] = []
    layout = of.layout
    rows = zip(of.episodes, of.read(["serial"]), layout.env_id.tolist(), layout.position.tolist(), strict=True)
    for episode, data, env, position in rows:
        serials = data["serial"].tolist()
        buffer.put(env, position, serials, episode.id)
        order.append((env, position, serials))
        got += [(episode.id, serial) for serial in serials or [-1]]
        known = saved.seen[episode.id]
        opened = any(episode.id in b[name].open.values() for b in saved.buffers.values() if name in b)
        if opened and not known.last:
            rank.known[episode.id] = replace(known, last=True, truncated=True, reason="resumed")
    live = [s for _, _, serials in order for s in serials]
    for column, factor in saved.columns.items():
        values = of.columns.get(column)
        if values is not None and not saved.recovered:
            np.testing.assert_array_equal(values, priority(live) * factor)
    buffer.next = dict(of.next_positions)
    return got


def late_comer(world: World, rng: random.Random) -> None:
    """A session that another one has taken the place of can no longer commit."""
    if not world.zombies:
        return
    world.settle()
    writer = world.zombies.pop(rng.randrange(len(world.zombies)))
    before = world.arc.refresh().head.number
    serial = world.take_some(1)
    with refused(archive.SupersededError):
        writer.add_episode({"serial": np.array(serial), "reward": np.array(serial) * 0.5})
        writer.commit()
    assert world.arc.refresh().head.number == before
    world.abandon(writer)


# -- recovering --------------------------------------------------------------------------------------------------------


def recover(world: World, rng: random.Random) -> None:
    """What a run that died has journaled comes back."""
    world.settle()
    able = [s for s in world.active.values() if s.journal]
    if not able:
        return
    session = rng.choice(able)
    for rank in session.alive:
        world.die(session, rank)
    made = world.arc.refresh().recover(session.run)
    note_recovered(world, session)
    own = [s for s in world.standing if s.run == session.run and s.whole]
    assert (None if made is None else made.name) == (own[-1].name if own else None)
    look(world, rng)


def note_recovered(world: World, session: Session) -> None:
    """If a checkpoint came of what a session has journaled, it has what was durable of each rank; if not, the newest
    one has. Two came where a process that was left alive ticked between the recovery and the end of its journal."""
    points = list(world.arc.refresh().checkpoints)
    before = _began_with(world, session)
    if len(points) == len(world.standing):
        assert before is None or before.session != session.name or _holds(world, session, before)
        return
    for made in points[len(world.standing) :]:
        _note_made(world, session, before, made)


def _note_made(world: World, session: Session, before: Saved | None, made: Any) -> None:
    stamp = next(world.stamps)
    buffers: dict[int, Buffers] = {rank: {} for rank in made.ranks}
    for rank in session.ranks:
        rank.known, rank.buffers = _survived(world, rank, made)
        rank.stamp(stamp, session.run)
        buffers[rank.number] = copied(rank.buffers)
    columns = {} if before is None else before.columns
    world.saved.append(
        Saved(
            made.name,
            session.name,
            session.run,
            session.tree,
            made.step,
            made.world_size,
            True,
            buffers,
            session.seen(),
            dict(columns),
            {},
            recovered=True,
            journal=True,
        )
    )


def _began_with(world: World, session: Session) -> Saved | None:
    """The newest checkpoint of a session with its buffers, or the one that it went on from."""
    own = [s for s in world.saved if s.session == session.name and s.replay and s.whole]
    return own[-1] if own else session.origin


def _holds(world: World, session: Session, saved: Saved) -> bool:
    """Whether a checkpoint has what was durable of each rank."""
    return all(
        any(_live(world, b) == _live(world, saved.buffers[rank.number]) for _, b in rank.durable)
        for rank in session.ranks
    )


def _live(world: World, buffers: Buffers) -> list[tuple[str, str, list[int]]]:
    return [(n, e, s) for n, b in sorted(buffers.items()) for e, s in b.episodes(world.owner)]


def _survived(world: World, rank: Rank, made: Any) -> tuple[Episodes, Buffers]:
    """What was durable of a rank: of several that may be, the one that came back."""
    got = _came_back(rank.number, made)
    for known, buffers in reversed(rank.durable):
        used = {name: one for name, one in buffers.items() if one.next}
        if {name: _shown(one) for name, one in used.items()} == got:
            return dict(known), copied(used)
    raise AssertionError(f"rank {rank.number} came back with {got}, which it never held: {rank.durable}")


Shown = tuple[set[tuple[int, int]], set[tuple[int, int]], dict[int, int], dict[int, str]]


def _shown(buffer: Buffer) -> Shown:
    """Where its live steps stand, and live episodes without any; where each env row goes on, what is open there."""
    places = {(env, position) for env, row in buffer.live.items() for position in row}
    return places, set(buffer.empty), buffer.next, buffer.open


def _came_back(rank: int, made: Any) -> dict[str, Shown]:
    """The same of the buffers of a rank in a checkpoint."""
    about = made.staged(rank).index.buffers
    got: dict[str, Shown] = {
        name: (set(), set(), dict(one.next_positions), dict(one.open_episodes)) for name, one in about.items()
    }
    for row in made.live.select(["rank", "buffer", "env_id", "position", "lo", "hi"]).to_pylist():
        if row["rank"] == rank:
            places, empty, _, _ = got[row["buffer"]]
            length = row["hi"] - row["lo"]
            places.update((row["env_id"], row["position"] + i) for i in range(length))
            empty.update([] if length else [(row["env_id"], row["position"])])
    return {name: one for name, one in got.items() if one[2]}
