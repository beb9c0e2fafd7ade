"""What one does to an archive beside writing to it: a thin face over `maintain`, as a part of `Archive`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from archive.manifest import Commit, CommitLog


class Upkeep(ABC):
    """The verbs of an archive that add a commit without a writer."""

    @abstractmethod
    def _log(self) -> CommitLog:
        """Where commits are added; UsageError in an archive that was opened at a commit."""

    @abstractmethod
    def _committed(self, head: Commit) -> None:
        """Show this commit, if it is newer than what is shown."""

    def upgrade(self) -> Self:
        """Go on in the newest version of the format, which forgetting, tags, labels and late fields need.

        Nothing is rewritten; libraries that know an earlier version alone can no longer open the archive.
        """
        from archive.maintain import upgrade

        self._committed(upgrade(self._log()))
        return self
