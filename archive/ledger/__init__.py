"""The ledger of prompts. Draws, starts, seals, trainings and drops come in; rows of the ledger table go out, and the
work that must be repeated."""

from __future__ import annotations

from archive.ledger.fold import LedgerRows
from archive.ledger.keys import Key
from archive.ledger.ledger import Ledger, Ledgers
from archive.ledger.view import Group, LedgerView, Rollout, TrainedBatch, names, of_run, taken_back

__all__ = [
    "Group",
    "Key",
    "Ledger",
    "LedgerRows",
    "LedgerView",
    "Ledgers",
    "Rollout",
    "TrainedBatch",
    "names",
    "of_run",
    "taken_back",
]
