"""On top of the archive, no I/O: what was gathered for a batch, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.fields import Ragged, to_tensors


def tensors(value: Any) -> Any:
    """A gathered batch as tensors: rows of arrays that differ in length are a Ragged, text and JSON stay lists."""
    if isinstance(value, dict):
        return {k: tensors(v) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return _ragged(value, (len(value),))
    if isinstance(value, list) and value and isinstance(value[0], list) and _arrays(value):
        if len({len(rows) for rows in value}) == 1:
            return _ragged([row for rows in value for row in rows], (len(value), len(value[0])))
        return [to_tensors(rows) for rows in value]
    return to_tensors(value)


def _arrays(value: list[Any]) -> bool:
    return all(isinstance(row, np.ndarray) for rows in value for row in rows) and any(map(len, value))


def _ragged(rows: list[Any], shape: tuple[int, ...]) -> Any:
    if len({row.shape[1:] for row in rows}) > 1 or not all(row.ndim for row in rows):
        return to_tensors(rows)
    lengths = np.array([len(row) for row in rows], np.int64).reshape(shape)
    return to_tensors(Ragged(np.concatenate(rows), lengths))
