"""Checkpoints. Snapshots of the ranks come in; one commit for all ranks goes out, and the start of a resumed rank."""

from __future__ import annotations

from archive.checkpoint import assembly, requests, resumption
from archive.checkpoint.assembly import commit_recovered
from archive.checkpoint.checkpointlist import Checkpoints, Run, Runs
from archive.checkpoint.checkpoints import MAIN_BUFFER, Checkpoint
from archive.checkpoint.joint import Joint, fresh_rows
from archive.checkpoint.pending import Pending, on_terminal
from archive.checkpoint.requests import watch
from archive.checkpoint.resumption import Holding
from archive.checkpoint.retention import Keep, candidates, keep_of, read_clock
from archive.checkpoint.saver import Saver, finish_at_exit

__all__ = [
    "MAIN_BUFFER",
    "Checkpoint",
    "Checkpoints",
    "Holding",
    "Joint",
    "Keep",
    "Pending",
    "Run",
    "Runs",
    "Saver",
    "assembly",
    "candidates",
    "commit_recovered",
    "finish_at_exit",
    "fresh_rows",
    "keep_of",
    "on_terminal",
    "read_clock",
    "requests",
    "resumption",
    "watch",
]
