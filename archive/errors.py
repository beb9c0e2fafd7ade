"""The error tree under its public name."""

from __future__ import annotations

from archive.base import ExpiredError
from archive.base.errors import *  # noqa: F403

LetGoError = ExpiredError  # the name that it had before
