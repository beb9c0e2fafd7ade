"""Pure, no I/O: the metrics of this process as text, in the format that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from archive.observe.families import FAMILIES, OPERATION, Family
from archive.observe.sums import BOUNDS_S, Labels, labels, samples, times

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metrics() -> str:
    """What this process has done since it began (a forked child, since the fork), as Prometheus scrapes it.

    Waits for nothing, and holds up nobody: it may be asked for at any time, from any thread.
    """
    return "".join(f"{line}\n" for family in FAMILIES for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    name = family.prometheus
    yield f"# HELP {name} {family.help}."
    yield f"# TYPE {name} {family.kind}"
    if family is OPERATION:
        yield from _histograms(name)
        return
    for sample in sorted(samples(family.name)):
        yield _line(name, sample.labels, sample.value)


def _histograms(name: str) -> Iterator[str]:
    for operation, one in sorted(times().items()):
        own = labels(operation=operation)
        bounds = [*map(repr, BOUNDS_S), "+Inf"]
        for bound, count in zip(bounds, accumulate(one.counts), strict=True):
            yield _line(f"{name}_bucket", own + labels(le=bound), count)
        yield _line(f"{name}_sum", own, one.seconds)
        yield _line(f"{name}_count", own, sum(one.counts))


def _line(name: str, own: Labels, value: float) -> str:
    inside = ",".join(f'{label.name}="{label.value.translate(_ESCAPED)}"' for label in own)
    return f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}"
