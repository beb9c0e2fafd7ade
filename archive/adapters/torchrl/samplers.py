"""Samplers: priorities, remaining permutations and use counts as columns, the rest as state; a class for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl.parts import Parts, load_state, module, state_dict_of
from archive.adapters.torchrl.places import Placed
from archive.arrays import Ints
from archive.base import UsageError

USED, UNKNOWN = -1, -2  # no place in the remaining permutation: drawn already; nothing was drawn yet


def saved_samplers(parts: Parts) -> dict[str, Other]:
    """Each sampler of a buffer, by the name that its state has, as what is saved of it."""
    theirs = module("samplers")
    kinds: tuple[tuple[Any, type[Other]], ...] = (
        (theirs.PrioritizedSampler, Prioritized),
        (theirs.SliceSamplerWithoutReplacement, TrajectoriesOnce),
        (theirs.SamplerWithoutReplacement, Once),
        (theirs.ConsumingSampler, Consuming),
        (object, Other),
    )
    return {
        name: next(ours for kind, ours in kinds if isinstance(sampler, kind))(parts, name, sampler)
        for name, sampler in parts.samplers.items()
    }


@dataclass(frozen=True)
class Other:
    """A sampler that has nothing to say of single steps."""

    parts: Parts
    name: str
    sampler: Any

    def columns(self, live: Ints) -> dict[str, Any]:
        """One value a live step.  live: cell of each."""
        return {}

    def state(self) -> dict[str, Any]:
        """What it knows beside the columns."""
        return {"class": type(self.sampler).__name__, "dict": state_dict_of(self.sampler, "sampler")}

    def restore(self, placed: Placed) -> list[str]:
        """Give the sampler its state again; what it could not be given, for people."""
        self.sampler._empty()
        if hasattr(self.sampler, "_cache") and "static-stop-and-length" not in self.sampler._cache:
            self.sampler._cache = {}
        return self.refill(placed, placed.own(self.name))

    def refill(self, placed: Placed, own: dict[str, Any]) -> list[str]:
        """The same, of a sampler that is empty.  own: its state where nothing moved."""
        name = type(self.sampler).__name__
        given = [s["dict"] for s in placed.states(self.name) if s["class"] == name and s.get("dict")]
        if own.get("dict") and own["class"] == name:
            load_state(self.sampler, own["dict"])
        elif given and isinstance(self.sampler, module("samplers").StalenessAwareSampler):
            load_state(self.sampler, max(given, key=lambda d: int(d["consumer_version"])))
        elif given:
            return [f"the state of {name} belongs to slots that have moved: it begins anew"]
        return []


class Prioritized(Other):
    """A sampler with trees of priorities: their leaves are what priorities became by alpha and eps."""

    def columns(self, live: Ints) -> dict[str, Any]:
        out = np.zeros(len(live))
        known = np.flatnonzero(live < self._room)
        if len(known):
            leaves = self.sampler._sum_tree[self._index(live[known])]
            out[known] = torch.as_tensor(leaves).cpu().double().numpy().reshape(-1)
        return {"priority": out}

    def state(self) -> dict[str, Any]:
        return _values(self.sampler, "_alpha", "_beta", "_eps", "_max_priority")

    def refill(self, placed: Placed, own: dict[str, Any]) -> list[str]:
        sampler, cells = self.sampler, placed.cells
        known = [s["values"] for s in placed.states(self.name) if "_alpha" in s.get("values", {})]
        sampler._maybe_init_from_storage(self.parts.storage)
        if len(cells) and int(cells.max()) >= self._room:
            raise UsageError(
                f"the sampler has room for {sampler._max_capacity} priorities, the storage for more; make both of one "
                "size"
            )
        mine = own.get("values", {}) if "_alpha" in own.get("values", {}) else None
        for name in ("_alpha", "_beta", "_eps") if known else ():
            setattr(sampler, name, (mine or known[0])[name])
        if "priority" not in placed.columns:
            if len(cells):
                sampler.mark_update(torch.from_numpy(np.ascontiguousarray(cells)), storage=self.parts.storage)
            return ["the checkpoint has no priorities: all steps begin with the default one"]
        self._set_leaves(cells, np.asarray(placed.columns["priority"], np.float64))
        sampler._max_priority = tuple(mine["_max_priority"]) if mine else self._highest(known, placed)
        return []

    @property
    def _room(self) -> int:
        """Leaves that its trees have: the next power of two, as storages of several dimensions round their size up."""
        return 1 << int(self.sampler._max_capacity).bit_length()

    def _index(self, cells: Ints) -> torch.Tensor:
        index: torch.Tensor = torch.from_numpy(np.ascontiguousarray(cells)).to(self.sampler.device)
        return index

    def _set_leaves(self, cells: Ints, values: Any) -> None:
        """Write leaves of both trees; a step that has never had a priority has none in either."""
        known = values > 0
        if known.any():
            dtype = self.sampler.dtype if isinstance(self.sampler.dtype, torch.dtype) else torch.float
            leaf = torch.from_numpy(np.ascontiguousarray(values[known])).to(dtype).to(self.sampler.device)
            at = self._index(cells[known])
            self.sampler._sum_tree[at] = leaf
            self.sampler._min_tree[at] = leaf

    def _highest(self, known: list[Any], placed: Placed) -> tuple[Any, Any]:
        """The maximum of the sources; kept at the cell with the greatest leaf."""
        given = [v["_max_priority"][0] for v in known if v["_max_priority"][0] is not None]
        if not given:
            if known or not len(placed.cells) or not self.sampler._alpha:
                return None, None
            self.sampler._recompute_max_priority_from_tree()
            return tuple(self.sampler._max_priority)
        best = max(given, key=float)
        if not len(placed.cells):
            return best, None
        at = int(placed.cells[int(np.argmax(placed.columns["priority"]))])
        return best, torch.tensor(at, device=self.sampler.device)


class Once(Other):
    """A sampler that draws each step once: a step's place in what remains of its permutation."""

    def columns(self, live: Ints) -> dict[str, Any]:
        if self.sampler._sample_list is None:
            return {"remaining": np.full(len(live), UNKNOWN, np.int64)}
        order, size = self._remaining(self.sampler._sample_list.cpu().numpy())
        places = np.full(max(size, int(live.max(initial=-1)) + 1), USED, np.int64)
        places[order] = np.arange(len(order))
        return {"remaining": places[live]}

    def _remaining(self, order: Ints) -> tuple[Ints, int]:
        """Cells that are yet to be drawn, in order, and how many cells there are at least."""
        return order, self.sampler.len_storage

    def state(self) -> dict[str, Any]:
        values = _values(self.sampler, "len_storage", "drop_last", "_ran_out", "_remaining_batches", "shuffle")
        return values | {"order": None}

    def refill(self, placed: Placed, own: dict[str, Any]) -> list[str]:
        sampler, values = self.sampler, own.get("values", {})
        if "len_storage" in values:
            for name, kind in (
                ("len_storage", int),
                ("_ran_out", bool),
                ("_remaining_batches", int),
                ("drop_last", bool),
            ):
                setattr(sampler, name, kind(values[name]))
            self._set_order(own["order"] if isinstance(self, TrajectoriesOnce) else _ordered(placed))
            return []
        if "remaining" not in placed.columns:
            return ["the checkpoint has no order of what is yet to be drawn: it is drawn anew"]
        order = _ordered(placed)
        order = None if order is None else self._renumbered(order)
        if order is not None and len(order):
            self._set_order(order)
            batch = self.parts.rb._batch_size or 1
            sampler._remaining_batches = len(order) // batch if sampler.drop_last else -(-len(order) // batch)
        return []

    def _renumbered(self, cells: Ints) -> Ints:
        """What the sampler calls these cells."""
        self.sampler.len_storage = len(self.parts.storage)
        return cells

    def _set_order(self, order: Any) -> None:
        device = getattr(self.parts.storage, "device", None)
        where = "cpu" if device in (None, "auto") else device
        self.sampler._sample_list = None if order is None else torch.as_tensor(order).to(where).clone()


class TrajectoriesOnce(Once):
    """The same of trajectories: the sampler numbers them in the order of their first cells."""

    def _remaining(self, order: Ints) -> tuple[Ints, int]:
        starts = self._starts()
        known = self.sampler.len_storage == len(starts)
        return starts[order[order < len(starts)]] if known else order[:0], len(self.parts.storage)

    def state(self) -> dict[str, Any]:
        return super().state() | {"order": self.sampler._sample_list}

    def _renumbered(self, cells: Ints) -> Ints:
        number = {cell: i for i, cell in enumerate(self._starts().tolist())}
        self.sampler.len_storage = self.sampler._storage_len_buffer = len(number)
        return np.array([number[c] for c in cells.tolist() if c in number], np.int64)

    def _starts(self) -> Ints:
        """The first cell of each trajectory."""
        storage = self.parts.storage
        if not len(storage):
            return np.zeros(0, np.int64)
        start, _, _ = self.sampler._get_stop_and_length(storage)
        return np.asarray(np.ravel_multi_index(tuple(start.cpu().numpy().T), tuple(storage.shape)), np.int64)


class Consuming(Other):
    """A sampler that lets go of steps that were drawn often enough: how often each was."""

    def columns(self, live: Ints) -> dict[str, Any]:
        self.sampler._ensure_state(self.parts.storage)
        counts = self.sampler._sample_count
        return {"uses": np.zeros(len(live), np.int64) if counts is None else counts.cpu().numpy()[live]}

    def refill(self, placed: Placed, own: dict[str, Any]) -> list[str]:
        sampler = self.sampler
        if own.get("dict"):
            load_state(sampler, own["dict"])
            return []
        sampler._ensure_state(self.parts.storage)
        if "uses" in placed.columns and len(placed.cells):
            cells = torch.from_numpy(np.ascontiguousarray(placed.cells)).to(sampler._sample_count.device)
            sampler._sample_count[cells] = torch.from_numpy(np.array(placed.columns["uses"])).to(cells.device)
            sampler._live_mask &= sampler._sample_count < sampler.max_sample_count
            sampler._rebuild_free_indices()
        return []


def _values(sampler: Any, *names: str) -> dict[str, Any]:
    return {"class": type(sampler).__name__, "values": {name: getattr(sampler, name) for name in names}}


def _ordered(placed: Placed) -> Ints | None:
    """Cells that are yet to be drawn, in order; those of several sources in turn. None: nothing was drawn yet."""
    places = np.asarray(placed.columns["remaining"])
    if not len(places) or (places == UNKNOWN).all():
        return None
    places = np.where(places == UNKNOWN, np.iinfo(np.int64).max, places)
    left = np.flatnonzero(places >= 0)
    return placed.cells[left[np.argsort(places[left], kind="stable")]]
