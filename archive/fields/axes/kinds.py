"""Pure, no I/O: the one list of the kinds of axis. A new kind is a class of its own and a line here (and its name in
`archive.fields.schema.AXES`)."""

from __future__ import annotations

from typing import Any

from archive.base import CorruptManifestError, show
from archive.fields import FieldSpec
from archive.fields.axes.axis import Axis
from archive.fields.axes.free import FreeAxis
from archive.fields.axes.next_of import NextOfAxis
from archive.fields.axes.offset import OffsetAxis
from archive.fields.axes.ragged import RaggedAxis
from archive.fields.axes.step import StepAxis

KINDS: dict[str, type[Axis[Any]]] = {
    "step": StepAxis,
    "offset": OffsetAxis,
    "ragged": RaggedAxis,
    "free": FreeAxis,
}


def axis_of(spec: FieldSpec) -> Axis[Any]:
    """A field that has data on its axis; CorruptManifestError for an axis that this library does not know."""
    if spec.next_of:
        return NextOfAxis(spec)
    kind = KINDS.get(spec.axis)
    if kind is None:
        raise CorruptManifestError(
            f"field {show(spec.path)!r} is on axis {spec.axis!r}, which holds no data that this library can read; a "
            "newer one may know it"
        )
    return kind(spec)
