"""Pure, no I/O: where the ranks that read a data set stand, and up to where all of them have read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from archive.base import UsageError


class Spoken(NamedTuple):
    """What ranks of one session said last, and all of its ranks as far as they are known."""

    said: Mapping[int, Any]
    world: Collection[int] = ()


class Cursors(NamedTuple):
    """What the ranks of sessions that went on from each other said, the oldest session first."""

    sessions: tuple[Spoken, ...] = ()

    @property
    def by_rank(self) -> dict[int, Any]:
        """What each rank said last, by rank, those of the newest session last."""
        out: dict[int, Any] = {}
        for one in self.sessions:
            for rank, value in one.said.items():
                out.pop(rank, None)
                out[rank] = value
        return out

    @property
    def joint(self) -> Any:
        """The lowest that all ranks of the newest session have passed; a rank that has said nothing yet stands where
        the sessions before had come to. None: one stands at the beginning."""
        if not self.sessions:
            return None
        newest = self.sessions[-1]
        values = list(newest.said.values())
        if set(newest.world) - newest.said.keys():
            values.append(Cursors(self.sessions[:-1]).joint)
        return lowest(values)

    def saying(self, rank: int, value: Any, world_size: int) -> Cursors:
        """The same once a rank of a session that is not among these, of so many ranks, has said this."""
        return Cursors((*self.sessions, Spoken({rank: value}, range(world_size))))


def lowest(values: Sequence[Any]) -> Any:
    """What is in no part beyond any of these JSON values: the least number, part by part of lists and objects; None
    where one is None. UsageError where they cannot be compared."""
    first: Any = values[0]
    if any(value is None for value in values):
        return None
    if all(value == first and type(value) is type(first) for value in values):
        return first
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return min(values)
    if all(isinstance(value, (list, tuple)) and len(value) == len(first) for value in values):
        return type(first)(lowest(parts) for parts in zip(*values, strict=True))
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: lowest([value[key] for value in values if key in value]) for key in keys}
    raise UsageError(
        f"the ranks' cursors {', '.join(f'{value!r:.40}' for value in values[:4])} have no lowest one: say numbers "
        "that count up, or lists or objects of them; .cursors has what each rank said, undrawn(keys) what none drew"
    )
