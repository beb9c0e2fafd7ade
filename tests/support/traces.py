"""Whether something is found anywhere in an archive: in names, and in bytes as they lie there, inflated and decoded."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numcodecs
import pyarrow.parquet as pq

ZSTD = b"\x28\xb5\x2f\xfd"


def traces(root: Path, *wanted: bytes) -> list[str]:
    """Where any of these bytes are found: files, or members of them."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    found = ((str(path.relative_to(root)), path.read_bytes()) for path in files)
    return [name for name, data in found if any(one in form for form in _forms(name, data) for one in wanted)]


def _forms(name: str, data: bytes) -> Iterator[bytes]:
    yield name.encode()
    yield data
    if name.endswith(".parquet"):
        yield from _parquet(data)
    elif data[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            for one in members.namelist():
                yield from _forms(one, members.read(one))
    elif ZSTD in data[:4]:
        yield numcodecs.Zstd().decode(data[:-4])  # the checksum comes last


def _parquet(data: bytes) -> Iterable[bytes]:
    file = pq.ParquetFile(io.BytesIO(data))
    yield repr(file.metadata.metadata).encode()
    for column in file.read().columns:
        yield repr(column.to_pylist()).encode()
        if hasattr(column.type, "value_type") and hasattr(column.combine_chunks(), "dictionary"):
            yield repr(column.combine_chunks().dictionary.to_pylist()).encode()
