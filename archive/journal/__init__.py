"""The journal, between checkpoints. Additions of a rank come in; numbered objects that make them durable go out, and
after a crash a checkpoint with all that these hold."""

from __future__ import annotations

from archive.journal import tails
from archive.journal.ends import index_at
from archive.journal.journal import Durable, Journal, seconds
from archive.journal.node import JOURNALS, Node, NodeJournal, node_of
from archive.journal.recovery import recover, take_over
from archive.journal.tails import Tails
from archive.journal.ticker import LOOK_S, PATIENCE, QUIET_S
from archive.journal.ticks import JournalObjects

__all__ = [
    "JOURNALS",
    "LOOK_S",
    "PATIENCE",
    "QUIET_S",
    "Durable",
    "Journal",
    "JournalObjects",
    "Node",
    "NodeJournal",
    "Tails",
    "index_at",
    "node_of",
    "recover",
    "seconds",
    "tails",
    "take_over",
]
