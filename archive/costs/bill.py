"""The cost of a run at several stores, from figures that are given, and from an archive: a table for people, programs
and notebooks, what to change first, and limits that are near."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from archive.base import UsageError, cached_property, size, tabulate
from archive.costs import observed
from archive.costs.causes import MONTH_DAYS, Spent, causes
from archive.costs.changes import Saving, savings, warnings
from archive.costs.workload import Workload
from archive.store import PRICES, Prices, prices_of

if TYPE_CHECKING:
    import pyarrow as pa

_COUNTS = ("writes", "lists", "reads")
_BYTES = ("uploaded", "received", "stored")
_WIDTH = 110  # of a sentence
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


@dataclass(frozen=True)
class Cost:
    """The cost of a run, cause by cause, the largest first by the first store's prices. stores: name -> its prices.

    `table`: a row for each store and cause: requests and bytes a day, bytes stored, dollars a day and a month (of 30
    days, the first one: what is kept for ever costs more in each).  `dollars`: store -> dollars a month, of all.
    `savings`: the changes that make it a tenth.  `warnings`: limits of the stores that it comes near.
    """

    run: Workload
    stores: Mapping[str, Prices]
    about: str = ""

    @cached_property
    def spent(self) -> list[Spent]:
        """The use of a store in a day, cause by cause, the dearest first."""
        return sorted(causes(self.run), key=lambda one: -one.dollars(self._first))

    @property
    def _first(self) -> Prices:
        return next(iter(self.stores.values()))

    @property
    def dollars(self) -> dict[str, float]:
        """Store -> dollars a month."""
        found = {name: sum(one.dollars(prices) for one in self.spent) for name, prices in self.stores.items()}
        return {name: day * MONTH_DAYS for name, day in found.items()}

    @cached_property
    def savings(self) -> list[Saving]:
        """The changes that make a tenth of it, or as little as they can: the one that saves most first."""
        return savings(self.run, self._first)

    @property
    def warnings(self) -> list[str]:
        """Sentences on the limits of the stores that it comes near."""
        return [sentence for prices in self.stores.values() for sentence in warnings(self.run, prices)]

    @cached_property
    def table(self) -> pa.Table:
        """A row for each store and cause, as Arrow."""
        import pyarrow as pa

        return pa.Table.from_pylist(list(self._rows()))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for name, prices in self.stores.items():
            for one in self.spent:
                day = one.dollars(prices)
                counts = {column: round(getattr(one, column)) for column in (*_COUNTS, *_BYTES)}
                deletes = round(one.requests.get("delete", 0))
                dollars = {"dollars_day": day, "dollars_month": day * MONTH_DAYS}
                yield {"store": name, "cause": one.cause, **counts, "deletes": deletes, **dollars}

    def to_json(self) -> dict[str, Any]:
        """One JSON object: the run, the prices, the causes, and what to change."""
        keep = None if self.run.keep is None else str(self.run.keep)
        return {
            "run": {name: getattr(self.run, name) for name in Workload.__dataclass_fields__} | {"keep": keep},
            "stores": {name: asdict(prices) for name, prices in self.stores.items()},
            "causes": list(self._rows()),
            "dollars_month": self.dollars,
            "savings": [asdict(one) | {"dollars_month": one.dollars_day * MONTH_DAYS} for one in self.savings],
            "warnings": self.warnings,
        }

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> list[str]:
        """The columns of the table for people: requests a day, dollars a month at each store."""
        return ["cause", *_COUNTS, "stored", *(f"$ {name}" for name in self.stores)]

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table for people, in order; the last two are sums, of a month and of a day."""
        out = []
        for one in self.spent:
            counts = [f"{getattr(one, column):,.0f}" for column in _COUNTS]
            stored = size(one.stored) if one.stored else "-"
            month = (one.dollars(prices) * MONTH_DAYS for prices in self.stores.values())
            out.append([one.cause, *counts, stored, *map(_dollars, month)])
        counts = [f"{sum(getattr(one, column) for one in self.spent):,.0f}" for column in _COUNTS]
        stored = size(sum(one.stored for one in self.spent))
        out.append(["all", *counts, stored, *map(_dollars, self.dollars.values())])
        blank = [""] * (len(_COUNTS) + 1)
        return [*out, ["all, a day", *blank, *(_dollars(month / MONTH_DAYS) for month in self.dollars.values())]]

    @property
    def head(self) -> str:
        """A sentence on the run."""
        run = self.run
        journal = "no journal" if run.journal_s is None else f"a journal of {run.journal_s:g} s"
        if run.journals and run.journal_ranks > 1:
            journal += f" for each {run.journal_ranks} ranks"
        steps = f"{run.steps_s:,.0f} steps of {size(run.step_bytes)} a second"
        ranks = f"{run.ranks:,} rank{'' if run.ranks == 1 else 's'}"
        return f"{ranks}, {steps}, {journal}, a checkpoint every {run.checkpoint_s:g} s"

    @property
    def advice(self) -> list[str]:
        """Sentences on what to change first, and what that leaves a month."""
        if not self.savings:
            return []
        before, name = next(iter(self.dollars.values())), next(iter(self.stores))
        after = self.savings[-1].dollars_day * MONTH_DAYS
        whole = "a tenth" if after <= 0.1 * before * (1 + 1e-9) else f"{_dollars(after)}, not a tenth"
        rows = [(_dollars(one.dollars_day * MONTH_DAYS), one.change, one.loses or "nothing") for one in self.savings]
        steps = tabulate(("$ a month", "with", "gives up"), rows, right=("$ a month",))
        return [f"to pay {whole} of {_dollars(before)} a month at {name}, one after the other:", *steps]

    def __str__(self) -> str:
        lines = [self.head, "requests a day; what is stored, and dollars, in the first month"]
        lines += ["", *tabulate(self.columns, self.rows, right=self.columns[1:])]
        told = [line for one in self.warnings for line in _wrapped(one)]
        dated = ", ".join(f"{one.store} ({one.read_on})" for one in self.stores.values())
        shown = [*([self.about] if self.about else []), *lines, *_apart(self.advice), *_apart(told)]
        return "\n".join([*shown, *_apart(_wrapped(f"list prices of {dated}"))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from archive.view import notebook

        told: dict[str, Sequence[Mapping[str, Any]]] = {
            "By cause": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "To change first": [asdict(one) for one in self.savings],
            "Limits": [{"warning": one} for one in self.warnings],
        }
        return notebook.plan_of("Cost", {"run": self.head}, told)


def _apart(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []


def _wrapped(sentence: str) -> list[str]:
    return wrap(sentence, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _dollars(value: float) -> str:
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"
