"""Which rows make up which episode, and which manifest files are folded: against naive answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.manifest import attempts, chains
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


def fold(sizes: list[int], large: int = 10**9) -> list[int]:
    """Rows of the files after each commit of as many new rows."""
    files: list[int] = []
    for new in sizes:
        keep = attempts.files_to_keep(files, [1 if n < large else attempts.MAX_FOLDED_BYTES + 1 for n in files], new)
        files = [*files[:keep], sum(files[keep:]) + new]
        assert sum(files) >= new
    return files


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=60))
def test_each_file_holds_at_least_twice_the_newer_ones(sizes: list[int]) -> None:
    files = fold(sizes)
    assert sum(files) == sum(sizes)
    assert all(files[i] >= 2 * sum(files[i + 1 :]) for i in range(len(files) - 1))


def test_ten_thousand_commits_leave_few_files_and_rewrite_little() -> None:
    files: list[int] = []
    written = most = 0
    for _ in range(10_000):
        keep = attempts.files_to_keep(files, [1] * len(files), 64)
        files = [*files[:keep], sum(files[keep:]) + 64]
        written, most = written + files[-1], max(most, len(files))
    assert most <= 13
    assert written / (10_000 * 64) <= 11


def test_large_files_and_all_that_are_older_stay() -> None:
    big = attempts.MAX_FOLDED_BYTES + 1
    assert attempts.files_to_keep([10, 10, 10], [1, big, 1], 100) == 2
    assert attempts.files_to_keep([10, 10, 10], [1, 1, big], 100) == 3
    assert attempts.files_to_keep([10, 10, 10], [big, 1, 1], 100) == 1
    assert attempts.files_to_keep([], [], 5) == 0


LARGEST_FIRST = [200, 40, 10]
WHERE = [(LARGEST_FIRST, 1, 3), (LARGEST_FIRST, 5, 3), (LARGEST_FIRST, 6, 2), (LARGEST_FIRST, 11, 1)]


@pytest.mark.parametrize(("rows", "new", "keep"), [*WHERE, ([9, 4], 1, 0), ([2], 1, 1), ([1], 1, 0)])
def test_where_the_fold_begins(rows: list[int], new: int, keep: int) -> None:
    assert attempts.files_to_keep(rows, [1] * len(rows), new) == keep


# -- segments: the newest rows stay in small files ---------------------------------------------------------------------


def joined(sizes: list[int]) -> tuple[list[int], int, int]:
    """Rows of the segments files after commits of so many rows; most files at once, and rows written in all."""
    files: list[int] = []
    most = written = 0
    for new in sizes:
        start, stop, keep = attempts.fold(files, [1] * len(files), new)
        new += sum(files[keep:])
        del files[keep:]
        if start < stop:
            whole, newer = sum(files[start:stop]), sum(files[stop:]) + new
            assert 2 * max(files[start:stop]) <= whole <= 2 * newer
            files[start:stop] = [whole]
            written += whole
        files.append(new)
        most, written = max(most, len(files)), written + new
    assert sum(files) == sum(sizes)
    return files, most, written


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=60))
def test_segments_are_joined_with_their_neighbours(sizes: list[int]) -> None:
    joined(sizes)


@pytest.mark.parametrize(("new", "most_written"), [(16, 17), (64, 13), (4000, 13)])
def test_ten_thousand_commits_leave_the_newest_segments_in_small_files(new: int, most_written: int) -> None:
    files, most, written = joined([new] * 10_000)
    assert most <= 13
    assert written / (10_000 * new) <= most_written
    newer = 0
    for rows in files[::-1]:
        assert rows <= max(256, 8 * new, 2 * newer)
        newer += rows


@pytest.mark.parametrize("kind", ["random", "growing", "shrinking"])
def test_commits_of_all_sizes_leave_few_segments_files(kind: str) -> None:
    sizes = {
        "random": np.random.default_rng(0).integers(1, 200, 10_000).tolist(),
        "growing": list(range(1, 10_001)),
        "shrinking": list(range(10_000, 0, -1)),
    }[kind]
    _, most, written = joined(sizes)
    assert most <= 25
    assert written / sum(sizes) <= 10


def test_large_segments_files_stay() -> None:
    big = attempts.MAX_FOLDED_BYTES + 1
    assert not attempts.is_recent([10], [big], 1)
    assert attempts.is_recent([10], [1], 1)
    assert not attempts.is_recent([], [], 1)
    assert attempts.files_to_join([100, 100, 100], [1, 1, 1], 400) == (0, 3)
    assert attempts.files_to_join([100, 100, 100], [big, 1, 1], 400) == (1, 3)
    assert attempts.files_to_join([100, 100, 100], [1, big, 1], 400) == (0, 0)
    assert attempts.files_to_join([], [], 5) == (0, 0)
