"""A sample of small faults, of the kinds that cosmic-ray knows, each in one function of the library.

Constants, default values and decorators stay as they are.
"""

from __future__ import annotations

import ast
import hashlib
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.places import ROOT

TARGETS = (
    "archive/log/*.py", "archive/journal/*.py", "archive/checkpoint/retention.py",
    *(f"archive/maintain/{name}.py" for name in ("retention", "survivors", "prune", "plans")),
)  # fmt: skip

Place = tuple[str, str, str, int, int]  # file, function, its line, where in that, and which of several lines alike


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

        out = mutate_code(text_of(self.file), _operators()[self.operator], self.occurrence)
        assert out is not None
        return str(out)

    def shown(self) -> str:
        """Where it is, and its first line, as it was and as it is: the same wherever the function stands."""
        pairs = zip(text_of(self.file).split("\n"), self.source().split("\n"), strict=False)
        before, after = next(((a, b) for a, b in pairs if a != b), ("", ""))
        return f"{self.file} {self.function}\n- {before.strip()}\n+ {after.strip()}"


def files() -> list[Path]:
    """The files that faults are put into."""
    return [one for pattern in TARGETS for one in sorted(ROOT.glob(pattern))]


@cache
def text_of(file: str) -> str:
    return Path(ROOT, file).read_text("utf-8")


@cache
def _operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    every = OperatorProvider()
    return {name: every[name]() for name in every if not every[name].arguments()}


def sample(count: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """Faults at so many places, one at each, that change what a function does. Which ones hangs on the text of a
    function's lines: a change of other code does not draw others."""
    by_place: dict[Place, list[Mutant]] = defaultdict(list)
    for path in files():
        file = str(path.relative_to(ROOT))
        if not only or any(part in file for part in only):
            for place, mutant in _faults(file):
                by_place[place].append(mutant)
    out: list[Mutant] = []
    for place in sorted(by_place, key=lambda one: _drawn(seed, *one)):
        kinds, nth = Counter[str](), {}
        for mutant in by_place[place]:
            kinds[mutant.operator] += 1
            nth[mutant] = kinds[mutant.operator]
        ordered = sorted(nth, key=lambda one: _drawn(seed, *place, one.operator, nth[one]))
        if (found := next(filter(changed, ordered), None)) is not None:
            out.append(found)
        if len(out) == count:
            break
    return out


def _drawn(*given: object) -> str:
    return hashlib.sha256(repr(given).encode()).hexdigest()


def _faults(file: str) -> Iterator[tuple[Place, Mutant]]:
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    functions, lines = functions_of(compiled(text_of(file), file)), text_of(file).split("\n")
    spans = {name: (code.co_firstlineno, max(_lines(code))) for name, code in functions.items()}
    nodes = list(ast_nodes(get_ast_from_path(Path(ROOT, file))))
    for name, operator in _operators().items():
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            inside = [function for function, (first, last) in spans.items() if first <= line <= last]
            if inside:
                text, first = lines[line - 1], spans[inside[-1]][0]
                alike = sum(one.strip() == text.strip() for one in lines[first - 1 : line - 1])
                place = file, inside[-1], text.strip(), column - len(text) + len(text.lstrip()), alike
                yield place, Mutant(file, inside[-1], line, name, occurrence)


def _lines(code: types.CodeType) -> Iterator[int]:
    yield from (line for _, _, line in code.co_lines() if line is not None)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _lines(inner)


def compiled(source: str, file: str) -> types.CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a fault may compare with a literal by `is`
        return compile(_bare(ast.parse(source)), str(Path(ROOT, file)), "exec", dont_inherit=True)


def _bare(module: ast.Module) -> ast.Module:
    """A module without annotations, which nothing reads, though those of inner functions are in the code."""
    for one in ast.walk(module):
        if isinstance(one, ast.FunctionDef):
            one.returns = None
        elif isinstance(one, ast.arg):
            one.annotation = None
    return module


def functions_of(module: types.CodeType) -> dict[str, types.CodeType]:
    """Functions and methods by their qualified names, but none that is in another one."""
    out: dict[str, types.CodeType] = {}
    for one in module.co_consts:
        if isinstance(one, types.CodeType):
            is_class = not one.co_flags & 0x02  # CO_NEWLOCALS: what is called
            out |= functions_of(one) if is_class else {one.co_qualname: one}
    return {name: code for name, code in out.items() if "<" not in name}


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What a function does, wherever it stands."""
    consts = [_shape(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable, tuple(consts)


def changed(mutant: Mutant) -> types.CodeType | None:
    """The faulty code of its function; None if that does the same, or cannot be compiled."""
    before = functions_of(compiled(text_of(mutant.file), mutant.file))[mutant.function]
    try:
        after = functions_of(compiled(mutant.source(), mutant.file)).get(mutant.function)
    except SyntaxError:
        return None
    is_other = after is not None and after.co_freevars == before.co_freevars and _shape(after) != _shape(before)
    return after if is_other else None
