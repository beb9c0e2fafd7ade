"""Which rows make up which episode, against a naive walk."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.index import chains
from tests.support.sampling import examples


def table(rows: list[dict[str, Any]]) -> pa.Table:
    kinds = {"episode_id": pa.string(), "session": pa.dictionary(pa.int32(), pa.string()), "rank": pa.int32(),
             "sequence": pa.int64(), "predecessor": pa.string(), "replaces": pa.bool_(), "commit": pa.int64(),
             "created_at": pa.timestamp("us", tz="UTC")}  # fmt: skip
    return pa.table({n: pa.array([r.get(n) for r in rows], k) for n, k in kinds.items()})


def resolved(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Episode id -> the numbers of its rows."""
    whole = table(rows)
    found = chains.resolve(whole.select(chains.COLUMNS), lambda: whole.select(chains.DETAIL))
    assert found.episodes == len(found.offsets) - 1
    assert found.firsts().tolist() == [found.of(i)[0] for i in range(found.episodes)]
    assert found.lasts().tolist() == sorted(found.lasts().tolist()), "in order of their newest rows"
    out = {rows[int(found.of(i)[0])]["episode_id"]: found.of(i).tolist() for i in range(found.episodes)}
    assert len(out) == found.episodes
    return out


def naive(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """From the newest row of each id back along the predecessors."""
    place = {chains.address(r["session"], r["rank"], r["sequence"]): i for i, r in enumerate(rows)}
    newest: dict[str, int] = {}
    for i, row in enumerate(rows):
        best = newest.get(row["episode_id"])
        if best is None or (row["commit"], row["sequence"]) > (rows[best]["commit"], rows[best]["sequence"]):
            newest[row["episode_id"]] = i
    out = {}
    for name, i in newest.items():
        chain: list[int] = []
        at: int | None = i
        while at is not None:
            chain.insert(0, at)
            at = place.get(rows[at]["predecessor"] or "")
        out[name] = chain
    return out


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Episodes that go on, are replaced, and go on from an earlier point, as after a resume."""
    rows: list[dict[str, Any]] = []
    for sequence in range(draw(st.integers(0, 14))):
        name = draw(st.sampled_from("abcdef"))
        earlier = [r for r in rows if r["episode_id"] == name]
        kind = draw(st.sampled_from(["goes on", "goes on", "replaces", "resumes"])) if earlier else "begins"
        before = earlier[-1] if kind == "goes on" else draw(st.sampled_from(earlier)) if kind == "resumes" else None
        rows.append({
            "episode_id": name, "session": "s", "rank": 0, "sequence": sequence, "commit": 1 + sequence // 3,
            "predecessor": chains.address("s", 0, before["sequence"]) if before else None,
            "replaces": kind == "replaces",
        })  # fmt: skip
    return rows


@settings(max_examples=examples(300), deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_chains_agree_with_the_naive_walk(rows: list[dict[str, Any]], random: Any) -> None:
    want = naive(rows)
    assert resolved(rows) == want
    order = list(range(len(rows)))
    random.shuffle(order)  # files may hold them in any order
    shuffled = table([rows[i] for i in order])
    found = chains.resolve(shuffled.select(chains.COLUMNS), lambda: shuffled.select(chains.DETAIL))
    got = {
        rows[order[int(found.of(i)[0])]]["episode_id"]: [order[r] for r in found.of(i)] for i in range(found.episodes)
    }
    assert got == want


def row(
    name: str, sequence: int, commit: int = 1, *, after: int | None = None, session: str = "s", replaces: bool = False
) -> dict[str, Any]:
    before = None if after is None else chains.address("s", 0, after)
    return {"episode_id": name, "session": session, "rank": 0, "sequence": sequence, "commit": commit,
            "predecessor": before,
            "replaces": replaces}  # fmt: skip


def test_without_links_nothing_more_is_loaded() -> None:
    def never() -> pa.Table:
        raise AssertionError("not needed")

    found = chains.resolve(table([row("a", 0), row("b", 1)]).select(chains.COLUMNS), never)
    assert (found.rows.tolist(), found.offsets.tolist(), found.single) == ([0, 1], [0, 1, 2], True)
    assert chains.resolve(table([]).select(chains.COLUMNS), never).episodes == 0


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        pytest.param(
            [row("a", 0), row("a", 1, 2, after=0), row("a", 2, 3, after=1), row("a", 0, 4, after=0, session="later")],
            {"a": [0, 3]}, id="a resume supersedes the tail written after its checkpoint",
        ),
        pytest.param(
            [row("a", 0), row("a", 1, 2, after=0), row("a", 2, 3, replaces=True), row("b", 3, 3)],
            {"a": [2], "b": [3]}, id="a replacement supersedes all",
        ),
        pytest.param([row("a", 0), row("a", 1, after=0)], {"a": [0, 1]}, id="every episode may have several rows"),
        pytest.param([row("a", 5, after=4), row("a", 6, after=5)], {"a": [0, 1]}, id="a predecessor that is gone"),
        pytest.param(
            [row("a", 0), row("b", 0, session="t") | {"rank": 1}, row("a", 1, after=0),
             row("b", 1, session="t") | {"rank": 1, "predecessor": chains.address("t", 1, 0)}],
            {"a": [0, 2], "b": [1, 3]}, id="sessions and ranks have sequences of their own",
        ),
    ],
)  # fmt: skip
def test_what_makes_up_an_episode(rows: list[dict[str, Any]], want: dict[str, list[int]]) -> None:
    assert resolved(rows) == want
