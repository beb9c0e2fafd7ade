"""Pure, no I/O: the metrics that there are, under the names that Prometheus and OpenTelemetry know them by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_UNITS = {"": "", "By": "_bytes", "s": "_seconds"}


class Kind(StrEnum):
    """What may be done with a metric: a counter only grows, a gauge is as it is now, a histogram has buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, and unit ("By", "s" or none), as OpenTelemetry writes them."""

    name: str
    kind: Kind
    unit: str
    help: str

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, the same as OpenTelemetry's exporter gives it."""
        total = "_total" if self.kind is Kind.COUNTER else ""
        return self.name.replace(".", "_") + _UNITS[self.unit] + total


OPERATION = Family("archive.operation", Kind.HISTOGRAM, "s", "Time that operations took, by operation")
FAMILIES = (
    OPERATION,
    Family("archive.operation.failures", Kind.COUNTER, "", "Operations that ended in an error, by operation"),
    Family("archive.written", Kind.COUNTER, "By", "Steps made visible, as stored, by commit or checkpoint"),
    Family("archive.requests", Kind.COUNTER, "", "Requests sent, each try counts, by verb and kind of store"),
    Family("archive.received", Kind.COUNTER, "By", "Payload received, by kind of store"),
    Family("archive.sent", Kind.COUNTER, "By", "Payload sent, by kind of store"),
    Family("archive.retries", Kind.COUNTER, "", "Tries after the first, by kind of store"),
    Family("archive.errors", Kind.COUNTER, "", "Requests that failed for good, by kind of store"),
    Family("archive.answered.no", Kind.COUNTER, "", "Requests answered as expected: not there, or already there"),
    Family(
        "archive.resume.needed",
        Kind.COUNTER,
        "By",
        "Bytes of the steps of shares that were read",
    ),
    Family("archive.resume.received", Kind.COUNTER, "By", "What was received while shares were read"),
    Family("archive.resume.planned", Kind.COUNTER, "", "Requests to read shares, by what plans say"),
    Family("archive.resume.requests", Kind.COUNTER, "", "Requests to read shares, as they were sent"),
    Family("archive.journal.behind", Kind.GAUGE, "s", "Age of the oldest addition of a writer that is not durable"),
)
