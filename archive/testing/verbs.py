"""Pure, no I/O: what an operation on a store is called, as `arc.io_stats()` counts them."""

from __future__ import annotations

from archive.base import UsageError

VERBS = ("get", "put", "create", "list", "delete", "head", "copy")


def check_verb(verb: str) -> str:
    """The verb itself, or "any"; UsageError for all else."""
    if verb != "any" and verb not in VERBS:
        raise UsageError(f"{verb!r} is no operation of a store: give one of {', '.join(VERBS)}, or any")
    return verb
