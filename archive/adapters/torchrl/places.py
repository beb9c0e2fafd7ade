"""Where restored steps go: the cell of each, and which of them end their trajectory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters.torchrl.cells import Cells
from archive.adapters.torchrl.episodes import END, SPLIT, Keys
from archive.adapters.torchrl.tracking import NONE
from archive.arrays import Ints, run_tails
from archive.base import UsageError, cached_property

if TYPE_CHECKING:
    from resharding import Share, ShareBuffer

SYSTEM = "torchrl"
NO_STEPS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Given:
    """What a share has for one buffer."""

    share: Share
    part: ShareBuffer
    unfinished: str
    states: Mapping[int, Any]  # by source rank: those that this adapter saved

    @property
    def layout(self) -> Any:
        return self.part.layout

    @cached_property
    def columns(self) -> dict[str, Any]:
        return {name: np.asarray(values) for name, values in self.part.columns.items()}

    @cached_property
    def unit(self) -> Ints:
        """The episode of each step."""
        return np.repeat(np.arange(len(self.layout.length)), self.layout.length)

    @cached_property
    def episode_ids(self) -> list[str]:
        ids: list[str] = self.part.episodes.table["episode_id"].to_pylist()
        return ids

    @cached_property
    def open_ends(self) -> Ints:
        """The last step of each episode that is open."""
        ends = np.cumsum(self.layout.length) - 1
        return np.asarray(ends[self.layout.open & (self.layout.length > 0)], np.int64)

    @cached_property
    def keys(self) -> Keys:
        state = next(iter(self.states.values()), None)
        return Keys(None, END) if state is None else Keys.from_state(state["storage"]["keys"])

    def kind(self, source: int) -> Any:
        """What the storage of a source rank was made of."""
        return self.states[source]["storage"]["kind"] if source in self.states else "tensordict"


@dataclass(frozen=True)
class Target:
    """Where the steps go: the cell of each step in the share's order (NONE: no room in a rectangle),
    in how many rows."""

    cell: Ints
    rows: int
    inner: tuple[int, ...]
    own: Any = None  # the state to go on from, where nothing moved
    ends: Ints = field(default_factory=lambda: NO_STEPS)  # steps after which their episode does not go on
    seams: Ints = field(default_factory=lambda: NO_STEPS)  # steps followed by others: ends, unless they say so

    @property
    def moved(self) -> bool:
        """Whether steps lie elsewhere than they did when they were written."""
        return self.own is None or bool(self.own["storage"]["moved"])

    @property
    def columns(self) -> int:
        """Cells a row; 1 of a storage without any."""
        return max(1, math.prod(self.inner))

    @cached_property
    def placed(self) -> Ints:
        """The steps that have a cell."""
        return np.flatnonzero(self.cell != NONE)


@dataclass(frozen=True)
class Placed:
    """Steps in their cells, and what was saved beside them of each part of the buffer."""

    given: Given
    target: Target

    @cached_property
    def cells(self) -> Ints:
        """The cell of each step that has one."""
        return self.target.cell[self.target.placed]

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Name -> a value for each of these steps."""
        return {name: values[self.target.placed] for name, values in self.given.columns.items()}

    def states(self, part: str) -> list[Any]:
        """The states of a part of the buffer ("writer", "sampler", ...), of all source ranks that have one."""
        return [state[part] for state in self.given.states.values() if state.get(part)]

    def own(self, part: str) -> Any:
        """The state of that part to go on from, where nothing moved; else an empty one."""
        return (self.target.own or {}).get(part) or {}


def room_for(cells: Cells, states: Mapping[int, Any], num_envs: int | None) -> int:
    """Steps that a storage holds when it is in use: one of several dimensions rounds its size up to whole rows."""
    if cells.listed or cells.storage.ndim == 1 or cells.storage.initialized:
        return int(cells.storage.max_size)
    inner = (num_envs or 1,) if num_envs is not None else next(_saved_inner(states), (1,))
    return cells.capacity(inner) * math.prod(inner)


def _saved_inner(states: Mapping[int, Any]) -> Any:
    return (tuple(s["storage"]["inner"]) for s in states.values() if s["storage"]["inner"])


def target_of(cells: Cells, given: Given) -> Target:
    """The cell of each step: where it lay, if nothing has moved, else in order of time."""
    own = _unmoved(cells, given)
    if own is not None:
        ends = given.open_ends if given.unfinished == "close" else NO_STEPS
        about = own["storage"]
        return Target(given.columns["slot"].astype(np.int64), about["rows"], tuple(about["inner"]), own, ends)
    inner = _inner(cells, given)
    width = max(1, math.prod(inner))
    order = _in_time(given)
    rows = len(order) // width
    order = order[len(order) - rows * width :]  # a rectangle has no place for the oldest few
    cell = np.full(len(given.unit), NONE, np.int64)
    column, row = np.divmod(np.arange(len(order)), max(1, rows))
    cell[order] = row * width + column
    return Target(cell, rows, inner, None, *_seams(given, order, column))


def _unmoved(cells: Cells, given: Given) -> Any:
    """The state of the one source whose steps all come here, on the same rank, into a storage of the same size."""
    rank, plan = given.share.rank, given.share.plan
    own = given.states.get(rank)
    if own is None or plan.world_size != plan.checkpoint.world_size or "slot" not in given.columns:
        return None
    about = own["storage"]
    here = bool((given.layout.source_rank == rank).all())
    whole = len(given.unit) == about["rows"] * math.prod(about["inner"])
    room = cells.capacity(tuple(about["inner"]))
    fits = room == about["capacity"] and (not cells.inner or list(cells.inner) == about["inner"])
    return own if here and whole and fits else None


def _inner(cells: Cells, given: Given) -> tuple[int, ...]:
    """The storage's other dimensions: as they are, else as planned, else as they were."""
    if cells.listed or getattr(cells.storage, "ndim", 1) == 1:
        return ()
    if cells.storage.initialized:
        return cells.inner
    if given.part.rules.num_envs is not None:
        return (given.part.rules.num_envs,)
    saved: tuple[int, ...] | None = next(_saved_inner(given.states), None)
    if saved is None:
        raise UsageError("how many columns the storage has is not known; plan with num_envs=, or extend it once before")
    return saved


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
        width = max(1, math.prod(about["inner"]))
        full = about["rows"] == about["capacity"] and "rank_key" not in writer
        head = writer.get("cursor", 0) if full else 0
        column[mine], age[mine] = slot[mine] % width, (slot[mine] // width - head) % max(1, about["rows"])
    return np.lexsort((age, column, source))


def _seams(given: Given, order: Ints, column: Ints) -> tuple[Ints, Ints]:
    """(steps that end their episode, steps that end it unless they say so), of steps in order."""
    opens = np.zeros(len(given.unit), bool)
    opens[given.open_ends] = True
    edge = run_tails(column)
    seam = edge | run_tails(given.unit[order])
    goes_on = opens[order] & edge & (given.unfinished == "continue")
    ends = order[opens[order] & seam & ~goes_on]
    if given.keys.traj is not None or given.keys.unit == "step":
        return ends, NO_STEPS  # other trajectories have other ids
    return ends, order[seam & ~goes_on & ~_goes_on_in_next(given, order)]


def _goes_on_in_next(given: Given, order: Ints) -> Any:
    """Whether the step after each goes on with its trajectory, which is two episodes as its items are of two kinds."""
    split = np.array([r == SPLIT for r in given.part.episodes.table["reason"].to_pylist()], bool)[given.unit[order]]
    if not split.any() or "slot" not in given.columns:
        return np.zeros(len(order), bool)
    slot, source = given.columns["slot"][order], given.layout.source_rank[given.unit[order]]
    follows = (source[1:] == source[:-1]) & ((slot[1:] == slot[:-1] + 1) | (slot[1:] == 0))
    return split & np.r_[follows, False]
