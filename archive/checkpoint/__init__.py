"""Checkpoints: what each rank cut comes in; one commit for all ranks goes out, and what a rank resumes from."""

from __future__ import annotations

from archive.checkpoint import requests, resuming, starting
from archive.checkpoint.checkpointlist import Checkpoints, Clock, read_clock
from archive.checkpoint.checkpoints import MAIN_BUFFER, Checkpoint, checkpoint_at
from archive.checkpoint.drafting import Joint, fresh_rows
from archive.checkpoint.holding import Holding
from archive.checkpoint.joining import commit_recovered
from archive.checkpoint.pending import Pending
from archive.checkpoint.progressbar import on_terminal
from archive.checkpoint.requests import watch
from archive.checkpoint.retention import Candidate, Keep, best_of
from archive.checkpoint.runs import Run, Runs
from archive.checkpoint.saver import Saver, finish_at_exit

__all__ = [
    "MAIN_BUFFER",
    "Candidate",
    "Checkpoint",
    "Checkpoints",
    "Clock",
    "Holding",
    "Joint",
    "Keep",
    "Pending",
    "Run",
    "Runs",
    "Saver",
    "best_of",
    "checkpoint_at",
    "commit_recovered",
    "finish_at_exit",
    "fresh_rows",
    "on_terminal",
    "read_clock",
    "requests",
    "resuming",
    "starting",
    "watch",
]
