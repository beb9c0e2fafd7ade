"""The cells that a share's steps go to: where they lay, if nothing has moved, else in order of time; and the steps that
end their trajectory there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters.torchrl.lists import Cells
from archive.adapters.torchrl.tracker import END, NONE, SPLIT, Keys
from archive.arrays import Ints, ascending, run_tails
from archive.base import UsageError, cached_property

if TYPE_CHECKING:
    from resharding import Share, ShareBuffer

NO_STEPS: Ints = np.zeros(0, np.int64)


class Placement:
    """The steps of a share, in its order, and what was saved beside them; and the cell of each.

    cell: NONE where a rectangle has no room.  rows, inner: the extent of the storage then.  own: the state to go on
    from, where nothing moved.  ends: the steps after which their episode does not go on.  seams: those that
    are followed by other steps: ends, unless they say so.
    """

    def __init__(
        self, cells: Cells, share: Share, part: ShareBuffer, unfinished: str, states: Mapping[int, Any]
    ) -> None:
        """states: by source rank, those that this adapter saved."""
        self.share = share
        self.part = part
        self.unfinished = unfinished
        self.by_rank = states
        self.layout = part.layout
        self.unit = np.repeat(np.arange(len(self.layout.length)), self.layout.length)  # the episode of each step
        self.values = {name: np.asarray(values) for name, values in part.columns.items()}
        self._own = self._unmoved(cells)
        self.inner: tuple[int, ...]
        if self._own is not None:
            self.rows, self.inner = self._own["storage"]["rows"], tuple(self._own["storage"]["inner"])
            self.cell = self.values["slot"].astype(np.int64)
            self.ends, self.seams = self.open_ends if unfinished == "close" else NO_STEPS, NO_STEPS
        else:
            self.inner = self._inner(cells)
            order = self._in_time()
            self.rows = len(order) // self.width
            order = order[len(order) - self.rows * self.width :]  # a rectangle has no place for the oldest few
            column, row = np.divmod(np.arange(len(order)), max(1, self.rows))
            self.cell = np.full(len(self.unit), NONE, np.int64)
            self.cell[order] = row * self.width + column
            self.ends, self.seams = self._seams(order, column)

    # -- what is known of the steps -----------------------------------------------------------------------------

    @cached_property
    def open_ends(self) -> Ints:
        """The last step of each episode that is open."""
        ends = np.cumsum(self.layout.length) - 1
        return np.asarray(ends[self.layout.open & (self.layout.length > 0)], np.int64)

    @cached_property
    def keys(self) -> Keys:
        """The keys that tell trajectories apart."""
        state = next(iter(self.by_rank.values()), None)
        return Keys(None, END) if state is None else Keys.from_state(state["storage"]["keys"])

    def kind(self, step: int) -> Any:
        """The kind of the storage of a step's source rank."""
        state = self.by_rank.get(int(self.layout.source_rank[self.unit[step]]))
        return "tensordict" if state is None else state["storage"]["kind"]

    # -- what goes into the storage -----------------------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """True if steps lie elsewhere than they did when they were written."""
        return self._own is None or bool(self._own["storage"]["moved"])

    @property
    def width(self) -> int:
        """Cells a row; 1 of a storage without any."""
        return max(1, math.prod(self.inner))

    @cached_property
    def placed(self) -> Ints:
        """The steps that have a cell."""
        return np.flatnonzero(self.cell != NONE)

    @cached_property
    def cells(self) -> Ints:
        """The cell of each step that has one."""
        return self.cell[self.placed]

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Name -> a value for each of these steps."""
        return {name: values[self.placed] for name, values in self.values.items()}

    def states(self, part: str) -> list[Any]:
        """The states of a part of the buffer ("writer", "sampler", ...), of all source ranks that have one."""
        return [state[part] for state in self.by_rank.values() if state.get(part)]

    def own(self, part: str) -> Any:
        """The state of that part to go on from, where nothing moved; else an empty one."""
        return (self._own or {}).get(part) or {}

    # -- how they are placed ------------------------------------------------------------------------------------

    def _unmoved(self, cells: Cells) -> Any:
        """The state of the one source whose steps all come here, on the same rank, to a storage of the same size."""
        rank, plan = self.share.rank, self.share.plan
        own = self.by_rank.get(rank)
        if own is None or plan.world_size != plan.checkpoint.world_size or "slot" not in self.values:
            return None
        about = own["storage"]
        here = bool((self.layout.source_rank == rank).all())
        whole = len(self.unit) == about["rows"] * math.prod(about["inner"])
        fits = cells.capacity(tuple(about["inner"])) == about["capacity"]
        return own if here and whole and fits and (not cells.inner or list(cells.inner) == about["inner"]) else None

    def _inner(self, cells: Cells) -> tuple[int, ...]:
        """The storage's other dimensions: as they are, else as planned, else as they were."""
        if cells.listed or getattr(cells.storage, "ndim", 1) == 1:
            return ()
        if cells.storage.initialized:
            return cells.inner
        if self.part.rules.num_envs is not None:
            return (self.part.rules.num_envs,)
        saved = _saved_inner(self.by_rank)
        if saved is None:
            raise UsageError(
                "how many columns the storage has is not known; plan with num_envs=, or extend it once before"
            )
        return saved

    def _in_time(self) -> Ints:
        """Steps source by source, column by column, oldest first."""
        count, source = len(self.unit), self.layout.source_rank[self.unit]
        ranks = ascending(source).tolist()
        if "slot" not in self.values or any(rank not in self.by_rank for rank in ranks):
            return np.arange(count)
        slot, column, age = self.values["slot"].astype(np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
        for rank in ranks:
            mine = source == rank
            about, writer = self.by_rank[rank]["storage"], self.by_rank[rank]["writer"]
            width = max(1, math.prod(about["inner"]))
            full = about["rows"] == about["capacity"] and "rank_key" not in writer
            head = writer.get("cursor", 0) if full else 0
            column[mine], age[mine] = slot[mine] % width, (slot[mine] // width - head) % max(1, about["rows"])
        return np.lexsort((age, column, source))

    def _seams(self, order: Ints, column: Ints) -> tuple[Ints, Ints]:
        """(steps that end their episode, steps that end it unless they say so), of steps in order."""
        opens = np.zeros(len(self.unit), bool)
        opens[self.open_ends] = True
        edge = run_tails(column)
        seam = edge | run_tails(self.unit[order])
        goes_on = opens[order] & edge & (self.unfinished == "continue")
        ends = order[opens[order] & seam & ~goes_on]
        if self.keys.traj is not None or self.keys.unit == "step":
            return ends, NO_STEPS  # other trajectories have other ids
        return ends, order[seam & ~goes_on & ~self._goes_on_in_next(order)]

    def _goes_on_in_next(self, order: Ints) -> Any:
        """True where the next step goes on with the trajectory, which is two episodes as its items are of two kinds."""
        reasons = self.part.episodes.table["reason"].to_pylist()
        split = np.array([reason == SPLIT for reason in reasons], bool)[self.unit[order]]
        if not split.any() or "slot" not in self.values:
            return np.zeros(len(order), bool)
        slot, source = self.values["slot"][order], self.layout.source_rank[self.unit[order]]
        follows = (source[1:] == source[:-1]) & ((slot[1:] == slot[:-1] + 1) | (slot[1:] == 0))
        return split & np.r_[follows, False]


def room_for(cells: Cells, states: Mapping[int, Any], num_envs: int | None) -> int:
    """Steps that a storage holds when it is in use: one of several dimensions rounds its size up to whole rows."""
    if cells.listed or cells.storage.ndim == 1 or cells.storage.initialized:
        return int(cells.storage.max_size)
    inner = (num_envs or 1,) if num_envs is not None else _saved_inner(states) or (1,)
    return cells.capacity(inner) * math.prod(inner)


def _saved_inner(states: Mapping[int, Any]) -> tuple[int, ...] | None:
    """The other dimensions that a saved storage had; None if none had any."""
    every = (tuple(state["storage"]["inner"]) for state in states.values())
    return next((inner for inner in every if inner), None)
