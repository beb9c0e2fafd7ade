"""Which files of a table are folded when rows are added: few files stay, and a row is rewritten a few times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.log import tablefiles
from tests.support.sampling import examples


def fold(sizes: list[int], large: int = 10**9) -> list[int]:
    """Rows of the files after each commit of as many new rows."""
    files: list[int] = []
    for new in sizes:
        keep = tablefiles.files_to_keep(
            files, [1 if n < large else tablefiles.MAX_FOLDED_BYTES + 1 for n in files], new
        )
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
        keep = tablefiles.files_to_keep(files, [1] * len(files), 64)
        files = [*files[:keep], sum(files[keep:]) + 64]
        written, most = written + files[-1], max(most, len(files))
    assert most <= 13
    assert written / (10_000 * 64) <= 11


def test_large_files_and_all_that_are_older_stay() -> None:
    big = tablefiles.MAX_FOLDED_BYTES + 1
    assert tablefiles.files_to_keep([10, 10, 10], [1, big, 1], 100) == 2
    assert tablefiles.files_to_keep([10, 10, 10], [1, 1, big], 100) == 3
    assert tablefiles.files_to_keep([10, 10, 10], [big, 1, 1], 100) == 1
    assert tablefiles.files_to_keep([], [], 5) == 0


LARGEST_FIRST = [200, 40, 10]
WHERE = [(LARGEST_FIRST, 1, 3), (LARGEST_FIRST, 5, 3), (LARGEST_FIRST, 6, 2), (LARGEST_FIRST, 11, 1)]


@pytest.mark.parametrize(("rows", "new", "keep"), [*WHERE, ([9, 4], 1, 0), ([2], 1, 1), ([1], 1, 0)])
def test_where_the_fold_begins(rows: list[int], new: int, keep: int) -> None:
    assert tablefiles.files_to_keep(rows, [1] * len(rows), new) == keep


# -- segments: the newest rows stay in small files ---------------------------------------------------------------------


def joined(sizes: list[int]) -> tuple[list[int], int, int]:
    """Rows of the segments files after commits of so many rows; most files at once, and rows written in all."""
    files: list[int] = []
    most = written = 0
    for new in sizes:
        start, stop, keep = tablefiles.fold(files, [1] * len(files), new)
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


@pytest.mark.parametrize(
    ("rows", "new", "expected"),
    [
        ([100], 400, (0, 0)),  # one file is not written again for itself alone
        ([100, 100], 100, (0, 2)),
        ([100, 100], 99, (0, 0)),
        ([100, 99], 400, (0, 0)),  # rows of the larger one would be rewritten too often
        ([90, 30, 50, 50], 60, (2, 4)),
        ([50, 50, 100, 100], 200, (0, 4)),
    ],
)
def test_which_neighbours_are_joined(rows: list[int], new: int, expected: tuple[int, int]) -> None:
    assert tablefiles.files_to_join(rows, [1] * len(rows), new) == expected


def test_of_neighbours_with_as_many_rows_the_newest_are_joined() -> None:
    big = tablefiles.MAX_FOLDED_BYTES + 1
    assert tablefiles.files_to_join([100] * 5, [1, 1, big, 1, 1], 400) == (3, 5)


def test_new_segments_go_into_the_newest_file_while_that_has_few_rows() -> None:
    assert tablefiles.is_recent([255], [1], 1)
    assert not tablefiles.is_recent([256], [1], 1)
    assert tablefiles.is_recent([2100], [1], 300)
    assert not tablefiles.is_recent([2101], [1], 300)


def test_large_segments_files_stay() -> None:
    big = tablefiles.MAX_FOLDED_BYTES + 1
    assert not tablefiles.is_recent([10], [big], 1)
    assert tablefiles.is_recent([10], [1], 1)
    assert not tablefiles.is_recent([], [], 1)
    assert tablefiles.files_to_join([100, 100, 100], [1, 1, 1], 400) == (0, 3)
    assert tablefiles.files_to_join([100, 100, 100], [big, 1, 1], 400) == (1, 3)
    assert tablefiles.files_to_join([100, 100, 100], [1, big, 1], 400) == (0, 0)
    assert tablefiles.files_to_join([], [], 5) == (0, 0)
