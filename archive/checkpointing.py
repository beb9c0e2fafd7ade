"""When to checkpoint, under its public name: requests by signal, by the bucket or over HTTP, and saving on a crash."""

from __future__ import annotations

from archive.checkpoint.requests import *  # noqa: F403
