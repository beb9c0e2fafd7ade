"""Pure, no I/O: rows of one field of a batch: those of an item, made longer, put where a mask says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from archive.fields import Ragged, mapped


def row_of(nest: Any, i: int) -> Any:
    """One item of a batch's nest."""
    return mapped(nest, lambda leaf: _row(leaf, i))


def _row(leaf: Any, i: int) -> Any:
    """An array that torch has no dtype for, and lists, are indexed as tensors are."""
    if not isinstance(leaf, Ragged):
        return leaf[i]
    stop = int(leaf.lengths[: i + 1].sum())
    return leaf.values[stop - int(leaf.lengths[i]) : stop]


def first_row(leaf: Any) -> Any:
    """The first row of a leaf that has rows, else the leaf."""
    rows = isinstance(leaf, list) or (isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim)
    return leaf[0] if rows and len(leaf) else leaf


def spread(rows: Any, mask: torch.Tensor) -> Any:
    """Rows put where the mask is set, zeros elsewhere."""
    if isinstance(rows, torch.Tensor):
        out = rows.new_zeros((*mask.shape, *rows.shape[1:]))
        out[mask] = rows
        return out
    plain = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    plain[mask.numpy()] = rows
    return plain


def filled(leaf: Any, steps: int, length: int) -> Any:
    """Rows of `steps` steps made `length` long; what has another number of rows belongs to the whole episode."""
    scalar = isinstance(leaf, (torch.Tensor, np.ndarray)) and not leaf.ndim
    if scalar or not isinstance(leaf, (torch.Tensor, np.ndarray, list)) or len(leaf) != steps or steps == length:
        return leaf
    if isinstance(leaf, torch.Tensor):
        return torch.cat([leaf, leaf.new_zeros((length - steps, *leaf.shape[1:]))])
    if isinstance(leaf, list):
        empty = leaf[0][:0] if leaf and isinstance(leaf[0], torch.Tensor) else None
        return leaf + [empty] * (length - steps)
    tail = np.full((length - steps, *leaf.shape[1:]), "" if leaf.dtype == object else 0, leaf.dtype)
    return np.concatenate([leaf, tail])
