"""Small inputs that claim, or hold, far more than they should: of each family the known kinds."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive import tables
from tests.support.nonsense import sealed

MB = 1 << 20
MANY = 10**15

# -- JSON --------------------------------------------------------------------------------------------------------------


def json_texts() -> list[str]:
    """Too deep, too many digits, one key in another, and long lists of nothing."""
    deep = ["[" * 10**5, "[" * 10**5 + "]" * 10**5, '{"a":' * 10**5 + "1" + "}" * 10**5, '{"a":[' * 10**5]
    numbers = ["9" * 10**7, "-" + "9" * 10**6, "1e" + "9" * 10**6, "0." + "1" * 10**6, f"[{'1' * 5000}]"]
    return [*deep, *numbers, f'{{"format": {"9" * 10**6}}}', '"' + "\\u0000" * 10**5, "[" + "[]," * 10**5 + "[]]"]


def commit_bombs(seeds: Sequence[Any]) -> list[tuple[bytes, int]]:
    return [(sealed(text.encode()), 1) for text in json_texts()]


def small_bombs(seeds: Sequence[tuple[str, Any]]) -> list[tuple[str, bytes]]:
    return [(kind, text.encode()) for kind, _ in seeds for text in json_texts()[:6]]


def text_bombs(seeds: Sequence[Any]) -> list[str]:
    return json_texts()


def tree_bombs(seeds: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    nested = '{"format": 1, "tree": ' + "[" * 5000 + "]" * 5000 + "}"
    return [*((text, {}) for text in json_texts()), (nested, {})]


def condition_bombs(seeds: Sequence[str]) -> list[str]:
    """Parentheses and words in one another, a long list, and a long number."""
    deep = ["(" * 10**5, "(" * 3000 + "length > 1" + ")" * 3000, "not " * 10**5 + "terminated"]
    long = ["length in (" + "1," * 10**5 + "1)", "length > " + "9" * 10**6, "length > 1 and " * 10**4 + "terminated"]
    return [*deep, *long, "length > 1 or " * 10**4 + "terminated", "episode_id = '" + "x" * 10**6 + "'"]


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def claiming(data: bytes, old: int, new: int, count: int = -1) -> bytes:
    """A Parquet file whose footer says one number in place of another, everywhere, or so many times."""
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    footer = footer.replace(_varint(2 * old), _varint(2 * new), count)  # whole numbers are zigzag
    return body + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def written(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def only_a_schema(elements: bytes, count: int) -> bytes:
    """A file of no rows, of these elements of a schema, in Thrift's compact protocol."""
    size = bytes([count << 4 | 12]) if count < 15 else b"\xfc" + _varint(count)
    footer = b"\x15\x02\x19" + size + elements + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _group(name: bytes, children: int) -> bytes:
    return b"\x35\x00\x18" + _varint(len(name)) + name + b"\x15" + _varint(2 * children) + b"\x00"


def _leaf(name: bytes) -> bytes:
    return b"\x15\x04\x25\x00\x18" + _varint(len(name)) + name + b"\x00"


def deep_schema(levels: int) -> bytes:
    return only_a_schema(_group(b"a", 1) * levels + _leaf(b"a"), levels + 1)


def wide_schema(columns: int, claimed: int | None = None) -> bytes:
    return only_a_schema(
        _group(b"schema", columns if claimed is None else claimed) + _leaf(b"a") * columns, columns + 1
    )


def long_texts(rows: int, size: int) -> bytes:
    """So many rows of one long text, which the file has once."""
    table = tables.from_columns("live", {"rank": np.zeros(rows, np.int32), "session": "s", "buffer": "x" * size})
    zeros = {name: 0 for name in table.column_names if pa.types.is_integer(table.schema.field(name).type)}
    for name, value in zeros.items():
        table = tables.set_column(table, name, value)
    return tables.dumps(table)


def parquet_bombs(seeds: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
    rows = 7777
    plain = written(tables.from_columns("live", {"rank": [0] * rows, "buffer": "b"}))
    for new in (MANY, 2**31 - 1, 2**62, 1 << 20):
        yield "live", claiming(plain, rows, new)
        yield "live", claiming(plain, rows, new, 1)
    for levels in (100, 10_000, 100_000):
        yield "live", deep_schema(levels)
    for columns in (1000, 100_000):
        yield "live", wide_schema(columns)
    yield "live", wide_schema(3, 2**31 - 1)
    yield "live", plain[:-8] + b"\xff\xff\xff\x7fPAR1"
    yield "live", long_texts(1 << 20, MB)


# -- chunks ------------------------------------------------------------------------------------------------------------


def deflated_zeros(size: int, wbits: int = -zlib.MAX_WBITS) -> bytes:
    """So many megabytes of zeros: one block, as often."""
    first = zlib.compressobj(9, zlib.DEFLATED, wbits)
    begun = first.compress(bytes(MB)) + first.flush(zlib.Z_FULL_FLUSH)
    again = first.compress(bytes(MB)) + first.flush(zlib.Z_FULL_FLUSH)
    return begun + again * (size - 1) + first.flush()


def summed(body: bytes) -> bytes:
    return body + int(google_crc32c.value(body)).to_bytes(4, "little")


def long_text_chunks() -> list[bytes]:
    """Texts that say that there are 2^32 of them, or that one has 2 GB."""
    claims = [(2**32 - 1, 0), (1, 2**31 - 1), (1, 2**32 - 1), (2**31, 2**31), (6, 2**31 - 1)]
    return [struct.pack("<II", *claim) + b"x" * 64 for claim in claims]


def shard_bombs(seeds: Sequence[Any]) -> Iterator[Any]:
    """Chunks that inflate, shapes that overflow, texts of 2 GB; arrays of 10^15 rows."""
    (_, chunks), (gzip, theirs), (plain, others) = seeds
    yield json.dumps(gzip).encode(), theirs | {"x/c/0/0": summed(deflated_zeros(2048, zlib.MAX_WBITS | 16))}
    for body in long_text_chunks():
        yield json.dumps(plain).encode(), others | {"t/c/0": summed(body)}
    sizes = [(2**62, 2), (2**32, 2**32), (2**63, 2), (MANY, MANY), (10**40, 2), (-1, 2), (MANY, 2)]
    for shape in sizes:
        for key in ("shape", "chunk_shape"):
            root = json.loads(json.dumps(plain))
            meta = root["consolidated_metadata"]["metadata"]["x"]
            if key == "shape":
                meta["shape"] = list(shape)
            else:
                meta["chunk_grid"]["configuration"]["chunk_shape"] = list(shape)
            yield json.dumps(root).encode(), others
    for text in json_texts():
        yield text.encode(), chunks


def packed_bombs(seeds: Sequence[bytes]) -> list[bytes]:
    return [deflated_zeros(4096)]


# -- ZIP and NumPy -----------------------------------------------------------------------------------------------------


def npy(shape: str, kind: str = "'<f8'") -> bytes:
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header


def zipped(members: Sequence[tuple[bytes, int, int, int]], body: bytes) -> bytes:
    """An archive of these bytes with these members: name, where, compressed and inflated size. All are deflated."""
    directory = b"".join(
        struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 8, 0, 0, 0, min(packed, 2**32 - 1),
                    min(size, 2**32 - 1), len(name), 0, 0, 0, 0, 0, where) + name
        for name, where, packed, size in members
    )  # fmt: skip
    count = min(len(members), 0xFFFF)
    zip64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *(len(members),) * 2, len(directory), len(body))
    zip64 += struct.pack("<IIQI", 0x07064B50, 0, len(body) + len(directory), 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), len(body), 0)
    return body + directory + zip64 + end


def member(name: bytes, packed: bytes, size: int) -> bytes:
    head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0, 8, 0, 0, 0, len(packed), min(size, 2**32 - 1), len(name), 0)
    return head + name + packed


def npz_bombs(seeds: Sequence[Any]) -> Iterator[dict[str, bytes]]:
    """A member that inflates to gigabytes, 10^5 members, members that are one, sizes of ZIP64, and headers."""
    names = (b"observations.npy", b"actions.npy", b"rewards.npy", b"terminals.npy")
    for shape in (f"({1 << 28},)", f"({MANY},)", "(9223372036854775807, 2)"):
        header = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = header.compress(npy(shape)) + header.flush(zlib.Z_FULL_FLUSH) + deflated_zeros(2048)
        for size in (len(npy(shape)) + 2048 * MB, 2**32 - 1, 100):
            body = member(names[0], packed, size)
            yield {"x.npz": zipped([(name, 0, len(packed), size) for name in names], body)}
    for many in (100_000,):
        yield {"x.npz": zipped([(b"%d.npy" % i, 0, 100, 100) for i in range(many)], member(b"0.npy", bytes(100), 100))}
    for kind in ("'<U999999999'", "'|S2147483647'", "[('a', '<f8', (1000000, 1000000))]", "'|O'", "'<M8[as]'"):
        out = io.BytesIO()
        import zipfile

        with zipfile.ZipFile(out, "w") as file:
            for name in names:
                file.writestr(name.decode(), npy("(3,)", kind) + bytes(100))
        yield {"x.npz": out.getvalue()}
