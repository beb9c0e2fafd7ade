"""Rows of a ledger that say what cannot be."""

from __future__ import annotations

import pyarrow as pa
import pytest

from archive import tables
from archive.base import CorruptManifestError
from archive.ledger import LedgerRows
from archive.tables import MOST_SIBLINGS
from tests.support.fuzzing.plans import ledger_seeds


def rows(name: str, values: list[int | str | None]) -> pa.Table:
    """The rows of a table that has other values in its first places."""
    (table,) = ledger_seeds(None)
    column = [*values, *table[name].to_pylist()[len(values) :]]
    return tables.from_columns("ledger", {n: table[n] for n in table.column_names} | {name: column})


@pytest.mark.parametrize(("name", "value"), [("siblings", MOST_SIBLINGS + 1), ("sibling", MOST_SIBLINGS)])
def test_so_many_siblings_take_no_memory(name: str, value: int) -> None:
    with pytest.raises(CorruptManifestError, match=f"an impossible {name}"):
        tables.loads(tables.dumps(rows(name, [value])), "ledger", where="x")


def test_one_sibling_alone_is_not_trained_on() -> None:
    """ "trained" ends a round for all its siblings, or says nothing."""
    table = rows("state", ["drawn"] * 3 + ["trained"])
    found = LedgerRows(table, table.slice(0, 0), {}).prompts()
    assert found.rounds["a"][0].state == "sealed"
