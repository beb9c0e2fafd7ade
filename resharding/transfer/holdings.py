"""Pure, no I/O: what an archive holds already, so that a transfer adds what is new and refuses what is not the same.

A row of the segments table is named by session, rank and sequence. Sessions are named by users, too, so two rows of one
name are the same only if they were also made at the same time. What a compaction cut has names of its own: it is
known by its steps, which keep their stream and positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from archive.base import DuplicateEpisodeError

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("episode_id", "session", "rank", "sequence", "created_at", "buffer", "env_id", "position", "length")

Stream = tuple[str, int, str, int, int]


class Row(NamedTuple):
    """A row of the segments table, as far as saying which it is takes."""

    episode_id: str
    session: str
    rank: int
    sequence: int
    created_at: int
    buffer: str
    env_id: int
    position: int
    length: int

    @property
    def address(self) -> tuple[str, int, int]:
        return self.session, self.rank, self.sequence

    @property
    def stream(self) -> Stream:
        return self.session, self.rank, self.buffer, self.env_id, self.created_at


def rows_of(table: pa.Table) -> list[Row]:
    """Of a table that has COLUMNS."""
    import pyarrow as pa

    columns = [table[n].cast(pa.int64()) if n == "created_at" else table[n] for n in COLUMNS]
    return [Row(*values) for values in zip(*(c.to_pylist() for c in columns), strict=True)]


class Holdings:
    """Rows of an archive (or of several)."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._made: dict[tuple[str, int, int], int] = {}
        self._episodes: dict[str, list[Row]] = {}
        self._stretches: dict[Stream, list[tuple[int, int]]] = {}
        self._sorted: set[Stream] = set()
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._made[row.address] = row.created_at
            self._episodes.setdefault(row.episode_id, []).append(row)
            self._stretches.setdefault(row.stream, []).append((row.position, row.position + row.length))
            self._sorted.discard(row.stream)

    def has(self, row: Row) -> bool:
        """Whether the row is here, by name, or by its steps if a compaction named it."""
        if row.address in self._made:
            return self._made[row.address] == row.created_at
        return row.sequence < 0 and self._covers(row)

    def _covers(self, row: Row) -> bool:
        stretches = self._stretches.get(row.stream)
        if stretches is None:
            return False
        if row.stream not in self._sorted:
            self._stretches[row.stream] = stretches = _joined(stretches)
            self._sorted.add(row.stream)
        at = bisect_right(stretches, (row.position, 2**63)) - 1
        return at >= 0 and row.position + row.length <= stretches[at][1]

    def check(self, rows: Sequence[Row], origin: Callable[[], Holdings], where: str) -> None:
        """Refuse rows whose name or episode belongs to something else here: ids are never renumbered.

        `origin()`: all rows of the archive that they come from. An episode that is here already may go on, or be
        replaced, if all that is here of it comes from there.
        """
        for row in rows:
            if self._made.get(row.address, row.created_at) != row.created_at:
                raise _clash(row, where, f"sessions of both are called {row.session!r}")
        for name in dict.fromkeys(row.episode_id for row in rows if row.episode_id in self._episodes):
            if not all(origin().has(known) for known in self._episodes[name]):
                raise _clash(self._episodes[name][0], where, "both have an episode of this id")


def _clash(row: Row, where: str, why: str) -> DuplicateEpisodeError:
    return DuplicateEpisodeError(
        f"episode {row.episode_id!r} of {where} is not the one that is there already ({why}); nothing was committed. "
        "Leave it out with resharding.filter(...): ids are never renumbered"
    )


def _joined(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(stretches):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return out
