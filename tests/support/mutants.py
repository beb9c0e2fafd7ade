"""Run as a program: mutation testing. A sample of small faults, of the kinds that cosmic-ray knows, each put into a
function of the library alone, and the tests that reach it: one of them must fail.

Usage: python -m tests.support.mutants [--count 300] [--seed 0] [--only PART ...] [--tests PATH ...]

The tests are collected and run once, so that it is known which statements each of them reaches, and how long it takes.
For each fault this process then forks: the child gives the function its faulty code, and runs the tests that reach it:
those of its room and then others, the quick ones first. So no file is changed, and nothing is imported again. The
folder has what is known so far: a run that was ended goes on. Constants, default values and decorators stay as they
are.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests.support.places import ROOT

COSMIC_RAY = "build/cosmic-ray"  # where `make mutants` installs it
TARGETS = (
    "archive/log/*.py", "archive/journal/*.py", "archive/checkpoint/retention.py",
    *(f"archive/maintain/{name}.py" for name in ("retention", "survivors", "prune", "plans")),
)  # fmt: skip
TESTS = ("tests/log", "tests/journal", "tests/maintain", "tests/checkpoint", "tests/saved")
SLOW = (
    "moto",
    "seaweedfs",
    "s3",
    "proxied",
    "obstore",
    "nonsense",
    "forged",
    "forgery",
    "histories",
    "kills",
    "deaths",
)
MOST_TEST_S = 1.0  # of one test; those that take longer are left out
MOST_CPU_S = 90.0  # of the tests of one fault; more is a fault that was noticed
MOST_IDLE_S, LEAST_BUSY_S = 60.0, 1.0  # in so long a process runs so long, or waits to run, or else it hangs
KILLED, ALIVE, TIMED_OUT, UNSEEN = "killed", "alive", "timed out", "in no test"

_REACHED, _BROKEN = "reached_by_tests", 99

Where = tuple[str, int]  # a file, and a line of it


class Mutant(NamedTuple):
    """A fault: which operator of cosmic-ray, at which of the places that it finds."""

    file: str
    function: str
    line: int
    operator: str
    occurrence: int

    def source(self) -> str:
        """The text of the file with this fault."""
        from cosmic_ray.mutating import mutate_code

        out = mutate_code(Path(ROOT, self.file).read_text("utf-8"), _operators()[self.operator], self.occurrence)
        assert out is not None
        return str(out)

    def shown(self) -> str:
        """Its first line, as it was and as it is."""
        pairs = zip(Path(ROOT, self.file).read_text("utf-8").split("\n"), self.source().split("\n"), strict=False)
        before, after = next(((a, b) for a, b in pairs if a != b), ("", ""))
        return f"{self.file}:{self.line} {self.function} ({self.operator})\n  - {before.strip()}\n  + {after.strip()}"


class Run(NamedTuple):
    """What a test took, and which statements it reaches: file and line."""

    name: str
    seconds: float
    reached: list[list[Any]]


# -- faults ------------------------------------------------------------------------------------------------------------


def _operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    every = OperatorProvider()
    return {name: every[name]() for name in every if not every[name].arguments()}


def sample(count: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """Faults at so many places, one at each, that change what a function does."""
    found = [one for pattern in TARGETS for one in sorted(ROOT.glob(pattern)) if not only or _is_of(one, only)]
    by_place: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for path in found:
        for place, mutant in _faults(path):
            by_place[place].append(mutant)
    chance = random.Random(seed)
    places = sorted(by_place)
    chance.shuffle(places)
    out: list[Mutant] = []
    for place in places:
        mutant = chance.choice(by_place[place])
        if len(out) < count and changed(mutant):
            out.append(mutant)
    return out


def _is_of(path: Path, only: Sequence[str]) -> bool:
    return any(part in str(path.relative_to(ROOT)) for part in only)


def _faults(path: Path) -> Iterator[tuple[tuple[str, int, int], Mutant]]:
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    file, functions = str(path.relative_to(ROOT)), _functions(_compiled(path.read_text("utf-8"), str(path)))
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for name, operator in _operators().items():
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            inside = [q for q, code in functions.items() if _is_in(line, code)]
            if inside:
                yield (file, line, column), Mutant(file, inside[-1], line, name, occurrence)


def _is_in(line: int, code: types.CodeType) -> bool:
    return code.co_firstlineno <= line <= max(_lines(code))


def _lines(code: types.CodeType) -> Iterator[int]:
    yield from (line for _, _, line in code.co_lines() if line is not None)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _lines(inner)


def _compiled(source: str, path: str) -> types.CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _functions(module: types.CodeType) -> dict[str, types.CodeType]:
    """Functions and methods by their qualified names, but none that is in another one."""
    out: dict[str, types.CodeType] = {}
    for one in module.co_consts:
        if isinstance(one, types.CodeType):
            is_class = not one.co_flags & 0x02  # CO_NEWLOCALS: what is called
            out |= _functions(one) if is_class else {one.co_qualname: one}
    return {name: code for name, code in out.items() if "<" not in name}


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What a function does, wherever it stands."""
    consts = [_shape(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable, tuple(consts)


def changed(mutant: Mutant) -> types.CodeType | None:
    """The faulty code of its function; None if that does the same, or cannot be compiled."""
    path = Path(ROOT, mutant.file)
    before = _functions(_compiled(path.read_text("utf-8"), str(path)))[mutant.function]
    try:
        after = _functions(_compiled(mutant.source(), str(path))).get(mutant.function)
    except SyntaxError:
        return None
    is_other = after is not None and after.co_freevars == before.co_freevars and _shape(after) != _shape(before)
    return after if is_other else None


# -- tests -------------------------------------------------------------------------------------------------------------


class Tests:
    """The collected tests, to be run in forked children."""

    def __init__(self, items: Sequence[pytest.Item], folder: Path) -> None:
        self._items = {one.nodeid: one for one in items if not any(name in one.nodeid for name in SLOW)}
        self._folder = folder

    @cached_property
    def runs(self) -> dict[str, Run]:
        """What each test that passes takes and calls, by its name."""
        file = self._folder / "tests.jsonl"
        file.touch()
        known = self._known(file)
        if left := [name for name in self._items if name not in known]:
            print(f"{len(left)} tests are run once", flush=True)
            forked(lambda: self._measure(left, file))
            known = self._known(file)
        return {name: one for name, one in known.items() if name in self._items and one.reached}

    @staticmethod
    def _known(file: Path) -> dict[str, Run]:
        return {one.name: one for one in (Run(*json.loads(line)) for line in file.read_text().splitlines())}

    def _measure(self, names: Sequence[str], file: Path) -> int:
        """Add lines to a file, a test each; one that fails, or takes too long, reaches nothing."""
        reached = _mark_all()
        for name in names:
            reached.clear()
            began = time.process_time()
            found = sorted(reached) if self._passes(name, MOST_TEST_S) else []
            with file.open("a") as out:
                print(json.dumps([name, time.process_time() - began, found]), file=out)
        return 0

    def of(self, mutant: Mutant) -> list[str]:
        """The names of tests that reach a fault: those of its room first, and quick ones before slow ones."""
        room, line = mutant.file.split("/")[1], mutant.line
        lines = {at for one in self.runs.values() for file, at in one.reached if file == mutant.file and at <= line}
        place = [mutant.file, max(lines, default=0)]
        reaching = [one for one in self.runs.values() if place in one.reached]
        return [one.name for one in sorted(reaching, key=lambda one: (room not in one.name, one.seconds))]

    def first_failing(self, names: Sequence[str]) -> int:
        """1 once a test fails, else 0."""
        return int(not all(map(self._passes, names)))

    def _passes(self, name: str, most_s: float = 0) -> bool:
        """True if a test passes; False also if it takes longer than this."""
        item = self._items[name]
        signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, most_s)
        try:
            reports = runtestprotocol(item, log=False, nextitem=item.session)  # type: ignore[arg-type]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return not any(one.failed for one in reports) and any(one.passed for one in reports if one.when == "call")


def _too_long(*_: object) -> None:
    raise TimeoutError("longer than what tests of faults may take")


class _Marked(ast.NodeTransformer):
    """Statements of functions note that they are reached, in a set that is among the builtins."""

    def __init__(self, file: str) -> None:
        self._file = file

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for one in ast.walk(node):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(one, name, None), list):
                    setattr(one, name, [new for stmt in block for new in (self._mark(stmt), stmt)])
        return node

    def _mark(self, stmt: ast.stmt) -> ast.stmt:
        mark = ast.parse(f"{_REACHED}.add(({self._file!r}, {stmt.lineno}))").body[0]
        return ast.increment_lineno(mark, stmt.lineno - 1)


def _mark_all() -> set[Where]:
    """Let all functions that are to be mutated note which of their statements are reached: file and line."""
    reached: set[Where] = set()
    setattr(builtins, _REACHED, reached)
    for path in (one for pattern in TARGETS for one in ROOT.glob(pattern)):
        file = str(path.relative_to(ROOT))
        marked = _Marked(file).visit(ast.parse(path.read_text("utf-8")))
        for name, code in _functions(compile(marked, str(path), "exec", dont_inherit=True)).items():
            _swap(file, name, code)
    return reached


def forked(work: Callable[[], int], *, bounded: bool = False) -> int | None:
    """The result of work in a child; None if it took too long."""
    pid = os.fork()
    if not pid:
        code = _BROKEN
        try:
            os.setpgid(0, 0)
            code = work()
        finally:
            os._exit(code)
    looked, before = time.monotonic(), (0.0, 0.0)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _end_group(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == _BROKEN:
                raise RuntimeError("what ran in a forked process failed, other than by a test")
            return code
        now = _times(pid)
        is_idle = time.monotonic() - looked > MOST_IDLE_S and abs(sum(now) - sum(before)) < LEAST_BUSY_S
        if bounded and (now[0] > MOST_CPU_S or is_idle):
            _end_group(pid)
            os.waitpid(pid, 0)
            return None
        if time.monotonic() - looked > MOST_IDLE_S:
            looked, before = time.monotonic(), now
        time.sleep(0.05)


def _end_group(pid: int) -> None:
    """End a child, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _times(pid: int) -> tuple[float, float]:
    """How long the threads of a process ran, and how long they waited for a processor."""
    ran = waited = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            a, b, _ = task.read_text().split()
            ran, waited = ran + int(a) / 1e9, waited + int(b) / 1e9
    return ran, waited


# -- both --------------------------------------------------------------------------------------------------------------


def _swap(file: str, function: str, code: types.CodeType) -> None:
    """Give a function, wherever it is, other code."""
    path = str(Path(ROOT, file))
    for one in gc.get_objects():
        known = one.__code__ if isinstance(one, types.FunctionType) else None
        if known and (known.co_filename, known.co_qualname, known.co_freevars) == (path, function, code.co_freevars):
            one.__code__ = code


def outcome(tests: Tests, mutant: Mutant) -> str:
    """What the tests make of a fault."""
    names = tests.of(mutant)
    if not names:
        return UNSEEN
    code = changed(mutant)
    assert code is not None

    def work() -> int:
        _swap(mutant.file, mutant.function, code)
        return tests.first_failing(names)

    match forked(work, bounded=True):
        case None:
            return TIMED_OUT
        case 0:
            return ALIVE
        case _:
            return KILLED


class Mutation:
    """A plugin of pytest that puts faults in place of a run of the tests."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._folder = Path(given.folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            self._judge(Tests(session.items, self._folder))
        return True

    def _judge(self, tests: Tests) -> None:
        tests.runs  # noqa: B018  # before the first fault
        file = self._folder / "outcomes.jsonl"
        known = {}
        if file.exists():
            known = {tuple(one["mutant"]): one["outcome"] for one in map(json.loads, file.read_text().splitlines())}
        wanted = sample(self._given.count, self._given.seed, self._given.only)
        for number, mutant in enumerate(wanted):
            if tuple(mutant) not in known:
                known[tuple(mutant)] = found = outcome(tests, mutant)
                with file.open("a") as out:
                    print(json.dumps({"mutant": mutant, "outcome": found}), file=out)
                told = mutant.shown() if found in (ALIVE, UNSEEN) else f"{mutant.file}:{mutant.line}"
                print(f"{number + 1} of {len(wanted)}: {found}: {told}", flush=True)
        _tell({mutant: known[tuple(mutant)] for mutant in wanted})


def _tell(outcomes: dict[Mutant, str]) -> None:
    alive = [one for one, outcome in outcomes.items() if outcome in (ALIVE, UNSEEN)]
    print(*(f"{outcomes[one]}: {one.shown()}" for one in alive), sep="\n")
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} killed, {1 - len(alive) / max(1, len(outcomes)):.1%}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--folder", default="build/mutants")
    given = parser.parse_args()
    sys.path.append(str(ROOT / COSMIC_RAY))  # last: it brings packages along that are there already
    files = Path(given.folder).resolve() / "files"
    shutil.rmtree(files, ignore_errors=True)
    how = ["-q", "--timeout", "0", "--basetemp", str(files), "--rootdir", str(ROOT)]
    how += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*how, *(str(ROOT / one) for one in given.tests)], plugins=[Mutation(given)]))


if __name__ == "__main__":
    sys.exit(main())
