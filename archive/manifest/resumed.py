"""Pure, no I/O: what a writer resumes from: its place, its live steps, and the episodes that it finds open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archive.base import UsageError
from archive.manifest.branches import Origin
from archive.manifest.live import Runs
from archive.manifest.records import ForkedFrom, RunEntry

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
    saved_by: int | None = None  # how many ranks saved it
    holders: Callable[[], Mapping[str, int]] = field(default=dict, compare=False)  # episode -> rank that has it live


def check_same_origin(entry: RunEntry | None, rank: int, session: str, origin: Origin | None) -> None:
    """Ranks that went on from different checkpoints would hold some steps twice, and others not at all."""
    if origin is None or entry is None or entry.session != session or entry.resumed_from is None:
        return
    if entry.resumed_from.commit != origin.commit:
        raise UsageError(
            f"rank {rank} resumes from commit {origin.commit}, but another rank of session {session!r} did from commit "
            f"{entry.resumed_from.commit}: have all ranks plan before any of them opens its writer (a barrier), or one "
            f"of them plan for all, or name the session to resharding.plan(checkpoint, session={session!r}); then "
            "start the session anew, under another name"
        )
