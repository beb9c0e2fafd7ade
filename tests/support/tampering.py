"""Looks at and changes the objects of a local archive without the code under test; seals are made right again."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive.testing import small_archive


def same(a: Any, b: Any) -> bool:
    """Whether two nests hold the same bits."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    left, right = np.asarray(a), np.asarray(b)
    if left.dtype.kind in "OU":
        return bool(left.tolist() == right.tolist())
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def write_some(root: Path, episodes: int = 3, commits: int = 1, **options: Any) -> list[str]:
    """An archive of small episodes, as `small_archive` makes it; their ids."""
    small_archive(str(root), episodes, commits=commits, **options)
    return [f"e{i}" for i in range(episodes)]


def commit_files(root: Path) -> list[Path]:
    """All commits, oldest first."""
    return sorted(root.glob("commits/*/*.json"))


def body(path: Path) -> dict[str, Any]:
    """The body of a commit, if its seal is right."""
    line, digest, rest = path.read_bytes().split(b"\n")
    assert hashlib.sha256(line).hexdigest().encode() == digest
    assert rest == b""
    found: dict[str, Any] = json.loads(line)
    return found


def seal(path: Path, new: object) -> None:
    """Replaces a commit, with a checksum that is right."""
    line = json.dumps(new).encode()
    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def change_commit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the newest commit."""
    path = commit_files(root)[-1]
    new = body(path)
    change(new)
    seal(path, new)


def change_table(root: Path, kind: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Changes a Parquet file that the newest commit names; all checksums are made right."""
    with_chunks: dict[str, Any] = {}

    def rewrite(new: dict[str, Any]) -> None:
        ref = new[kind][-1] if isinstance(new[kind], list) else new[kind]
        with_chunks.update(_rewritten(root, ref, change))

    change_commit(root, rewrite)
    if kind == "chunks":
        change_table(root, "segments", lambda table: _with_reference(table, with_chunks))


def _rewritten(root: Path, ref: dict[str, Any], change: Callable[[pa.Table], pa.Table]) -> dict[str, Any]:
    path = root / ref["path"]
    before = pq.read_table(path)
    after = change(before)
    pq.write_table(after, path, use_dictionary=False)
    data = path.read_bytes()
    ref.update(bytes=len(data), crc32c=int(google_crc32c.value(data)))
    if after.num_rows > before.num_rows:  # else what is gone is told by the commit
        steps = {"steps": sum(after["length"].to_pylist())} if "steps" in ref else {}
        ref.update(rows=after.num_rows, **steps)
    return ref


def _with_reference(table: pa.Table, ref: dict[str, Any]) -> pa.Table:
    rows = table.num_rows
    table = set_column(table, "chunks_bytes", pa.array([ref["bytes"]] * rows, pa.int64()))
    return set_column(table, "chunks_crc32c", pa.array([ref["crc32c"]] * rows, pa.uint32()))


def set_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def replace_text(column: str, old: str, new: str) -> Callable[[pa.Table], pa.Table]:
    """For `change_table`: matches of a pattern in one column are replaced."""

    def change(table: pa.Table) -> pa.Table:
        values = [None if v is None else re.sub(old, lambda _: new, v) for v in table[column].to_pylist()]
        return set_column(table, column, pa.array(values, pa.string()))

    return change


def zip_structure(data: bytes) -> Iterator[int]:
    """Where the bytes of a ZIP are that are neither chunks nor metadata: headers and directory."""
    at = 0
    while data[at : at + 4] == b"PK\x03\x04":
        stored, name, extra = struct.unpack_from("<I4xHH", data, at + 18)
        yield from range(at, at + 30 + name + extra)
        at += 30 + name + extra + stored
    yield from range(at, len(data))


def inverted(data: bytes) -> bytes:
    """With all bits of its middle half turned."""
    lo, hi = len(data) // 4, len(data) * 3 // 4
    return data[:lo] + bytes(b ^ 255 for b in data[lo:hi]) + data[hi:]
