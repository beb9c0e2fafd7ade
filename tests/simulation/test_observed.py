"""Simulated histories of whole archives are steps that the specification allows; those of a library with a known fault
are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from archive import writer
from archive.store import Storage
from tests.support import specification
from tests.support.observations import Event, Opening, Projection
from tests.support.sampling import fresh_seed
from tests.support.simulation.histories import KINDS, History, Kind, run
from tests.support.simulation.known_faults import KNOWN_FAULTS, KnownFault
from tests.support.simulation.library import forget_the_last, replaced
from tests.support.simulation.promises import JOBS
from tests.support.simulation.store import Observation

pytestmark = pytest.mark.skipif(bool(specification.missing()), reason=specification.missing() or "TLC runs")

SEEDS, SOAK_SEEDS, MUTANT_SEEDS = range(12), 300, range(4)


@contextlib.contextmanager
def openings() -> Iterator[dict[str, Opening]]:
    """The decisions to open sessions, as they are made."""
    found: dict[str, Opening] = {}
    opened = writer.open_session

    def open_session(log: Any, who: Any, seen: int, keep: Any, origin: Any, forked_from: Any, **how: Any) -> None:
        found.setdefault(who.session, Opening(seen, forks=forked_from is not None))
        opened(log, who, seen, keep, origin, forked_from, **how)

    with mock.patch.object(writer, "open_session", open_session):
        yield found


def observed(kind: Kind, seeds: Sequence[int], fault: KnownFault | None = None) -> list[list[Event]]:
    """The events of these histories, of the library as it is or with a fault."""
    out = []
    with replaced(), mock.patch.dict(KINDS, {kind.name: kind}):
        for seed in seeds:
            with openings() as found, contextlib.nullcontext() if fault is None else fault.back():
                seen = list(run(History.drawn(seed, kind)).observations)
            forget_the_last()
            out.append((seen, found))
    return [events(f"{fault and fault.name}-{kind.name}-{seeds[at]}", *one) for at, one in enumerate(out)]


def events(name: str, seen: Sequence[Observation], found: Mapping[str, Opening]) -> list[Event]:
    storage = Storage.connect(f"memory://observed/{abs(hash(name)):x}")
    for one in seen:
        if one.data is not None and not storage.exists(one.what):
            storage.create(one.what, one.data)
    return list(Projection(storage, found).events(seen))


def test_histories_are_allowed_and_those_with_a_fault_are_refused(tmp_path: Path) -> None:
    traces = observed(JOBS, SEEDS)
    assert sum(map(len, traces)) > 100
    whose = [""] * len(traces)
    for fault in KNOWN_FAULTS:
        if fault.refused:
            some = observed(replace(fault.kind, check=lambda world: None), MUTANT_SEEDS, fault)
            traces, whose = traces + some, whose + [fault.name] * len(some)
    found = specification.check_traces(tmp_path, traces)
    refused = {(whose[at], why) for at, one in enumerate(found) if one is not None for why in one[1]}
    assert refused == {(fault.name, fault.refused) for fault in KNOWN_FAULTS if fault.refused}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_fresh_histories_are_allowed(tmp_path: Path) -> None:
    first = fresh_seed()
    traces = observed(JOBS, range(first, first + SOAK_SEEDS))
    found = specification.check_traces(tmp_path, traces)
    assert [(first + at, one, traces[at][one[0]]) for at, one in enumerate(found) if one is not None] == []
