"""Pure, no I/O: the fields of some episodes as columns of Ray's blocks, a row an episode, a step or a window.

Numbers are tensors, of one shape where all rows have it, else of any length. Texts, JSON (as text), ragged fields of
episodes and windows, and fields that some episodes lack (null there) are Arrow's lists and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorType

from archive.arrays import Ints, Mask, offsets_of, spans
from archive.base import FieldError, show
from archive.fields import Array, FieldSpec, Ragged, dtypes, json_texts, lists_column, plain, rows_column
from archive.read import Windows

AFTER = ".after"  # ends the names of columns of what a field has beyond the last step


@dataclass(frozen=True)
class Unit:
    """The rows of a dataset: of kind "episode", "step" or "window"."""

    kind: str
    length: int = 1
    stride: int = 1
    pad: bool = False

    def frame(self, lengths: Ints) -> Frame:
        """The rows of episodes of these lengths."""
        if self.kind == "episode":
            return Frame(lengths, np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths)
        made = Windows(lengths, self.length, self.stride, self.pad)
        episode, start, stop = made.places(np.arange(len(made)))
        return Frame(lengths, episode, start, stop - start)

    def counts(self, lengths: Ints) -> Ints:
        """The number of rows of each episode."""
        if self.kind == "episode":
            return np.ones(len(lengths), np.int64)
        return np.diff(Windows(lengths, self.length, self.stride, self.pad).offsets)


class Frame(NamedTuple):
    """Rows of a block. lengths: of the episodes; of each row: the number of its episode, its first step, its steps."""

    lengths: Ints
    episode: Ints
    start: Ints
    steps: Ints


class Held(NamedTuple):
    """A field of some episodes: its rows end to end, the first of each episode and their number, and a mask of the
    episodes that have it."""

    values: Array | Ragged
    first: Ints
    counts: Ints
    present: Mask


def held(spec: FieldSpec, leaves: Sequence[Any]) -> Held:
    """A field of episodes, each of which has such a leaf, read with ragged="flat"; None: it lacks the field."""
    present = np.array([leaf is not None for leaf in leaves], bool)
    parts: list[Any] = [leaf for leaf in leaves if leaf is not None]
    values: Array | Ragged
    if spec.axis == "ragged":
        parts = [leaf if isinstance(leaf, Ragged) else Ragged(leaf, np.ones(len(leaf), np.int64)) for leaf in parts]
        empty = Ragged(no_rows(spec), np.zeros(0, np.int64))
        values = Ragged(*(np.concatenate(one) for one in zip(empty, *parts, strict=True)))
        sizes = [len(leaf.lengths) for leaf in parts]
    else:
        parts = [json_texts(leaf) if isinstance(leaf, list) else leaf for leaf in parts]
        parts = [leaf.reshape(1, *leaf.shape) if spec.scalar and not leaf.ndim else leaf for leaf in parts]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else no_rows(spec)
        sizes = [len(leaf) for leaf in parts]
    counts = np.zeros(len(leaves), np.int64)
    counts[present] = sizes
    return Held(values, offsets_of(counts)[:-1], counts, present)


def whole(values: Array, lengths: Ints) -> Held:
    """A field of one row a step of episodes of these lengths, which are end to end."""
    return Held(values, offsets_of(lengths)[:-1], lengths, np.ones(len(lengths), bool))


def no_rows(spec: FieldSpec) -> Array:
    """The rows of a field of an episode without steps."""
    dtype = np.dtype(object) if spec.dtype in ("str", "json") else dtypes.to_numpy(spec.dtype)
    return np.empty((0, *spec.shape), dtype)


def columns(spec: FieldSpec, given: Held, frame: Frame, unit: Unit, *, partial: bool) -> dict[str, Any]:
    """The columns of a field. partial: some episodes of the dataset lack it, and it is null there."""
    absent = ~given.present[frame.episode] if partial else None
    try:
        if spec.axis == "free":
            return {spec.name: _free(spec, given, frame, unit, absent)}
        if unit.kind == "episode":
            return {spec.name: _lists(given.values, given.first, given.counts, absent)}
        first = given.first[frame.episode] + frame.start
        if unit.kind == "window":
            made = {spec.name: _windows(given.values, first, frame.steps, unit.length, absent)}
        else:
            made = {spec.name: _rows(given.values, first, absent)}
        return made | ({spec.name + AFTER: _after(given, frame)} if spec.axis == "offset" else {})
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise FieldError(
            f"field {show(spec.path)!r} does not go into a block of Ray's ({e}); leave it out with fields="
        ) from e


def _free(spec: FieldSpec, given: Held, frame: Frame, unit: Unit, absent: Mask | None) -> Any:
    """A field of the whole episode: with each episode or window, or with the first step, and null at the others."""
    first, counts = given.first[frame.episode], given.counts[frame.episode]
    if unit.kind == "step":
        later = frame.start > 0
        absent = later if absent is None else absent | later
    return _rows(given.values, first, absent) if spec.scalar else _lists(given.values, first, counts, absent)


def _after(given: Held, frame: Frame) -> Any:
    """Rows beyond the last step, as a list, with the rows that have that step; null with the others."""
    counts = (given.counts - frame.lengths)[frame.episode]
    none = (frame.start + frame.steps < frame.lengths[frame.episode]) | (counts < 1)
    first = given.first[frame.episode] + frame.lengths[frame.episode]
    return _lists(given.values, first, counts, none)


def _rows(values: Array | Ragged, at: Ints, absent: Mask | None) -> Any:
    """The rows at some places, one each."""
    if absent is None and isinstance(values, Ragged) and _is_numbers(values.values):
        first = offsets_of(values.lengths)[:-1][at]
        lengths = values.lengths[at].astype(np.int64, copy=False)
        return _tensors(_taken(values.values, spans(first, lengths)), lengths)
    if absent is None and not isinstance(values, Ragged):
        return _one_shape(_taken(values, at))
    return _values(values).take(pa.array(at, mask=absent))


def _lists(values: Array | Ragged, first: Ints, counts: Ints, absent: Mask | None) -> Any:
    """The rows [first, first + count), together."""
    counts = counts if absent is None else np.where(absent, 0, counts)
    at = spans(first, counts)
    if absent is None and not isinstance(values, Ragged) and _is_numbers(values):
        return _tensors(_taken(values, at), counts)
    return lists_column(_values(values).take(pa.array(at)), counts, absent)


def _windows(values: Array | Ragged, first: Ints, counts: Ints, length: int, absent: Mask | None) -> Any:
    """The rows [first, first + count), together, filled up to `length` with zeros, "" or nothing."""
    counts = counts if absent is None else np.where(absent, 0, counts)
    is_full = bool((counts == length).all())
    if absent is None and not isinstance(values, Ragged) and _is_numbers(values):
        rows, shape = _taken(values, spans(first, counts)), (len(counts), length, *values.shape[1:])
        if is_full:
            return _one_shape(rows.reshape(shape))
        filled = np.zeros(shape, rows.dtype)
        filled[real(counts, length)] = rows
        return _one_shape(filled)
    if is_full:
        return _lists(values, first, counts, None)
    each = _values(values)
    filler = pa.array([_filler(each.type)], each.type)
    at = np.full((len(counts), length), len(each))
    at[real(counts, length)] = spans(first, counts)
    every = pa.concat_arrays([each, filler])
    return _nulled(lists_column(every.take(pa.array(at.reshape(-1))), np.full(len(counts), length)), absent)


def real(counts: Ints, length: int) -> Mask:
    """A mask of the steps of padded windows that are real."""
    return np.arange(length) < counts[:, None]


def mask_column(frame: Frame, unit: Unit) -> Any:
    """The column of `real` for windows."""
    return _one_shape(real(frame.steps, unit.length))


def _nulled(column: Any, absent: Mask | None) -> Any:
    return column if absent is None else column.take(pa.array(np.arange(len(column)), mask=absent))


def _filler(kind: Any) -> Any:
    if pa.types.is_fixed_size_list(kind):
        return [_filler(kind.value_type)] * kind.list_size
    return "" if pa.types.is_string(kind) else [] if pa.types.is_large_list(kind) else pa.scalar(0).cast(kind).as_py()


def _values(values: Array | Ragged) -> Any:
    """One value of Arrow's for each row."""
    if isinstance(values, Ragged):
        return lists_column(rows_column(values.values), values.lengths)
    return rows_column(values)


def _taken(values: Array, at: Ints) -> Array:
    """The rows at some places; no copy where these are all of them."""
    is_all = len(at) == len(values) and (not len(at) or (at[0] == 0 and bool((np.diff(at) == 1).all())))
    return values if is_all else values[at]


def _is_numbers(values: Array) -> bool:
    return values.dtype.kind in "biufcV" and values.dtype.names is None


def _one_shape(rows: Array) -> Any:
    """Rows of one shape: tensors, or plain values where each is one."""
    if (rows.ndim == 1 and rows.dtype.kind != "c") or not _is_numbers(rows):
        return rows_column(rows)
    if 0 in rows.shape[1:]:
        raise ValueError("its rows have no elements")
    return ArrowTensorArray.from_numpy(plain(rows))


def _tensors(rows: Array, lengths: Ints) -> Any:
    """Rows end to end as tensors of so many rows each."""
    rows = plain(rows)
    if 0 in rows.shape[1:]:
        raise ValueError("its rows have no elements")
    shape = np.empty((len(lengths), rows.ndim), np.int64)
    shape[:, 0], shape[:, 1:] = lengths, rows.shape[1:]
    shapes = pa.ListArray.from_arrays(
        pa.array(np.arange(len(shape) + 1) * rows.ndim, pa.int32()), pa.array(shape.reshape(-1))
    )
    flat = pa.array(rows.reshape(-1))
    data = lists_column(flat, lengths * int(np.prod(rows.shape[1:])))
    kind = ArrowVariableShapedTensorType(flat.type, rows.ndim)
    return pa.ExtensionArray.from_storage(kind, pa.StructArray.from_arrays([data, shapes], ["data", "shape"]))
