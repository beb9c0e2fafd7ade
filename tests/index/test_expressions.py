"""where="..." means what it says: against an oracle in plain Python, and never anything but a condition."""

from __future__ import annotations

import operator
import sys
import uuid
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
from archive.base.errors import UsageError
from archive.fields import Objects
from archive.index import expressions
from archive.index.episodes import COLUMNS
from archive.index.expressions import matching
from tests.support.sampling import examples

ROWS: list[dict[str, Any]] = [
    {"length": n, "return": r, "reason": why, "complete": done, "terminated": end, "metadata": meta}
    for n, r, why, done, end, meta in [
        (0, None, None, True, None, None),
        (1, 1.5, "gap", False, True, '{"k":1,"task":"push"}'),
        (2, float("nan"), "it's", True, False, '{"k":2.5}'),
        (2, -3.0, "", True, None, '{"k":null,"task":"pull"}'),
        (7, float("inf"), 'a"b\\', False, True, "{}"),
        (100, 2.0, "gap", True, False, '{"k":-1,"task":"push"}'),
    ]
]
COLUMN_TYPES = {
    "length": pa.int64(), "return": pa.float64(), "reason": pa.dictionary(pa.int32(), pa.string()),
    "complete": pa.bool_(), "terminated": pa.bool_(), "metadata": pa.string(),
}  # fmt: skip
EMPTY = archive.create(f"memory://{uuid.uuid4().hex}").episodes.table.schema  # of the columns that no row here has


def column(name: str) -> pa.ChunkedArray:
    if name.startswith("metadata."):
        return pa.chunked_array([Objects(column("metadata"), "metadata").column(name.removeprefix("metadata."))])
    if name not in COLUMN_TYPES:
        return pa.chunked_array([pa.nulls(len(ROWS), EMPTY.field(name).type)])
    kind = COLUMN_TYPES[name]
    values = [row[name] for row in ROWS]
    plain = (
        pa.array(values, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    )
    return pa.chunked_array([plain])


def found(text: str) -> list[int]:
    return np.flatnonzero(matching(text, column, len(ROWS)).mask).tolist()


class Term(NamedTuple):
    """A condition as text, and its value (True, False or None for unknown) of each row."""

    text: str
    values: list[bool | None]


OPERATORS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt,
             "<=": operator.le,
             ">": operator.gt, ">=": operator.ge}  # fmt: skip
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "1.5", ".5", "2e0", "1E2", "+7", "-3.0", "100", "9999999999"])
TEXTS = st.sampled_from(["gap", "it's", "", 'a"b\\', "and", "other"])
METADATA: dict[str, list[Any]] = {
    "metadata.k": [None, 1, 2.5, None, None, -1], "metadata.task": [None, "push", None, "pull", None, "push"],
}  # fmt: skip


def values_of(name: str) -> list[Any]:
    return METADATA[name] if name in METADATA else [row[name] for row in ROWS]


def quoted(text: str, mark: str) -> str:
    return mark + text.replace("\\", "\\\\").replace(mark, "\\" + mark) + mark


@st.composite
def comparisons(draw: st.DrawFn) -> Term:
    name, symbol = (
        draw(st.sampled_from(["length", "return", "metadata.k", "steps"])),
        draw(st.sampled_from(sorted(OPERATORS))),
    )
    if draw(st.booleans()):
        name, value = draw(st.sampled_from(["reason", "metadata.task"])), draw(TEXTS)
        symbol, literal = draw(st.sampled_from(["=", "!="])), quoted(value, draw(st.sampled_from("'\"")))
    else:
        literal = draw(NUMBERS)
        value = float(literal)
    test = OPERATORS[symbol]
    column_values = values_of("length" if name == "steps" else name)
    space = draw(st.sampled_from(["", " ", "\t\n "]))
    values = [None if v is None else bool(test(v, value)) for v in column_values]
    return Term(f"{name}{space}{symbol}{space}{literal}", values)


@st.composite
def memberships(draw: st.DrawFn) -> Term:
    negate = draw(st.sampled_from(["", "not ", "NOT "]))
    if draw(st.booleans()):
        name, members = "reason", draw(st.lists(TEXTS, min_size=1, max_size=3))
        listed = ", ".join(quoted(m, "'") for m in members)
    else:
        name, numbers = (
            draw(st.sampled_from(["length", "metadata.k"])),
            draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        )
        members, listed = numbers, ",".join(map(str, numbers))
    return Term(
        f"{name} {negate}in ({listed})", [(v in members and v is not None) != bool(negate) for v in values_of(name)]
    )


@st.composite
def nulls(draw: st.DrawFn) -> Term:
    name, negate = draw(st.sampled_from(["return", "reason", "metadata.k", "terminated"])), draw(st.booleans())
    word = draw(st.sampled_from(["null", "NULL", "none"]))
    return Term(f"{name} is {'not ' if negate else ''}{word}", [(v is None) != negate for v in values_of(name)])


FLAGS = st.sampled_from(["complete", "terminated"]).map(lambda name: Term(name, values_of(name)))


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def inverted(a: bool | None) -> bool | None:
    return None if a is None else not a


def joined(parts: tuple[Term, Term, str]) -> Term:
    left, right, word = parts
    if word.lower() == "and":
        values = [both(a, b) for a, b in zip(left.values, right.values, strict=True)]
    else:
        values = [inverted(both(inverted(a), inverted(b))) for a, b in zip(left.values, right.values, strict=True)]
    return Term(f"({left.text}) {word} ({right.text})", values)


CONDITIONS = st.recursive(
    comparisons() | memberships() | nulls() | FLAGS,
    lambda inner: (
        st.tuples(inner, inner, st.sampled_from(["and", "or", "AND", "Or"])).map(joined)
        | inner.map(lambda t: Term(f"not ({t.text})", [inverted(v) for v in t.values]))
    ),
    max_leaves=6,
)


@settings(max_examples=examples(300), deadline=None)
@given(CONDITIONS)
def test_conditions_mean_what_plain_python_says(term: Term) -> None:
    assert found(term.text) == [i for i, v in enumerate(term.values) if v]


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("length = 1 or length = 2 and complete", "length = 1 or (length = 2 and complete)"),
        ("not length = 1 and complete", "(not (length = 1)) and complete"),
        ("not not complete", "complete"),
        ("((complete))", "complete"),
        ("complete = true", "complete"),
        ("complete == FALSE", "not complete"),
        ("1 < length", "length > 1"),
        ("length > -1", "length >= 0"),
        ("length in (1, null)", "length = 1"),
        ("reason in ('gap', null)", "reason = 'gap' or reason is null"),
        ("length=2and complete", "length = 2 and complete"),
    ],
)
def test_precedence_and_spelling(text: str, same_as: str) -> None:
    assert found(text) == found(same_as)


def test_a_comparison_with_null_is_never_true() -> None:
    assert found("return = null") == found("return != null") == found("metadata.nothing = 1") == []
    assert found("metadata.nothing is null") == list(range(len(ROWS)))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "  ",
            "length >",
            "> 3",
            "length = ",
            "length 3",
            "(complete",
            "complete)",
            "()",
            "and",
            "not",
            "complete and",
        ),
        *(
            "length in ()",
            "length in (1,)",
            "length in 1",
            "length in (reason)",
            "length is 3",
            "length not = 3",
            "length not 3",
        ),
        *(
            "length = 1 = 2",
            "1",
            "'a'",
            "true",
            "null",
            "complete and 1",
            "length + 1 = 2",
            "length = 0x10",
            "length = 1;complete",
        ),
        *(
            "nothing = 1",
            "meta.k = 1",
            "length.real = 1",
            "'unclosed",
            "length = 'a\\'",
            "é = 1",
            "\0",
            "length = 1 -- no",
            "length # 1",
        ),
        *(
            "__import__('os')",
            "__class__",
            "().__class__",
            "lambda: 1",
            "length if complete",
            "exec('1')",
            "__row = 1",
            "{length}",
            "[1]",
        ),
        *(
            "`length`",
            "length := 1",
            "complete and __import__('os').system('true')",
            "metadata['k'] = 1",
            "length && complete",
        ),
        *(
            "length > 'a'",
            "complete > 1",
            "reason > 1",
            "reason in (1)",
            "length in (1, 'a')",
            "metadata.task in ('a', 1)",
        ),
        *("length > 99999999999999999999", "length > " + "9" * 5000, "return", "length and complete", "(length) = 1"),
    ],
)
def test_what_is_no_condition_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="condition") as caught:
        found(text)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "text",
    ["(" * 20_000 + "complete" + ")" * 20_000, "not " * 20_000 + "complete", " or ".join(["length = 1"] * 50_000),
     " and ".join(["complete"] * 1002)],
    ids=["parentheses", "not", "or", "and"],
)  # fmt: skip
def test_no_length_of_nesting_crashes(text: str) -> None:
    limit = sys.getrecursionlimit()
    with pytest.raises(UsageError, match=r"nested too deeply|more than 1000"):
        found(text)
    assert sys.getrecursionlimit() == limit
    assert found(" or ".join(["length = 1"] * 1000)) == [1]


def condition_or_refusal(text: str) -> set[int]:
    """What meets it; nothing else than a UsageError may be raised."""
    try:
        return set(found(text))
    except UsageError:
        return set()


WORDS = ["length", "=", "1", "(", ")", "and", "or", "not", "in", "is", "null", ",", "'x'", "return", ">", "complete"]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=9))
def test_any_words_are_a_condition_or_are_refused(words: list[str]) -> None:
    assert condition_or_refusal(" ".join(words)) <= set(range(len(ROWS)))


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_is_refused(text: str) -> None:
    assert condition_or_refusal(text) <= set(range(len(ROWS)))


def test_the_columns_needed_are_known_before_any_is_loaded() -> None:
    _, needed = expressions.parse("return > 1 and metadata.k = 2 or update_count = 3", COLUMNS)
    assert needed == {"return", "metadata.k", "update_count_max"}
