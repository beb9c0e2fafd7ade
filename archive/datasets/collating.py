"""One batch of some items: a nest of tensors, a TensorDict, or padded with masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archive.base import UsageError
from archive.datasets.items import merged
from archive.datasets.padding import Padded
from archive.datasets.tensordicts import tensordict_of

KINDS = ("dict", "tensordict", "padded", "list")


def collate(items: Sequence[Any], kind: Any = "dict") -> Any:
    """One batch of some items: a nested "dict" of tensors, a "tensordict", "padded" (or a Padded), or the "list" as it
    is. A DataLoader's collate_fn, too, and faster than its own: items that were read together are not taken apart
    first."""
    if check_kind(kind) == "list":
        return list(items)
    return as_kind(merged(items), len(items), kind)


def as_kind(nest: dict[str, Any], count: int, kind: Any) -> Any:
    """A batch's nest of tensors as it is, padded, or as a TensorDict of `count` items."""
    if isinstance(kind, Padded) or kind == "padded":
        return (kind if isinstance(kind, Padded) else Padded()).batch(nest, count)
    return tensordict_of(nest, count) if kind == "tensordict" else nest


def check_kind(kind: Any) -> Any:
    """One of KINDS, or a Padded."""
    if isinstance(kind, Padded):
        return kind
    if kind not in KINDS:
        raise UsageError(
            f"collate={kind!r}: give one of {', '.join(KINDS)}, a Padded, or a function of the list of items"
        )
    return kind
