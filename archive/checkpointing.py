"""When to checkpoint, under its public name: requests by signal or by the bucket, and saving on a crash."""

from __future__ import annotations

from archive.checkpoint.requests import *  # noqa: F403
