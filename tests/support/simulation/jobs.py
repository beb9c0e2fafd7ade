"""Rules of jobs: a job begins from what was saved, adds episodes, draws prompts and seals them, journals, saves, stalls
and begins anew. Its ranks are processes, which may die one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

import archive
import resharding
from tests.support.simulation.scheduler import here
from tests.support.simulation.world import Job, Rank, Saved, Session, State, steps_of

RUNS = ("main", "main", "main", "side")
WAITS_S = (0.05, 3.0, 70.0, 4_000.0)
PATIENCE_S = 60.0  # for ranks that may have died


def pause(me: Job, rng: random.Random) -> None:
    here().block("a while", rng.choice(WAITS_S))


def start(me: Job, rng: random.Random) -> None:
    """Begin, or begin anew, from the newest checkpoint, as README's loop does."""
    close(me, rng)
    run, size = rng.choice(RUNS), rng.choice([1, 1, 2])
    how: dict[str, Any] = {"journal_s": rng.choice([2.0, 30.0, 30.0, None])}
    if rng.random() < 0.2:
        how |= {"keep": archive.Keep(last=1), "forget": "unreferenced"}
        me.world.expiring.add(run)
    stall = pause if rng.random() < 0.3 else None
    go_on(me, run, size, how, lambda: stall and stall(me, rng))


def go_on(me: Job, run: str, size: int, how: Mapping[str, Any], stalls: Callable[[], Any] = lambda: None) -> bool:
    """Open a session with so many ranks that goes on with all that the run has; False if that is nothing."""
    name = me.world.new_name(me.name.lower())
    session = me.session = me.world.sessions[name] = Session(name, run, me.world.now(), size)
    point = me.open().recover(run)
    me.launch(size)
    known = me.carried((me.arc, None if point is None else resharding.plan(point, size)))
    session.looked = me.world.now()
    stalls()

    def opened(rank: int) -> tuple[Any, frozenset[str]]:
        arc, plan = known()
        place: dict[str, Any] = {"rank": rank, "world_size": size, "run": run}
        if plan is not None:
            place = {"resume": plan.share(rank)}
            dict(place["resume"].columns)  # a rank has those that it finds
        writer = arc.writer(**place, session=name, **how)
        return writer, frozenset(writer.live["episode_id"].to_pylist())

    writers = []
    for errand in [me.begin(rank, lambda rank=rank: opened(rank)) for rank in range(size)]:
        writer, live = errand.result()
        writers.append(writer)
        session.ranks.append(Rank([State(live, frozenset(), frozenset(), me.world.now())]))

    def prompts() -> tuple[list[str], list[str]]:
        ledger = writers[0].ledger("prompts")
        return [one.key for one in ledger.to_train(all_ranks=True)], ledger.to_reissue("group", all_ranks=True)

    session.to_train, session.to_reissue = map(frozenset, me.at(0, prompts))
    me.writers = writers
    return point is not None


def begun(rule: Callable[[Job, random.Random], None]) -> Callable[[Job, random.Random], None]:
    """A rule of a job that begins first where it is not at work, or none of its ranks lives."""

    @wraps(rule)
    def made(me: Job, rng: random.Random) -> None:
        if not me.living:
            start(me, rng)
        rule(me, rng)

    return made


@begun
def add(me: Job, rng: random.Random) -> None:
    rank, writer, state = me.one(rng)
    name = me.world.new_name("e")
    with me.holding(rank, name, live=state.live | {name}):
        me.at(rank, lambda: writer.add_episode(steps_of(name), episode_id=name))
    if writer._journal is not None and rng.random() < 0.3:
        me.at(rank, lambda: writer.journal(columns={"p": {name: np.ones(len(steps_of(name)["obs"]))}}))


@begun
def draw(me: Job, rng: random.Random) -> None:
    """Prompts are drawn, and their rollouts begin."""
    rank, writer, _ = me.one(rng)
    names = [me.world.new_name("e") for _ in range(rng.choice([1, 1, 3]))]

    def drawn() -> None:
        writer.ledger("prompts").draw(names)
        writer.ledger("prompts").start(names)

    me.at(rank, drawn)
    me.session.ranks[rank].drawn += names


@begun
def redo(me: Job, rng: random.Random) -> None:
    """The rollouts that sessions before have left behind begin again."""
    rank, writer, _ = me.one(rng)

    def begin_again() -> list[str]:
        left = [one.key for one in writer.ledger("prompts").to_reissue()]
        writer.ledger("prompts").start(left)
        return left

    me.session.ranks[rank].drawn += me.at(rank, begin_again)


@begun
def seal(me: Job, rng: random.Random) -> None:
    """The rollout of a prompt ends."""
    rank, writer, state = me.one(rng)

    def sealed() -> None:
        with writer.together():
            writer.add_episode(steps_of(name), episode_id=name)
            writer.ledger("prompts").seal(name, episode_id=name)

    if drawn := me.session.ranks[rank].drawn:
        name = drawn.pop()
        with me.holding(rank, name, live=state.live | {name}, sealed=state.sealed | {name}):
            me.at(rank, sealed)


@begun
def train(me: Job, rng: random.Random) -> None:
    rank, writer, state = me.one(rng)
    if able := sorted(me.at(rank, lambda: [group.key for group in writer.ledger("prompts").to_train()])):
        name = rng.choice(able)
        with me.holding(rank, sealed=state.sealed - {name}, trained=state.trained | {name}):
            me.at(rank, lambda: writer.ledger("prompts").train([name]))


def remove(me: Job, rng: random.Random) -> str | None:
    """An episode leaves the buffer: its name, if there is one that no ledger awaits."""
    if not me.living:
        start(me, rng)
    rank, writer, state = me.one(rng)
    if able := sorted(state.live - state.sealed - state.trained - (me.session.to_train or frozenset())):
        name = rng.choice(able)
        with me.holding(rank, live=state.live - {name}):
            me.at(rank, lambda: writer.remove([name]))
        return name
    return None


@begun
def sync(me: Job, rng: random.Random) -> None:
    rank, writer, _ = me.one(rng)
    if writer._journal is not None:
        of, began = me.session.ranks[rank], me.world.now()
        state = of.held
        told = me.at(rank, writer.sync)
        me.world.store.told("durable", f"journal/{me.session.name}/rank-{rank:05}", told.number)
        of.durable.append((state, began, me.world.now()))


@begun
def commit(me: Job, rng: random.Random) -> None:
    rank, writer, _ = me.one(rng)
    every = me.session.ranks[rank].added
    made = me.at(rank, writer.commit)
    me.world.store.told("committed", made.transaction, made.number)
    me.world.committed |= every


@begun
def checkpoint(me: Job, rng: random.Random) -> None:
    """A checkpoint of all ranks, whose column may be that of the one before; partial, perhaps, where some have died."""
    me.saves, session = me.saves + 1, me.session
    states = {rank: me.session.ranks[rank].held for rank in me.living}
    value, replay = rng.randrange(2), rng.random() < 0.9
    own = rng.choice([None, {"value": value}])
    how = {"state": own, "save_replay": replay, "partial": len(states) < len(me.writers) and rng.random() < 0.7}

    def begin(writer: Any) -> Any:
        count = sum(writer.live["length"].to_pylist())
        columns = {"columns": {"p": np.full(count, float(value))}} if replay and count else {}
        return writer.checkpoint(me.saves, f"{me.session.name}-{me.saves}", **how, **columns, timeout_s=PATIENCE_S)

    pending = {rank: me.at(rank, lambda writer=me.writers[rank]: begin(writer)) for rank in states}
    if rng.random() < 0.25:  # what is journaled while it is joined
        add(me, rng)
        sync(me, rng)
        if me.session is not session:  # all ranks have died meanwhile, and it has begun anew
            return
    found, *_ = [me.at(rank, one.result) for rank, one in pending.items()]
    there = {rank: state for rank, state in states.items() if rank not in found.missing_ranks}
    whole = len(there) == len(me.writers)
    me.session.saved[found.number] = Saved(there, value, own, me.world.now(), replay, whole)


def overtaken(me: Job, rng: random.Random) -> None:
    """A checkpoint that is staged; before it is committed, more is journaled, and somebody else recovers that."""
    if not me.living:
        start(me, rng)
    session = me.session

    def told() -> int:
        return sum(len(rank.durable) for rank in session.ranks)

    before, waits = told(), iter(range(60))

    def recover_first() -> None:
        while told() == before and next(waits, None) is not None:
            here().block("what is journaled meanwhile", 1.0)
        archive.open(me.world.url).recover(session.run)

    with me.world.store.rival(me.name, recover_first):
        checkpoint(me, rng)


def close(me: Job, rng: random.Random) -> None:
    living, writers, me.writers = me.living, me.writers, []
    for rank in living:
        me.at(rank, writers[rank].close)
        me.world.committed |= me.session.ranks[rank].added


@begun
def lose(me: Job, rng: random.Random) -> None:
    """One of several ranks dies alone."""
    if len(me.living) > 1:
        here().kill(me.processes[rng.choice(me.living)])


@begun
def linger(me: Job, rng: random.Random) -> None:
    """A checkpoint, hours in which a prompt is drawn and nothing else happens, and the same checkpoint again."""
    number = rng.getrandbits(16)
    checkpoint(me, random.Random(number))
    draw(me, rng)
    here().block("hours", 3_900.0)
    checkpoint(me, random.Random(number))


_SAVING = (sync, commit, checkpoint, overtaken, linger, close)
JOB_RULES = (start, add, draw, redo, seal, train, remove, *_SAVING, pause, lose)
JOB_PARTIES = (
    {
        "start": 1.5,
        "add": 5,
        "remove": 0.7,
        "expunge": 0.7,
        "sync": 3,
        "commit": 1,
        "checkpoint": 6,
        "close": 0.3,
        "pause": 1.5,
        "linger": 0.3,
        "lose": 0.7,
    },
    {"start": 1.5, "draw": 3, "redo": 1, "seal": 3, "train": 2, "sync": 3, "checkpoint": 2.5, "pause": 1, "add": 1},
)
