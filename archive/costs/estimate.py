"""The cost of a run, from figures that are given, and from an archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from archive.base import UsageError
from archive.costs import observed
from archive.costs.bill import Cost
from archive.costs.workload import Workload
from archive.store import PRICES, Prices, prices_of

_FIGURES = tuple(one.name for one in fields(Workload))


def cost(
    archive: Any = None,
    *,
    stores: str | Prices | Sequence[str | Prices] = tuple(PRICES),
    run: str | None = None,
    **figures: Any,
) -> Cost:
    """The dollars of a run at S3, S3 Express, GCS and R2, by cause, the largest first, and what makes it a tenth.

    archive: an open one, whose newest checkpoints and journals give the figures; None: only `figures` count.  run: one
    of its runs.  stores: names, or Prices of one's own; the first one's count for what to change.  figures: `ranks=`,
    `steps_s=`, `step_bytes=`, `journal_s=`, `checkpoint_s=`, `keep=` and others, as `archive.costs.Workload` has them;
    they take the place of those of the archive.
    """
    unknown = sorted(figures.keys() - set(_FIGURES))
    if unknown:
        raise UsageError(f"a run has no figure {unknown[0]!r}: give some of {', '.join(_FIGURES)}")
    given = [stores] if isinstance(stores, str | Prices) else list(stores)
    if not given:
        raise UsageError(f"stores={stores!r}: give one of {', '.join(PRICES)}, or Prices")
    priced = {one if isinstance(one, str) else one.store: prices_of(one) for one in given}
    if archive is None:
        if run is not None:
            raise UsageError(f"run={run!r} names a run of an archive: give that, too")
        return Cost(Workload(**figures), priced)
    if not (hasattr(archive, "storage") and hasattr(archive, "head")):
        raise UsageError(f"archive={archive!r:.80} is no archive: give an open one, archive.open(url)")
    taken = observed.figures(archive.storage, archive.head, run)
    if "step_bytes" not in taken | figures:
        raise UsageError(f"the shards of {archive.url} are many objects each: give step_bytes=, or --step-bytes")
    told = f"{archive.url}: figures of its newest checkpoints" + (f"; given: {', '.join(figures)}" if figures else "")
    return Cost(Workload(**(taken | figures)), priced, told)
