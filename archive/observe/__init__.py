"""What a process does, for who looks at it from outside: operations come in; metrics, spans and their text go out.

Costs next to nothing where nobody looks: a few sums in memory, and no span without a provider of OpenTelemetry."""

from __future__ import annotations

from archive.observe.families import FAMILIES, Family, Kind
from archive.observe.operations import Operation, operation, timed
from archive.observe.prometheus import metrics
from archive.observe.sums import Label, Sample, add, source

__all__ = [
    "FAMILIES",
    "Family",
    "Kind",
    "Label",
    "Operation",
    "Sample",
    "add",
    "metrics",
    "operation",
    "source",
    "timed",
]
