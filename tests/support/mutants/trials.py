"""The tests that reach a fault, run in forked children that have it: one of them must fail."""

from __future__ import annotations

import ast
import builtins
import gc
import hashlib
import importlib
import json
import os
import signal
import time
import types
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests.support import processes
from tests.support.mutants import faults
from tests.support.mutants.children import Child
from tests.support.mutants.faults import Mutant, text_of
from tests.support.places import ROOT

STORES = ("moto", "seaweedfs", "s3", "proxied", "obstore")
SWEEPS = ("nonsense", "histories", "kills", "deaths")
MOST_TEST_S = 4.0  # of one test; those that take longer are left out
SHORT_S = 0.5  # of a test: longer ones come last
QUICK_S = 3.0  # of the tests that come first; the others come when all faults had these
TIMES, MORE_S = 5, 5.0  # with a fault a test may take so many times what it takes without, and so much more
WORKERS = 2
KILLED, ALIVE, TIMED_OUT, UNSEEN = "killed", "alive", "timed out", "in no test"

_REACHED = "reached_by_tests"
_NEW = 0.05  # of a test that noticed nothing yet, in the order of tests: so many times less than one that did

Where = tuple[str, int]  # a file, and a line of it
Functions = dict[tuple[str, str], list[types.FunctionType]]


class Run(NamedTuple):
    """What a test took, and which statements it reaches: lines by file."""

    name: str
    seconds: float
    reached: dict[str, list[int]]


class Outcome(NamedTuple):
    """What the tests make of a fault, and the test that noticed it, or hung."""

    mutant: Mutant
    outcome: str
    test: str


class Tests:
    """The collected tests, to be run in forked children."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item], folder: Path) -> None:
        self._items = {one.nodeid: one for one in items if not any(name in one.nodeid for name in STORES + SWEEPS)}
        self._versions = {one: digest([Path(ROOT, one.partition("::")[0])]) for one in self._items}
        self._factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        self._file = folder / f"tests-{digest(faults.files())}.jsonl"  # anew once any function has changed
        self._kills: Counter[tuple[str, str]] = Counter()  # by a file or function, and a test
        processes.import_core()
        self._functions = _functions_there()
        self._runs: dict[str, Run] = {}

    def measure(self) -> None:
        """Learn what each test that passes takes and reaches: all that are not known are run once. One that fails, or
        takes too long, reaches nothing."""
        while left := self._unknown():
            print(f"{len(left)} tests are run once", flush=True)
            parts = [left[at::WORKERS] for at in range(WORKERS) if left[at:]]
            children = [Child(partial(self._measured, part), float("inf")) for part in parts]
            while not all(one.ended for one in children):
                time.sleep(0.05)
            for one in children:
                if one.hung:
                    self._note(Run(one.at, 0.0, {}))
                one.forget()

    def _unknown(self) -> list[str]:
        self._file.touch()
        lines = map(json.loads, self._file.read_text().splitlines())
        known = {name: Run(name, *rest) for name, version, *rest in lines if self._versions.get(name) == version}
        self._runs = {name: one for name, one in known.items() if one.reached}
        return [name for name in self._items if name not in known]

    def _measured(self, names: Sequence[str], child: Child) -> int:
        reached = self._mark_all()
        for name in names:
            child.note(name)
            reached.clear()
            began = time.process_time()
            found: dict[str, list[int]] = {}
            for file, line in sorted(reached) if self._passes(name, MOST_TEST_S, child) else []:
                found.setdefault(file, []).append(line)
            self._note(Run(name, time.process_time() - began, found))
        return 0

    def _note(self, run: Run) -> None:
        """Add a line to the file, at once, as several children do."""
        line = json.dumps([run.name, self._versions[run.name], *run[1:]]) + "\n"
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

    def _mark_all(self) -> set[Where]:
        """Let all functions that faults are put into note which of their statements are reached."""
        reached: set[Where] = set()
        setattr(builtins, _REACHED, reached)
        for path in faults.files():
            file = str(path.relative_to(ROOT))
            marked: Any = _Marked(file).visit(ast.parse(text_of(file)))
            for name, code in faults.functions_of(compile(marked, str(path), "exec", dont_inherit=True)).items():
                self._swap(file, name, code)
        return reached

    def of(self, mutant: Mutant) -> list[str]:
        """The names of the tests that reach a fault. First those that noticed others close by, or are of its room;
        quick ones before slow ones."""
        room, line = mutant.file.split("/")[1], _statement(mutant.file, mutant.line)

        def promise(one: Run) -> float:
            kills = 4 * self._kills[mutant.function, one.name] + self._kills[mutant.file, one.name]
            return (kills + _NEW * (4 if room in one.name else 1)) / (one.seconds + 0.1)

        reaching = [one for one in self._runs.values() if line in one.reached.get(mutant.file, ())]
        ordered = sorted(reaching, key=lambda one: (one.seconds > SHORT_S, -promise(one), one.name))
        return [one.name for one in ordered]

    def judged(self, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
        """The outcome of each fault, as they come; several are judged at once.

        A test that fails after others did counts only if it also fails as the first of a new child, where nothing is
        left of the others.
        """
        waiting = deque((one, list[str](), True) for one in mutants)
        running: list[tuple[Mutant, list[str], int, Child]] = []  # with how many of the tests it runs now
        while waiting or running:
            while waiting and len(running) < WORKERS:
                mutant, names, is_quick = waiting.popleft()
                if names := names or self.of(mutant):
                    count = self._quick(names) if is_quick else len(names)
                    running.append((mutant, names, count, self._trial(mutant, names[:count])))
                else:
                    yield Outcome(mutant, UNSEEN, "")
            for one in [one for one in running if one[-1].ended]:
                running.remove(one)
                mutant, names, count, child = one
                at = child.at
                if child.result == 0 and count == len(names):
                    yield Outcome(mutant, ALIVE, "")
                elif child.result == 0:
                    waiting.append((mutant, names[count:], False))
                elif at != names[0]:
                    waiting.appendleft((mutant, names[names.index(at) :], count < len(names)))
                else:
                    self.learn(found := Outcome(mutant, TIMED_OUT if child.hung else KILLED, at))
                    yield found
                child.forget()
            time.sleep(0.05)

    def _quick(self, names: Sequence[str]) -> int:
        """The number of the first tests that take a few seconds together."""
        ends = accumulate(self._runs[name].seconds for name in names)
        return next((at for at, seconds in enumerate(ends, 1) if seconds > QUICK_S), len(names))

    def learn(self, found: Outcome) -> None:
        """Take note of the test that noticed a fault: it may notice others."""
        if found.test:
            self._kills[found.mutant.function, found.test] += 1
            self._kills[found.mutant.file, found.test] += 1

    def _trial(self, mutant: Mutant, names: Sequence[str]) -> Child:
        """A child that runs these tests with a fault; its result is 1 once one of them fails, else 0."""
        code = faults.changed(mutant)
        assert code is not None

        def work(child: Child) -> int:
            self._swap(mutant.file, mutant.function, code)
            for name in names:
                child.note(name)
                if not self._passes(name, MORE_S + TIMES * self._runs[name].seconds, child):
                    return 1
            return 0

        return Child(work, 3 * MORE_S + TIMES * sum(self._runs[name].seconds for name in names))

    def _swap(self, file: str, function: str, code: types.CodeType) -> None:
        """Give a function other code."""
        for one in self._functions[file, function]:
            if one.__code__.co_freevars == code.co_freevars:
                one.__code__ = code

    def _passes(self, name: str, most_s: float, child: Child) -> bool:
        """True if a test passes, and in time."""
        item = self._items[name]
        self._factory._basetemp = child.folder / "files"
        self._factory._basetemp.mkdir(exist_ok=True)
        signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, most_s, 1.0)  # again: it may be caught
        try:
            reports = runtestprotocol(item, log=False, nextitem=item.session)  # type: ignore[arg-type]
        except TimeoutError:
            return False
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


@cache
def _statements(file: str) -> list[tuple[int, int]]:
    """The first and last line of each statement, outer ones before inner ones."""
    found = (one for one in ast.walk(ast.parse(text_of(file))) if isinstance(one, ast.stmt))
    return sorted({(one.lineno, one.end_lineno or one.lineno) for one in found}, key=lambda one: (one[0], -one[1]))


def _statement(file: str, line: int) -> int:
    """The first line of the innermost statement that a line is of: of the words of an `except` that of its `try`."""
    return max(first for first, last in _statements(file) if first <= line <= last)


def _functions_there() -> Functions:
    """The functions of the files that faults are put into, by file and qualified name."""
    names = {str(path): str(path.relative_to(ROOT)) for path in faults.files()}
    for file in names.values():
        importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    gc.unfreeze()
    out: Functions = {}
    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and one.__code__.co_filename in names:
            out.setdefault((names[one.__code__.co_filename], one.__code__.co_qualname), []).append(one)
    gc.collect()
    gc.freeze()  # what is there is not copied into each child by its garbage collector
    return out


def digest(paths: Sequence[Path]) -> str:
    """The first digits of a digest of files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:8]
