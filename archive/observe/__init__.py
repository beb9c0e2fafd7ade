"""Observation of a process from outside. Operations come in; metrics, spans, log lines and bars go out.

Costs next to nothing where nobody looks: a few sums in memory, and no span without a provider of OpenTelemetry."""

from __future__ import annotations

from archive.observe.bars import Advance, bar, telling
from archive.observe.meters import FAMILIES, Family, Label, MetricKind, Sample, add, gauge, metrics, source
from archive.observe.tracing import Operation, operation, timed

__all__ = [
    "FAMILIES",
    "Advance",
    "Family",
    "Label",
    "MetricKind",
    "Operation",
    "Sample",
    "add",
    "bar",
    "gauge",
    "metrics",
    "operation",
    "source",
    "telling",
    "timed",
]
