"""What each field of an episode is looked at as: by its schema; and by their first steps those that are lists of bytes,
which may be packets of a camera's video."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from archive.adapters.video import is_packets
from archive.base import ArchiveError, FieldError
from archive.fields import schema, to_numpy
from archive.view.answers.listings import Listing
from archive.view.answers.shown import Shown
from archive.views import frames

if TYPE_CHECKING:
    from archive import Episode

LARGEST = 2**24  # numbers a step; more is no picture that one looks at
MOST = 200  # fields that are told of; of more, the first
FIRST = 8  # steps whose bytes say whether they are packets


@dataclass(frozen=True)
class Kind:
    """A field: "frames", "curve", "text" (words, JSON), "tokens" (lists of numbers), or "raw"."""

    name: str
    told: str  # dtype, shape and axis, for people
    kind: str
    shape: tuple[int, ...] = ()
    bytes: bool = False  # lists of bytes: if "frames", packets of video


def kinds(shown: Shown, listing: Listing, ep: Episode) -> list[Kind]:
    """The fields of an episode; nodes, which hold other fields, left out."""
    every = list(_by_schema(ep.specs, ep.fields))
    lists = [kind.name for kind in every if kind.bytes]
    films = shown.kept(("films", listing.key, ep.id), lambda: _films(ep, lists)) if lists else ()
    return [replace(kind, kind="frames") if kind.name in films else kind for kind in every]


def _films(ep: Episode, lists: list[str]) -> tuple[str, ...]:
    """Which of these fields are packets of video; none where they cannot be read, as whoever looks at them is told."""
    try:
        data = ep.read(lists, 0, min(FIRST, ep.length), missing="skip", ragged="flat")
    except ArchiveError:
        return ()
    return tuple(name for name, leaf in frames.leaves(data) if is_packets(leaf))


def _by_schema(specs: Mapping[schema.Path, schema.FieldSpec], told: Mapping[str, str]) -> Iterator[Kind]:
    for spec in specs.values():
        if spec.name in told:
            of_bytes = (spec.axis, spec.dtype, spec.shape) == ("ragged", "|u1", ())
            yield Kind(spec.name, told[spec.name], _kind(spec), spec.shape, of_bytes)


def _kind(spec: schema.FieldSpec) -> str:
    if spec.axis == "free":
        return "raw"
    sample = _sample(spec)
    if sample is None:
        return "text"
    if spec.axis == "ragged":
        return "tokens" if sample.ndim <= 2 else "raw"
    if math.prod(spec.shape) > LARGEST or len(spec.shape) > 4:
        return "raw"
    if frames.as_pictures(sample) is not None:
        return "frames"
    return "curve" if frames.as_curves(sample) is not None else "raw"


def _sample(spec: schema.FieldSpec) -> np.ndarray | None:
    """A step of zeros as it is read, without taking the memory; None for what is no number."""
    try:
        dtype = to_numpy(spec.dtype)
    except (FieldError, ValueError, TypeError):
        return None
    if dtype.kind not in "biufV":
        return None
    dtype = np.dtype(np.float32) if dtype.kind == "V" else dtype
    return np.broadcast_to(np.zeros((), dtype), (1, *spec.shape)) if math.prod(spec.shape) <= LARGEST else np.zeros(1)
