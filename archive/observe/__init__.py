"""Observation of a process from outside. Operations come in; metrics, spans and log lines go out.

Costs next to nothing where nobody looks: a few sums in memory, and no span without a provider of OpenTelemetry."""

from __future__ import annotations

from archive.observe.meters import FAMILIES, Family, Label, MetricKind, Sample, add, gauge, metrics, source
from archive.observe.tracing import Operation, operation, timed

__all__ = [
    "FAMILIES",
    "Family",
    "Label",
    "MetricKind",
    "Operation",
    "Sample",
    "add",
    "gauge",
    "metrics",
    "operation",
    "source",
    "timed",
]
