"""Text for people: tables of it."""

from __future__ import annotations

from archive.base import tabulate


def test_a_table_has_its_columns_below_one_another_and_no_cell_breaks_it() -> None:
    rows = [["a", 1, None], ["longer", 1000, "\x1b[2J"], ["two\nlines", 20, "end"]]
    assert tabulate(["name", "steps", "why"], rows, right={"steps"}) == [
        "name        steps  why",
        "a               1  -",
        "longer       1000  \\x1b[2J",
        "two\\nlines     20  end",
    ]


def test_a_table_without_rows_is_no_text() -> None:
    assert tabulate(["name"], []) == []
