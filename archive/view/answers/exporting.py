"""What is on screen as a page of its own, which needs nothing else: the pages of `archive export --html`."""

from __future__ import annotations

from collections.abc import Callable

from archive.base import UsageError
from archive.view.answers.planning import planned
from archive.view.answers.shown import Shown, checkpoint_at
from archive.view.web import Query, Reply, bytes_reply


def page(shown: Shown, query: Query) -> Reply:
    """The page of `what=`: "episode" `id=`, the "episodes" that are meant, "checkpoint" `number=`, its "plan" for
    `ranks=`, or the whole "archive"; X-Name: of the file. As bytes: it is saved, never shown from here."""
    make = PAGES.get(query.text("what"))
    if make is None:
        raise UsageError(f"what={query.text('what')!r:.40} is no page: {', '.join(PAGES)}")
    return bytes_reply(make(shown, query).encode(), Name=f"archive-{query.text('what')}.html")


def _episode(shown: Shown, query: Query) -> str:
    return shown.listing(query).episodes[query.needed("id")].to_html()


def _episodes(shown: Shown, query: Query) -> str:
    scope = shown.scope(query)
    return scope.listing.episodes.pick(scope.places).to_html(query.text("where") or "Episodes")


def _checkpoint(shown: Shown, query: Query) -> str:
    return checkpoint_at(shown.at(query), query.number("number", 0)).to_html()


def _plan(shown: Shown, query: Query) -> str:
    return planned(shown, query).to_html()


def _archive(shown: Shown, query: Query) -> str:
    return shown.at(query).to_html()


PAGES: dict[str, Callable[[Shown, Query], str]] = {
    "episode": _episode,
    "episodes": _episodes,
    "checkpoint": _checkpoint,
    "plan": _plan,
    "archive": _archive,
}
