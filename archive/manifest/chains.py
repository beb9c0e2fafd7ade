"""Pure, no I/O: which rows of the segments table make up which episode.

An episode is the chain of segments that ends at its newest row: each row names its predecessor. So a row that
continues or replaces an episode supersedes whatever else was written under that id. Its newest row is the newest of
those that no resume has left behind (`branches`); of a checkpoint, of those that the session which made it has seen,
and in a chain that holds what is live in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, run_tails, spans
from archive.base import CorruptManifestError
from archive.manifest.branches import Mask
from archive.steps import codes, places, row_codes

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("predecessor", "replaces")
Current = Callable[["pa.Table", Ints], Mask]  # of rows with DETAIL, and the number of each row's episode
DETAIL = ("episode_id", "session", "rank", "sequence", "predecessor", "commit")


class Chains(NamedTuple):
    """Row numbers of all episodes end to end (oldest segment first), and where each episode's begin."""

    rows: Ints
    offsets: Ints

    @property
    def episodes(self) -> int:
        """How many there are."""
        return len(self.offsets) - 1

    @property
    def single(self) -> bool:
        """Whether each episode is one row."""
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
    """The name by which a segment is a predecessor."""
    return f"{session}:{rank}:{sequence}"


def resolve(
    marks: pa.Table, detail: Any, live: Callable[[], Ints] | None = None, current: Current | None = None
) -> Chains:
    """The episodes of a segments table, in order of their newest rows.

    `marks` has COLUMNS; `detail()` gives DETAIL, and is called only if some episode has more than one row. So is
    `live()`: rows that are to be in their episode's chain; and `current`: which rows say how their episodes stand.
    """
    import pyarrow.compute as pc

    count = marks.num_rows
    linked = pc.or_kleene(pc.is_valid(marks["predecessor"]), pc.fill_null(marks["replaces"], False))
    if not pc.any(linked, min_count=0).as_py():
        return Chains(np.arange(count), np.arange(count + 1))
    table = detail()
    shared = pc.unique(table["episode_id"].filter(linked))
    several = pc.is_in(table["episode_id"], value_set=shared).to_numpy(zero_copy_only=False)
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
    """The chains of the episodes that have these rows: how long each is, and its rows, end to end."""
    import pyarrow as pa

    part = table.take(pa.array(rows))
    episode = part["episode_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    before = predecessors(part)
    _check_own(part, episode, before)
    may = np.ones(len(rows), bool) if current is None else current(part, episode)
    commit = part["commit"].to_numpy()
    order = np.lexsort((part["sequence"].to_numpy(), _writers(part, episode, commit), commit, may, episode))
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
    """Of each row where the first one lies that its session and rank have of the episode in the same commit: what a
    merge brings of several archives comes in the order in which they were given, whatever their clocks said."""
    (writer,) = row_codes(part.select(["session", "rank"]))
    if not writer.any():
        return writer
    keys = codes(episode, commit, writer)
    return places(keys, keys)


def predecessors(table: pa.Table) -> Ints:
    """The place of each row's predecessor in a table that has DETAIL; -1 where it has none, or none that is there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [table[name].cast(pa.string()) for name in ("session", "rank", "sequence")]
    addresses = pc.binary_join_element_wise(*parts, ":").combine_chunks()
    found = pc.index_in(table["predecessor"].cast(pa.string()), value_set=addresses)
    out: Ints = pc.fill_null(found, -1).to_numpy().astype(np.int64)
    return out


def _check_own(table: pa.Table, episode: Ints, before: Ints) -> None:
    """CorruptManifestError if a row goes on from one of another episode."""
    strange = np.flatnonzero((before >= 0) & (episode[before] != episode))
    if len(strange):
        row, names = int(strange[0]), table["episode_id"]
        raise CorruptManifestError(
            f"the segments table has episode {names[row].as_py()!r} go on from a segment of episode "
            f"{names[int(before[row])].as_py()!r}; run `archive verify`"
        )


def _walked(tails: Ints, episode: Ints, before: Ints) -> tuple[Ints, Ints]:
    """From each tail (of each episode, in their order) back to the first segment: how many there are, and all of them,
    oldest first, end to end. Each round goes back twice as far as the one before."""
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
    """Give episodes of which something superseded is live the newest chain that has it."""
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
