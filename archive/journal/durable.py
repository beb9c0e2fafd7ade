"""Pure, no I/O: how far what a writer added is durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from archive.base import size


@dataclass(frozen=True)
class Durable:
    """How far what a writer added is durable, beyond its commits.

    positions: of each (buffer, env id) the position below which all steps are; -1 is what was added without an env id.
    seconds_behind: how old the oldest addition is that is not durable, 0.0 if all is.  number: of the next object of
    the journal.  pending_bytes: of steps that are not durable.
    """

    positions: Mapping[tuple[str, int], int]
    seconds_behind: float
    number: int
    pending_bytes: int

    def __repr__(self) -> str:
        if not self.seconds_behind:
            return f"<durable: all, next object {self.number}>"
        behind = f"{self.seconds_behind:.1f} s and {size(self.pending_bytes)} behind"
        return f"<durable: {behind}, next object {self.number}>"
