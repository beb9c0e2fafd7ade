"""Faults that the library had once, each of which is there again without what keeps it out: a simulator that does not
find these proves nothing."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pyarrow as pa

from archive.journal import ends, recovery, ticker
from archive.ledger import view
from archive.log import conflicts, sessions
from archive.maintain import forget, objects
from archive.saved import fold
from tests.support.simulation.histories import FAULTS, STRIKES, HistoryError, Kind, explore
from tests.support.simulation.promises import JOBS

Weights = Mapping[str, float]


@dataclass(frozen=True)
class KnownFault:
    """A fault, what keeps it out (attributes of the library, and what stands in their place without it), and what
    parties do, and befalls them, where it shows soonest."""

    name: str
    without: tuple[tuple[Any, str, Any], ...]
    parties: tuple[Weights, ...]
    befalls: tuple[str, ...] = STRIKES + FAULTS
    sizes: tuple[int, ...] = JOBS.sizes
    given: str = ""  # a history that shows it, by the shortest trace of the specification
    refused: str = ""  # the condition of the specification that refuses the histories with it

    @property
    def kind(self) -> Kind:
        others = self.parties[1:] or self.parties
        return replace(JOBS, lead=self.parties[:1], parties=others, befalls=self.befalls, sizes=self.sizes)

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, instead in self.without:
                stack.enter_context(mock.patch.object(owner, name, instead))
            yield

    def found(self, first: int, cpu_s: float, tries: int = 0) -> tuple[int, float, HistoryError | None]:
        """Histories of fresh seeds until one goes wrong: how many, the seconds of CPU, and what went wrong."""
        began, done = time.process_time(), [0]

        def stop(number: int, _: int) -> bool:
            done[0] = number
            return time.process_time() > began + cpu_s

        with self.back():
            try:
                explore(itertools.count(first), self.kind, stop, tries)
            except HistoryError as error:
                return done[0] + 1, time.process_time() - began, error
        return done[0], time.process_time() - began, None


def _nothing(*_: Any, **__: Any) -> None:
    """Nothing is checked."""


def _by_clock(table: pa.Table, sessions: Any) -> pa.Table:
    return table.sort_by("created_at")


def _as_it_was(self: objects.History, settled: int) -> int:
    """The wait counts from what was in force when it began, undone or not."""
    return self._let_go.get(settled) or 0


def _of_ticks(of: Callable[..., Any]) -> Any:
    """A recovery only where something ticked."""

    def made(storage: Any, head: Any, entry: Any, found: Mapping[int, Any]) -> Any:
        return of(storage, head, entry, found) if any(one.objects for one in found.values()) else None

    return staticmethod(made)


_JOB = {"start": 2, "add": 5, "sync": 3, "checkpoint": 2, "pause": 1}
KNOWN_FAULTS = (
    KnownFault(
        "a start that opens late ends a newer job",
        ((sessions, "_check_seen", _nothing),),
        (_JOB,),
        ("stop",),
        refused="opens",
    ),
    KnownFault(
        "a prune deletes what the next checkpoint refers to",
        ((conflicts.Conflicts, "_check_objects", _nothing), (conflicts.Conflicts, "gone", lambda *_: {})),
        ({"add": 2, "linger": 1}, {"expire": 1}),
        (),
        (2,),
        given="A.start:13 A.add:0 A.linger:0 B.pause:5 B.expire:2",
    ),
    KnownFault("a recovered checkpoint that some ranks cannot read", ((fold.SessionFold, "_kinds", {}),), (_JOB,)),
    KnownFault(
        "a clock that steps back",
        ((view, "_in_order", _by_clock), (view, "_PLACES", (*view._PLACES, "created_at"))),
        ({"start": 0.5, "draw": 3, "seal": 3, "sync": 3},),
        ("clock",),
        (1,),
        given="A.start:13 A.draw:0 A.sync:0 A.seal:0 A.sync:0 A!clock:110/-86400",
    ),
    KnownFault(
        "a number of a journal that goes back",
        ((conflicts, "_check_grows", _nothing),),
        ({"add": 1, "overtaken": 3},),
        (),
        given="A.start:13 A.add:0 A.overtaken:15",
    ),
    KnownFault(
        "a recovery where nothing ticked",
        ((recovery.RecoveryBase, "of", _of_ticks(recovery.RecoveryBase.of)),),
        ({"start": 2, "add": 3, "checkpoint": 4},),
        ("crash",),
    ),
    KnownFault(
        "a forgetting that starves",
        ((forget, "MOST_TRIES", 1 << 30), (forget._Forgetting, "_again", _nothing)),
        ({"add": 1, "checkpoint": 3, "crowd": 2},),
        (),
        given="A.start:13 A.add:0 A.checkpoint:2 A.checkpoint:5 A.checkpoint:2 A.crowd:1",
    ),
    KnownFault(
        "a wait that counts from what was undone",
        ((objects.History, "let_go", _as_it_was),),
        ({"add": 2, "commit": 1, "checkpoint": 3}, {"label": 1, "waver": 2, "prune": 2}),
        (),
        (2, 2, 3),
        given="A.start:13 A.add:0 A.checkpoint:2 A.checkpoint:5 A.label:0 A.label:0 A.waver:15 A.prune:0",
    ),
    KnownFault(
        "somebody who was replaced is told that all is durable",
        (
            (ticker.Heartbeat, "check", ticker.Heartbeat.surface),
            (ticker.Heartbeat, "beat", _nothing),
            (ends, "end", lambda *_: {}),
        ),
        (_JOB,),
        ("stop",),
        refused="ended",
    ),
)
