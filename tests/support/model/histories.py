"""Draws histories, carries them out, and makes those that fail short.

A history is a list of steps; a step is the name of a rule and a number, from which the rule draws what it does as the
world stands. So a step means something whichever others were left out.
"""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import archive
from archive import tables
from archive.checkpoint import assembly
from archive.log import tablefiles
from archive.store import retry
from archive.write import slabs
from tests.support.model import adding, keeping, resuming, saving
from tests.support.model.checking import check_all
from tests.support.model.world import Rule, World

RULES: dict[str, tuple[Rule, float]] = {
    "append": (adding.append, 32),
    "add_episode": (adding.add_episode, 14),
    "revise": (adding.revise, 3),
    "evict_oldest": (adding.evict_oldest, 6),
    "evict_some": (adding.evict_some, 5),
    "remove": (adding.remove, 5),
    "clear": (adding.clear, 1),
    "close_episodes": (adding.close_episodes, 5),
    "weights": (adding.weights, 3),
    "begin": (resuming.begin, 1),
    "resume": (resuming.resume, 2.5),
    "late_comer": (resuming.late_comer, 0.5),
    "recover": (resuming.recover, 1.2),
    "commit": (saving.commit, 4),
    "sync": (saving.sync, 3),
    "checkpoint": (saving.checkpoint, 5),
    "fail": (saving.fail, 0.7),
    "kill": (saving.kill, 1),
    "label": (keeping.label, 1.5),
    "add_fields": (keeping.add_fields, 1.6),
    "tag": (keeping.tag, 0.3),
    "reader": (keeping.reader, 0.5),
    "forget": (keeping.forget, 0.8),
    "undo": (keeping.undo, 0.4),
    "prune": (keeping.prune, 0.4),
    "compact": (keeping.compact, 0.3),
    "merge": (keeping.merge, 0.3),
}
_NAMES = list(RULES)
_WEIGHTS = list(accumulate(weight for _, weight in RULES.values()))

LENGTH = 120
Root = Callable[[], tuple[str, Any]]  # a fresh URL, and the options of its store


@dataclass(frozen=True)
class Step:
    """One rule, and the number that it draws from."""

    rule: str
    seed: int


@dataclass(frozen=True)
class History:
    """What is done to an archive that is made as `seed` says."""

    seed: int
    steps: tuple[Step, ...]

    @classmethod
    def drawn(cls, seed: int, length: int = LENGTH) -> History:
        """The history of a seed."""
        rng = random.Random(seed)
        rest = [Step(rng.choices(_NAMES, cum_weights=_WEIGHTS)[0], rng.getrandbits(32)) for _ in range(length - 1)]
        return cls(seed, (Step("begin", seed), *rest))

    @classmethod
    def parse(cls, text: str) -> History:
        """What `str` has made of one."""
        seed, *steps = text.split()
        parts = (step.partition(":") for step in steps)
        return cls(int(seed), tuple(Step(rule, int(number)) for rule, _, number in parts))

    def __str__(self) -> str:
        return " ".join([str(self.seed), *(f"{step.rule}:{step.seed}" for step in self.steps)])


def in_memory() -> tuple[str, Any]:
    """A place of its own."""
    return f"memory://model-{uuid.uuid4().hex}", None


def run(history: History, root: Root = in_memory, begun: list[Step] | None = None) -> None:
    """Carry a history out, and in the end hold everything against the model. begun: gets the steps as they begin."""
    rng = random.Random(history.seed)
    layout, shard_bytes = rng.choice(["packed", "packed", "directory"]), rng.choice([None, None, 1, 300])
    url, options = root()
    with settings(shard_bytes, small_tables=rng.random() < 0.3):
        here = World(url, options)
        here.arc = archive.create(url, storage_options=options, layout=layout)
        try:
            for step in history.steps:
                if begun is not None:
                    begun.append(step)
                RULES[step.rule][0](here, random.Random(step.seed))
                here.maybe_tick()
            check_all(here)
            keeping.end(here, rng)
        finally:
            here.end()


@contextlib.contextmanager
def settings(shard_bytes: int | None, *, small_tables: bool) -> Iterator[None]:
    """Pauses of who waits for others are short: all that they wait for is a moment away. Tables are decoded once.
    Shards may be small, and each commit's segments in a file of their own at first."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.multiple(assembly, FIRST_POLL_S=0.0005, MAX_POLL_S=0.002, STEP_IN_S=0.002))
        enter(mock.patch.multiple(retry, BASE_S=0.0005, CAP_S=0.002))
        enter(mock.patch.object(tables, "loads", decoded_once(tables.loads)))
        if shard_bytes is not None:
            enter(mock.patch.object(slabs, "SHARD_BYTES", shard_bytes))
        if small_tables:
            enter(mock.patch.multiple(tablefiles, _RECENT_ROWS=1, _RECENT_COMMITS=1))
        yield


def decoded_once(loads: Callable[..., Any]) -> Callable[..., Any]:
    """The same tables of the same bytes, which are looked at after each step: decoding them anew each time takes a
    third of a history."""
    known: dict[Any, Any] = {}

    def call(data: Any, kind: str, *, columns: Sequence[str] | None = None, **how: Any) -> Any:
        asked = bytes(data), kind, columns and tuple(columns), *sorted(how.items())
        if asked not in known:
            known[asked] = loads(data, kind, columns=columns, **how)
        return known[asked]

    return call


# -- what fails --------------------------------------------------------------------------------------------------------


def failure_of(history: History, root: Root = in_memory, begun: list[Step] | None = None) -> Exception | None:
    """What a history fails with; None if all is well."""
    try:
        run(history, root, begun)
    except Exception as error:
        return error
    return None


def shrunk(history: History, tries: int = 150, root: Root = in_memory) -> History:
    """A history that fails by the same kind of error, with as many steps left out as so many tries find."""
    begun: list[Step] = []
    kind, left = type(failure_of(history, root, begun)), tuple(begun)
    size = max(1, len(left) // 2)
    while True:
        before = at = len(left)
        while at > 0 and tries > 0:
            fewer, tries = (*left[: max(0, at - size)], *left[at:]), tries - 1
            if type(failure_of(replace(history, steps=fewer), root)) is kind:
                left = fewer
            at -= size
        if tries <= 0 or (size == 1 and len(left) == before):
            return replace(history, steps=left)
        size = max(1, size // 2)


class HistoryError(AssertionError):
    """A history went wrong; says how to see it again."""


def explore(
    seeds: Iterator[int], stop: Callable[[int], bool], root: Root = in_memory, *, length: int = LENGTH, tries: int = 150
) -> int:  # fmt: skip
    """Carry out the histories of these seeds until `stop(steps so far)`; how many steps that were.

    HistoryError for the first that goes wrong, with a short history that does, too, found in so many tries.
    """
    done = 0
    while not stop(done):
        history = History.drawn(next(seeds), length)
        if (error := failure_of(history, root)) is not None:
            print(f"MODEL_SEED={history.seed} went wrong: {error!r:.1000}")  # making it short may take too long
            short = shrunk(history, tries, root)
            raise HistoryError(
                f"MODEL_SEED={history.seed} went wrong after {done} steps of others; so does, with "
                f"{len(short.steps)} steps, MODEL_HISTORY='{short}'"
            ) from (failure_of(short, root) or error)
        done += len(history.steps)
    return done
