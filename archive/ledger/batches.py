"""Pure, no I/O: what was trained on, batch by batch, in the order in which it was; out of a ledger's rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.ledger.keys import parsed
from archive.ledger.terms import DROPPED, SEALED, TRAINED, Key

if TYPE_CHECKING:
    import pyarrow as pa


_CALL = ("session", "rank", "created_at", "update_count", "key", "round")  # the first four: in which call
SAID = (*_CALL, "state", "sibling", "episode_id")


class Batch(NamedTuple):
    """What one call of `train` took: the step it was for, when, the keys, and the ids of their episodes by sibling."""

    step: int
    at: datetime
    keys: list[Key]
    episodes: list[str]


def batches(rows: pa.Table) -> list[Batch]:
    """The batches that these rows tell of, oldest first. A step is the update count or, where none was told, the
    batch's place."""
    import pyarrow as pa
    import pyarrow.compute as pc

    state = rows["state"].cast(pa.string())
    sealed = _sealed(rows.filter(pc.is_in(state, pa.array([SEALED, DROPPED]))))
    trained = list(_tuples(rows.filter(pc.equal(state, TRAINED)), _CALL))
    out: list[Batch] = []
    call: Any = None
    for key, (*said, text, number) in zip(parsed([text for *_, text, _ in trained]), trained, strict=True):
        if said != call:
            call = said
            out.append(Batch(len(out) if said[3] is None else said[3], said[2], [], []))
        of = sealed.get((text, number), {})
        out[-1].keys.append(key)
        out[-1].episodes.extend(of[sibling] for sibling in sorted(of))
    return out


def _sealed(rollouts: pa.Table) -> dict[tuple[str, int], dict[int, str]]:
    """(key, round) -> sibling -> its episode, the one that was sealed last; without those that were dropped after."""
    out: dict[tuple[str, int], dict[int, str]] = {}
    for key, number, sibling, episode in _tuples(rollouts, ["key", "round", "sibling", "episode_id"]):
        if episode is not None:
            out.setdefault((key, number), {})[sibling] = episode
        else:
            out.get((key, number), {}).pop(sibling, None)
    return out


def _tuples(rows: pa.Table, names: Sequence[str]) -> Any:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)
