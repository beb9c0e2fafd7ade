"""Pure, no I/O: self-contained pages of an archive, of runs side by side, and of any set of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archive.views import summaries
from archive.views.markup import Markup, facts, section
from archive.views.page import LISTING, document
from archive.views.rows import listed

if TYPE_CHECKING:
    import pyarrow as pa


def episodes(title: str, about: Mapping[str, Any], found: pa.Table, fields: Mapping[str, str]) -> str:
    """A page of some episodes: how they are spread, and a row for each, to be sorted and filtered."""
    return _page(title, facts({**about, **summaries.totals(found)}), Markup(""), found, fields)


def archive(
    title: str, about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]],
    found: pa.Table, fields: Mapping[str, str],
) -> str:  # fmt: skip
    """A page of an archive, or of some of its runs side by side: runs, checkpoints, and all their episodes."""
    told = Markup(section("Runs", summaries.runs_table(runs)) + summaries.newest_checkpoints(checkpoints))
    return _page(title, facts({**about, **summaries.totals(found)}), told, found, fields)


def _page(title: str, head: Markup, told: Markup, found: pa.Table, fields: Mapping[str, str]) -> str:
    place, rows = listed(found)
    spread = summaries.overview(found, fields, compared=summaries.by_run(found), rows=place)
    return document(title, [head, told, spread], rows, *LISTING)
