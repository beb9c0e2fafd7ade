"""A job whose ranks draw prompts, make rollouts of them, and train on these: with journal, ledger and checkpoints.

Its weights are, for the test, the list of what was trained on: a rank's state in each checkpoint. What was made durable
is told, fact by fact, so that somebody can look after a crash whether it is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import archive
import resharding
from tests.support.nodes import on_node

NAME = "prompts"
PARTS = 4
PER_PART = 5
SIBLINGS = 2
BATCH = 2
NEVER_S = 10_000.0

Fact = list[Any]  # what, and of whom: see the test that looks for each
Tell = Callable[[Sequence[Fact]], None]


def key_of(part: int, at: int) -> str:
    return f"p{part}-{at}"


KEYS = [key_of(part, at) for part in range(PARTS) for at in range(PER_PART)]


def expected(key: str, sibling: int) -> dict[str, Any]:
    """The steps of a rollout; siblings have different fields, so that a tick with both takes several objects."""
    part, at = map(int, key[1:].split("-"))
    serial = (part * 1000 + at * 10 + sibling) * 100 + np.arange(2 + at + sibling)
    frame = np.repeat(serial[:, None], 4, 1).astype(np.float32)
    return {"serial": serial, "frame": frame} | ({"logprob": serial * -0.5} if sibling else {})


@dataclass(frozen=True)
class Job:
    """One session of it. batches: how many each rank draws; None: all that are left, and all is trained at the end.
    together: whether an episode and its seal are one. checkpoints: whether any is made before the end. nodes: how many
    machines keep a journal for their ranks; 0: each rank keeps its own."""

    session: str
    world_size: int
    batches: int | None = None
    together: bool = True
    checkpoints: bool = True
    journal_s: float = NEVER_S
    wait_s: float = 60.0
    nodes: int = 0

    @property
    def finishes(self) -> bool:
        return self.batches is None


@dataclass
class Trainer:
    """What a rank's process has in memory: `weights`: keys that it was trained on; `reader`: part of the data set that
    is its own -> how many keys of it were drawn; `others`: of the other parts, when it began; `waiting`: episodes that
    were to be trained on then, some of which had left before their training was taken back."""

    weights: list[str] = field(default_factory=list)
    reader: dict[int, int] = field(default_factory=dict)
    others: dict[int, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)


def weights_of(checkpoint: Any) -> dict[int, list[str]]:
    """What each rank's weights were trained on."""
    found = {rank: checkpoint.state(rank) for rank in checkpoint.ranks}
    return {rank: [] if state is None else list(state["weights"]) for rank, state in found.items()}


def reader_of(ledger: Any) -> dict[int, int]:
    """How far each part of the data set was read: what any rank said last that goes furthest."""
    out = dict.fromkeys(range(PARTS), 0)
    for said in ledger.cursors.values():
        for part, at in said.items():
            out[int(part)] = max(out[int(part)], at)
    return out


def found_in(arc: archive.Archive) -> Any:
    """The checkpoint to go on from; None if nothing was committed or journaled."""
    try:
        return arc.checkpoints.latest or arc.recover()
    except archive.NotFoundError:
        return None


def begin(
    arc: archive.Archive, job: Job, rank: int, planned: Callable[[], object], *, fresh: bool = False
) -> tuple[archive.Writer, Trainer]:  # fmt: skip
    """Go on where the run stands; or begin it, if it is `fresh`, or nothing of it is there.

    planned: waits until all ranks know where: from then on the run's newest session is this one."""
    found = None if fresh else found_in(arc)
    plan = None if found is None else resharding.plan(found, world_size=job.world_size)
    me = Trainer()
    if plan is not None:
        mine = (keys for r, keys in weights_of(plan.checkpoint).items() if r % job.world_size == rank)
        me.weights = [key for keys in mine for key in keys]
        me.waiting = [name for group in plan.checkpoint.ledger(NAME).to_train() for name in group.episodes]
    planned()
    options = {"session": job.session, "journal_s": job.journal_s, "journal": "node" if job.nodes else "rank"}
    with on_node(rank, job.world_size, max(1, job.nodes)):
        if plan is None:
            w = arc.writer(rank, job.world_size, **options)
        else:
            w = arc.writer(resume=plan.share(rank), **options)
    try:
        parts = reader_of(w.ledger(NAME))
    except BaseException:
        w._end()
        raise
    me.reader = {part: at for part, at in parts.items() if part % job.world_size == rank}
    me.others = {part: at for part, at in parts.items() if part not in me.reader}
    return w, me


class Rank:
    """One rank of a job, from its beginning to its end."""

    def __init__(self, w: archive.Writer, me: Trainer, job: Job, tell: Tell) -> None:
        self.w, self.me, self.job = w, me, job
        self.ledger = w.ledger(NAME)
        self._tell = tell
        self._facts: list[Fact] = []  # that may not be durable yet
        self._ends: list[tuple[int, Fact]] = []  # of episodes: the position after them
        self._position = w.durable_until.positions.get(("replay", -1), 0)
        self._step = 0
        tell([["begins", job.session], *(["returns", name, job.session] for name in me.waiting)])

    def run(self) -> None:
        for rollout in self.ledger.to_reissue():
            self.make(*rollout)
        self.sync()
        if self.job.checkpoints:
            self.checkpoint()
        for count in itertools.count():
            batch = [] if count == self.job.batches else self.draw()
            if batch:
                self.batch(batch)
            if count == 1 and self.job.checkpoints:  # on all ranks, also on those that have nothing left
                self.checkpoint()
            if count and not batch:
                break
        self.end()

    def batch(self, keys: Sequence[str]) -> None:
        """Two rollouts of each of these, and training on what was complete before."""
        ready = [group.key for group in self.ledger.to_train()]
        for sibling in range(SIBLINGS):  # of the others one is started at a time
            self.ledger.start(keys[:1], sibling)
        for at, key in enumerate(keys):
            self.make(key, at % SIBLINGS)
        self.sync()
        self.train(ready[:1])
        for at, key in enumerate(keys):
            self.make(key, (at + 1) % SIBLINGS)
        self.commit() if keys[0].endswith("-2") else self.sync()
        self.train(ready[1:])

    def end(self) -> None:
        """The data set is finished; or the process will be gone before long, with something under way."""
        if self.job.finishes:
            self.train([group.key for group in self.ledger.to_train()])
            self.checkpoint()
            self.w.close()
        else:
            self.sync()
            self.train([group.key for group in self.ledger.to_train()])
            if batch := self.draw():
                self.make(batch[0], 1)

    # -- what it does, and says ---------------------------------------------------------------------------------

    def draw(self) -> list[str]:
        """The next of the data set; none at its end."""
        part = next((part for part, at in sorted(self.me.reader.items()) if at < PER_PART), None)
        if part is None:
            return []
        at = self.me.reader[part]
        keys = [key_of(part, i) for i in range(at, min(at + BATCH, PER_PART))]
        self.me.reader[part] = at + len(keys)
        known = self.me.others | self.me.reader  # a rank's word takes the place of what that rank said in other worlds
        self.ledger.draw(keys, siblings=SIBLINGS, cursor={str(part): n for part, n in known.items()})
        self._facts += [*(["drawn", key] for key in keys), ["read", part, at + len(keys)]]
        return keys

    def make(self, key: str, sibling: int) -> None:
        self.ledger.start(key, sibling)
        if self.job.together:
            with self.w.together():
                name = self._added(key, sibling)
                self.ledger.seal(key, sibling, name)
        else:
            name = self._added(key, sibling)
            self.sync()
            self.ledger.seal(key, sibling, name)
        self._facts.append(["sealed", key, sibling, name])
        self.look()

    def _added(self, key: str, sibling: int) -> str:
        data = expected(key, sibling)
        name = self.w.add_episode(data, metadata={"key": key, "sibling": sibling})
        fact = ["episode", name]
        self._facts.append(fact)
        self._position += len(data["serial"])
        self._ends.append((self._position, fact))
        return name

    def train(self, keys: Sequence[str]) -> None:
        """Train on them, and let their episodes go."""
        done = [name for key in keys for name in self.ledger.sealed(key).values()]
        if not keys:
            return
        self.ledger.train(keys)
        self.me.weights += keys
        live = set(self.w.live["episode_id"].to_pylist())
        gone = [name for name in done if name in live][:-1]  # not all of them
        if gone:
            self._tell([["leaves", name] for name in gone])  # before it can be durable
            self.w.remove(gone)
            self._facts += [["gone", name, self.job.session] for name in gone]

    def sync(self) -> None:
        self.w.sync()
        self.told()

    def look(self) -> None:
        """Tell what is durable without having asked for it."""
        now = self.w.durable_until.positions.get(("replay", -1), 0)
        self._tell([fact for end, fact in self._ends if end <= now])
        self._ends = [(end, fact) for end, fact in self._ends if end > now]

    def commit(self) -> None:
        self.w.commit()
        self.told()

    def told(self) -> None:
        self._tell(self._facts)
        self._facts = []

    def checkpoint(self) -> None:
        self._step += 1
        n = int(np.sum(self.w.live["length"].to_numpy()))
        facts, self._facts = self._facts, []
        state = {"weights": list(self.me.weights)}
        options = {"columns": {"age": np.full(n, self._step)}, "progress": {"step": self._step}}
        pending = self.w.checkpoint(self._step, state=state, timeout_s=self.job.wait_s, **options)
        made = pending.result()
        self._tell([*facts, ["checkpoint", made.number, self.w.rank, list(state["weights"])]])


def last(job: Job, session: str, world_size: int) -> Job:
    """The session that finishes the data set."""
    return replace(job, session=session, world_size=world_size, batches=None, checkpoints=True)
