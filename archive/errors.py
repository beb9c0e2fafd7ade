"""The error tree under its public name."""

from __future__ import annotations

from archive.base.errors import *  # noqa: F403
