"""Texts of plans, and rows of ledgers: seeds, other ones, and what reads and follows them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

import archive
import resharding
from archive import tables
from archive.ledger import LedgerRows
from tests.support.fuzzing.mutating import mutated_table
from tests.support.fuzzing.objects import attempted

# -- plans -------------------------------------------------------------------------------------------------------------


def checkpoint_of_three() -> archive.Checkpoint:
    """Of three ranks with two env rows each, and a buffer of demonstrations."""
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    writers = [arc.writer(rank, 3, session="s") for rank in range(3)]
    for w in writers:
        for _ in range(2):
            w.append({"x": np.arange(6).reshape(2, 3)}, env_ids=[0, 1], first=True)
        w.buffer("demo").add_episode({"x": np.arange(4)})
    pending = [w.checkpoint(1, columns={"p": np.arange(4.0)}) for w in writers]
    found = [one.result(60) for one in pending]
    for w in writers:
        w.close()
    return found[0]


_CHECKPOINT: list[archive.Checkpoint] = []


def _checkpoint() -> archive.Checkpoint:
    if not _CHECKPOINT:
        _CHECKPOINT.append(checkpoint_of_three())
    return _CHECKPOINT[0]


def plan_seeds(tmp: Path) -> list[Any]:
    found = _checkpoint()
    plans = [resharding.plan(found, world_size=2), resharding.plan(found, world_size=3)]
    plans.append(resharding.plan(found, world_size=2, max_length=2, num_envs=2, filter="length > 0"))
    return [json.loads(plan.to_json()) for plan in plans]


def plan_reader() -> Callable[[str], None]:
    found = _checkpoint()

    def follow(text: str) -> None:
        plan = resharding.Plan.from_json(text, found)
        repr(plan), plan.dropped, plan.moved, plan.to_json()
        for rank in range(min(plan.world_size, 3)):
            share = plan.share(rank)
            for part in map(share.buffer, share.buffers):
                for attempt in (part.cost, part.buffer_resume, lambda part=part: list(part.stream())):
                    attempted(attempt)

    return follow


# -- ledgers -----------------------------------------------------------------------------------------------------------


def ledger_seeds(tmp: Path | None) -> list[pa.Table]:
    words = ["drawn"] * 3 + ["started", "sealed", "sealed", "started", "dropped", "trained", "cursor"]
    keys = ['"a"', "7", '"b"', '"a"', '"a"', '"a"', "7", "7", '"b"', '"a"']
    count = len(words)
    columns = {
        "ledger": "prompts", "key": keys, "round": [0] * count, "sibling": [-1, -1, -1, 0, 0, 1, 1, 0, -1, -1],
        "state": words, "siblings": [2, 3, 1] + [None] * (count - 3), "episode_id": [f"e{i}" for i in range(count)],
        "cursor": [None] * (count - 1) + ['{"epoch": 1}'], "session": "s", "rank": [0, 1] * (count // 2),
        "sequence": list(range(count)), "created_at": 0, "commit": 1,
    }  # fmt: skip
    return [tables.from_columns("ledger", columns)]


def fold_rows(table: pa.Table) -> None:
    """What a session makes of rows that a table held, if it may hold them."""
    rows = tables.loads(tables.dumps(table), "ledger", where="x")
    for undone in (rows.slice(0, 0), rows):
        seen = LedgerRows(rows, undone, {})
        seen.prompts().dealt(0, 2, lambda episode: 1 if episode == "e4" else None)
    seen.awaited(), seen.in_flight


def mutated_rows(table: pa.Table, rng: Random) -> pa.Table:
    """Rows that say other things, of the columns that a ledger has."""
    changed = mutated_table(table, rng)
    try:
        return changed.select(table.column_names).cast(table.schema)
    except (pa.ArrowException, KeyError):
        return table
