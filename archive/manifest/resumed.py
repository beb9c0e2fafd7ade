"""Pure, no I/O: what a writer resumes from: its place, its live steps, and the episodes that it finds open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archive.manifest.branches import Origin
from archive.manifest.live import Runs
from archive.manifest.records import ForkedFrom

Stream = tuple[str, int, int]  # session, rank, env id


@dataclass(frozen=True)
class Unfinished:
    """What the written segments of an episode add up to, so that it can go on, or be closed."""

    predecessor: str
    stored: int
    returned: float | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class KnownEpisode:
    """An episode that a new writer takes over, or finds open."""

    id: str
    env_id: int
    begin: int  # position of its first step in the env row
    headless: bool
    broken: bool
    unfinished: Unfinished | None = None  # set if it is open


@dataclass(frozen=True)
class BufferResume:
    """One buffer as a new writer takes it over. `runs.episode` and `runs.stream` index the two lists."""

    runs: Runs
    episodes: Sequence[KnownEpisode]
    streams: Sequence[Stream]
    next_positions: Mapping[int, int]
    open_episodes: Mapping[int, int]  # env id -> place in `episodes`
    to_close: Sequence[int] = ()  # open ones that the resume's policy ends: each gets a segment row of length 0
    dropped: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # reason -> episodes, steps that the plan left behind


@dataclass(frozen=True)
class Resume:
    """What a writer starts from: its place and its buffers."""

    rank: int
    world_size: int
    run: str
    buffers: Mapping[str, BufferResume]
    checkpoint: int | None = None  # the commit that it was read from
    origin: Origin | None = None  # the branch that its session is part of; None if it takes nothing over
    name: str | None = None  # of that checkpoint
    forked_from: ForkedFrom | None = None  # where a new run begins there
    holders: Callable[[], Mapping[str, int]] = field(default=dict, compare=False)  # episode -> rank that has it live
