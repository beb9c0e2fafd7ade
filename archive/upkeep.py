"""What one does to an archive beside writing to it: a thin face over `maintain`, as a part of `Archive`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from archive.manifest import Commit, CommitLog
from archive.store import Storage

if TYPE_CHECKING:
    from archive.checkpoint import Checkpoint
    from archive.maintain import Tag, Tags


class Upkeep(ABC):
    """The verbs of an archive that add a commit without a writer."""

    @property
    @abstractmethod
    def storage(self) -> Storage: ...

    @property
    @abstractmethod
    def head(self) -> Commit: ...

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

    @property
    def tags(self) -> Tags:
        """Name -> tag, as of this commit: `arc.tags["paper"].commit`."""
        from archive.maintain import Tags

        return Tags(self.storage, self.head)

    def tag(self, name: str, what: Checkpoint | int | None = None, *, by: str | None = None) -> Tag:
        """Name a checkpoint, or a commit by its number (None: the newest), for `archive.open(url, commit=name)`.

        A tag stays what it is (AlreadyExistsError), and what it names is kept: nothing of it is forgotten or pruned.
        Where forgetting went over a checkpoint since, the tag names the newest commit, which still has it. LetGoError
        for what was let go of already.
        """
        from archive.maintain import tags

        self._committed(tags.add(self._log(), name, what, by))
        return tags.Tags(self.storage, self.head)[name]
