"""An archive that is shown, and what a browser asks of it, become a Reply; one function a question. No HTTP in here."""

from __future__ import annotations

from archive.view.answers.about import about
from archive.view.answers.shown import Settings, Shown
from archive.view.answers.tables import rows

__all__ = ["Settings", "Shown", "about", "rows"]
