"""Requests of checkpoints, under their public name: by signal or through the bucket; and saving on a crash."""

from __future__ import annotations

from archive.checkpoint.requests import *  # noqa: F403
