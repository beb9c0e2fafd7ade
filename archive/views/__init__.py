"""What is looked at: plain values come in; HTML, SVG and figures go out, with everything escaped. No I/O."""

from __future__ import annotations

from archive.views import charts, episodepage, frames, markup, overviews, page, plots, summaries, texts
from archive.views.markup import size
from archive.views.tokenizing import decoder

__all__ = [
    "charts",
    "decoder",
    "episodepage",
    "frames",
    "markup",
    "overviews",
    "page",
    "plots",
    "size",
    "summaries",
    "texts",
]
