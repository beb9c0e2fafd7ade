"""What reading tails and recovering asks of a store: in proportion to what was journaled."""

from __future__ import annotations

import numpy as np
import pytest

import archive
from archive import tables
from archive.base import layout
from archive.journal import tails
from archive.saved import TickIndex, TickObject, pack
from archive.store import Storage
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.ticks import NEVER_S

EVERY = 10


def world(ranks: int, ticks: int, *, saved: bool) -> archive.Archive:
    """Ranks that have a checkpoint, if they have, and journaled so many objects beyond."""
    arc = fresh()
    writers = [archive.open(arc.url).writer(r, ranks, session="s", journal_s=NEVER_S) for r in range(ranks)]
    if saved:
        for w in writers:
            w.add_episode({"obs": np.arange(3)}, episode_id=f"first-{w.rank}")
        pending = [w.checkpoint(1, columns={"p": np.arange(3.0)}, state={"r": w.rank}) for w in writers]
        for p in pending:
            p.result(60)
    for w in writers:
        w.add_episode({"obs": np.arange(3)}, episode_id=f"second-{w.rank}")
        w.sync()
    die(*writers)
    arc.refresh()
    entry = arc.head.runs["main"]
    for rank in range(ranks):
        prolong(arc.storage, "s", rank, entry.journal[rank], ticks)
    return arc


def prolong(storage: Storage, session: str, rank: int, first: int, ticks: int) -> None:
    """Ticks like the one that is there: one of ten has steps that follow, the others say how far training has got."""
    key = layout.journal_key(session, rank, first)
    found = TickObject(storage.get(key), key, key)
    rows = found.table("segments")
    (row,) = rows.to_pylist()
    items = []
    for i in range(1, ticks):
        new, steps = layout.journal_key(session, rank, first + i), i % EVERY == 0
        more = {
            "episode_id": [f"{row['episode_id']}-{i}"], "sequence": [row["sequence"] + i],
            "position": [row["position"] + 3 * i], "shard": [new],
        }  # fmt: skip
        columns = {name: rows[name] for name in rows.column_names} | more
        index = TickIndex(
            found.index.run, session, rank, first + i, f"{i:016x}", found.index.sequence + i, progress=str(i),
            rows={"segments": 1} if steps else {},
        )  # fmt: skip
        table = {"segments": tables.from_columns("segments", columns)} if steps else {}
        items.append((new, b"".join(bytes(part) for part in pack(index, table, [])[0])))
    storage.put_many(items)


def test_64_ranks_and_100_ticks() -> None:
    ranks, ticks = 64, 100
    arc = archive.open(world(ranks, ticks, saved=True).url)
    size = sum(one.bytes for one in arc.storage.scan("journal"))
    before = arc.io_stats()
    found = arc.tails()
    spent = arc.io_stats() - before
    assert found.total.objects == ranks * ticks
    assert spent.get <= ranks * (ticks + 2)
    assert spent.list == spent.put == 0
    assert spent.bytes_in <= 1.01 * size
    before = arc.io_stats()
    made = arc.recover()
    spent = arc.io_stats() - before
    assert spent.get + spent.put + spent.create + spent.list + spent.head - ranks * ticks <= ranks * 4
    assert spent.bytes_in <= 1.05 * size + ranks * 300_000
    episodes = ranks * (ticks // EVERY + 1)
    assert made.record.buffers["replay"].episodes == episodes
    assert made.record.buffers["replay"].steps == 3 * episodes


@pytest.mark.parametrize("ticks", [1, 50, 150, 1000])
def test_a_tail_takes_a_request_an_object_and_few_more(ticks: int) -> None:
    arc = archive.open(world(1, ticks, saved=True).url)
    before = arc.io_stats()
    assert arc.tails().total.objects == ticks
    spent = arc.io_stats() - before
    assert spent.get <= ticks + 2 + 0.02 * ticks


def test_10_000_ticks_of_one_rank() -> None:
    arc = archive.open(world(1, 10_000, saved=True).url)
    before = arc.io_stats()
    made = arc.recover()
    spent = arc.io_stats() - before
    assert made.record.buffers["replay"].steps == 3 * 1_001
    assert made.progress == 9_999
    assert spent.get <= 10_000 + tails.MAX_AHEAD + 10
    assert archive.open(arc.url).recover().number == made.number
