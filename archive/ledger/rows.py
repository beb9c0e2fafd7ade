"""Pure, no I/O: what was said of prompts, call by call, to rows of the ledger table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from archive import tables
from archive.ledger.keys import texts
from archive.ledger.terms import CURSOR, DRAWN, SEALED, STARTED, WHOLE_KEY, Key
from archive.manifest import Place
from archive.write import EpisodeRecord

if TYPE_CHECKING:
    import pyarrow as pa


class Said(NamedTuple):
    """One call of a verb: the same of so many keys. `made`: of sealed ones, what the writer knows of the episodes; its
    weights count where none were given."""

    ledger: str
    state: str
    at: datetime
    keys: Sequence[Key]
    rounds: Sequence[int]
    sibling: int = WHOLE_KEY
    siblings: int | None = None
    made: Sequence[EpisodeRecord] = ()
    model_weights_uuid: str | None = None
    update_count: int | None = None
    reason: str | None = None
    cursor: str | None = None


def rows(said: Sequence[Said], place: Place, sequence: int) -> pa.Table:
    """The rows that a commit needs of it: of a rollout's states and of a cursor the last."""
    about = {"session": place.session, "rank": place.rank, "sequence": sequence}
    return tables.concat("ledger", [_table(one, about) for one in _that_count(said)])


def _that_count(said: Sequence[Said]) -> list[Said]:
    """Without what was started and is sealed by now, and without cursors that others followed."""
    sealed: set[tuple[str, int, Key, int]] = set()  # later on
    cursors: set[str] = set()
    out = []
    for one in reversed(said):
        if one.state == STARTED and sealed:
            left = [(key, n) for key, n in _each(one) if (one.ledger, one.sibling, key, n) not in sealed]
            one = one._replace(keys=[key for key, _ in left], rounds=[n for _, n in left])
        elif one.state == SEALED:
            sealed |= {(one.ledger, one.sibling, key, n) for key, n in _each(one)}
        elif one.state == CURSOR and one.ledger in cursors:
            continue
        elif one.state == CURSOR:
            cursors.add(one.ledger)
        out.append(one)
    return [one for one in reversed(out) if len(one.keys)]


def _each(one: Said) -> Any:
    return zip(one.keys, one.rounds, strict=True)


def _table(one: Said, about: dict[str, Any]) -> pa.Table:
    key = ["null"] if one.state == CURSOR else texts(one.keys)
    columns = {
        "ledger": one.ledger, "key": key, "round": one.rounds, "sibling": one.sibling, "state": one.state,
        "siblings": one.siblings if one.state == DRAWN else None, "reason": one.reason, "cursor": one.cursor,
        "model_weights_uuid": one.model_weights_uuid, "update_count": one.update_count, "created_at": one.at,
    }  # fmt: skip
    if one.state == SEALED:
        columns["episode_id"] = [record.id for record in one.made]
        if one.model_weights_uuid is None:
            columns["model_weights_uuid"] = [record.weights[0] for record in one.made]
        if one.update_count is None:
            columns["update_count"] = [record.weights[1] for record in one.made]
    return tables.from_columns("ledger", {**columns, **about})
