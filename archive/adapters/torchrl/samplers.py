"""Samplers: priorities, remaining permutations and use counts as columns, what else they know as state; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl.parts import Parts, load_state, module
from archive.arrays import Ints
from archive.base import UsageError

USED, UNKNOWN = -1, -2  # no place in the remaining permutation: drawn already; nothing was drawn yet
Columns = dict[str, Any]


@dataclass(frozen=True)
class Placed:
    """Where restored steps lie: cell of each, in the order of the columns."""

    cells: Ints
    columns: Mapping[str, Any]
    rows: int
    inner: int  # cells a row


def _kinds() -> Any:
    return module("samplers")


def is_prioritized(sampler: Any) -> bool:
    return isinstance(sampler, _kinds().PrioritizedSampler)


# -- saving -----------------------------------------------------------------------------------------------------


def columns_of(parts: Parts, live: Ints) -> Columns:
    """One value a live step; live: cell of each."""
    out: Columns = {}
    for sampler in parts.samplers.values():
        if is_prioritized(sampler):
            out["priority"] = leaves(sampler, live)
        elif isinstance(sampler, _kinds().SamplerWithoutReplacement):
            out["remaining"] = _remaining(sampler, parts, live)
        elif isinstance(sampler, _kinds().ConsumingSampler):
            out["uses"] = _uses(sampler, parts, live)
    return out


def leaves(sampler: Any, cells: Ints) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The leaves of the sum tree: what priorities became by alpha and eps."""
    out = np.zeros(len(cells))
    known = np.flatnonzero(cells < _room(sampler))
    if len(known):
        index = torch.from_numpy(cells[known]).to(sampler.device)
        out[known] = torch.as_tensor(sampler._sum_tree[index]).cpu().double().numpy().reshape(-1)
    return out


def _room(sampler: Any) -> int:
    """Leaves that its trees have: the next power of two, as storages of several dimensions round their size up."""
    return 1 << int(sampler._max_capacity).bit_length()


def _remaining(sampler: Any, parts: Parts, live: Ints) -> Ints:
    order = sampler._sample_list
    if order is None:
        return np.full(len(live), UNKNOWN, np.int64)
    order = order.cpu().numpy()
    if by_trajectory(sampler):
        starts, size = _starts(sampler, parts.storage), len(parts.storage)
        order = starts[order[order < len(starts)]] if sampler.len_storage == len(starts) else order[:0]
    else:
        size = max(sampler.len_storage, int(live.max(initial=-1)) + 1)
    places = np.full(max(size, int(live.max(initial=-1)) + 1), USED, np.int64)
    places[order] = np.arange(len(order))
    return places[live]


def by_trajectory(sampler: Any) -> bool:
    """Whether it deals out trajectories rather than steps."""
    return isinstance(sampler, _kinds().SliceSamplerWithoutReplacement)


def _starts(sampler: Any, storage: Any) -> Ints:
    """The first cell of each trajectory, as the sampler numbers them."""
    if not len(storage):
        return np.zeros(0, np.int64)
    start, _, _ = sampler._get_stop_and_length(storage)
    shape = tuple(storage.shape)
    return np.asarray(np.ravel_multi_index(tuple(start.cpu().numpy().T), shape), np.int64)


def _uses(sampler: Any, parts: Parts, live: Ints) -> Ints:
    sampler._ensure_state(parts.storage)
    counts = sampler._sample_count
    return np.zeros(len(live), np.int64) if counts is None else counts.cpu().numpy()[live]


def state_of(sampler: Any, parts: Parts) -> dict[str, Any]:
    """What a sampler knows beside the columns."""
    out: dict[str, Any] = {"class": type(sampler).__name__}
    if is_prioritized(sampler):
        out["values"] = {n: getattr(sampler, n) for n in ("_alpha", "_beta", "_eps", "_max_priority")}
    elif isinstance(sampler, _kinds().SamplerWithoutReplacement):
        names = ("len_storage", "drop_last", "_ran_out", "_remaining_batches", "shuffle")
        out["values"] = {n: getattr(sampler, n) for n in names}
        out["order"] = sampler._sample_list if by_trajectory(sampler) else None
    else:
        out["dict"] = _plain_state(sampler)
    return out


def _plain_state(sampler: Any) -> dict[str, Any]:
    try:
        return dict(sampler.state_dict())
    except NotImplementedError as e:
        raise UsageError(
            f"the sampler {type(sampler).__name__} has no state_dict(), so its state cannot be saved"
        ) from e


# -- restoring --------------------------------------------------------------------------------------------------


def restore(parts: Parts, sampler: Any, states: Mapping[int, Any], own: Any, placed: Placed) -> list[str]:
    """Give a sampler its state again; what it could not be given, for people.

    states: by source rank.  own: its state where nothing moved, else None.
    """
    sampler._empty()
    if hasattr(sampler, "_cache") and "static-stop-and-length" not in sampler._cache:
        sampler._cache = {}
    if is_prioritized(sampler):
        return _restore_priorities(parts, sampler, states, own, placed)
    if isinstance(sampler, _kinds().SamplerWithoutReplacement):
        return _restore_remaining(parts, sampler, states, own, placed)
    if isinstance(sampler, _kinds().ConsumingSampler):
        return _restore_uses(parts, sampler, own, placed)
    return _restore_plain(sampler, states, own)


def _restore_priorities(parts: Parts, sampler: Any, states: Mapping[int, Any], own: Any, placed: Placed) -> list[str]:
    known = [s["values"] for s in states.values() if s and "_alpha" in s.get("values", {})]
    sampler._maybe_init_from_storage(parts.storage)
    if len(placed.cells) and int(placed.cells.max()) >= _room(sampler):
        raise UsageError(
            f"the sampler has room for {sampler._max_capacity} priorities, the storage for more; make both of one size"
        )
    if known:
        values = own["values"] if own and "_alpha" in own.get("values", {}) else known[0]
        sampler._alpha, sampler._beta, sampler._eps = values["_alpha"], values["_beta"], values["_eps"]
    if "priority" not in placed.columns:
        if len(placed.cells):
            sampler.mark_update(torch.from_numpy(np.ascontiguousarray(placed.cells)), storage=parts.storage)
        return ["the checkpoint has no priorities: all steps begin with the default one"]
    set_leaves(sampler, placed.cells, np.asarray(placed.columns["priority"], np.float64))
    if own and known:
        sampler._max_priority = tuple(own["values"]["_max_priority"])
    else:
        sampler._max_priority = _highest(sampler, known, placed)
    return []


def set_leaves(sampler: Any, cells: Ints, values: Any) -> None:
    """Write leaves of both trees."""
    if not len(cells):
        return
    index = torch.from_numpy(np.ascontiguousarray(cells)).to(sampler.device)
    known = values > 0  # a step that has never had a priority has none in either tree
    dtype = sampler.dtype if isinstance(sampler.dtype, torch.dtype) else torch.float
    leaf = torch.from_numpy(np.ascontiguousarray(values[known])).to(dtype).to(sampler.device)
    if len(leaf):
        at = index[torch.from_numpy(np.asarray(known)).to(index.device)]
        sampler._sum_tree[at] = leaf
        sampler._min_tree[at] = leaf


def _highest(sampler: Any, known: Sequence[Any], placed: Placed) -> tuple[Any, Any]:
    """The maximum of the sources; kept at the cell with the greatest leaf."""
    given = [v["_max_priority"][0] for v in known if v["_max_priority"][0] is not None]
    if not given:
        if known or not len(placed.cells) or not sampler._alpha:
            return None, None
        sampler._recompute_max_priority_from_tree()
        return tuple(sampler._max_priority)
    best = max(given, key=float)
    if not len(placed.cells):
        return best, None
    at = int(placed.cells[int(np.argmax(placed.columns["priority"]))])
    return best, torch.tensor(at, device=sampler.device)


def _restore_remaining(parts: Parts, sampler: Any, states: Mapping[int, Any], own: Any, placed: Placed) -> list[str]:
    values = (own or {}).get("values", {})
    if own and "len_storage" in values:
        sampler.len_storage, sampler._ran_out = int(values["len_storage"]), bool(values["_ran_out"])
        sampler._remaining_batches, sampler.drop_last = int(values["_remaining_batches"]), bool(values["drop_last"])
        order = own["order"] if by_trajectory(sampler) else _ordered(placed)
        sampler._sample_list = None if order is None else torch.as_tensor(order).to(_device(parts)).clone()
        return []
    if "remaining" not in placed.columns:
        return ["the checkpoint has no order of what is yet to be drawn: it is drawn anew"]
    order = _ordered(placed)
    if order is not None and by_trajectory(sampler):
        starts = _starts(sampler, parts.storage)
        number = {int(cell): i for i, cell in enumerate(starts.tolist())}
        order = np.array([number[c] for c in order.tolist() if c in number], np.int64)
        sampler.len_storage = sampler._storage_len_buffer = len(starts)
    elif order is not None:
        sampler.len_storage = len(parts.storage)
    if order is not None and len(order):
        sampler._sample_list = torch.from_numpy(order).to(_device(parts))
        batch = parts.rb._batch_size or 1
        whole = len(order) // batch
        sampler._remaining_batches = whole if sampler.drop_last else -(-len(order) // batch)
    return []


def _ordered(placed: Placed) -> Ints | None:
    """Cells that are yet to be drawn, in order; those of several sources in turn. None: nothing was drawn yet."""
    places = np.asarray(placed.columns["remaining"])
    if not len(places) or (places == UNKNOWN).all():
        return None
    places = np.where(places == UNKNOWN, np.iinfo(np.int64).max, places)
    left = np.flatnonzero(places >= 0)
    return placed.cells[left[np.argsort(places[left], kind="stable")]]


def _device(parts: Parts) -> Any:
    device = getattr(parts.storage, "device", None)
    return "cpu" if device in (None, "auto") else device


def _restore_uses(parts: Parts, sampler: Any, own: Any, placed: Placed) -> list[str]:
    if own and own.get("dict"):
        load_state(sampler, own["dict"])
        return []
    sampler._ensure_state(parts.storage)
    if "uses" not in placed.columns or not len(placed.cells):
        return []
    cells = torch.from_numpy(np.ascontiguousarray(placed.cells)).to(sampler._sample_count.device)
    sampler._sample_count[cells] = torch.from_numpy(np.array(placed.columns["uses"])).to(cells.device)
    sampler._live_mask &= sampler._sample_count < sampler.max_sample_count
    sampler._rebuild_free_indices()
    return []


def _restore_plain(sampler: Any, states: Mapping[int, Any], own: Any) -> list[str]:
    if own and own.get("dict") and own["class"] == type(sampler).__name__:
        load_state(sampler, own["dict"])
        return []
    given = [s["dict"] for s in states.values() if s and s["class"] == type(sampler).__name__ and s.get("dict")]
    if not given:
        return []
    if isinstance(sampler, _kinds().StalenessAwareSampler):
        load_state(sampler, max(given, key=lambda d: int(d["consumer_version"])))
        return []
    return [f"the state of {type(sampler).__name__} belongs to slots that have moved: it begins anew"]
