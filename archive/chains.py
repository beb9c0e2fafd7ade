"""Pure, no I/O: which rows of the segments table make up which episode.

An episode is the chain of segments that ends at its newest row: each row names its predecessor. So a row that
continues or replaces an episode supersedes whatever else was written under that id: the tail written after the
checkpoint from which a run was resumed, or an earlier revision. Of a checkpoint it is the newest chain that holds what
is live in it: a run that went back goes on with what was superseded since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.ranges import Ints, spans

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("predecessor", "replaces")
DETAIL = ("episode_id", "session", "rank", "sequence", "predecessor", "commit", "created_at")


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


def resolve(marks: pa.Table, detail: Any, live: Callable[[], Ints] | None = None) -> Chains:
    """The episodes of a segments table, in order of their newest rows.

    `marks` has COLUMNS; `detail()` gives DETAIL, and is called only if some episode has more than one row. So is
    `live()`: rows that are to be in their episode's chain.
    """
    import pyarrow.compute as pc

    count = marks.num_rows
    linked = pc.or_kleene(pc.is_valid(marks["predecessor"]), pc.fill_null(marks["replaces"], False))
    if not pc.any(linked, min_count=0).as_py():
        return Chains(np.arange(count), np.arange(count + 1))
    table = detail()
    shared = pc.unique(table["episode_id"].filter(linked))
    several = pc.is_in(table["episode_id"], value_set=shared).to_numpy(zero_copy_only=False)
    groups = _grouped(table, np.flatnonzero(several), live)
    singles = np.flatnonzero(~several)
    newest = np.concatenate([singles, np.array([g[-1] for g in groups], np.int64)])
    lengths = np.concatenate([np.ones(len(singles), np.int64), np.array([len(g) for g in groups], np.int64)])
    order = np.argsort(newest, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(lengths[order])])
    return Chains(_gather(np.concatenate([singles, *groups]), lengths, order), offsets)


def _gather(rows: Ints, lengths: Ints, order: Ints) -> Ints:
    return rows[spans((np.cumsum(lengths) - lengths)[order], lengths[order])]


def _grouped(table: pa.Table, rows: Ints, live: Callable[[], Ints] | None) -> list[Ints]:
    """The chain of each episode that more than one row names."""
    import pyarrow as pa

    part = table.take(pa.array(rows))
    columns = {name: part[name].to_pylist() for name in DETAIL if name != "created_at"}
    created = part["created_at"].cast(pa.int64()).to_pylist()
    place = {
        address(s, r, q): i
        for i, (s, r, q) in enumerate(zip(columns["session"], columns["rank"], columns["sequence"], strict=True))
    }
    ages = list(zip(columns["commit"], created, columns["sequence"], strict=True))
    newest: dict[str, int] = {}
    for i, name in enumerate(columns["episode_id"]):
        if name not in newest or ages[i] > ages[newest[name]]:
            newest[name] = i
    before = [place.get(name or "") for name in columns["predecessor"]]
    chains = {name: _chain(i, before) for name, i in newest.items()}
    if live is not None:
        _go_back(chains, columns["episode_id"], before, ages, np.flatnonzero(np.isin(rows, live())).tolist())
    return [rows[np.array(chain, np.int64)] for chain in chains.values()]


def _go_back(
    chains: dict[str, list[int]], names: list[str], before: list[int | None], ages: list[Any], live: list[int]
) -> None:
    """Give episodes of which something superseded is live the newest chain that has it."""
    gone = [i for i in live if i not in chains[names[i]]]
    after: dict[int, list[int]] = {}
    for j, i in enumerate(before) if gone else ():
        if i is not None:
            after.setdefault(i, []).append(j)
    for i in gone:
        if i not in chains[names[i]]:
            branches = [i]
            for j in branches:
                branches += (k for k in after.get(j, ()) if k not in branches)
            chains[names[i]] = _chain(max(branches, key=ages.__getitem__), before)


def _chain(tail: int, before: list[int | None]) -> list[int]:
    """From the first segment to `tail`; a predecessor that is gone leaves the chain headless."""
    chain, i = [tail], before[tail]
    while i is not None and len(chain) <= len(before):
        chain.append(i)
        i = before[i]
    return chain[::-1]
