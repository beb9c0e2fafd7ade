"""The specification in archive/docs/spec, checked by TLC: the protocol keeps its promises, and without any of its
guards one is broken, by a trace as long as the table of the specification says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import specification
from tests.support.guards import LARGE, LIVENESS, MODULES, MUTANTS, SOUND
from tests.support.specification import SPEC, Case

MOST_LINES, MOST_WIDE = 400, 120
_ROW = re.compile(r"^\| `([^|]+)` \| [^|]+ \| [^|]+ \| `(\w+)` \| (\d+|endless) \|$", re.MULTILINE)
needs_tlc = pytest.mark.skipif(bool(specification.missing()), reason=specification.missing() or "TLC runs")


def test_the_modules_can_be_read_in_one_sitting() -> None:
    lines = [line for path in SPEC.glob("*.tla") for line in path.read_text().splitlines()]
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_WIDE


def test_the_table_has_each_guard_and_what_is_broken_without_it() -> None:
    rows = _ROW.findall((SPEC / "README.md").read_text())
    told = sorted((tuple(sorted(guards.split("`, `"))), promise, steps) for guards, promise, steps in rows)
    lasting = [(case, name, "endless") for *_, name, case in LIVENESS if case.without]
    every = [(case, case.breaks, str(case.steps)) for cases in MUTANTS.values() for case in cases]
    assert told == sorted((tuple(sorted(case.without)), promise, steps) for case, promise, steps in every + lasting)
    used = re.findall(r'(?:Off|Guard)\("([^"]+)"|Planned\("\w+", \w+, "([^"]+)"', "".join(
        path.read_text() for path in SPEC.glob("*.tla")
    ))  # fmt: skip
    assert {name for pair in used for name in pair if name} == {name for guards, *_ in told for name in guards}


@needs_tlc
@pytest.mark.parametrize("name", SOUND)
def test_the_protocol_keeps_its_promises(name: str, tmp_path: Path) -> None:
    _explored(name, SOUND[name], tmp_path)


@needs_tlc
@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_guard_a_promise_is_broken(name: str, tmp_path: Path) -> None:
    _explored(name, MUTANTS[name], tmp_path)


def _explored(name: str, cases: list[Case], folder: Path) -> None:
    found = specification.explore(folder, *MODULES[name], cases)
    wrong = [f"{one}: {broken}" for one, broken in zip(cases, found, strict=True) if broken != (one.breaks, one.steps)]
    assert not wrong


@needs_tlc
@pytest.mark.parametrize(("module", "constants", "name", "case"), LIVENESS, ids=str)
def test_what_must_happen_happens_at_last(
    module: str, constants: dict[str, Any], name: str, case: Case, tmp_path: Path
) -> None:
    assert specification.lives(tmp_path, module, constants, case, name) is (not case.without)


@needs_tlc
@pytest.mark.soak
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in LARGE.items() for case in cases], ids=str)
def test_the_protocol_keeps_its_promises_for_larger_constants(name: str, case: Case, tmp_path: Path) -> None:
    _explored(name, [case], tmp_path)
