"""Pure, no I/O: losses before the archive, or by a resume, with reasons, until a checkpoint has recorded them."""

from __future__ import annotations

from collections.abc import Mapping

Counts = Mapping[str, tuple[int, int]]  # reason -> episodes, steps


class Losses:
    """Counts of one buffer. One thread adds to them, another marks those that a committed checkpoint has."""

    def __init__(self) -> None:
        self.counts: Counts = {}  # replaced, never changed
        self._reported: Counts = {}

    def add(self, reason: str, episodes: int, steps: int) -> None:
        had = self.counts.get(reason, (0, 0))
        self.counts = {**self.counts, reason: (had[0] + episodes, had[1] + steps)}

    def reported(self, counts: Counts) -> None:
        """Take note that a checkpoint with these counts is committed."""
        self._reported = counts

    def unreported(self, more: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        """The counts that no committed checkpoint has, and `more`, in the form of a checkpoint."""
        out = {reason: dict(counts) for reason, counts in more.items()}
        for reason, counts in self.counts.items():
            before = self._reported.get(reason, (0, 0))
            episodes, steps = counts[0] - before[0], counts[1] - before[1]
            if episodes or steps:
                total = out.setdefault(reason, {"episodes": 0, "steps": 0})
                total["episodes"] += episodes
                total["steps"] += steps
        return out
