"""The ledger of prompts: what was drawn, started, sealed, trained or dropped comes in; rows of the ledger table go out,
and what is to be done again."""

from __future__ import annotations

from archive.ledger import loading
from archive.ledger.archived import Archived
from archive.ledger.batches import Batch, batches
from archive.ledger.folding import Seen
from archive.ledger.ledger import Ledger, Ledgers, TakenOver
from archive.ledger.terms import Group, Key, Rollout
from archive.ledger.views import LedgerView, left_in_flight, of_run

__all__ = [
    "Archived",
    "Batch",
    "Group",
    "Key",
    "Ledger",
    "LedgerView",
    "Ledgers",
    "Rollout",
    "Seen",
    "TakenOver",
    "batches",
    "left_in_flight",
    "loading",
    "of_run",
]
