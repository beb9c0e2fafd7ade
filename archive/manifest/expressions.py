"""Pure, no I/O: conditions as text ("return > 10 and update_count >= 100"), parsed into Arrow expressions.

Never evaluated as Python. Grammar, loosest first: `or`, `and`, `not`, comparison (= == != < <= > >=, `in (...)`,
`is null`, `is not null`), parentheses, values (numbers, 'strings', true, false, null), columns; `metadata.key` is
the value of a key of the episode's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from archive.base import UsageError

if TYPE_CHECKING:
    import pyarrow.compute as pc

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][\w.\-]*)|(?P<op>==|!=|<=|>=|<>|[=<>(),])|(?P<bad>\S))"
)
_WORDS = {"and", "or", "not", "in", "is", "null", "none", "true", "false"}
_JOINTS = {"and", "or", "not"}
MAX_JOINTS = 1000  # Arrow evaluates expressions recursively, and would crash
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_ALIASES = {"update_count": "update_count_max", "id": "episode_id", "steps": "length"}

Token = tuple[str, str, int]


def parse(text: str, columns: Collection[str]) -> tuple[pc.Expression, set[str]]:
    """The expression of a condition, and the columns that it needs."""
    return _Parser(text, columns).parse()


class _Parser:
    def __init__(self, text: str, columns: Collection[str]) -> None:
        self.text, self.columns, self.needed = text, columns, set[str]()
        self.tokens = self._tokens()
        self.at = 0

    def parse(self) -> tuple[pc.Expression, set[str]]:
        if not self.tokens:
            self._fail("is empty")
        if sum(kind == "word" and word in _JOINTS for kind, word, _ in self.tokens) > MAX_JOINTS:
            self._fail(f"has more than {MAX_JOINTS} of 'and', 'or', 'not'; use `column in (...)`")
        try:
            expression = self._any()
        except RecursionError:
            self._fail("is nested too deeply")
        if self.at < len(self.tokens):
            self._fail(f"has {self.tokens[self.at][1]!r} where it should end")
        return self._condition(expression), self.needed

    def _tokens(self) -> list[Token]:
        out: list[Token] = []
        for match in _TOKEN.finditer(self.text):
            kind = match.lastgroup or "bad"
            if kind == "bad":
                self._fail(f"has {match[kind]!r} at position {match.start(kind)}, which means nothing here")
            word = match[kind]
            is_word = kind == "name" and word.lower() in _WORDS
            out.append(("word", word.lower(), match.start(kind)) if is_word else (kind, word, match.start(kind)))
        return out

    def _fail(self, what: str) -> Any:
        text = self.text if len(self.text) <= 400 else self.text[:400] + "..."
        raise UsageError(
            f'the condition {text!r} {what}; write as in "return > 10 and update_count >= 100". '
            f"Columns: {', '.join(sorted(self.columns))}, metadata.<key>"
        )

    def _accept(self, *words: str) -> bool:
        if (
            self.at < len(self.tokens)
            and self.tokens[self.at][1] in words
            and self.tokens[self.at][0] in ("word", "op")
        ):
            self.at += 1
            return True
        return False

    def _next(self) -> Token:
        if self.at >= len(self.tokens):
            self._fail("ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

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
        if isinstance(part, tuple):
            return part[0] if part[1] else self._fail(f"has the value {part[0]!r} where a condition should be")
        return part

    def _comparison(self) -> Any:
        if self._accept("("):
            inner = self._any()
            if not self._accept(")"):
                self._fail("lacks a closing parenthesis")
            return inner
        left = self._operand()
        if self._accept("is"):
            negate = self._accept("not")
            if not self._accept("null", "none"):
                self._fail("has 'is' without 'null'")
            null = self._value(left).is_null()
            return ~null if negate else null
        negate = self._accept("not")
        if self._accept("in"):
            members = self._is_in(self._value(left), self._list())
            return ~members if negate else members
        if negate:
            self._fail("has 'not' where a comparison should be; write 'not column = value'")
        if self.at < len(self.tokens) and self.tokens[self.at][1] in _COMPARE:
            operator = _COMPARE[self._next()[1]]
            return operator(self._value(left), self._value(self._operand()))
        return left

    def _value(self, operand: Any) -> Any:
        import pyarrow.compute as pc

        if not isinstance(operand, tuple):
            self._fail("compares a condition; compare columns and values")
        value, is_column = operand
        return value if is_column else pc.scalar(value)

    def _is_in(self, column: Any, values: list[Any]) -> Any:
        import pyarrow as pa

        try:
            return column.isin(values)
        except pa.ArrowException as e:
            return self._fail(f"has a list of values of several types ({e})")

    def _list(self) -> list[Any]:
        if not self._accept("("):
            self._fail("has 'in' without a list in parentheses")
        values = [self._literal()]
        while self._accept(","):
            values.append(self._literal())
        if not self._accept(")"):
            self._fail("lacks the parenthesis that closes a list")
        return values

    def _literal(self) -> Any:
        value, is_column = self._operand()
        return self._fail("has a column in a list of values") if is_column else value

    def _number(self, text: str) -> int | float:
        if not re.fullmatch(r"[-+]?\d+", text):
            return float(text)
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            self._fail(f"has the number {text[:30]}, which is beyond 64 bits")
        return int(text)

    def _operand(self) -> tuple[Any, bool]:
        """(value, False) or (column, True)."""
        import pyarrow.compute as pc

        kind, text, _ = self._next()
        if kind == "number":
            return self._number(text), False
        if kind == "string":
            return re.sub(r"\\(.)", r"\1", text[1:-1]), False
        if kind == "word" and text in _CONSTANTS:
            return _CONSTANTS[text], False
        if kind != "name":
            self._fail(f"has {text!r} where a column or a value should be")
        name = _ALIASES.get(text, text)
        if name not in self.columns and not name.startswith("metadata."):
            self._fail(f"names the column {text!r}, which does not exist")
        self.needed.add(name)
        return pc.field(name), True


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda a, b: a == b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
