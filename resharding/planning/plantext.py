"""Pure, no I/O: the text of a plan, and what it must say to be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from archive.arrays import Ints, Mask
from archive.base import Count, IntegrityError, Positive, Record, UsageError, plainjson, stored
from archive.manifest import Origin
from resharding.placing import Dropped, Parts, Placement, Rules

FORMAT = 1
_WHAT = "the text of this plan"
_MOST_RANKS = 1 << 20  # a plan counts for each


@dataclass(frozen=True, slots=True)
class _Rules(Record):
    """`Rules`, as the text has them."""

    world_size: Positive
    num_envs: Positive | None = stored(None, always=True)
    max_length: Count | None = stored(None, always=True)
    capacity: Count | None = stored(None, always=True)
    max_episodes: Count | None = stored(None, always=True)
    incomplete: str = "keep"
    unfinished: str = "close"
    policy: str = "balanced"
    divisible: bool = False

    def made(self) -> Rules:
        return Rules(**{one.name: getattr(self, one.name) for one in fields(Rules)})


@dataclass(frozen=True, slots=True)
class _Origin(Record):
    """`Origin`; the text has a list of its values."""

    session: str
    run: str
    commit: Count
    sequences: Mapping[int, int]
    trained: Mapping[int, int] | None = stored(None, always=True)

    def made(self) -> Origin:
        return Origin(*(getattr(self, name) for name in Origin._fields))


@dataclass(frozen=True, slots=True)
class _Buffer(Record):
    """Who gets which steps of one buffer, and who none."""

    rules: _Rules
    parts: tuple[Any, ...]
    dropped: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Said(Record):
    """The whole text."""

    commit: Count
    digest: str
    world_size: Positive
    identity: bool
    buffers: Mapping[str, _Buffer]
    seen: Count | None = None
    conditions: str | None = stored(None, always=True)
    origin: _Origin | None = stored(None, always=True)


def read(text: str) -> _Said:
    """What a text says; UsageError if it is no plan at all, IntegrityError if it is a damaged one."""
    try:
        body = plainjson.parse(text, what=_WHAT, error=IntegrityError)
    except IntegrityError as e:
        raise UsageError(f"this is no plan: it is not JSON ({e})") from e
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UsageError(f"this is no plan of format {FORMAT}")
    if isinstance(origin := body.get("origin"), list) and len(origin) <= len(Origin._fields):
        body["origin"] = dict(zip(Origin._fields, origin, strict=False))
    said = _Said.from_json(body, what=_WHAT, error=IntegrityError)
    if said.world_size > _MOST_RANKS:
        raise _damaged(f"it is for {said.world_size} ranks")
    return said


def placements(said: _Said, steps: Mapping[str, Ints]) -> dict[str, Placement]:
    """Who gets what; steps: of each unit of each buffer of the checkpoint. IntegrityError for what is not there."""
    if strange := said.buffers.keys() - steps.keys():
        raise _damaged(f"the checkpoint has no buffer {min(strange)!r:.80}")
    return {name: _placement(one, said.world_size, steps[name]) for name, one in said.buffers.items()}


def _placement(one: _Buffer, world_size: int, steps: Ints) -> Placement:
    parts = Parts(*_columns(one.parts, len(Parts._fields)))
    reason, *rest = one.dropped or ((),)
    dropped = Dropped(_texts(reason), *_columns(rest, len(Dropped._fields) - 1))
    _check(len(dropped.reason) == len(dropped.unit), "columns of several lengths")
    _check((parts.target >= 0) & (parts.target < world_size), "a rank beyond its world size")
    for units in (parts, dropped):
        _check((units.unit >= 0) & (units.unit < len(steps)), "episodes that the checkpoint has not")
        _check((units.lo >= 0) & (units.lo <= units.hi) & (units.hi <= steps[units.unit]), "steps that are not there")
    return Placement(parts, dropped)


def _columns(lists: Any, count: int) -> list[Ints]:
    """So many columns of integers, all of one length."""
    columns = [_ints(values) for values in lists]
    _check(len(columns) == count and len({len(column) for column in columns}) == 1, "columns of several lengths")
    return columns


def _ints(values: Any) -> Ints:
    _check(isinstance(values, list) and set(map(type, values)) <= {int}, "a column of other than whole numbers")
    try:
        return np.array(values, np.int64)
    except OverflowError as e:
        raise _damaged("a column has a number of more than 64 bits") from e


def _texts(values: Any) -> np.ndarray[Any, Any]:
    _check(isinstance(values, (list, tuple)) and set(map(type, values)) <= {str}, "reasons that are no text")
    out = np.empty(len(values), object)
    out[:] = values
    return out


def _check(held: bool | Mask, what: str) -> None:
    if not np.all(held):
        raise _damaged(f"it has {what}")


def _damaged(why: str) -> IntegrityError:
    return IntegrityError(f"{_WHAT} is damaged ({why}); make the plan again")
