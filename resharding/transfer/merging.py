"""Merging and splitting archives: which episodes of which archives become visible in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from archive import Archive
from archive.arrays import Ints
from archive.base import UsageError
from resharding.transfer.destination import Destination, How, taken_from
from resharding.transfer.outgoing import Outgoing
from resharding.transfer.transfer import transfer


def merge(urls: Sequence[Any], to: Any, **how: Unpack[How]) -> Archive:
    """Make the episodes of several archives visible in one, which is made if it is not there.

    copy=False (default) refers to the sources' shards (they are pinned there; the target must be opened with
    `allow_bases`); copy=True copies them: a store that has both archives does so by itself, and compares sizes and
    ETags; with verify=True, and elsewhere, every byte is read and compared with its checksum.  Merging again adds
    what is new: labels and added fields that follow, in the source, what is known of the same here, so they count
    from then on.
    progress: called with (shards there, shards) of each source.  storage_options, allow_bases: of all these archives,
    single_writer: of the target, as `archive.open` has them.
    """
    target = Destination(to, **how)
    given = [urls] if isinstance(urls, (str, Archive)) else urls
    sources = [target.source(url) for url in given]
    return transfer([Outgoing(source, source.index.chains.rows) for source in sources], target)


def split(url: Any, to: Any, count: int, **how: Unpack[How]) -> Archive:
    """Make the first `count` episodes of an archive visible in another; otherwise as merge, with its options."""
    target = Destination(to, **how)
    source = target.source(url)
    if not 0 < count <= len(source.episodes):
        raise UsageError(
            f"count={count}: the archive at {source.url} has {len(source.episodes)} episodes; give 1 to that many"
        )
    return transfer([_episodes(source, np.arange(count))], target)


def filter(url: Any, to: Any, **options: Any) -> Archive:
    """Make the episodes that meet the conditions (as `Episodes.filter` takes them) visible in another archive;
    otherwise as merge, with its options."""
    target = Destination(to, **taken_from(options))
    source = target.source(url)
    return transfer([_episodes(source, source.episodes.filter(**options).numbers)], target)


def _episodes(source: Archive, chosen: Ints) -> Outgoing:
    parts = [source.index.chains.of(int(i)) for i in chosen]
    return Outgoing(source, np.concatenate(parts) if parts else np.zeros(0, np.int64))
