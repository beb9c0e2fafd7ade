"""The parts of a replay buffer beside its storage, as columns and state, and back: samplers, a class for each kind
(priorities, remaining permutations, use counts), the writer, random generator, transforms and prefetched batches."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl.items import from_state, to_state
from archive.adapters.torchrl.lists import Cells
from archive.adapters.torchrl.parts import Parts, load_state, module, state_dict_of
from archive.adapters.torchrl.placement import Placement
from archive.adapters.torchrl.tracker import as_path
from archive.arrays import Ints
from archive.base import UsageError
from archive.fields import dtypes, trees

USED, UNKNOWN = -1, -2  # no place in the remaining permutation: drawn already; nothing was drawn yet


def saved_samplers(parts: Parts) -> dict[str, Other]:
    """The samplers of a buffer, by the names that their states have, as what is saved of them."""
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
        """The sampler's state beside the columns."""
        return {"class": type(self.sampler).__name__, "dict": state_dict_of(self.sampler, "sampler")}

    def restore(self, placed: Placement) -> list[str]:
        """Give the sampler its state again; what it could not be given, for people."""
        self.sampler._empty()
        if hasattr(self.sampler, "_cache") and "static-stop-and-length" not in self.sampler._cache:
            self.sampler._cache = {}
        return self.refill(placed, placed.own(self.name))

    def refill(self, placed: Placement, own: dict[str, Any]) -> list[str]:
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

    def refill(self, placed: Placement, own: dict[str, Any]) -> list[str]:
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

    def _highest(self, known: list[Any], placed: Placement) -> tuple[Any, Any]:
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

    def refill(self, placed: Placement, own: dict[str, Any]) -> list[str]:
        sampler, values = self.sampler, own.get("values", {})
        if "len_storage" in values:
            for name, kind in (
                ("len_storage", int),
                ("_ran_out", bool),
                ("_remaining_batches", int),
                ("drop_last", bool),
            ):
                setattr(sampler, name, kind(values[name]))
            self._set_order(own.get("order") if isinstance(self, TrajectoriesOnce) else _ordered(placed))
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
        """The sampler's own numbers of these cells."""
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

    def refill(self, placed: Placement, own: dict[str, Any]) -> list[str]:
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


def _ordered(placed: Placement) -> Ints | None:
    """Cells that are yet to be drawn, in order; those of several sources in turn. None: nothing was drawn yet."""
    places = np.asarray(placed.columns["remaining"])
    if not len(places) or (places == UNKNOWN).all():
        return None
    places = np.where(places == UNKNOWN, np.iinfo(np.int64).max, places)
    left = np.flatnonzero(places >= 0)
    return placed.cells[left[np.argsort(places[left], kind="stable")]]


# -- writers: cursors, counters and the heap of the best items -------------------------------------------------------

_NOT_IN_HEAP = -1


def writer_columns(parts: Parts, live: Ints) -> dict[str, Any]:
    """Rank of each live step in the heap of the best, and its place there."""
    if not parts.max_value:
        return {}
    heap = parts.writer._current_top_values or []
    size = max([len(parts.storage), *(int(slot) + 1 for _, slot in heap)])
    rank, place = np.zeros(size), np.full(size, _NOT_IN_HEAP, np.int64)
    for i, (value, slot) in enumerate(heap):
        rank[int(slot)], place[int(slot)] = float(value), i
    return {"heap_rank": rank[live], "heap_place": place[live]}


def writer_state(parts: Parts) -> dict[str, Any]:
    """The state of the writer beside the columns."""
    writer = parts.writer
    out: dict[str, Any] = {"class": type(writer).__name__}
    if not (parts.round_robin or parts.max_value):
        return out | {"dict": state_dict_of(writer, "writer")}
    out |= {"cursor": int(writer._cursor), "write_count": int(writer._write_count)}
    if parts.round_robin:
        return out | {"generation": writer._generation if writer.tracks_generations else None}
    return out | {"reduction": writer._reduction, "rank_key": list(as_path(writer._rank_key) or ())}


def restore_writer(parts: Parts, cells: Cells, placed: Placement) -> list[str]:
    """Give a writer its state again; what there is to say of that, for people."""
    writer, own = parts.writer, placed.own("writer")
    if not (parts.round_robin or parts.max_value):
        if own.get("class") == type(writer).__name__ and own.get("dict"):
            load_state(writer, own["dict"])
        return []
    rows = placed.rows
    if "cursor" in own:
        writer._cursor, writer._write_count = own["cursor"], own["write_count"]
    else:
        each = placed.width if parts.round_robin else 1
        writer._cursor, writer._write_count = rows % max(1, -(-int(parts.storage.max_size) // each)), rows
    if parts.max_value:
        return _restore_heap(writer, cells, placed)
    if own.get("generation") is not None and writer.tracks_generations:
        writer._generation = own["generation"].clone()
        writer._align_generation_device()
    if "cursor" not in own and rows and hasattr(parts.storage, "_last_cursor"):
        parts.storage._set_last_cursor(rows - 1)
    return []


def _restore_heap(writer: Any, cells: Cells, placed: Placement) -> list[str]:
    notes: list[str] = []
    if "heap_rank" in placed.columns:
        rank, place = placed.columns["heap_rank"], placed.columns["heap_place"]
        held = np.flatnonzero(place != _NOT_IN_HEAP)
        held = held[np.argsort(place[held], kind="stable")]
        heap = [(float(rank[i]), int(placed.cells[i])) for i in held.tolist()]
    else:
        heap = _ranked(writer, cells, placed.cells)
        notes = ["the checkpoint has no heap of ranks: they are taken from the steps"]
    if "rank_key" not in placed.own("writer"):
        heapq.heapify(heap)
    writer._current_top_values = heap
    return notes


def _ranked(writer: Any, cells: Cells, placed: Ints) -> list[tuple[float, int]]:
    """The rank of each step by the writer's own key."""
    key = as_path(writer._rank_key) or ()
    values = cells.flat(key) if len(placed) else np.zeros(0)
    if values is None:
        raise UsageError(
            f"the steps have no field {writer._rank_key!r}, by which the writer ranks them; give it another rank_key"
        )
    reduce = module("utils")._reduce
    out = []
    for cell in placed.tolist():
        value = dtypes.to_torch(np.asarray(values[cell]))
        number = value if value.numel() == 1 else reduce(value.reshape(-1), writer._reduction, dim=0)
        out.append((float(number), cell))
    return out


# -- the rest: random generator, transforms, prefetched batches ------------------------------------------------------


def rest_of(parts: Parts, queue: Sequence[Any], left_out: int = 0) -> dict[str, Any]:
    """The state of all that.  queue: the batches that are ready.  left_out: how many of these are not in it."""
    rb = parts.rb
    return {
        "rng": None if rb._rng is None else {"device": str(rb._rng.device), "state": rb._rng.get_state()},
        "transform": dict(rb._transform.state_dict()) if rb._transform is not None else {},
        "batch_size": rb._batch_size,
        "consume_after_n_samples": rb._consume_after_n_samples,
        "prefetch": {"capacity": int(rb._prefetch_cap), "queue": [to_state(batch) for batch in queue]}
        | ({"left_out": left_out} if left_out else {}),
        "written": int(getattr(rb, "_prioritized_sampler_write_count", 0)),
    }


def restore_rest(parts: Parts, placed: Placement) -> tuple[int, list[str]]:
    """Give a buffer the rest of its state: how many prefetched batches were dropped, and notes for people."""
    rb, own, known = parts.rb, placed.own("extras"), placed.states("extras")
    if own:
        _restore_rng(rb, own.get("rng"))
        rb._batch_size, rb._consume_after_n_samples = own["batch_size"], own["consume_after_n_samples"]
        dropped = _restore_queue(rb, own["prefetch"]["queue"]) + own["prefetch"].get("left_out", 0)
    else:
        _new_rng(rb, known, placed.share.seed, parts.name)
        rb._batch_size = rb._batch_size if rb._batch_size or not known else known[0]["batch_size"]
        dropped = sum(len(s["prefetch"]["queue"]) + s["prefetch"].get("left_out", 0) for s in known)
    notes = _restore_transform(rb, own, known)
    if "prioritized_sampler" in parts.samplers:
        rb._prioritized_sampler_write_count = own.get("written", int(rb.write_count))
    return dropped, notes


def _restore_rng(rb: Any, saved: Any) -> None:
    if saved is None:
        return
    if rb._rng is None or str(rb._rng.device) != saved["device"]:
        rb.set_rng(torch.Generator(device=saved["device"]))
    rb._rng.set_state(saved["state"])


def _new_rng(rb: Any, known: Sequence[Any], seed: int, name: str) -> None:
    """A seed of its own for each buffer on each rank; buffers without a generator keep to the process's."""
    if rb._rng is None and not any(s.get("rng") for s in known):
        return
    if rb._rng is None:
        rb.set_rng(torch.Generator())
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rb._rng.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _restore_transform(rb: Any, own: Any, known: Sequence[Any]) -> list[str]:
    state: Any = next((s.get("transform", {}) for s in ([own] if own else known)), {})
    if not state:
        return []
    if rb._transform is None or not rb._transform.state_dict():
        return ["the saved transforms have state, this buffer's have none: it is not used"]
    load_state(rb._transform, state)
    if not own and len({_fingerprint(s.get("transform", {})) for s in known}) > 1:
        return ["the transforms of the source ranks differ in state: that of the first rank is used"]
    return []


def _fingerprint(state: Any) -> str:
    skeleton, arrays = trees.flatten(state)
    digest = hashlib.sha256(repr(skeleton).encode())
    for key in sorted(arrays):
        digest.update(arrays[key].tobytes())
    return digest.hexdigest()


def _restore_queue(rb: Any, queue: Sequence[Any]) -> int:
    """Put the batches back that were drawn ahead; how many there is no room for."""
    known = all("kind" in batch for batch in queue)
    fitting = queue if known and rb._prefetch and len(queue) <= rb._prefetch_cap else []
    for batch in fitting:
        future: Future[Any] = Future()
        future.set_result(from_state(batch))
        rb._prefetch_queue.append(future)
    return len(queue) - len(fitting)
