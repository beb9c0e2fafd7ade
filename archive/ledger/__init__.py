"""The ledger of prompts: what was drawn, started, sealed, trained or dropped comes in; rows of the ledger table go out,
and what is to be done again."""

from __future__ import annotations

from archive.ledger.terms import CURSOR, DRAWN, DROPPED, SEALED, STARTED, TRAINED, WHOLE_KEY, Key, Rollout

__all__ = ["CURSOR", "DRAWN", "DROPPED", "SEALED", "STARTED", "TRAINED", "WHOLE_KEY", "Key", "Rollout"]
