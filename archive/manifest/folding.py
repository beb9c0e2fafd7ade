"""Pure, no I/O: which manifest files a commit folds into its own.

Each file holds at least twice the rows of all newer ones together. So there are few files at any age (at most 13
after 10,000 commits of like size), and a row is rewritten a few times at most.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_FOLDED_BYTES = 32 * 1024 * 1024


def files_to_keep(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> int:
    """How many of the oldest files stay as they are; the others are folded with the new rows.

    `rows` and `sizes_bytes` are of the present files, oldest first. Files too large to fold stay, and so do all
    that are older than one of them.
    """
    large = [i for i, size in enumerate(sizes_bytes) if size > MAX_FOLDED_BYTES]
    first = large[-1] + 1 if large else 0
    newer = new_rows
    keep = len(rows)
    for i in range(len(rows) - 1, first - 1, -1):
        if rows[i] < 2 * newer:
            keep = i
        newer += rows[i]
    return keep
