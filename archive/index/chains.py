"""Pure, no I/O: the rows of the segments table that make up each episode, and those that a resume has left behind.

An episode is the chain of segments that ends at its newest row: each row names its predecessor. So a row that
continues or replaces an episode supersedes all else that was written under that id. Its newest row is the newest of
those that no resume has left behind (`Branches`); of a checkpoint, of those that the session which made it has seen,
and in a chain that holds what is live in it.

A session that resumes from a checkpoint sees what that checkpoint saw, and what it writes itself; not what was written
after the checkpoint by the session that made it, nor by another that went on from there. A line is the sessions of
one run that go back to the same first session. In each line the newest session that has an episode decides its state:
rows that it does not see are left behind, though the archive still holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask, arrow, codes, numbers, places, row_codes, run_tails, spans, texts
from archive.base import CorruptManifestError, cached_property
from archive.log import Origin, Sequences
from archive.tables import ADDRESS

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("predecessor", "replaces")
Current = Callable[["pa.Table", Ints], Mask]  # of rows with DETAIL, and the number of each row's episode
DETAIL = ("episode_id", *ADDRESS, "predecessor", "commit")
Sight = Mapping[str, Sequences | None]  # session -> its visible segments; None: all

_ALL = np.iinfo(np.int64).max


class Chains(NamedTuple):
    """Row numbers of all episodes end to end (oldest segment first), and the start of each episode."""

    rows: Ints
    offsets: Ints

    @property
    def episodes(self) -> int:
        """The number of episodes."""
        return len(self.offsets) - 1

    @property
    def single(self) -> bool:
        """True if each episode is one row."""
        return len(self.rows) == self.episodes

    def firsts(self) -> Ints:
        return self.rows[self.offsets[:-1]]

    def lasts(self) -> Ints:
        return self.rows[self.offsets[1:] - 1]

    def of(self, episode: int) -> Ints:
        return self.rows[self.offsets[episode] : self.offsets[episode + 1]]

    def rows_of(self, episodes: Ints) -> Ints:
        """Rows of these episodes, end to end."""
        return _gather(self.rows, np.diff(self.offsets), episodes)


def address(session: str, rank: int, sequence: int) -> str:
    """The name by which other segments name this one as their predecessor."""
    return f"{session}:{rank}:{sequence}"


def later(address: str, by: int) -> str:
    """The address of a segment that is numbered so many later."""
    stem, _, sequence = address.rpartition(":")
    return f"{stem}:{int(sequence) + by}"


def resolve(
    marks: pa.Table, detail: Any, live: Callable[[], Ints] | None = None, current: Current | None = None
) -> Chains:
    """The episodes of a segments table, in order of their newest rows.

    `marks` has COLUMNS; `detail()` gives DETAIL, and is called only if some episode has more than one row. So is
    `live()`: rows that must be in their episode's chain; and `current`: a mask of the rows that decide their state.
    """
    import pyarrow.compute as pc

    count = marks.num_rows
    linked = pc.or_kleene(pc.is_valid(marks["predecessor"]), arrow(numbers(marks["replaces"], False)))
    if not pc.any(linked, min_count=0).as_py():
        return Chains(np.arange(count), np.arange(count + 1))
    table = detail()
    shared = pc.unique(table["episode_id"].filter(linked))
    several = numbers(pc.is_in(table["episode_id"], value_set=shared))
    singles, rows = np.flatnonzero(~several), np.flatnonzero(several)
    lengths, chained = _chained(table, rows, live, current)
    newest = np.concatenate([singles, chained[np.cumsum(lengths) - 1]])
    lengths = np.concatenate([np.ones(len(singles), np.int64), lengths])
    order = np.argsort(newest, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(lengths[order])])
    return Chains(_gather(np.concatenate([singles, chained]), lengths, order), offsets)


def _gather(rows: Ints, lengths: Ints, order: Ints) -> Ints:
    return rows[spans((np.cumsum(lengths) - lengths)[order], lengths[order])]


def _chained(
    table: pa.Table, rows: Ints, live: Callable[[], Ints] | None, current: Current | None
) -> tuple[Ints, Ints]:
    """The chains of the episodes of these rows: the length of each, and its rows, end to end."""

    part = table.take(arrow(rows))
    episode = numbers(part["episode_id"].combine_chunks().dictionary_encode().indices).astype(np.int64)
    before = predecessors(part)
    _check_own(part, episode, before)
    may = np.ones(len(rows), bool) if current is None else current(part, episode)
    commit = numbers(part["commit"])
    order = np.lexsort((numbers(part["sequence"]), _writers(part, episode, commit), commit, may, episode))
    tails = order[run_tails(episode[order])]
    lengths, chained = _walked(tails, episode, before)
    if live is not None:
        wanted = np.flatnonzero(np.isin(rows, live()))
        gone = wanted[~np.isin(wanted, chained)]
        if len(gone):
            _go_back(tails, episode, before, np.argsort(order), gone.tolist())
            lengths, chained = _walked(tails, episode, before)
    return lengths, rows[chained]


def _writers(part: pa.Table, episode: Ints, commit: Ints) -> Ints:
    """The place, for each row, of the first row of its session and rank in the episode and commit. So what a merge
    brings of several archives has the order in which they were given, whatever their clocks said."""
    (writer,) = row_codes(part.select(["session", "rank"]))
    if not writer.any():
        return writer
    keys = codes(episode, commit, writer)
    return places(keys, keys)


def predecessors(table: pa.Table) -> Ints:
    """The place of each row's predecessor in a table that has DETAIL; -1 if it has none, or it is not there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [table[name].cast(pa.string()) for name in ("session", "rank", "sequence")]
    addresses = pc.binary_join_element_wise(*parts, texts([":"])[0]).combine_chunks()
    found = pc.index_in(table["predecessor"].cast(pa.string()), value_set=addresses)
    out: Ints = numbers(found, -1).astype(np.int64)
    return out


def _check_own(table: pa.Table, episode: Ints, before: Ints) -> None:
    """CorruptManifestError if a row goes on from a row of another episode."""
    strange = np.flatnonzero((before >= 0) & (episode[before] != episode))
    if len(strange):
        row, names = int(strange[0]), table["episode_id"]
        raise CorruptManifestError(
            f"the segments table has episode {names[row].as_py()!r} go on from a segment of episode "
            f"{names[int(before[row])].as_py()!r}; run `archive verify`"
        )


def _walked(tails: Ints, episode: Ints, before: Ints) -> tuple[Ints, Ints]:
    """The segments from each tail (one for each episode, in order) back to the first: how many, and all of them, oldest
    first, end to end. Each round goes back twice as far as the one before."""
    back, depth = before.copy(), (before >= 0).astype(np.int64)
    inside = np.zeros(len(before), bool)
    inside[tails] = True
    rounds = 0
    while (onward := np.flatnonzero(back >= 0)).size:
        if (rounds := rounds + 1) > len(before).bit_length():
            name = "the segments table has an episode that goes on from itself, in a circle"
            raise CorruptManifestError(f"{name}; run `archive verify`")
        to = back[onward]
        inside[to[inside[onward]]] = True
        depth[onward] += depth[to]
        back[onward] = back[to]
    rows = np.flatnonzero(inside)
    return np.bincount(episode[rows], minlength=len(tails)), rows[np.lexsort((depth[rows], episode[rows]))]


def _go_back(tails: Ints, episode: Ints, before: Ints, age: Ints, gone: list[int]) -> None:
    """Give episodes with live superseded rows the newest chain that has these rows."""
    after: dict[int, list[int]] = {}
    for j, i in enumerate(before.tolist()):
        if i >= 0:
            after.setdefault(i, []).append(j)
    have = set(_walked(tails, episode, before)[1].tolist())
    for i in gone:
        if i not in have:
            branches = [i]
            for j in branches:
                branches += after.get(j, ())
            at = tails[int(episode[i])] = max(branches, key=age.__getitem__)
            while at >= 0:
                have.add(int(at))
                at = before[at]


# -- branches ----------------------------------------------------------------------------------------------------------


class ByWriter:
    """Rows of the segments table, by their writers."""

    def __init__(self, table: pa.Table) -> None:
        """table: with the columns session, rank and sequence."""
        self.sequence = numbers(table["sequence"])
        named = table.select(["session", "rank"])
        (self._writer,) = row_codes(named)
        self._count = int(self._writer.max(initial=-1)) + 1
        each = named.take(arrow(places(np.arange(self._count), self._writer))).to_pylist()
        self._of: dict[str, list[tuple[int, int]]] = {}  # session -> its ranks, and their numbers
        for number, one in enumerate(each):
            self._of.setdefault(one["session"], []).append((one["rank"], number))

    def written_by(self, sessions: Iterable[str]) -> Mask:
        """A mask of the rows that one of these sessions wrote."""
        numbers = [number for name in sessions for _, number in self._of.get(name, ())]
        mine = np.zeros(self._count, bool)
        mine[numbers] = True
        out: Mask = mine[self._writer]
        return out

    def seen(self, sight: Sight, some: Ints | slice = slice(None)) -> Mask:
        """A mask of the visible rows among `some`. Pieces that a compaction cut (sequence below 0) go with the rows
        after them."""
        limit = np.zeros(self._count, np.int64)
        for name in sight.keys() & self._of.keys():
            cut = sight[name]
            for rank, number in self._of[name]:
                limit[number] = _ALL if cut is None else cut.get(rank, 0)
        sequence = self.sequence[some]
        out: Mask = (sequence >= 0) & (sequence < limit[self._writer[some]])
        return out


class Branches:
    """The recorded resumes of an archive. A session without a record began by itself."""

    def __init__(self, origins: Mapping[str, Origin], runs: Mapping[str, str]) -> None:
        """origins: in the order in which the sessions were opened; runs: the run of each of these sessions."""
        self.origins = origins
        self.runs = {origin.session: origin.run for origin in origins.values()} | dict(runs)

    @classmethod
    def of(cls, table: pa.Table) -> Branches:
        """The branches of the rows of the branches table."""
        runs: dict[str, str] = {}
        parents: dict[str, tuple[str, str, int]] = {}
        sequences: dict[str, dict[int, int]] = {}
        trained: dict[str, dict[int, int]] = {}
        for row in table.to_pylist():
            name = row["session"]
            runs[name] = row["run"]
            parents.setdefault(name, (row["parent"], row["parent_run"], row["resumed_from"]))
            sequences.setdefault(name, {})[row["rank"]] = row["sequence"]
            if row.get("trained") is not None:
                trained.setdefault(name, {})[row["rank"]] = row["trained"]
        return cls({name: Origin(*of, sequences[name], trained.get(name)) for name, of in parents.items()}, runs)

    def __bool__(self) -> bool:
        return bool(self.origins)

    def beyond(self, others: Branches) -> Branches:
        """The resumes that `others` lack."""
        new = {name: origin for name, origin in self.origins.items() if name not in others.origins}
        return Branches(new, self.runs)

    def around(self, sessions: Iterable[str]) -> Branches:
        """The origins that share an ancestor with any of `sessions`."""
        firsts = {self._first.get(name, name) for name in sessions}
        return Branches({n: o for n, o in self.origins.items() if self._first[n] in firsts}, self.runs)

    def sight(self, session: str, own: Sequences | None = None) -> dict[str, Sequences | None]:
        """The sessions that a session sees: itself (up to `own`, if given), and those it goes back to."""
        return {session: own} | {origin.session: origin.sequences for origin in self._before(session)}

    def sight_trained(self, session: str, own: Sequences | None = None) -> dict[str, Sequences | None]:
        """The same for ledger rows "trained": of earlier sessions only the rows known to the resumed weights."""
        known = {
            origin.session: origin.sequences if origin.trained is None else origin.trained
            for origin in self._before(session)
        }
        return {session: own} | known

    def _before(self, session: str) -> list[Origin]:
        """The checkpoints that a session goes back to, newest first."""
        out: dict[str, Origin] = {}
        origin = self.origins.get(session)
        while origin is not None and origin.session not in out and origin.session != session:
            out[origin.session] = origin
            origin = self.origins.get(origin.session)
        return list(out.values())

    @cached_property
    def _first(self) -> dict[str, str]:
        """Session -> the first one that it goes back to; ancestors come before their descendants."""
        out: dict[str, str] = {}
        for name in self.origins:
            line = list(self.sight(name))
            for session in reversed(line):
                out.setdefault(session, line[-1])
        return out

    def _lines(self) -> Iterator[tuple[set[str], list[str]]]:
        """The sessions of one origin, and those of one run among them, newest first; once for each such run."""
        trees: dict[str, set[str]] = {}
        lines: dict[tuple[str, str], list[str]] = {}
        for name, first in self._first.items():
            trees.setdefault(first, set()).add(name)
            lines.setdefault((first, self.runs[name]), []).append(name)
        for (first, _), sessions in lines.items():
            yield trees[first], sessions[::-1]

    def current(self, rows: ByWriter, episode: Ints) -> Mask:
        """A mask of the rows that decide the state of their episodes: all but those left behind.
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

    def spliced(self, rows: ByWriter, before: Ints) -> Ints:
        """Rows whose session does not see the predecessor that they name, though both go back to one session.

        before: the place of each row's predecessor among the rows; -1 for none.
        """
        out: list[Ints] = []
        for tree, line in self._lines():
            inside = rows.written_by(tree)
            for session in line:
                mine = np.flatnonzero(rows.written_by([session]) & (before >= 0))
                mine = mine[inside[before[mine]] & (rows.sequence[before[mine]] >= 0)]
                out.append(mine[~rows.seen(self.sight(session), before[mine])])
        return np.concatenate(out) if out else np.zeros(0, np.int64)


def _of_same(episode: Ints, these: Ints, among: Ints) -> Mask:
    """A mask of the rows of `among` whose episode has a row in `these`."""
    marked = np.zeros(int(episode.max(initial=-1)) + 1, bool)
    marked[episode[these]] = True
    out: Mask = marked[episode[among]]
    return out
