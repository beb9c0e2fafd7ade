"""Which rows of each table follow segments that go, and which rows of two archives are news: against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from archive import tables
from archive.tables import ADDRESS, FOLLOWING, STREAM, TABLES, follow, news, of_segments

BASE = {"session": "s", "buffer": "", "rank": 0, "env_id": 0, "sequence": 0, "position": 0, "length": 1}


def drawn(kind: str, rng: np.random.Generator, count: int) -> pa.Table:
    """Rows with values so near each other that many meet."""
    names = tables.schema(kind).names
    rows = [
        BASE
        | {"session": f"s{rng.integers(2)}", "buffer": f"b{rng.integers(2)}", "rank": int(rng.integers(2))}
        | {"sequence": int(rng.integers(3)), "env_id": int(rng.integers(-1, 2)), "position": int(rng.integers(30))}
        | {"length": int(rng.integers(kind == "late", 6)), "episode_id": [None, "e0", "e1", "e2"][rng.integers(4)]}
        | {"key": f"k{rng.integers(2)}", "value": str(rng.integers(2)), "by": [None, "x"][rng.integers(2)]}
        | {"fields": [["a"], ["b"], ["a", "b"]][rng.integers(3)], "dropped": bool(rng.integers(2))}
        for _ in range(count)
    ]
    if kind == "segments":
        rows = [row | {"episode_id": row["episode_id"] or "e3"} for row in rows]
    return tables.from_columns(
        kind, {n: [row[n] for row in rows] for n in names if rows and n in rows[0]} or {"rank": []}
    )


def is_of(kind: str, row: dict[str, Any], segment: dict[str, Any]) -> bool:
    if kind == "late":
        steps, held = (range(r["position"], r["position"] + r["length"]) for r in (row, segment))
        return all(row[n] == segment[n] for n in STREAM) and bool({*steps} & {*held})
    return all(row[n] is not None and row[n] == segment[n] for n in (ADDRESS if kind == "labels" else ["episode_id"]))


def entries(kind: str, table: pa.Table) -> list[tuple[int, Any, Any]]:
    """Of each row, once for each of its fields: its number, what it is about, and what it says."""
    out = []
    for number, row in enumerate(table.to_pylist()):
        for field in row["fields"] if kind == "late" else [None]:
            about = tuple(field if n == "fields" else row[n] for n in TABLES[kind].about)
            out.append((number, about, tuple(row[n] for n in TABLES[kind].told)))
    return out


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", FOLLOWING)
def test_rows_follow_the_segments_that_they_are_of(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, gone, kept = (drawn(k, rng, int(rng.integers(12))) for k in (kind, "segments", "segments"))
    of_gone, of_kept = (
        [any(is_of(kind, row, one) for one in some.to_pylist()) for row in rows.to_pylist()] for some in (gone, kept)
    )
    assert of_segments(kind, rows, kept).tolist() == of_kept
    assert follow(kind, rows, gone, kept).tolist() == [a and not b for a, b in zip(of_gone, of_kept, strict=True)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["labels", "late"])
def test_news_is_what_came_after_all_that_is_known_of_the_same(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    theirs = drawn(kind, rng, 20)
    ours = theirs.take(pa.array(np.flatnonzero(rng.random(20) < 0.2)))
    known = {(about, told) for _, about, told in entries(kind, ours)}
    new: set[int] = set()
    for number, about, told in reversed(every := entries(kind, theirs)):
        later = [one for one in every[every.index((number, about, told)) :] if one[1] == about]
        if not any((a, t) in known for _, a, t in later):
            new.add(number)
    assert news(kind, theirs, ours).equals(theirs.take(pa.array(sorted(new), pa.int64())))
