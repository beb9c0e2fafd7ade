"""An archive becomes pages to walk around in, served to a browser on this machine (`archive view URL`, `arc.view()`)
or saved in one file each; and what notebooks and figures show of it."""

from __future__ import annotations

from archive.view import frames, notebook, pages, plots, texts
from archive.view.labels import labels_of
from archive.view.server import alone
from archive.view.shown import Settings
from archive.view.tokens import decoder
from archive.view.viewer import Viewer, serve

__all__ = [
    "Settings",
    "Viewer",
    "alone",
    "decoder",
    "frames",
    "labels_of",
    "notebook",
    "pages",
    "plots",
    "serve",
    "texts",
]
