"""Tables under right checksums that somebody made up: columns that are gone, of other types, empty, or that name what
is not there. What comes of it is the library's error, or a value that is as good as another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import archive
from archive import tables
from archive.base import ArchiveError
from tests.support.nonsense import everything, filled, look_after
from tests.support.sampling import one_in, sampled
from tests.support.tampering import change_table, commit_files, set_column

Change = Callable[[pa.Table], pa.Table]
KINDS = ("checkpoints", "tags", "labels", "late", "forgotten", "branches")
LATER, NOBODY = 10**6, "nobody"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = filled(tmp_path_factory.mktemp("tables") / "root")
    archive.open(root).forget(ids=["also extra"], dry_run=False)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "root")


def values(name: str, kind: pa.DataType) -> list[Any]:
    if pa.types.is_unsigned_integer(kind):
        return [None, 0, LATER]
    if pa.types.is_integer(kind):
        return [None, -1, 0, 3, LATER, 2**31 - 1]
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        return [None, "", NOBODY, "../x", "[1", "\x1b[31m", "null", '{"loss": "x"}']
    return [None]


def changes(kind: str) -> Iterator[tuple[str, Change]]:
    """What may be wrong with a table, by what it is."""
    for field in tables.schema(kind):
        name = field.name
        yield f"{name} gone", lambda table, name=name: table.drop_columns([name])
        for other in (pa.int64(), pa.string(), pa.list_(pa.int64()), pa.struct([("a", pa.int8())])):
            yield f"{name} as {other}", lambda table, name=name, other=other: nulls(table, name, other)
        for value in values(name, field.type):
            yield f"{name} = {value!r}", lambda table, name=name, value=value: filled_with(table, name, value)
    yield "no rows", lambda table: table.slice(0, 0)
    yield "all rows twice", lambda table: pa.concat_tables([table, table])


def nulls(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    return set_column(table, name, pa.nulls(table.num_rows, kind))


def filled_with(table: pa.Table, name: str, value: Any) -> pa.Table:
    kind = table.schema.field(name).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return set_column(table, name, pa.array([value] * table.num_rows, plain))


@pytest.mark.parametrize("count", one_in(10))
@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_in_a_table(root: Path, kind: str, count: int) -> None:
    wrong = []
    before = {path: path.read_bytes() for path in (*root.glob("manifest/*"), commit_files(root)[-1])}
    for what, change in sampled(changes(kind), count):
        change_table(root, kind, change)
        for read in (everything, look_after):
            try:
                read(root)
            except ArchiveError:
                pass
            except Exception as e:
                wrong.append(f"{what}, {read.__name__}: {type(e).__name__}: {e}")
        for path, data in before.items():
            path.write_bytes(data)
    assert wrong == []
