"""Does no I/O: operations, which are timed, counted, and reported to OpenTelemetry if the program has a provider.

A provider is looked for, never imported for its own sake: a program with a provider has imported it. Spans have the
kind of an error, not its text, which may hold text from buckets.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from archive.base import __version__, one_line
from archive.observe.meters import BOUNDS_S, FAMILIES, OPERATION, Family, MetricKind, add, add_time, samples

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span

P = ParamSpec("P")
T = TypeVar("T")
Value = str | int | float | bool
_NAME = "archive"


class Operation:
    """`with operation("checkpoint", run="main") as done:`; `seconds` is how long it has taken."""

    __slots__ = ("_began", "_name", "_scope", "_span")

    def __init__(self, name: str, about: dict[str, Value], current: bool) -> None:
        self._name = name
        self._span = begin(name, about)
        self._scope = _scope(self._span) if current and self._span is not None else None
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def note(self, **about: Value) -> None:
        """Add attributes for traces: counts and names, nothing secret."""
        if self._span is not None:
            _note(self._span, about)

    def __enter__(self) -> Self:
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.seconds
        error = None if kind is GeneratorExit else error  # who needs no more of it
        add_time(self._name, seconds)
        if error is not None:
            add("archive.operation.failures", 1, operation=self._name)
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
        if self._span is not None:
            _end(self._span, error)
        record(self._name, seconds)


def operation(operation_name: str, /, *, current: bool = True, **about: Value) -> Operation:
    """An operation that begins now, and ends with its block. `about`: attributes for traces.

    current: operations within the block are parts of it; False for a block that a generator leaves and enters.
    """
    return Operation(operation_name, about, current)


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function, each call of which is an operation of this name."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def run(*args: P.args, **given: P.kwargs) -> T:
            with operation(name):
                return call(*args, **given)

        return run

    return wrap


def begin(name: str, about: Mapping[str, Value]) -> Span | None:
    """A span, if the program traces."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # what stands in until one is set
        return None
    span = provider.get_tracer(_NAME, __version__).start_span(f"{_NAME}.{name}")
    _note(span, about)
    return span


def _note(span: Span, about: Mapping[str, Value]) -> None:
    for name, value in about.items():
        span.set_attribute(f"{_NAME}.{name}", one_line(value) if isinstance(value, str) else value)


def _scope(span: Span) -> AbstractContextManager[Span]:
    """The block in which a span is the parent of those that begin."""
    from opentelemetry import trace

    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def _end(span: Span, error: BaseException | None) -> None:
    """End a span; with an error, as failed."""
    if error is not None:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, type(error).__name__)
    span.end()


_measured: tuple[MeterProvider, Histogram] | None = None


def record(operation: str, seconds: float) -> None:
    """Report the duration of an operation to OpenTelemetry's metrics, if the program collects them."""
    if "opentelemetry.metrics" not in sys.modules:
        return
    from opentelemetry import metrics

    provider = metrics.get_meter_provider()
    if type(provider).__module__.startswith("opentelemetry.metrics"):  # what stands in until one is set
        return
    _histogram(provider).record(seconds, {"operation": operation})


def _histogram(provider: MeterProvider) -> Histogram:
    """The histogram of this provider; all metrics are made with it, once."""
    global _measured
    if _measured is None or _measured[0] is not provider:
        meter = provider.get_meter(_NAME, __version__)
        bounds = list(BOUNDS_S)
        times = meter.create_histogram(
            OPERATION.name, OPERATION.unit, OPERATION.help, explicit_bucket_boundaries_advisory=bounds
        )
        _measured = (provider, times)
        for family in FAMILIES:
            _observe(meter, family)
    return _measured[1]


def _observe(meter: Meter, family: Family) -> None:
    if family.kind is MetricKind.COUNTER:
        meter.create_observable_counter(family.name, [_callback(family)], family.unit, family.help)
    elif family.kind is MetricKind.GAUGE:
        meter.create_observable_gauge(family.name, [_callback(family)], family.unit, family.help)


def _callback(family: Family) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        return [
            Observation(one.value, {label.name: label.value for label in one.labels}) for one in samples(family.name)
        ]

    return observe
