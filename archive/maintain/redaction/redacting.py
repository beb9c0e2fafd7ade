"""Engine: a forgetting after which nothing that is retained holds anything of some episodes.

Shards that hold their steps beside those of others are written anew without them. All is put before the one commit that
names it: killed before that, nothing has changed, and what was put is what a crash leaves behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import ConflictError, layout
from archive.maintain import Decided, Draft, Moved, Piece, Redacted, forgetting, moving
from archive.maintain.redaction.hindrances import hindrances
from archive.maintain.redaction.leavings import leavings
from archive.manifest import FileRef, new_session, tablefiles
from archive.store import Storage, split_key

_ADDRESS = ("session", "rank", "sequence")
_PLACE = ("shard", "start", "length", "position")
_COMPRESSION = "zstd:1"  # as a compaction does

Address = tuple[str, int, int]


@dataclass(frozen=True)
class Touched:
    """Shards that must go, and the rows of others that lie in them."""

    shards: frozenset[str]
    rows: Ints


@dataclass(frozen=True)
class _Written:
    """Where steps were put: by the address of their rows, and where they lay when they were read."""

    before: Mapping[Address, Mapping[str, Any]]
    places: Mapping[Address, Mapping[str, Any]]
    chunks: FileRef


class Redaction:
    """Takes the steps of episodes out of their shards. layout: of the shards that are written."""

    def __init__(self, storage: Storage, layout: str, ids: Collection[str]) -> None:
        self._storage = storage
        self._layout = layout
        self._ids = frozenset(ids)
        self._written: _Written | None = None
        self._touched: tuple[Decided, Touched] | None = None

    def planned(self, found: forgetting.Found) -> Decided:
        """What was decided, with the steps of others elsewhere; nothing is written."""
        touched = self._touched_by(found.decided)
        chunks = FileRef(layout.manifest_key("planned", "redact", "chunks"), 0, 0, 0)
        place = {"shard": layout.shard_key("planned", "redact", 0, self._layout)} | _named(chunks)
        return _moved(found.decided, Moved(touched.rows, [place] * len(touched.rows), chunks))

    def written(self, found: forgetting.Found) -> Decided:
        """As planned, with these steps written; ConflictError if they are no longer those that were written."""
        touched = self._touched_by(found.decided)
        now = _where(found.decided, touched.rows)
        if self._written is None:
            self._written = self._write(found.decided, touched.rows, now)
        elif self._written.before != now:
            raise ConflictError(
                f"steps at {self._storage.url} were moved or added while a redaction wrote others anew; nothing was "
                "committed: plan again"
            )
        places = [self._written.places[address] for address in now]
        return _moved(found.decided, Moved(touched.rows, places, self._written.chunks))

    def told(self, found: forgetting.Found, made: Draft | None) -> Redacted:
        """What it takes, and what stands in its way."""
        touched = self._touched_by(found.decided)
        lengths = found.decided.snapshot.take(touched.rows, ["length"])["length"].to_numpy()
        size = sum(made.gone.get(key, 0) for key in touched.shards) if made is not None else 0
        return Redacted(
            len(self._ids), len(touched.shards), int(lengths.sum()), size,
            tuple(hindrances(self._storage, found, made, self._ids, touched.shards)),
        )  # fmt: skip

    def _touched_by(self, decided: Decided) -> Touched:
        if self._touched is None or self._touched[0] is not decided:
            self._touched = decided, touched(decided)
        return self._touched[1]

    def _write(self, decided: Decided, rows: Ints, now: Mapping[Address, Mapping[str, Any]]) -> _Written:
        """Put the steps of these rows into shards of their own."""
        session = new_session()
        pieces = [Piece(int(row), 0, one["length"], True) for row, one in zip(rows, now.values(), strict=True)]
        places, table = moving.write(decided.snapshot, self._layout, session, _COMPRESSION, list(enumerate(pieces)))
        chunks = tablefiles.write(self._storage, session, "chunks", table)
        return _Written(
            now, {address: places[number] | _named(chunks) for number, address in enumerate(now)}, chunks
        )  # fmt: skip


def touched(decided: Decided) -> Touched:
    """The shards of rows that go, and those with leavings of such; rows that stay and lie in them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shard = decided.snapshot.columns(["shard"])["shard"].cast(pa.string()).combine_chunks()
    gone = {*shard.filter(pa.array(~decided.rows)).drop_null().unique().to_pylist()} | leavings(decided)
    own = frozenset(key for key in gone if split_key(key)[0] is None)
    inside = pc.is_in(shard, value_set=pa.array(sorted(own), pa.string())).to_numpy(zero_copy_only=False)
    return Touched(frozenset(gone), np.flatnonzero(inside & decided.rows))


def _moved(decided: Decided, moved: Moved) -> Decided:
    return replace(decided, moved=moved) if len(moved.rows) else decided


def _named(chunks: FileRef) -> dict[str, Any]:
    return {"chunks": chunks.path, "chunks_bytes": chunks.bytes, "chunks_crc32c": chunks.crc32c}


def _where(decided: Decided, rows: Ints) -> dict[Address, dict[str, Any]]:
    """Address of each row -> where its steps lie."""
    found = decided.snapshot.take(rows, [*_ADDRESS, *_PLACE]).to_pylist()
    return {(r["session"], r["rank"], r["sequence"]): {name: r[name] for name in _PLACE} for r in found}
