"""Which number each trajectory of a share has in RLinf's buffer, and its tree again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from archive.adapters import share_buffer
from archive.adapters.rlinf.trajectory import from_steps, index_entry
from archive.base import UsageError

SYSTEM = "rlinf"
MAX_SEED = 2**32 - 1  # RLinf gives it to numpy as well
NUMBER = "trajectory_id"  # attribute: the number of a trajectory, where it is no longer that of its metadata


class Numbered(NamedTuple):
    """One trajectory of a share."""

    number: int
    entry: dict[str, Any]  # of RLinf's index
    episode_id: str
    original: int | None  # the number in the episode's metadata
    tree: dict[str, Any]


@dataclass(frozen=True)
class Trajectories:
    """One buffer of a share, as RLinf's buffer is to have it."""

    part: Any  # the share's buffer
    numbers: list[int]
    state: Mapping[str, Any]  # of the rank, where it goes on as it was; empty where trajectories moved
    seed: int

    def __iter__(self) -> Iterator[Numbered]:
        """In order, read ahead in bounded memory."""
        for number, (ep, data) in zip(self.numbers, self.part.stream(), strict=True):
            metadata = _metadata(ep)
            if ep.length != metadata["T"]:
                raise UsageError(
                    f"of trajectory {ep.id!r} the plan keeps {ep.length} of {metadata['T']} steps; RLinf's are whole: "
                    "plan with max_episodes= instead of max_length="
                )
            tree = from_steps(data, metadata)
            yield Numbered(number, index_entry(metadata, number), ep.id, metadata.get(NUMBER), tree)

    @property
    def file_kind(self) -> str:
        """Which kind of files the buffers had that it comes from."""
        return file_kind((self.state, *self.part.source_states.values()))


def trajectories_of(share: Any, name: str) -> Trajectories:
    """Those of one buffer of a share; an error if they are not RLinf's. Reads no data."""
    part = share_buffer(share, name)
    state = part.state if share.plan.is_identity else None
    if state is not None and (not isinstance(state, Mapping) or state.get("system") != SYSTEM):
        raise UsageError(f"rank {share.rank} of buffer {name!r} was not saved from a replay buffer of RLinf")
    state = dict(state or {})
    saved = state.get("seed")
    return Trajectories(part, _numbers_of(part), state, share.seed & MAX_SEED if saved is None else saved)


def file_kind(states: Iterable[Any]) -> str:
    """Which kind of files the buffers of these states had: "pkl" or "pt"."""
    pickled = any(isinstance(s, Mapping) and s.get("trajectory_format") == "pkl" for s in states)
    return "pkl" if pickled else "pt"


def _numbers_of(part: Any) -> list[int]:
    """The trajectories' numbers: their own where all come from one source rank, else 0, 1, ... in order."""
    given = part.attributes.get(NUMBER, {})
    numbers = [given.get(ep.id, _metadata(ep).get(NUMBER)) for ep in part.episodes]
    one_source = len(np.unique(part.layout.source_rank)) <= 1
    if one_source and None not in numbers and len(set(numbers)) == len(numbers):
        return [int(n) for n in numbers]
    return list(range(len(numbers)))


def listed_at(state: Any) -> Callable[[int], tuple[int, int]]:
    """Where a number is in RLinf's list, as a key to sort by: as the state lists it, others after that, ascending."""
    ids = state.get("ids", ()) if isinstance(state, Mapping) else ()
    place = {int(number): i for i, number in enumerate(ids)}
    return lambda number: (place.get(number, len(place)), number)


def _metadata(episode: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = episode.metadata
    if "T" not in metadata or "shape" not in metadata:
        raise UsageError(
            f"episode {episode.id!r} is no trajectory [T, B, ...] of RLinf (imported with split=True, or another "
            "system's)"
        )
    return metadata
