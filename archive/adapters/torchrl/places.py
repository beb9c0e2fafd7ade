"""Where restored steps go: the cell of each, and which of them end their trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from archive.adapters.torchrl.episodes import END, SPLIT, Keys
from archive.adapters.torchrl.saving import Cells
from archive.adapters.torchrl.tracking import NONE
from archive.arrays import Ints
from archive.base import UsageError, cached_property

SYSTEM = "torchrl"


def ours(states: Mapping[int, Any]) -> dict[int, Any]:
    """Of states by rank, those that this adapter saved."""
    return {r: s for r, s in states.items() if isinstance(s, dict) and s.get("system") == SYSTEM}


@dataclass(frozen=True)
class Given:
    """What a share has for one buffer."""

    share: Any
    part: Any  # the share's buffer
    unfinished: str
    rank: int

    @cached_property
    def states(self) -> dict[int, Any]:
        """By source rank: the states that this adapter saved."""
        return ours(self.part.source_states)

    @cached_property
    def layout(self) -> Any:
        return self.part.layout

    @cached_property
    def columns(self) -> dict[str, Any]:
        return {name: np.asarray(values) for name, values in self.part.columns.items()}

    @cached_property
    def unit(self) -> Ints:
        """The episode of each step."""
        return np.repeat(np.arange(len(self.layout.length)), self.layout.length)

    @property
    def renumbered(self) -> bool:
        """Whether the ids of trajectories are given anew."""
        return not self.share.plan.is_identity

    @property
    def keys(self) -> Keys:
        state = next(iter(self.states.values()), None)
        return Keys(None, END) if state is None else Keys.from_state(state["storage"]["keys"])

    def kinds(self, source: int) -> Any:
        return self.states[source]["storage"]["kind"] if source in self.states else "tensordict"


@dataclass(frozen=True)
class Target:
    """Where the steps go: the cell of each step in the share's order (NONE: no room in a rectangle), in how many rows."""

    cell: Ints
    rows: int
    inner: tuple[int, ...]
    own: Any = None  # the state to go on from, where nothing moved
    ends: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # steps after which their episode does not go on
    seams: Ints = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # steps followed by others: ends, unless they say so

    @property
    def moved(self) -> bool:
        """Whether steps lie elsewhere than they did when they were written."""
        return self.own is None or bool(self.own["storage"]["moved"])

    @property
    def columns(self) -> int:
        return int(np.prod(self.inner, dtype=np.int64))


def room_for(cells: Cells, states: Mapping[int, Any], num_envs: int | None) -> int:
    """Steps that a storage holds when it is in use: one of several dimensions rounds its size up to whole rows."""
    saved = [s["storage"]["inner"] for s in states.values() if s["storage"]["inner"]]
    inner = saved[0] if num_envs is None and saved else [num_envs or 1]
    if cells.listed or cells.storage.ndim == 1 or cells.storage.initialized:
        return int(cells.storage.max_size)
    return cells.capacity(tuple(inner)) * int(np.prod(inner, dtype=np.int64))


def target_of(cells: Cells, given: Given) -> Target:
    own = _unmoved(cells, given)
    if own is not None:
        slots = given.columns["slot"].astype(np.int64)
        target = Target(slots, own["storage"]["rows"], tuple(own["storage"]["inner"]), own)
        ends = _open_ends(given) if given.unfinished == "close" else target.ends
        return replace(target, ends=ends)
    inner = _inner(cells, given)
    width = max(1, int(np.prod(inner, dtype=np.int64)))
    order = _in_time(given)
    rows = len(order) // width
    order = order[len(order) - rows * width :]  # a rectangle has no place for the oldest few
    cell = np.full(len(given.unit), NONE, np.int64)
    place = np.arange(len(order))
    column = place // rows if rows else place
    cell[order] = place % max(1, rows) * width + column
    return Target(cell, rows, inner, None, *_seams(given, order, column))


def _unmoved(cells: Cells, given: Given) -> Any:
    """The state of the one source whose steps all come here, on the same rank, into a storage of the same size."""
    plan, own = given.share.plan, given.states.get(given.rank)
    if own is None or plan.world_size != plan.checkpoint.world_size or "slot" not in given.columns:
        return None
    sources = np.unique(given.layout.source_rank)
    about = own["storage"]
    here = len(sources) == 0 or (len(sources) == 1 and int(sources[0]) == given.rank)
    whole = len(given.unit) == about["rows"] * int(np.prod(about["inner"], dtype=np.int64))
    room = cells.capacity(tuple(about["inner"]))
    fits = room == about["capacity"] and (not cells.inner or list(cells.inner) == about["inner"])
    return own if here and whole and fits else None


def _inner(cells: Cells, given: Given) -> tuple[int, ...]:
    """The storage's other dimensions: as they are, else as planned, else as they were."""
    if cells.listed or getattr(cells.storage, "ndim", 1) == 1:
        return ()
    if cells.storage.initialized:
        return cells.inner
    asked = given.share.plan.rules[given.part.name].num_envs
    if asked is not None:
        return (asked,)
    saved = [tuple(s["storage"]["inner"]) for s in given.states.values() if s["storage"]["inner"]]
    if not saved:
        raise UsageError("how many columns the storage has is not known; plan with num_envs=, or extend it once before")
    return saved[0]


def _in_time(given: Given) -> Ints:
    """Steps source by source, column by column, oldest first."""
    count = len(given.unit)
    source = given.layout.source_rank[given.unit]
    if "slot" not in given.columns or any(int(r) not in given.states for r in np.unique(source)):
        return np.arange(count)
    slot = given.columns["slot"].astype(np.int64)
    column, age = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for rank in np.unique(source).tolist():
        mine = source == rank
        about, writer = given.states[rank]["storage"], given.states[rank]["writer"]
        width = max(1, int(np.prod(about["inner"], dtype=np.int64)))
        full = about["rows"] == about["capacity"] and "rank_key" not in writer
        head = writer.get("cursor", 0) if full else 0
        column[mine], age[mine] = slot[mine] % width, (slot[mine] // width - head) % max(1, about["rows"])
    return np.lexsort((age, column, source))


def _open_ends(given: Given) -> Ints:
    """The last step of each episode that is open."""
    layout = given.layout
    ends = np.cumsum(layout.length) - 1
    return np.asarray(ends[np.asarray(layout.open, bool) & (layout.length > 0)], np.int64)


def _seams(given: Given, order: Ints, column: Ints) -> tuple[Ints, Ints]:
    """(steps that end their episode, steps that end it unless they say so), of steps in order."""
    if not len(order):
        return order, order
    opens = np.zeros(len(given.unit), bool)
    opens[_open_ends(given)] = True
    edge = np.r_[column[1:] != column[:-1], True]
    seam = edge | np.r_[given.unit[order][1:] != given.unit[order][:-1], False]
    goes_on = opens[order] & edge & (given.unfinished == "continue")
    ends = order[opens[order] & seam & ~goes_on]
    if given.keys.traj is not None or given.keys.unit == "step":
        return ends, order[:0]  # other trajectories have other ids
    return ends, order[seam & ~goes_on & ~_goes_on_in_next(given, order)]


def _goes_on_in_next(given: Given, order: Ints) -> Any:
    """Whether the step after each goes on with its trajectory, which is two episodes as its items are of two kinds."""
    split = np.array([r == SPLIT for r in given.part.episodes.table["reason"].to_pylist()], bool)[given.unit[order]]
    if not split.any() or "slot" not in given.columns:
        return np.zeros(len(order), bool)
    slot, source = given.columns["slot"][order], given.layout.source_rank[given.unit[order]]
    follows = (source[1:] == source[:-1]) & ((slot[1:] == slot[:-1] + 1) | (slot[1:] == 0))
    return split & np.r_[follows, False]
