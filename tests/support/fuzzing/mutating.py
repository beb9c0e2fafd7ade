"""Changes of valid input that make invalid input: of JSON by its structure, of tables by their columns, of bytes."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = (
    "", "nonsense", "../../etc/passwd", "/etc/passwd", "a\0b", "\x1b]52;c;ZXZpbA==\x07", "\u202e", "\ud800", "CON",
    "{0.__class__}", "%s%n", "<script>", "=1+1", "[" * 50, "9" * 400, "<U999999999", "|V999999999", "<M8[as]", "nan",
    "x" * 5000, "f" * 16, "null", "-1", "2024-13-01T00:00:00", "shards/../x.zip", "c/0", "$tuple", "\u0000",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 63, 64, 255, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**15,
    10**40, -(2**31), -(2**63), -(10**40), 10**400, 0.5, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan,
)  # fmt: skip
PLAIN = (None, True, False, [], {}, [[]], [None], {"": {}}, {"a": [1]})
DEEP = "\x02deep\x02"  # stands for lists in lists until the text is made
LEVELS = (60, 70, 200, 2000, 100_000)
Place = tuple[Any, ...]


def mutated_json(document: Any, rng: Random) -> str:
    """The text of a JSON document, changed at one to three places."""
    out = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        out = _changed(out, rng)
    text = json.dumps(out)
    if DEEP[1:-1] in text:
        levels = rng.choice(LEVELS)
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
        text = text.replace(json.dumps(DEEP), opening * levels + "1" + closing * levels)
    return text


def _changed(document: Any, rng: Random) -> Any:
    places = list(_places(document))
    if not places:
        return _anything(document, rng)
    place = rng.choice(places)
    owner = document
    for key in place[:-1]:
        owner = owner[key]
    key, old = place[-1], owner[place[-1]]
    match rng.randrange(8):
        case 0:
            del owner[key]
        case 1:
            owner[key] = copy.deepcopy(_at(document, rng.choice(places)))  # of a kind that occurs
        case 2:
            owner[key] = [old]
        case 3 if isinstance(owner, dict):
            owner[rng.choice(HOSTILE)] = owner.pop(key)
        case 3 | 4 if isinstance(owner, list):
            owner.insert(rng.randrange(len(owner) + 1), copy.deepcopy(old))
        case _:
            owner[key] = _anything(old, rng)
    return document


def _at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def _places(value: Any, at: Place = ()) -> Iterator[Place]:
    if at:
        yield at
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(one, (*at, key))


def _anything(old: Any, rng: Random) -> Any:
    """Something else: mostly of the same kind, and beyond what can be."""
    if isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.6:
        return rng.choice((*NUMBERS, old + 1, old - 1, -old, old * 1000))
    if isinstance(old, str) and rng.random() < 0.6:
        return mutated_text(old, rng)
    return copy.deepcopy(rng.choice((*PLAIN, rng.choice(HOSTILE), rng.choice(NUMBERS), DEEP)))


def mutated_text(old: str, rng: Random) -> str:
    """Text that is cut, doubled, changed in a character, or another."""
    at = rng.randrange(len(old) + 1)
    new = rng.choice(
        (old[:at], old + old, old[:at] + chr(rng.randrange(0x3000)) + old[at + 1 :], old[at:], old.upper())
    )
    return rng.choice((new, new, rng.choice(HOSTILE)))


def mutated_bytes(data: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Bytes of which some are flipped, set, cut out, doubled, or taken from elsewhere."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, size = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + size] = rng.randbytes(size)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at : at + size] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * size
            case 5 if other:
                start = rng.randrange(len(other))
                out[at : at + size] = other[start : start + size]
            case _:
                del out[at if rng.random() < 0.2 else len(out) :]
    return bytes(out)


# -- tables ------------------------------------------------------------------------------------------------------------

_KINDS = (
    pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.null(),
    pa.timestamp("ns"), pa.list_(pa.int64()), pa.struct([("a", pa.int8())]), pa.decimal128(38, 3), pa.date32(),
)  # fmt: skip


def mutated_table(table: pa.Table, rng: Random) -> pa.Table:
    """A table that lacks columns, has others, or impossible values, or other rows."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        table = _TABLE_CHANGES[rng.choices(range(len(_TABLE_CHANGES)), _WEIGHTS)[0]](table, rng)
    return table


def _any_column(table: pa.Table, rng: Random) -> int:
    return rng.randrange(table.num_columns)


def _without(table: pa.Table, rng: Random) -> pa.Table:
    return table.remove_column(_any_column(table, rng)) if table.num_columns > 1 else table


def _retyped(table: pa.Table, rng: Random) -> pa.Table:
    at, kind = _any_column(table, rng), rng.choice(_KINDS)
    try:
        column = table.column(at).cast(kind)
    except pa.ArrowException:
        column = pa.nulls(table.num_rows, kind)
    return table.set_column(at, table.column_names[at], column)


def _renamed(table: pa.Table, rng: Random) -> pa.Table:
    names = list(table.column_names)
    names[_any_column(table, rng)] = rng.choice((rng.choice(names), rng.choice(HOSTILE[:4])))
    return table.rename_columns(names)


def _rows(table: pa.Table, rng: Random) -> pa.Table:
    count = table.num_rows
    rows = [rng.randrange(count) for _ in range(rng.choice((0, 1, count, 2 * count)))] if count else []
    return table.take(pa.array(rows, pa.int64()))


def _other_values(table: pa.Table, rng: Random) -> pa.Table:
    at = _any_column(table, rng)
    column = table.column(at)
    plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
    values = plain.to_pylist()
    for row in range(len(values)):
        if rng.random() < 0.5:
            values[row] = _other(values[row], plain.type, rng)
    try:
        return table.set_column(at, table.column_names[at], pa.array(values, plain.type))
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return table


def _other(value: Any, kind: pa.DataType, rng: Random) -> Any:
    if rng.random() < 0.15:
        return None
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return max(least, min(most, int(rng.choice((*NUMBERS[:23], (value or 0) + 1, -(value or 1))))))
    if pa.types.is_floating(kind):
        return rng.choice(NUMBERS[-8:])
    if pa.types.is_boolean(kind):
        return not value
    if pa.types.is_string(kind):
        return _other_text(value, rng)
    if pa.types.is_list(kind):
        return [_other(one, kind.value_type, rng) for one in value or [None]] * rng.choice((1, 1, 2))
    if pa.types.is_struct(kind):
        found = value or {}
        return {kind[i].name: _other(found.get(kind[i].name), kind[i].type, rng) for i in range(kind.num_fields)}
    return value


def _other_text(value: str | None, rng: Random) -> str:
    """Text that is no surrogate: a table could not hold it. JSON is changed by its structure."""
    if value and value[:1] in '{["' and rng.random() < 0.8:
        try:
            text = mutated_json(json.loads(value), rng)
        except ValueError:
            text = "{}"
    else:
        text = mutated_text(value or "", rng)
    return text.encode("utf-8", "replace").decode()


_TABLE_CHANGES: tuple[Callable[[pa.Table, Random], pa.Table], ...] = (
    _without, _retyped, _renamed, _rows, _other_values
)  # fmt: skip
_WEIGHTS = (1, 1, 1, 2, 8)


def parquet(table: pa.Table, rng: Random) -> bytes:
    """The table's bytes, written in one of several ways."""
    out = io.BytesIO()
    try:
        pq.write_table(
            table, out, compression=rng.choice(("zstd", "none", "snappy")), use_dictionary=rng.random() < 0.5,
            row_group_size=rng.choice((None, 1, 2)),
        )  # fmt: skip
    except (pa.ArrowException, ValueError):  # of a type that Parquet does not know
        return b"PAR1PAR1"
    return out.getvalue()
