"""Pure, no I/O: the values of columns after a crash: for each live step the newest that was saved or journaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.fields import dtypes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """Values in stored form, and the address of the step of each."""

    dtype: str
    array: Array
    addresses: Ints


@dataclass(frozen=True, slots=True)
class Filled:
    """A value for each step that was asked for. lacking: of so many none was known."""

    dtype: str
    array: Array
    lacking: int


def fill(wanted: Ints, given: Sequence[Given]) -> Filled:
    """The newest value of each step, of those given from the oldest to the newest; of another dtype or shape than the
    newest ones none counts. A step without a value gets NaN where there is one, else the dtype's zero."""
    newest = given[-1]
    out = blank(newest.dtype, len(wanted), newest.array)
    order = np.argsort(wanted, kind="stable")
    ordered = wanted[order]
    known = np.zeros(len(wanted), bool)
    for one in given:
        if one.dtype == newest.dtype and one.array.shape[1:] == newest.array.shape[1:] and len(wanted):
            place = np.minimum(np.searchsorted(ordered, one.addresses), len(wanted) - 1)
            there = ordered[place] == one.addresses
            at = order[place[there]]
            out[at] = one.array[there]
            known[at] = True
    return Filled(newest.dtype, out, int((~known).sum()))


def blank(dtype: str, count: int, like: Array) -> Array:
    """Rows in stored form of steps whose value nobody knows."""
    out = np.zeros((count, *like.shape[1:]), like.dtype)
    if like.dtype.kind in "OT":
        return np.full((count, *like.shape[1:]), "null" if dtype == "json" else "", object)
    kind = dtypes.to_numpy(dtype)
    if kind.kind in "fc" or dtype in dtypes.ML_NAMES:
        nan, _ = dtypes.to_stored(np.full(1, np.nan).astype(kind))
        out[...] = nan.reshape(-1)[0] if nan.size == 1 else nan[0]
    return out
