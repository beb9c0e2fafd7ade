"""An archive becomes pages to walk around in, served to a browser on this machine: `archive view URL`, `arc.view()`."""

from __future__ import annotations

from archive.view.answers import Settings
from archive.view.labels import labels_of
from archive.view.viewer import Viewer, serve
from archive.view.web import alone

__all__ = ["Settings", "Viewer", "alone", "labels_of", "serve"]
