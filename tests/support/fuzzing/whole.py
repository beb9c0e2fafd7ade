"""Whole archives of which one object is another, under checksums that are right all the way up: who reads it?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import pyarrow.parquet as pq

from tests.support.fuzzing.mutating import mutated_json, mutated_table, parquet
from tests.support.fuzzing.objects import attempted
from tests.support.nonsense import everything, filled, look_after

Change = tuple[str, bytes]  # key of an object, and what it is now


def seeds(tmp: Path) -> Sequence[Path]:
    return [filled(tmp / "root")]


def mutated(root: Path, rng: Random) -> tuple[Path, list[Change]]:
    return root, _changes(root, rng)


def _changes(root: Path, rng: Random) -> list[Change]:
    """A table that the newest commit names, one that a row of another names, or a commit itself."""
    newest = sorted(root.glob("commits/*/*.json"))[-1]
    commit = json.loads(newest.read_bytes().split(b"\n")[0])
    if rng.random() < 0.1:
        return [(str(newest.relative_to(root)), _sealed(mutated_json(commit, rng)))]
    kinds = [kind for kind in commit if isinstance(commit[kind], list) and commit[kind] and "path" in commit[kind][0]]
    ref = rng.choice(commit[rng.choice(("segments", rng.choice(kinds)))])
    table = pq.read_table(root / ref["path"])
    changes = []
    paths = [path for path in set(table["chunks"].to_pylist()) if path] if "chunks" in table.column_names else []
    if paths and rng.random() < 0.4:
        named = rng.choice(sorted(paths))
        data = parquet(mutated_table(pq.read_table(root / named), rng), rng)
        changes.append((named, data))
        table = _with_reference(table, named, data)
    else:
        table = mutated_table(table, rng)
    data = parquet(table, rng)
    ref |= {"bytes": len(data), "crc32c": int(google_crc32c.value(data)), "rows": table.num_rows}
    return [*changes, (ref["path"], data), (str(newest.relative_to(root)), _sealed(json.dumps(commit)))]


def _with_reference(table: Any, path: str, data: bytes) -> Any:
    """The table, which says what a chunk file's bytes must be, as it is now."""
    for name, value in (("chunks_bytes", len(data)), ("chunks_crc32c", int(google_crc32c.value(data)))):
        column = table[name]
        values = [
            value if where == path else old
            for where, old in zip(table["chunks"].to_pylist(), column.to_pylist(), strict=True)
        ]
        table = table.set_column(table.schema.get_field_index(name), name, _column(values, column.type))
    return table


def _column(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, kind)


def _sealed(text: str) -> bytes:
    line = text.encode("utf-8", "surrogatepass")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def read(given: tuple[Path, list[Change]]) -> None:
    """Change the objects of an archive, read all of it, and put them back."""
    root, changes = given
    before = {key: (root / key).read_bytes() for key, _ in changes}
    for key, data in changes:
        (root / key).write_bytes(data)
    try:
        for everybody in (everything, look_after):
            attempted(lambda everybody=everybody: everybody(root))
    finally:
        for key, data in before.items():
            (root / key).write_bytes(data)
