"""Pure, no I/O: which session went on from which checkpoint, and so which rows of the segments table are in its branch.

A session that resumes from a checkpoint sees what that checkpoint saw, and what it writes itself; not what was written
after the checkpoint by the session that made it, nor by another one that went on from there. A line is the sessions of
one run that go back to the same first session. Of each line the newest session that has an episode says how it stands:
what it does not see is left behind, though the archive still holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import cached_property
from archive.steps import places, row_codes

if TYPE_CHECKING:
    import pyarrow as pa

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Sequences = Mapping[int, int]  # rank -> its segments below this number
Sight = Mapping[str, Sequences | None]  # session -> which of its segments are seen; None: all

COLUMNS = (  # all but the commit's number
    "session", "run", "parent", "parent_run", "rank", "sequence", "resumed_from", "trained",
)  # fmt: skip
_ALL = np.iinfo(np.int64).max


class Origin(NamedTuple):
    """What a session goes on from: a checkpoint, by the session that made it and how far each of its ranks had got.

    trained: how far each had got by what its weights know; None: as far. Of ledger rows "trained" only those count.
    """

    session: str
    run: str
    commit: int
    sequences: Sequences
    trained: Sequences | None = None


class Rows:
    """Rows of the segments table, by who wrote them."""

    def __init__(self, table: pa.Table) -> None:
        """table: with the columns session, rank and sequence."""
        self.sequence = table["sequence"].to_numpy()
        named = table.select(["session", "rank"])
        (self._writer,) = row_codes(named)
        self._count = int(self._writer.max(initial=-1)) + 1
        each = named.take(places(np.arange(self._count), self._writer)).to_pylist()
        self._of: dict[str, list[tuple[int, int]]] = {}  # session -> its ranks, and their numbers
        for number, one in enumerate(each):
            self._of.setdefault(one["session"], []).append((one["rank"], number))

    def written_by(self, sessions: Iterable[str]) -> Mask:
        """Those that one of these sessions wrote."""
        numbers = [number for name in sessions for _, number in self._of.get(name, ())]
        mine = np.zeros(self._count, bool)
        mine[numbers] = True
        out: Mask = mine[self._writer]
        return out

    def seen(self, sight: Sight, some: Ints | slice = slice(None)) -> Mask:
        """Which of some rows are seen. Pieces that a compaction cut (sequence below 0) go with what follows them."""
        limit = np.zeros(self._count, np.int64)
        for name in sight.keys() & self._of.keys():
            cut = sight[name]
            for rank, number in self._of[name]:
                limit[number] = _ALL if cut is None else cut.get(rank, 0)
        sequence = self.sequence[some]
        out: Mask = (sequence >= 0) & (sequence < limit[self._writer[some]])
        return out


class Branches:
    """What is recorded of the resumes of an archive. Sessions of which nothing is recorded began by themselves."""

    def __init__(self, origins: Mapping[str, Origin], runs: Mapping[str, str]) -> None:
        """origins: in the order in which the sessions were opened; runs: of each of these sessions."""
        self.origins = origins
        self.runs = {origin.session: origin.run for origin in origins.values()} | dict(runs)

    @classmethod
    def of(cls, table: pa.Table) -> Branches:
        """From the rows of the branches table."""
        origins: dict[str, Origin] = {}
        runs: dict[str, str] = {}
        for row in table.to_pylist():
            name = row["session"]
            found = origins.get(name) or Origin(row["parent"], row["parent_run"], row["resumed_from"], {})
            found = found._replace(sequences={**found.sequences, row["rank"]: row["sequence"]})
            if row.get("trained") is not None:
                found = found._replace(trained={**(found.trained or {}), row["rank"]: row["trained"]})
            origins[name] = found
            runs[name] = row["run"]
        return cls(origins, runs)

    def __bool__(self) -> bool:
        return bool(self.origins)

    def columns(self) -> dict[str, list[Any]]:
        """As columns of the branches table."""
        out: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for name, origin in self.origins.items():
            for rank, sequence in (origin.sequences or {0: 0}).items():
                trained = None if origin.trained is None else origin.trained.get(rank, 0)
                row = (name, self.runs[name], origin.session, origin.run, rank, sequence, origin.commit, trained)
                for column, value in zip(COLUMNS, row, strict=True):
                    out[column].append(value)
        return out

    def beyond(self, others: Branches) -> Branches:
        """What others do not have of it."""
        new = {name: origin for name, origin in self.origins.items() if name not in others.origins}
        return Branches(new, self.runs)

    def around(self, sessions: Iterable[str]) -> Branches:
        """What goes back to the same as one of these sessions does."""
        firsts = {self._first.get(name, name) for name in sessions}
        return Branches({n: o for n, o in self.origins.items() if self._first[n] in firsts}, self.runs)

    def sight(self, session: str, own: Sequences | None = None) -> dict[str, Sequences | None]:
        """What a session sees, itself (up to `own`, if given) and those it goes back to."""
        return {session: own} | {origin.session: origin.sequences for origin in self._before(session)}

    def sight_trained(self, session: str, own: Sequences | None = None) -> dict[str, Sequences | None]:
        """The same of rows of the ledger that say "trained": of the sessions it goes back to only what the weights that
        it went on with know of."""
        known = {
            origin.session: origin.sequences if origin.trained is None else origin.trained
            for origin in self._before(session)
        }
        return {session: own} | known

    def _before(self, session: str) -> list[Origin]:
        """What it goes back to, the newest first."""
        out: dict[str, Origin] = {}
        origin = self.origins.get(session)
        while origin is not None and origin.session not in out and origin.session != session:
            out[origin.session] = origin
            origin = self.origins.get(origin.session)
        return list(out.values())

    @cached_property
    def _first(self) -> dict[str, str]:
        """Session -> the first one that it goes back to; those before others that go back to them."""
        out: dict[str, str] = {}
        for name in self.origins:
            line = list(self.sight(name))
            for session in reversed(line):
                out.setdefault(session, line[-1])
        return out

    def _lines(self) -> Iterator[tuple[set[str], list[str]]]:
        """The sessions of one origin, and those of one run among them, newest first; for each such run."""
        trees: dict[str, set[str]] = {}
        lines: dict[tuple[str, str], list[str]] = {}
        for name, first in self._first.items():
            trees.setdefault(first, set()).add(name)
            lines.setdefault((first, self.runs[name]), []).append(name)
        for (first, _), sessions in lines.items():
            yield trees[first], sessions[::-1]

    def current(self, rows: Rows, episode: Ints) -> Mask:
        """Rows that say how their episodes stand: all but those left behind.
        `episode`: number of each row's episode."""
        out = ~rows.written_by(self._first)
        for tree, line in self._lines():
            left = np.flatnonzero(_of_same(episode, np.flatnonzero(rows.written_by(tree)), np.arange(len(out))))
            for session in line:
                if not len(left):
                    break
                seen = left[rows.seen(self.sight(session), left)]
                out[seen] = True
                left = left[~_of_same(episode, seen, left)]
        return out

    def spliced(self, rows: Rows, before: Ints) -> Ints:
        """Rows that name a predecessor which their session does not see, though both go back to one session.

        before: the place of each row's predecessor among the rows; -1 for none.
        """
        out: list[Ints] = []
        trees = {first: [s for s, f in self._first.items() if f == first] for first in set(self._first.values())}
        for tree in trees.values():
            inside = rows.written_by(tree)
            for session in tree:
                mine = np.flatnonzero(rows.written_by([session]) & (before >= 0))
                mine = mine[inside[before[mine]] & (rows.sequence[before[mine]] >= 0)]
                out.append(mine[~rows.seen(self.sight(session), before[mine])])
        return np.concatenate(out) if out else np.zeros(0, np.int64)


def _of_same(episode: Ints, these: Ints, among: Ints) -> Mask:
    """Which rows of `among` are of an episode that has one of `these`."""
    marked = np.zeros(int(episode.max(initial=-1)) + 1, bool)
    marked[episode[these]] = True
    out: Mask = marked[episode[among]]
    return out
