"""Pure, no I/O: digests of the rows of tensors, to see in this process which have changed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints
from archive.fields import Path

if TYPE_CHECKING:
    import torch

_HASH_BYTES = 1024 * 1024
_PRIMES = np.random.default_rng().integers(2**62, 2**63, 4096, np.int64).astype(np.uint64) | np.uint64(1)
Digests = np.ndarray[Any, np.dtype[np.uint64]]


def salt(number: int, path: Path) -> np.uint64:
    """A factor that tells a field from others of the same bytes."""
    return np.uint64(int(_PRIMES[number % len(_PRIMES)]) * (zlib.crc32(repr(path).encode()) | 1) % 2**64)


def of_texts(values: list[Any], columns: int) -> Digests:
    """A number for the values of each row of `columns` cells."""
    words = np.array([zlib.crc32(repr(v).encode()) for v in values], np.uint32)
    return _row_sums(words.reshape(-1, columns))


def of_tensor(leaf: torch.Tensor, rows: Ints | None) -> Digests:
    """A number for the bytes of each row (or of some), made in blocks of 1 MB."""
    count = len(leaf) if rows is None else len(rows)
    nbytes = int(np.prod(leaf.shape[1:], dtype=np.int64)) * leaf.element_size()
    import torch

    out = np.zeros(count, np.uint64)
    step = max(1, _HASH_BYTES // max(1, nbytes))
    for lo in range(0, count if nbytes else 0, step):
        part: Any = slice(lo, lo + step) if rows is None else torch.from_numpy(rows[lo : lo + step]).to(leaf.device)
        block = leaf.detach()[part].contiguous().cpu()
        flat = block.reshape(len(block), -1)
        if flat.stride(-1) != 1:  # of a dimension of size 1, any stride is contiguous, 0 too
            flat = flat.clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy()
        wide = raw if raw.shape[1] % 4 == 0 else np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
        out[lo : lo + step] = _row_sums(np.ascontiguousarray(wide).view(np.uint32))
    return out


def _row_sums(words: Any) -> Digests:
    """The sum of each row's words times numbers that are drawn once a process: rows that differ hardly ever agree."""
    out = np.zeros(len(words), np.uint64)
    for number, lo in enumerate(range(0, words.shape[1], len(_PRIMES))):
        part = words[:, lo : lo + len(_PRIMES)]
        one = np.einsum("ij,j->i", part, _PRIMES[: part.shape[1]], dtype=np.uint64, casting="unsafe")
        out += (one ^ (one >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15 + 2 * number)
    return out
