"""What is looked at: plain values come in; HTML, SVG and figures go out, with everything escaped. No I/O."""

from __future__ import annotations

from archive.views import (
    charts,
    conversation,
    episodepage,
    frames,
    markup,
    page,
    plots,
    reports,
    rollouts,
    summaries,
    texts,
)
from archive.views.tokenizing import decoder

__all__ = [
    "charts",
    "conversation",
    "decoder",
    "episodepage",
    "frames",
    "markup",
    "page",
    "plots",
    "reports",
    "rollouts",
    "summaries",
    "texts",
]
