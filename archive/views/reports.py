"""Pure, no I/O: what is shown of an archive, of runs, a checkpoint, a plan or episodes: in a notebook, or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archive.views import summaries
from archive.views.markup import Markup, facts, table
from archive.views.page import LISTING, block, document
from archive.views.rows import listed

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 200  # of a table in a notebook


@dataclass(frozen=True)
class Report:
    """Sections, then the episodes that they are about, with their fields. `first`: whether a notebook lists some."""

    heading: str
    title: str
    sections: Sequence[Markup]
    found: pa.Table | None = None
    fields: Mapping[str, str] | None = None
    first: bool = False

    def notebook(self) -> str:
        """A block with its own style, which changes nothing around it."""
        if self.found is None:
            return block(self.heading, *self.sections)
        spread = summaries.overview(self.found, self.fields or {})
        return block(self.heading, *self.sections, spread, summaries.first_rows(self.found) if self.first else "")

    def page(self) -> str:
        """A page of its own, with a row for each episode, to be sorted and filtered."""
        if self.found is None:
            return document(self.title, self.sections)
        place, rows = listed(self.found)
        return document(
            self.title, [*self.sections, summaries.overview(self.found, self.fields or {}, place)], rows, *LISTING
        )


def archive(
    title: str, about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]],
    found: pa.Table, fields: Mapping[str, str],
) -> Report:  # fmt: skip
    """An archive, or some of its runs side by side: runs, newest checkpoints, and all their episodes."""
    known = facts({**about, **summaries.totals(found)})
    sections = [known, summaries.runs(runs), summaries.newest_checkpoints(checkpoints)]
    return Report("Archive", title, sections, found, fields)


def runs(heading: str, about: Sequence[Mapping[str, Any]], found: pa.Table, fields: Mapping[str, str]) -> Report:
    """Some runs: what is known of each, and their returns in one picture."""
    return Report(heading, heading, [summaries.runs(about)], found, fields)


def checkpoint(
    about: Mapping[str, Any], per_rank: Mapping[int, int], buffers: Any, discarded: Any, progress: Any,
    found: pa.Table | None = None, fields: Mapping[str, str] | None = None,
) -> Report:  # fmt: skip
    """A checkpoint: what it holds, rank by rank and buffer by buffer; how its episodes are spread,
    if they are given."""
    title = f"{about['name']} of run {about['run']}"
    held = summaries.checkpoint(per_rank, buffers, discarded, progress)
    return Report("Checkpoint", title, [facts(about), held], found, fields)


def plan(about: Mapping[str, Any], moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any) -> Report:
    """A plan: which ranks get what of which, as a picture and in numbers."""
    title = f"{about['checkpoint']}: {about['source ranks']} ranks to {about['target ranks']}"
    return Report("Plan", title, [facts(about), summaries.plan(moved, ranks, dropped, about)])


def plan_of(verb: str, about: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Report:
    """A plan of what goes and what stays: rows by the title of their table, each with its reason."""
    told = [facts(about), *(summaries.told(title, rows) for title, rows in tables.items())]
    return Report(verb, verb, told)


def episodes(title: str, about: Mapping[str, Any], found: pa.Table, fields: Mapping[str, str]) -> Report:
    """Some episodes: how many, how they are spread, their fields and weights."""
    known = facts({**about, **summaries.totals(found)})
    return Report("Episodes", title, [known], found, fields, first=True)


def episode(about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any) -> Report:
    """One episode: what is known of it without reading its steps."""
    return Report("Episode", str(about["id"]), [facts(about), summaries.episode(fields, metadata, attributes)])


def rows(heading: str, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> Report:
    """A table of anything."""
    return Report(heading, heading, [table(columns, values[:MAX_ROWS], more=len(values) - MAX_ROWS)])
