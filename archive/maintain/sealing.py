"""Pure, no I/O: rows of the ledger that say which episode is a rollout of a prompt, against the episodes there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from archive.maintain.standing import Mask

if TYPE_CHECKING:
    import pyarrow as pa


def of_gone(ledger: pa.Table, segments: pa.Table, kept: pa.Table) -> Mask:
    """The rows that name an episode which had rows of the segments table, and has none that is kept. Who goes on from
    there finds these rollouts missing, as they are."""
    return _names(ledger, segments) & ~_names(ledger, kept)


def of_unknown(ledger: pa.Table, segments: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Ledger, key (JSON) and episode of rows that name one which has no row of the segments table."""
    import pyarrow as pa

    unknown = ledger["episode_id"].is_valid().to_numpy() & ~_names(ledger, segments)
    rows = ledger.filter(pa.array(unknown)).select(["ledger", "key", "episode_id"]).to_pylist()
    yield from ((row["ledger"], row["key"], row["episode_id"]) for row in rows)


def _names(ledger: pa.Table, segments: pa.Table) -> Mask:
    """Rows of the ledger that name an episode of these rows of the segments table."""
    import pyarrow.compute as pc

    ids = segments["episode_id"].combine_chunks()
    out: Mask = pc.is_in(ledger["episode_id"], ids).to_numpy() & ledger["episode_id"].is_valid().to_numpy()
    return np.asarray(out, bool)
