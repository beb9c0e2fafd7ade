"""Pure, no I/O: what was trained on, batch by batch, in the order in which it was; out of a ledger's rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.ledger.keys import parsed
from archive.ledger.terms import DROPPED, SEALED, TRAINED, Key
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa


_TOLD = ("session", "rank", "sequence", "created_at", "update_count", "key", "round")
SAID = (*_TOLD, "state", "sibling", "episode_id")


class Batch(NamedTuple):
    """What was trained on at one step, by all ranks: when the first of them said so, the keys, and the ids of their
    episodes by sibling."""

    step: int
    at: datetime
    keys: list[Key]
    episodes: list[str]


def batches(rows: pa.Table) -> list[Batch]:
    """The batches that these rows tell of, oldest first. A step is the update count, over the ranks of a session; where
    none was told, each call of `train` is one, and its place is the step."""
    sealed = _sealed(rows.filter(among(rows["state"], (SEALED, DROPPED))))
    trained = list(_tuples(rows.filter(among(rows["state"], (TRAINED,))), _TOLD))
    out: dict[tuple[Any, ...], Batch] = {}
    for key, told in zip(parsed([text for *_, text, _ in trained]), trained, strict=True):
        session, rank, sequence, at, step, text, number = told
        call = (session, step) if step is not None else (session, rank, sequence, at)
        batch = out.setdefault(call, Batch(len(out) if step is None else step, at, [], []))
        of = sealed.get((text, number), {})
        batch.keys.append(key)
        batch.episodes.extend(of[sibling] for sibling in sorted(of))
    return list(out.values())


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
