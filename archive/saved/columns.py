"""Pure, no I/O: values of columns by the steps that they are of: the newest of each step, those that differ from what
was known, and how a tick names the steps of its values.

A step's stream and position never change, whatever comes before it in live order or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask, Steps, group_of, offsets_of, run_starts, spans
from archive.base import CorruptStateError
from archive.fields import dtypes
from archive.saved.index import TickColumn
from archive.write import Column, Kind, Stream

Array = np.ndarray[Any, Any]
_MOST_STRETCHES = 16  # that a tick names one by one
_MOST = 2**40  # steps of a stream or of a column: more than there can be


class Values(NamedTuple):
    """Values of a column. `steps`: by the place of their stream among the streams; its column `at` says which value the
    first step of a row has."""

    column: Column
    steps: Steps
    streams: Sequence[Stream]

    @property
    def kind(self) -> Kind:
        """Its dtype and the shape of a row; only values of one kind lie in one array."""
        return self.column.dtype, self.column.array.shape[1:]


def in_order(steps: Steps) -> Steps:
    """The same steps, of which each has the next value."""
    return Steps(steps.stream, steps.lo, steps.hi, follows=("at",), at=offsets_of(steps.length)[:-1])


def _on_top(some: Sequence[Values], numbers: Mapping[Stream, int]) -> tuple[Array, Steps]:
    """The values of several of one kind, from the oldest to the newest, end to end; and for each step which is its
    newest. Streams have these numbers, or -1."""
    parts, start = [], 0
    for one in some:
        own = np.array([numbers.get(stream, -1) for stream in one.streams], np.int64)
        steps = one.steps
        parts.append(Steps(own[steps.stream], steps.lo, steps.hi, follows=("at",), at=steps["at"] + start))
        start += len(one.column.array)
    array = some[0].column.array if len(some) == 1 else np.concatenate([one.column.array for one in some])
    return array, Steps.joined(parts).topmost()


def newest(some: Sequence[Values]) -> Values:
    """The newest value of each step, of several of one kind from the oldest to the newest."""
    streams = tuple(dict.fromkeys(stream for one in some for stream in one.streams))
    array, steps = _on_top(some, {stream: number for number, stream in enumerate(streams)})
    count = steps.length
    # Rows of no bytes are all the same, and there may be very many: no memory is made for their numbers.
    rows = array[spans(steps["at"], count)] if array.size else array[: int(count.sum())]
    return Values(Column(rows, some[0].column.dtype), in_order(steps), streams)


def compacted(some: Sequence[Values]) -> list[Values]:
    """The newest value of each step, by kind; the kind of the newest is the last one."""
    kinds: dict[Kind, list[Values]] = {}
    for one in some:
        kinds[one.kind] = [*kinds.pop(one.kind, []), one]
    return [newest(of) for of in kinds.values()]


def common(kinds: Iterable[Kind]) -> Kind | None:
    """The kind that holds values of all these, as those of several ranks come to one; None if there is none, or no
    kind. Numbers and strings have none."""
    distinct = set(kinds)
    if len(distinct) == 1:
        return distinct.pop()
    shapes = {dtypes.given_shape(*kind) for kind in distinct}
    each = [dtypes.to_numpy(name) for name, _ in distinct]
    sorts = {"number" if dtypes.is_number(one) else "text" if one.kind in "OU" else one.kind for one in each}
    if len(shapes) != 1 or len(sorts) != 1:
        return None
    with suppress(TypeError):  # of dtypes that have none in common
        held = np.result_type(*each)
        name = "str" if held.hasobject else dtypes.logical_name(held)
        return name, dtypes.stored_trailing(name, shapes.pop())
    return None


def alike(some: Sequence[Values]) -> list[Values]:
    """The same values in their common kind; as they are if there is none."""
    kind = common(one.kind for one in some)
    return [one if kind is None or one.kind == kind else _as(one, kind[0]) for one in some]


def _as(values: Values, dtype: str) -> Values:
    array = values.column.array
    if array.dtype != object:  # strings are stored the same whatever their dtype
        array, _ = dtypes.to_stored(dtypes.from_stored(array, values.column.dtype).astype(dtypes.to_numpy(dtype)))
    return Values(Column(array, dtype), values.steps, values.streams)


def fill(wanted: Steps, numbers: Mapping[Stream, int], given: Sequence[Values]) -> tuple[Column, Mask]:
    """The newest value of each step, of those given from the oldest to the newest, and which steps have one: the others
    get NaN where the dtype has it, else its zero. Values of another dtype or shape than the newest ones do not count.
    """
    dtype, shape = given[-1].kind
    own = offsets_of(wanted.length)
    out = blank(dtype, int(own[-1]), shape)
    known = np.zeros(len(out), bool)
    array, steps = _on_top([one for one in given if one.kind == (dtype, shape)], numbers)
    met = wanted.meet(steps)
    count = met.hi - met.lo
    at = spans(own[met.left] + met.lo - wanted.lo[met.left], count)
    out[at] = array[spans(steps["at"][met.right] + met.lo - steps.lo[met.right], count)]
    known[at] = True
    return Column(out, dtype), known


def blank(dtype: str, count: int, shape: tuple[int, ...]) -> Array:
    """Rows in stored form, of this shape each, of steps whose value nobody knows."""
    kind = dtypes.to_numpy(dtype)
    if kind.kind in "OUT":
        return np.full((count, *shape), "null" if dtype == "json" else "", object)
    has_nan = kind.kind in "fc" or dtype in dtypes.ML_NAMES
    unknown, _ = dtypes.to_stored(np.full(1, np.nan).astype(kind) if has_nan else np.zeros(1, kind))
    out: Array = np.empty((count, *shape), unknown.dtype)
    out[...] = unknown[0]
    return out


def changed(values: Values, bases: Sequence[Sequence[Values]]) -> Values:
    """The values, in order, which some base does not have, or has otherwise. Bases are what a recovery may go on from,
    each from the oldest values to the newest; without one all are changed."""
    numbers = {stream: number for number, stream in enumerate(values.streams)}
    array, steps = values.column.array, values.steps
    new = np.full(len(array), not bases)
    for base in bases:
        before, known = fill(steps, numbers, base)
        same = Values(before, steps, values.streams).kind == values.kind
        new |= ~known | _unlike(array, before.array) if same else True
    if new.all():
        return values
    at = np.flatnonzero(new)
    row = group_of(steps["at"], at)
    lo = steps.lo[row] + at - steps["at"][row]
    each = Steps(steps.stream[row], lo, lo + 1, follows=("at",), at=np.arange(len(at)))
    return Values(Column(array[at], values.column.dtype), each.merged(), values.streams)


def _unlike(some: Array, others: Array) -> Mask:
    """True for each row that is not the same to the bit: NaN is what it is, and 0.0 is not -0.0."""
    if not some.size:
        return np.zeros(len(some), bool)
    if some.dtype != object:
        some, others = (np.ascontiguousarray(one).view(np.uint8).reshape(len(one), -1) for one in (some, others))
        width = next((n for n in (8, 4, 2) if some.shape[1] % n == 0), 1)
        some, others = some.view(f"u{width}"), others.view(f"u{width}")
    differs: Mask = (some != others).reshape(len(some), -1).any(axis=1)
    return differs


# -- in a tick ---------------------------------------------------------------------------------------------------------


def described(values: Values, path: str) -> tuple[TickColumn, dict[str, Array]]:
    """Values in order, as the index of a tick's object has them, and its arrays by path. Fields have no such paths:
    `%c` and `%r` are no escapes."""
    column, steps, streams = values
    array = f"%columns/{path}"
    rows = zip(steps.stream.tolist(), steps.lo.tolist(), steps.hi.tolist(), strict=True)
    if len(steps) <= _MOST_STRETCHES:
        stretches = tuple((*streams[n], lo, hi) for n, lo, hi in rows)
        return TickColumn(array, column.dtype, stretches), {array: column.array}
    ranges = f"%ranges/{path}"
    heads = run_starts(steps.stream)
    gaps = steps.lo - np.append(0, steps.hi[:-1])
    gaps[heads] = 0
    packed = np.concatenate([gaps, steps.length])
    counts = np.diff(heads, append=len(steps)).tolist()
    begins = zip(steps.stream[heads].tolist(), steps.lo[heads].tolist(), counts, strict=True)
    named = tuple((*streams[n], lo, count) for n, lo, count in begins)
    arrays = {array: column.array, ranges: packed.astype(np.min_scalar_type(int(packed.max())))}
    return TickColumn(array, column.dtype, (), named, ranges), arrays


def stretches_of(column: TickColumn, ranges: Array | None, where: str) -> tuple[Steps, list[Stream]]:
    """The steps of a column of a tick, and their streams; CorruptStateError if there cannot be so many, or such."""
    named = column.steps if ranges is None else column.streams
    first, last = np.array([one[3:] for one in named], np.int64).reshape(-1, 2).T
    if ranges is None:
        steps, good = Steps(np.arange(len(named)), first, last), True
    else:
        good = ranges.ndim == 1 and ranges.dtype.kind in "iu" and first.max(initial=0) <= _MOST
        good = good and last.min(initial=1) > 0 and int(ranges.max(initial=0)) <= _MOST // (len(ranges) + 1)
        gaps, lengths = np.split(ranges.astype(np.int64), 2) if good else (first, first)
        good = good and gaps.min(initial=0) >= 0 and lengths.min(initial=1) > 0
        steps = _unpacked(gaps, lengths, first, last) if good else Steps(first, first, first)
    if not good or steps.length.sum(dtype=np.float64) > _MOST:
        raise CorruptStateError(f"{where} names steps of column {column.array!r:.80} that there cannot be")
    return in_order(steps), [one[:3] for one in named]


def _unpacked(gaps: Ints, lengths: Ints, begins: Ints, rows: Ints) -> Steps:
    """Stretches of so many steps, each after a gap; so many rows of each stream, which begin there."""
    stream, ends = np.repeat(np.arange(len(rows)), rows), np.cumsum(gaps + lengths)
    heads = offsets_of(rows)[:-1]
    hi = ends + (begins - (ends - gaps - lengths)[heads])[stream]
    return Steps(stream, hi - lengths, hi)
