"""An archive that is shown, and what a browser asks of it, become a Reply; one function a question. No HTTP in here."""

from __future__ import annotations

from archive.view.answers.about import about, writable
from archive.view.answers.completion import check, names, values
from archive.view.answers.histograms import histograms
from archive.view.answers.shown import Settings, Shown
from archive.view.answers.tables import neighbours, rows

__all__ = [
    "Settings",
    "Shown",
    "about",
    "check",
    "histograms",
    "names",
    "neighbours",
    "rows",
    "values",
    "writable",
]
