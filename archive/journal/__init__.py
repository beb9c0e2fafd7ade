"""Between checkpoints: what a rank adds comes in, numbered objects that make it durable go out; and after a crash a
checkpoint with all that they hold."""

from __future__ import annotations

from archive.journal.entries import Entry, JournalColumn, Read, pack, parse, row_members

__all__ = ["Entry", "JournalColumn", "Read", "pack", "parse", "row_members"]
