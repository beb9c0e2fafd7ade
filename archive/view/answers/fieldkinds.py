"""Pure, no I/O: what each field of an episode is looked at as, from its schema alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from archive.base import FieldError
from archive.fields import schema, to_numpy
from archive.views import frames

LARGEST = 2**24  # numbers a step; more is no picture that one looks at
MOST = 200  # fields that are told of; of more, the first


@dataclass(frozen=True)
class Kind:
    """A field: "frames", "curve", "text" (words, JSON), "tokens" (lists of numbers), or "raw"."""

    name: str
    told: str  # dtype, shape and axis, for people
    kind: str
    shape: tuple[int, ...] = ()


def kinds(specs: Mapping[schema.Path, schema.FieldSpec], told: Mapping[str, str]) -> Iterator[Kind]:
    """The fields of an episode, as `ep.specs` and `ep.fields` have them; nodes, which hold other fields, left out."""
    for spec in specs.values():
        if spec.name in told:
            yield Kind(spec.name, told[spec.name], _kind(spec), spec.shape)


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
