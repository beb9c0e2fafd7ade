"""Going on in the newest version of the format."""

from __future__ import annotations

from archive.base import layout
from archive.manifest import Commit, CommitLog


def upgrade(log: CommitLog) -> Commit:
    """Commit that the archive is of the newest format from here on; the commit from which it is.

    Nothing is rewritten, and all that is there reads as before. Libraries of the earlier format no longer open it.
    """
    if log.catch_up().version >= layout.WRITE_VERSION:
        return log.head
    return log.append(f"upgrade/{layout.WRITE_VERSION}", lambda parent, attempt: _upgraded(parent))


def _upgraded(parent: Commit) -> Commit:
    return parent.after("upgrade", format=layout.format_block())
