"""Histories of whole archives: jobs with journals that die, stall and start again, archivists that forget, undo and
prune, readers. What each party did and was told is noted here; `promises` holds the archive against it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import numpy as np

import archive
import resharding
from archive.base import layout
from archive.index import Walk
from archive.log import tablefiles
from tests.support.simulation.scheduler import here
from tests.support.simulation.store import ObjectStore

RUNS = ("main", "main", "main", "side")
WAITS_S = (0.05, 3.0, 70.0, 4_000.0)
PRUNE = "1h"
CROWD = 40  # commits of others
REFUSALS = (
    archive.SupersededError,
    archive.SessionInUseError,
    archive.ExpiredError,
    archive.CheckpointError,
    archive.ConflictError,
    archive.NotDurableError,
    archive.DeadlineError,
    archive.AmbiguousWriteError,
    archive.ClosedError,
)


@dataclass(frozen=True)
class State:
    """What a rank held at a time (a count of requests): episodes, and prompts that are sealed or trained on."""

    live: frozenset[str]
    sealed: frozenset[str]
    trained: frozenset[str]
    at: int


@dataclass
class Rank:
    """The states of one rank, and those that it was told are durable: (state, when it asked, when it was told)."""

    states: list[State] = field(default_factory=list)
    durable: list[tuple[int, int, int]] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    added: frozenset[str] = frozenset()

    @property
    def ever(self) -> frozenset[str]:
        return frozenset().union(*(one.live for one in self.states))


@dataclass
class Saved:
    """A checkpoint that was acknowledged: the state of each rank, its column's value, its own state, and when it was
    told."""

    states: list[int]
    value: int
    own: Any
    told: int
    replay: bool


@dataclass
class Session:
    """One start of a job. planned, looked: when it began to choose its origin, and when it had. to_train, to_reissue:
    prompts that it found."""

    name: str
    run: str
    planned: int
    size: int
    looked: int = 1 << 62
    ranks: list[Rank] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    to_train: frozenset[str] | None = None
    to_reissue: frozenset[str] = frozenset()


@dataclass
class World:
    """An archive, and what those at work with it were told."""

    store: ObjectStore
    url: str
    sessions: dict[str, Session] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)  # episodes
    let_go: set[int] = field(default_factory=set)  # checkpoints that somebody wanted to forget
    forgotten: set[str] = field(default_factory=set)  # episodes
    expiring: set[str] = field(default_factory=set)  # runs of which some writer forgets
    tagged: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def actor(self, name: str) -> Job:
        return Job(self, name)

    def now(self) -> int:
        return len(self.store.seen)

    def new_name(self, stem: str) -> str:
        self.made += 1
        return f"{stem}{self.made}"


def made(store: ObjectStore, url: str) -> World:
    archive.create(url)
    return World(store, url)


def steps_of(name: str) -> dict[str, Any]:
    """The steps of an episode of this name."""
    code = crc32(name.encode())
    return {"obs": np.arange(1 + code % 4) + code % 1000, "reward": np.ones(1 + code % 4)}


class Job:
    """One process, with the writers of all ranks of a job."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.writers: list[Any] = []
        self.session: Session
        self.saves = 0
        self.arc: Any = None

    def open(self) -> Any:
        self.arc = self.arc.refresh() if self.arc is not None else archive.open(self.world.url)
        return self.arc

    @contextlib.contextmanager
    def holding(self, rank: int, added: str = "", **changed: frozenset[str]) -> Iterator[None]:
        """From now on a rank may be found to hold this; if the call within fails, it holds what it held before."""
        of = self.session.ranks[rank]
        before = of.states[-1] if of.states else State(frozenset(), frozenset(), frozenset(), 0)
        of.states.append(replace(before, at=self.world.now(), **changed))
        try:
            yield
        except BaseException:
            of.states.append(replace(before, at=self.world.now()))
            raise
        of.added |= {added} - {""}

    def one(self, rng: random.Random) -> tuple[int, Any, State]:
        """A rank of the job, which is begun if it is not at work."""
        if not self.writers:
            start(self, rng)
        rank = rng.randrange(len(self.writers))
        return rank, self.writers[rank], self.session.ranks[rank].states[-1]


def start(me: Job, rng: random.Random) -> None:
    """Begin, or begin anew, from the newest checkpoint, as README's loop does."""
    close(me, rng)
    run, size, planned, arc = rng.choice(RUNS), rng.choice([1, 1, 2]), me.world.now(), me.open()
    name = me.world.new_name(me.name.lower())
    me.session = me.world.sessions[name] = Session(name, run, planned, size)
    how: dict[str, Any] = {"session": name, "journal_s": rng.choice([2.0, 30.0, 30.0, None])}
    if rng.random() < 0.2:
        how |= {"keep": archive.Keep(last=1), "forget": "unreferenced"}
        me.world.expiring.add(run)
    point = arc.recover(run)
    plan = None if point is None else resharding.plan(point, size)
    me.session.looked = me.world.now()
    if rng.random() < 0.3:
        pause(me, rng)
    writers = []
    for rank in range(size if plan is not None else 0):
        dict(plan.share(rank).columns)
    for rank in range(size):
        place = {"rank": rank, "world_size": size, "run": run} if plan is None else {"resume": plan.share(rank)}
        writers.append(arc.writer(**place, **how))
        me.session.ranks.append(Rank())
        with me.holding(rank, live=frozenset(writers[-1].live["episode_id"].to_pylist())):
            pass
    ledger = writers[0].ledger("prompts")
    me.session.to_train = frozenset(group.key for group in ledger.to_train(all_ranks=True))
    me.session.to_reissue = frozenset(ledger.to_reissue("group", all_ranks=True))
    me.writers = writers


def add(me: Job, rng: random.Random) -> None:
    rank, writer, state = me.one(rng)
    name = me.world.new_name("e")
    with me.holding(rank, name, live=state.live | {name}):
        writer.add_episode(steps_of(name), episode_id=name)
    if writer._journal is not None and rng.random() < 0.3:
        writer.journal(columns={"p": {name: np.ones(len(steps_of(name)["obs"]))}})


def draw(me: Job, rng: random.Random) -> None:
    """A prompt is drawn, and its rollout begins."""
    rank, writer, _ = me.one(rng)
    name = me.world.new_name("e")
    writer.ledger("prompts").draw([name])
    writer.ledger("prompts").start([name])
    me.session.ranks[rank].drawn.append(name)


def seal(me: Job, rng: random.Random) -> None:
    """The rollout of a prompt ends."""
    rank, writer, state = me.one(rng)
    if drawn := me.session.ranks[rank].drawn:
        name = drawn.pop()
        with me.holding(rank, name, live=state.live | {name}, sealed=state.sealed | {name}), writer.together():
            writer.add_episode(steps_of(name), episode_id=name)
            writer.ledger("prompts").seal(name, episode_id=name)


def train(me: Job, rng: random.Random) -> None:
    rank, writer, state = me.one(rng)
    if able := sorted(group.key for group in writer.ledger("prompts").to_train()):
        name = rng.choice(able)
        with me.holding(rank, sealed=state.sealed - {name}, trained=state.trained | {name}):
            writer.ledger("prompts").train([name])


def remove(me: Job, rng: random.Random) -> None:
    rank, writer, state = me.one(rng)
    if able := sorted(state.live - state.sealed - state.trained - (me.session.to_train or frozenset())):
        name = rng.choice(able)
        with me.holding(rank, live=state.live - {name}):
            writer.remove([name])


def sync(me: Job, rng: random.Random) -> None:
    rank, writer, _ = me.one(rng)
    if writer._journal is not None:
        of, began = me.session.ranks[rank], me.world.now()
        state = len(of.states) - 1
        told = writer.sync()
        me.world.store.told("durable", f"journal/{me.session.name}/rank-{rank:05}", told.number)
        of.durable.append((state, began, me.world.now()))


def commit(me: Job, rng: random.Random) -> None:
    rank, writer, _ = me.one(rng)
    every = me.session.ranks[rank].added
    made = writer.commit()
    me.world.store.told("committed", made.transaction, made.number)
    me.world.committed |= every


def checkpoint(me: Job, rng: random.Random) -> None:
    """A checkpoint of all ranks, whose column may be that of the one before."""
    me.one(rng)
    me.saves += 1
    states, value, replay = [len(one.states) - 1 for one in me.session.ranks], rng.randrange(2), rng.random() < 0.8
    own, pending = rng.choice([None, {"value": value}]), []
    for writer in me.writers:
        count = sum(writer.live["length"].to_pylist())
        how = {"columns": {"p": np.full(count, float(value))}} if replay and count else {}
        name = f"{me.session.name}-{me.saves}"
        pending.append(writer.checkpoint(me.saves, name, state=own, save_replay=replay, **how))
    if rng.random() < 0.5:  # what is journaled while it is joined
        add(me, rng)
        sync(me, rng)
    found, *_ = [one.result() for one in pending]
    me.session.saved[found.number] = Saved(states, value, own, me.world.now(), replay)


@contextlib.contextmanager
def _rival(me: Job, acts: Callable[[], None]) -> Iterator[None]:
    """Somebody else acts before each commit of this party."""
    me.world.store.rivals[me.name] = acts
    try:
        yield
    finally:
        me.world.store.rivals.pop(me.name, None)


def overtaken(me: Job, rng: random.Random) -> None:
    """A checkpoint that is staged; before it is committed, more is journaled, and somebody else recovers that."""
    me.one(rng)
    session = me.session

    def told() -> int:
        return sum(len(rank.durable) for rank in session.ranks)

    before, waits = told(), iter(range(60))

    def recover_first() -> None:
        while told() == before and next(waits, None) is not None:
            here().block("what is journaled meanwhile", 1.0)
        archive.open(me.world.url).recover(session.run)

    with _rival(me, recover_first):
        checkpoint(me, rng)


def close(me: Job, rng: random.Random) -> None:
    writers, me.writers = me.writers, []
    for writer, rank in zip(writers, me.session.ranks if writers else [], strict=True):
        writer.close()
        me.world.committed |= rank.added


def pause(me: Job, rng: random.Random) -> None:
    here().block("a while", rng.choice(WAITS_S))


def idle(me: Job, rng: random.Random) -> None:
    """A prompt is drawn, and then nothing happens for hours."""
    draw(me, rng)
    here().block("hours", 3_900.0)


def recover(me: Job, rng: random.Random) -> None:
    me.open().recover(rng.choice(RUNS))


# -- archivists and readers --------------------------------------------------------------------------------------------


def forget(me: Job, rng: random.Random) -> None:
    arc = me.open()
    if not any(one.whole for one in arc.checkpoints):
        return
    plan = arc.forget(keep=archive.Keep(last=rng.randint(1, 2)), episodes=rng.choice([None, "unreferenced"]))
    gone = {one.commit for one in plan.checkpoints if not one.stays}
    me.world.let_go |= gone
    known = set(arc.episodes.table["episode_id"].to_pylist())
    plan = plan.commit()
    left = set(me.open().episodes.table["episode_id"].to_pylist())
    me.world.forgotten |= known - left


def undo(me: Job, rng: random.Random) -> None:
    """What the newest forgetting let go of is back, and can be read."""
    arc = me.open()
    if not arc.head.let_go:
        return
    try:
        arc.undo()
    except archive.UsageError:  # somebody else was quicker
        return
    done = next(one for one in reversed(arc.commits[:]) if one.kind == "undo")
    before = archive.open(me.world.url, commit=done.undoes - 1)
    names = {(one.number, one.name) for one in before.checkpoints}
    assert names <= {(one.number, one.name) for one in arc.at(done.number).checkpoints}, "undo did not bring all back"


def prune(me: Job, rng: random.Random) -> None:
    """Nothing is deleted but what was printed."""
    plan = me.open().prune(PRUNE)
    if rng.random() < 0.3:
        pause(me, rng)
    before, printed, needed = me.world.now(), {one.key for one in plan.going}, _needed(me.world, plan)
    try:
        plan.commit()
    finally:
        own = [one for one in me.world.store.seen[before:] if one.party == me.name and one.kind == "delete"]
        deleted = {key for one in own for key in one.what.split(",")}
        assert deleted <= printed, f"the plan of the prune did not have {sorted(deleted - printed)}"
        assert not deleted & needed, f"what was the newest within the wait needs {sorted(deleted & needed)}"


def _needed(world: World, plan: Any) -> set[str]:
    """The objects of commits that can still be opened: of all since the newest forgetting that is older than the wait
    and not undone, but for what was let go of longer ago."""
    arc, since = archive.open(world.url), (plan.clock - timedelta(hours=1)).timestamp()
    every = arc.commits[:]
    old = {one.number for one in every if world.store.objects[layout.commit_key(one.number)].made_s <= since}
    undone = {one.undoes for one in every if one.kind == "undo"}
    first = max((one.number for one in every if one.kind == "forget" and one.number in old - undone), default=0)
    walk, rows = Walk(arc.storage), tablefiles.load(arc.storage, "forgotten", arc.head.files("forgotten"))
    times = zip(rows["key"].to_pylist(), rows["commit"].to_pylist(), strict=True)
    needed: set[str] = set()
    for one in every:
        if one.number >= first:
            with contextlib.suppress(archive.MissingObjectError):  # of what an undone forgetting named, let go of since
                needed |= walk.reach(one).keys
    return needed - {key for key, number in times if number in old}


def _await_checkpoint(me: Job) -> None:
    """Let a few minutes pass until there is something to forget."""
    for _ in range(5):
        if any(one.whole for one in me.open().checkpoints):
            break
        here().block("a checkpoint", 60.0)


def expire(me: Job, rng: random.Random) -> None:
    """All that an archivist does in a day."""
    _await_checkpoint(me)
    recover(me, rng)
    forget(me, rng)
    here().block("the wait of a prune", 3_700.0)
    prune(me, rng)


def waver(me: Job, rng: random.Random) -> None:
    """What was let go of for longer than the wait is brought back, and let go of again."""
    _await_checkpoint(me)
    forget(me, rng)
    here().block("the wait of a prune", 3_700.0)
    undo(me, rng)
    forget(me, rng)


def crowd(me: Job, rng: random.Random) -> None:
    """A forgetting, and before each of its tries somebody else commits a label."""
    arc, left = archive.open(me.world.url), iter(range(CROWD))

    def label_one() -> None:
        if len(arc.episodes) and next(left, None) is not None:
            arc.label({arc.episodes[0].id: {"good": True}})

    with _rival(me, label_one):
        forget(me, rng)


def compact(me: Job, rng: random.Random) -> None:
    resharding.compact(me.open(), min_alive=rng.choice([0.5, 0.95]))


def tag(me: Job, rng: random.Random) -> None:
    arc = me.open()
    points = list(arc.checkpoints)
    if points:
        point, name = rng.choice(points), me.world.new_name("tag")
        arc.tag(name, point)
        me.world.tagged[name] = point.number


def look(me: Job, rng: random.Random) -> None:
    """Whoever reads the newest checkpoints finds what was saved, unless it takes longer than a prune waits."""
    began, arc = here().now, archive.open(me.world.url)
    points = list(arc.checkpoints)[-2:]
    if rng.random() < 0.5:
        here().block("a long look", rng.uniform(0.0, 3_000.0))
    try:
        for one in points:
            read(me.world, one)
    except (archive.MissingObjectError, archive.NotFoundError):
        assert here().now > began + 3_500.0, "a reader lacked what it had found a moment before"


def read(world: World, point: Any) -> frozenset[str]:
    """The episodes of a checkpoint, with the steps that they were added with."""
    found = {episode.id: episode.read() for episode in point.episodes}
    for name, data in found.items():
        for field_name, values in steps_of(name).items():
            assert np.array_equal(data[field_name], values), f"{name} has other steps than it was added with"
    return frozenset(found)


def label(me: Job, rng: random.Random) -> None:
    """Several labels, one commit after the other."""
    arc = me.open()
    for _ in range(rng.choice([1, 1, 30])):
        if ids := arc.episodes.table["episode_id"].to_pylist():
            arc.label({rng.choice(ids): {"good": True}}, by=me.name)


RULES = {
    rule.__name__: rule
    for rule in (
        start,
        add,
        draw,
        seal,
        train,
        remove,
        sync,
        commit,
        checkpoint,
        overtaken,
        close,
        pause,
        recover,
        forget,
        undo,
        prune,
        expire,
        waver,
        compact,
        crowd,
        idle,
        tag,
        look,
        label,
    )
}
PARTIES = [
    {"start": 2, "add": 6, "remove": 1, "sync": 3, "commit": 1, "checkpoint": 3, "close": 0.3, "pause": 2, "idle": 0.3},
    {"start": 2, "draw": 3, "seal": 3, "train": 2, "sync": 3, "checkpoint": 1, "pause": 1, "add": 1},
    {
        "forget": 3,
        "undo": 1.5,
        "prune": 3,
        "pause": 3,
        "tag": 0.5,
        "recover": 0.5,
        "expire": 0.5,
        "waver": 0.5,
        "compact": 0.7,
    },
    {"look": 2, "recover": 1, "label": 1, "pause": 1, "tag": 0.5},
]
