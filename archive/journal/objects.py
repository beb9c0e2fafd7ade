"""What a writer hands in becomes objects of its journal, tick by tick, in place of shards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from archive.base import AlreadyExistsError, SessionInUseError, layout
from archive.journal.saying import Said
from archive.manifest import Place, Sighting, tablefiles
from archive.saved import TickIndex, next_sequence, pack
from archive.shard import Member, ShardWriter, groups
from archive.write import ObjectDraft, Seal, Upload, Written, encoded

if TYPE_CHECKING:
    import pyarrow as pa

Packed = tuple[list[Any], "pa.Table | None"]  # an object's buffers, and the chunk rows of its shard


class Tick(Seal):
    """The end of a tick: all that was handed in before it is made durable together, and what is said with it.

    `positions`: of each buffer and env row the next one, when it was made. `oldest`: when the first of it was added.
    """

    said: Said

    def __init__(self, said: Said, positions: Mapping[tuple[str, int], int], oldest: float | None) -> None:
        super().__init__(said)
        self.positions = positions
        self.oldest = oldest


class JournalObjects:
    """The numbered objects of one rank's journal. What memory was short for goes on in the next: it counts with the
    rest of its tick only."""

    sealed = True

    def __init__(
        self, writer: ShardWriter, place: Place, resumed_from: int | None, seen: Callable[[], Sighting | None]
    ) -> None:
        """seen: gives the newest commit that the rank knows."""
        self._writer = writer
        self._place = place
        self._resumed_from = resumed_from
        self._seen = seen
        self._sequence = 0  # rows of this rank below it are in the objects so far
        self.took: Callable[[float], None] = lambda seconds: None  # called in the background: how long a tick took

    def key(self, number: int) -> str:
        return layout.journal_key(self._place.session, self._place.rank, number)

    def complete(self, draft: ObjectDraft, seal: Seal | None) -> Upload:
        rows = draft.rows
        self._sequence = max(self._sequence, next_sequence(rows.get("segments"), rows.get("ledger")))
        sequence, nonce = self._sequence, secrets.token_hex(8)

        def packed() -> Packed:
            found = self._pack(draft, rows, seal, sequence, nonce)
            if seal is not None:
                self.took(time.monotonic() - seal.made)
            return found

        def put(found: Packed) -> Written:
            try:
                self._writer.storage.create_once(draft.key, found[0])
            except AlreadyExistsError as e:
                raise SessionInUseError(
                    f"{self._writer.storage.full_url(draft.key)} is there already: another process writes, or wrote, "
                    "as this rank of this session; end one of them, and open this one's writer under a session name of "
                    "its own"
                ) from e
            return Written(rows.get("segments"), found[1], draft.nbytes, rows.get("ledger"), draft.number + 1)

        return Upload(packed, put)

    def _pack(
        self, draft: ObjectDraft, rows: Mapping[str, pa.Table], seal: Seal | None, sequence: int, nonce: str
    ) -> Packed:  # fmt: skip
        said: Said = Said() if seal is None else seal.said
        shard = self._shard(draft, said.arrays)
        rows = dict(rows) if said.live is None else {**rows, "live": said.live}
        index = TickIndex(
            run=self._place.run, session=self._place.session, rank=self._place.rank, number=draft.number, nonce=nonce,
            sequence=sequence, goes_on=seal is None, rows={kind: table.num_rows for kind, table in rows.items()},
            gone=said.gone, columns=said.entries, attributes=said.texts, progress=said.progress,
            resumed_from=self._resumed_from, seen=self._seen(),
        )  # fmt: skip
        buffers, placed = pack(index, {kind: table for kind, table in rows.items() if table.num_rows}, shard)
        return buffers, None if draft.slab is None else tablefiles.chunk_rows(draft.key, placed)

    def _shard(self, draft: ObjectDraft, columns: Mapping[str, Any]) -> list[Member]:
        if draft.slab is not None:
            return encoded(self._writer, draft.slab, columns)
        return groups.encode(columns, attributes={}) if columns else []
