"""Pure, no I/O: conditions as text ("return > 10 and update_count >= 100"), parsed into Arrow expressions.

Never evaluated as Python. Grammar, loosest first: `or`, `and`, `not`, comparison (= == != < <= > >=, `in (...)`,
`is null`, `is not null`), parentheses, values (numbers, 'strings', true, false, null), columns; `metadata.key` is
the value of a key of the episode's metadata (`metadata.tools.calls` of a nested one), `label.key` that of a label.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from archive.arrays import Mask
from archive.base import UsageError, check_text, one_line
from archive.index.episodes import COLUMNS

if TYPE_CHECKING:
    import pyarrow.compute as pc

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][\w.\-]*)|(?P<op>==|!=|<=|>=|<>|[=<>(),])|(?P<bad>\S))"
)
_WORDS = {"and", "or", "not", "in", "is", "null", "none", "true", "false"}
KEYED = ("metadata.", "label.")  # prefixes of columns with any key
MAX_JOINTS = 1000  # Arrow evaluates expressions recursively, and would crash
_NEGATIONS = ("not ", "!=", "<>", "invert(")
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_ALIASES = {"update_count": "update_count_max", "id": "episode_id", "steps": "length"}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class _Operand(NamedTuple):
    """A column or a value; not a condition yet."""

    value: Any
    is_column: bool


def parse(text: str, columns: Collection[str]) -> tuple[pc.Expression, set[str]]:
    """The expression of a condition, and the columns that it needs. UsageError if the text is not a condition."""
    parser = _Parser(text, columns)
    return parser.parse(), parser.needed


class _Parser:
    def __init__(self, text: str, columns: Collection[str]) -> None:
        self.text = text
        self.columns = columns
        self.needed = set[str]()
        self.tokens = [*self._tokens()]
        self.at = 0

    def parse(self) -> pc.Expression:
        if not self.tokens:
            self._fail("is empty")
        check_text(self.text, "the condition")
        if sum(kind == "word" and text in ("and", "or", "not") for kind, text in self.tokens) > MAX_JOINTS:
            self._fail(f"has more than {MAX_JOINTS} of 'and', 'or', 'not'; use `column in (...)`")
        try:
            expression = self._any()
        except RecursionError:
            self._fail("is nested too deeply")
        if self.at < len(self.tokens):
            self._fail(f"has {self.tokens[self.at][1]!r} where it should end")
        return self._condition(expression)

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """The kind of each token (number, string, name, op, or word of the language), and its text."""
        for match in _TOKEN.finditer(self.text):
            kind = match.lastgroup or "bad"
            text = match[kind]
            if kind == "bad":
                self._fail(f"has {text!r} at position {match.start(kind)}, which means nothing here")
            is_word = kind == "name" and text.lower() in _WORDS
            yield ("word", text.lower()) if is_word else (kind, text)

    def _fail(self, what: str) -> NoReturn:
        text = self.text if len(self.text) <= 400 else self.text[:400] + "..."
        raise UsageError(
            f'the condition {text!r} {what}; write as in "return > 10 and update_count >= 100". '
            f"Columns: {', '.join(sorted(self.columns))}, metadata.<key>, label.<key>"
        )

    def _accept(self, *words: str) -> str:
        """The next token, consumed, if it is one of these words or signs; else the empty string."""
        if self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if kind in ("word", "op") and text in words:
                self.at += 1
                return text
        return ""

    def _expect(self, word: str, otherwise: str) -> None:
        if not self._accept(word):
            self._fail(otherwise)

    def _any(self) -> Any:
        left = self._all()
        while self._accept("or"):
            left = self._condition(left) | self._condition(self._all())
        return left

    def _all(self) -> Any:
        left = self._negated()
        while self._accept("and"):
            left = self._condition(left) & self._condition(self._negated())
        return left

    def _negated(self) -> Any:
        return ~self._condition(self._negated()) if self._accept("not") else self._comparison()

    def _condition(self, part: Any) -> Any:
        """A condition; a bare column stands for itself being true."""
        if isinstance(part, _Operand) and not part.is_column:
            self._fail(f"has the value {part.value!r} where a condition should be")
        return part.value == True if isinstance(part, _Operand) else part  # noqa: E712 - of no type, if it has no value

    def _comparison(self) -> Any:
        if self._accept("("):
            inner = self._any()
            self._expect(")", "lacks a closing parenthesis")
            return inner
        left = self._operand()
        if self._accept("is"):
            negate = self._accept("not")
            if not self._accept("null", "none"):
                self._fail("has 'is' without 'null'")
            null = _value(left).is_null()
            return ~null if negate else null
        negate = self._accept("not")
        if self._accept("in"):
            members = self._is_in(_value(left))
            return ~members if negate else members
        if negate:
            self._fail("has 'not' where a comparison should be; write 'not column = value'")
        sign = self._accept(*_COMPARE)
        return _COMPARE[sign](_value(left), _value(self._operand())) if sign else left

    def _is_in(self, column: Any) -> Any:
        import pyarrow as pa

        self._expect("(", "has 'in' without a list in parentheses")
        values = [self._literal()]
        while self._accept(","):
            values.append(self._literal())
        self._expect(")", "lacks the parenthesis that closes a list")
        try:
            return column.isin(values)
        except pa.ArrowException as e:
            self._fail(f"has a list of values of several types ({e})")

    def _literal(self) -> Any:
        operand = self._operand()
        return self._fail("has a column in a list of values") if operand.is_column else operand.value

    def _operand(self) -> _Operand:
        import pyarrow.compute as pc

        if self.at >= len(self.tokens):
            self._fail("ends too early")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _Operand(self._number(text), False)
        if kind == "string":
            return _Operand(re.sub(r"\\(.)", r"\1", text[1:-1]), False)
        if kind == "word" and text in _CONSTANTS:
            return _Operand(_CONSTANTS[text], False)
        if kind != "name":
            self._fail(f"has {text!r} where a column or a value should be")
        name = _ALIASES.get(text, text)
        if name not in self.columns and not name.startswith(KEYED):
            self._fail(f"names the column {text!r}, which does not exist")
        self.needed.add(name)
        return _Operand(pc.field(name), True)

    def _number(self, text: str) -> int | float:
        if not re.fullmatch(r"[-+]?\d+", text):
            return float(text)
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            self._fail(f"has the number {text[:30]}, which is beyond 64 bits")
        return int(text)


def _value(operand: _Operand) -> Any:
    """The operand as an expression."""
    import pyarrow.compute as pc

    return operand.value if operand.is_column else pc.scalar(operand.value)


class Met(NamedTuple):
    """The rows that meet a condition, and notes for people: columns without values, rows that are left out because of
    them. negated: True if the condition has a negation, which does not bring these rows back."""

    mask: Mask
    notes: tuple[str, ...]
    negated: bool


def matching(
    condition: Any, column: Callable[[str], Any], count: int, names: Callable[[str], Iterable[str]] = lambda _: COLUMNS
) -> Met:
    """The rows of a table that meet a condition: text, or an Arrow expression over the columns that `names` gives for
    its text."""
    import pyarrow as pa

    told = str(condition)
    expression, needed = parse(condition, COLUMNS) if isinstance(condition, str) else (condition, {*names(told)})
    table = pa.table({"__row": pa.array(np.arange(count))} | {name: column(name) for name in sorted(needed)})
    try:
        wanted = _as_condition(expression)
        found, unknown = (table.filter(one)["__row"].to_numpy() for one in (wanted, wanted.is_null()))
    except (pa.ArrowException, TypeError) as e:
        raise UsageError(f"the condition {condition} cannot be applied to the episodes' columns: {e}") from e
    out = np.zeros(count, bool)
    out[found] = True
    lacking = {name: table[name].take(pa.array(unknown)).null_count for name in sorted(needed)} if len(unknown) else {}
    absent = [n for n in sorted(needed) if n.startswith(KEYED) and count and table[n].null_count == count]
    notes = [f"none of {count} episodes has {name}" for name in absent]
    notes += [
        f"the condition {one_line(told)} leaves out {less} of {count} episodes that have no {name}, and so does its "
        f"negation; `or {name} is null` takes them in"
        for name, less in lacking.items()
        if less and name not in absent and f"{name} is null" not in told
    ]
    return Met(out, tuple(notes), any(sign in told.lower() for sign in _NEGATIONS))


def _as_condition(expression: Any) -> pc.Expression:
    import pyarrow.compute as pc

    if not isinstance(expression, pc.Expression):
        raise TypeError(f"a {type(expression).__name__} is neither a text nor an Arrow expression")
    return expression
