"""RLinf's live TrajectoryReplayBuffer: its trajectories into a writer, and a buffer filled again from a share.

Works on `rlinf.data.replay_buffer` and `rlinf.data.storage.replay` alike: it is the same class, moved.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from archive.adapters import UNFINISHED, Item, LiveBuffer, Report, Saved, Tracked, common, kept_items, live
from archive.adapters.rlinf.trajectory import (
    SYSTEM,
    Mark,
    Numbered,
    Trajectories,
    listed_at,
    renumbered,
    to_steps,
    trajectories_of,
    tree_of,
)
from archive.base import IntegrityError, UsageError, Wait
from archive.checkpoint import Pending
from archive.fields import mapped
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Share, ShareBuffer

ON_MISSING = ("error", "skip")
SAVING_S = 30.0  # how long files that RLinf writes in the background are waited for
_PUBLIC = ("_trajectory_index", "_trajectory_id_list", "_trajectory_file_path", "_flat_trajectory_cache")

_tracked: Tracked[dict[int, Item]] = Tracked()


def save(buffers: Any, writer: Writer, *, step: int, on_missing: str = "error", **options: Any) -> Pending:
    """Checkpoint a live TrajectoryReplayBuffer, or several by name; only trajectories not seen before are written.

    on_missing: what becomes of trajectories whose files are gone or damaged: "error", or "skip" to leave them out (in
    the state's list of lost ones).  options: those of `Writer.checkpoint`.
    """
    common.check_option("on_missing", on_missing, ON_MISSING)
    return live.save(_buffers(buffers, on_missing), writer, step, **options)


def follow(buffers: Any, writer: Writer, *, on_missing: str = "error") -> None:
    """Have the journal of a writer (`journal_s=`) keep a live buffer, or several by name, between saves.

    At each tick it takes in the trajectories that are new, those that left, and the state: counter, random generators,
    the slots of the cache. After a crash the checkpoint that is recovered is restored as any other. Call it after
    `restore`, with the writer that resumes, once. From then on the buffer's own verbs that change it take turns with
    the journal.  on_missing: as for `save`.
    """
    common.check_option("on_missing", on_missing, ON_MISSING)
    every = _buffers(buffers, on_missing)
    for one in every.values() if writer.journaled else ():
        _watches.setdefault(one.buffer, _Watch()).over(one.buffer)
    live.follow(lambda: every, writer)


def restore(
    buffers: Any, source: Any, *, rank: int | None = None, existing: str = "error", unfinished: str = "close"
) -> Any:
    """Fill live buffers from a share, or from a checkpoint of a world of the same size; a Report, by name for a dict.

    Files of a buffer with auto_save are written to its folder.  existing: "replace" empties a buffer that holds
    something.  unfinished: as of the other adapters; trajectories are whole, so nothing is left to close.
    """
    common.check_option("unfinished", unfinished, UNFINISHED)
    return common.as_given(buffers, live.restore(_buffers(buffers), source, rank, existing))


def _buffers(buffers: Any, on_missing: str = "error") -> dict[str, RLinfBuffer]:
    return {name: RLinfBuffer(buffer, name, on_missing) for name, buffer in common.several(buffers).items()}


class RLinfBuffer(LiveBuffer):
    """A TrajectoryReplayBuffer of RLinf. Each trajectory is an episode, its number an attribute where it is another one
    than when it was written; all else is state."""

    system = SYSTEM

    def __init__(self, buffer: Any, name: str, on_missing: str) -> None:
        super().__init__(name)
        if not all(hasattr(buffer, name) for name in _PUBLIC):
            raise UsageError(f"a TrajectoryReplayBuffer of RLinf is expected, not {type(buffer).__name__}")
        self.buffer = buffer
        self.on_missing = on_missing

    def still(self) -> AbstractContextManager[Any]:
        watch = _watches.get(self.buffer)
        return nullcontext() if watch is None else watch.lock

    @property
    def held(self) -> int:
        return int(self.buffer.total_samples)

    def append(self, part: Buffer) -> Saved:
        with self.buffer._index_lock:
            numbers, index = list(self.buffer._trajectory_id_list), dict(self.buffer._trajectory_index)
        wait = Wait(SAVING_S, 0.02)

        def add(number: int) -> str | None:
            tree = self._tree(number, index[number], wait)
            return None if tree is None else to_steps(tree, number).add(part)

        found = [(n, Mark(index[n], n)) for n in numbers if n in index and _is_held(self.buffer, n)]
        known = kept_items(part, _tracked.of(self.buffer, part) or {}, found, add)
        _tracked.keep(self.buffer, part, known)
        if watch := _watches.get(self.buffer):
            part.undone(watch.given.update, dict(watch.given))
            watch.given.clear()
        state = _state(self.buffer, numbers, index, known)
        tick = state | {"ids": np.array(list(known), np.int64), "lost": {}}  # those only grow
        tick["live"] = {key: state["live"][key] for key in ("generator", "numpy", "cache")}
        return Saved(attributes=renumbered(known), state=state, tick=tick)

    def _tree(self, number: int, entry: Mapping[str, Any], wait: Wait) -> dict[str, Any] | None:
        """The tree that RLinf would save of a trajectory: from its file, which is whole, else from the cache."""
        buffer, cache, watch = self.buffer, self.buffer._flat_trajectory_cache, _watches.get(self.buffer)
        if watch is not None and number in watch.given:
            return _without_none(tree_of(watch.given[number]))
        try:
            if number in buffer._trajectory_file_path:
                return _without_none(tree_of(_loaded(buffer, number, entry["model_weights_id"], wait)))
        except Exception as e:  # what half a file leads to is torch's to say
            if cache is None or number not in cache.cache:
                if self.on_missing == "skip":
                    return None
                raise IntegrityError(
                    f"trajectory {number} of the replay buffer cannot be read from "
                    f"{buffer._trajectory_file_path[number]} ({e}); put its file back, or save with on_missing='skip'"
                ) from e
        envs = entry["shape"][1]
        tree: dict[str, Any] = {key: entry[key] for key in ("max_episode_length", "model_weights_id")}
        steps: dict[str, Any] = mapped(cache.get(number), lambda rows: rows.reshape(-1, envs, *rows.shape[1:]))
        return tree | steps

    def prepared(self, share: Share, part: ShareBuffer, states: Mapping[int, Any]) -> Trajectories:
        found = trajectories_of(share, self.name, states)
        state, held = dict(found.state), {*found.numbers, *found.state.get("lost", ())}
        if "live" in state and held != {*np.asarray(state["ids"]).tolist()}:  # nothing was left that kept a newer state
            state |= {"lost": {}, "live": {key: state["live"][key] for key in ("generator", "numpy")}}
        return replace(found, state=state)

    def put(self, ready: Trajectories) -> Report:
        with self.still():
            self._empty()
            try:
                kept = fill(self.buffer, ready)
            except BaseException:
                self._empty()  # rather than half of it
                raise
        index = self.buffer._trajectory_index
        known = {one.number: Item(Mark(index[one.number], one.original), one.episode_id) for one in kept}
        _tracked.restored(self.buffer, ready.part, known)
        counts = {"lost_before": len(ready.state.get("lost", ())), "not_in_cache": len(ready.numbers) - len(kept)}
        return Report(len(kept), sum(one.entry["shape"][0] for one in kept), counts)

    def _empty(self) -> None:
        """Make it as it was made: what `clear()` leaves of the window and its version goes, too."""
        self.buffer.clear()
        self.buffer._index_version = 0
        _set_window(self.buffer, None)
        _tracked.forget(self.buffer)


# -- a buffer that others change meanwhile ------------------------------------------------------------------------


class _Watch:
    """RLinf's buffer has no lock for its cache. The verbs of one that is followed take this one, and what was added is
    kept until it is taken in where RLinf, too, writes its file from it later."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.given: dict[int, Any] = {}
        self._watches = False

    def over(self, buffer: Any) -> None:
        if not self._watches:
            self._watches = True
            for name in ("clear", "clear_cache", "load_checkpoint"):
                setattr(buffer, name, partial(self._locked, getattr(buffer, name)))
            buffer.add_trajectories = partial(self._add, buffer, buffer.add_trajectories)

    def _locked(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self.lock:
            self.given.clear()
            return verb(*args, **options)

    def _add(self, buffer: Any, verb: Callable[[Any], Any], trajectories: Any) -> Any:
        with self.lock:
            given, had = list(trajectories or ()), buffer._trajectory_counter
            made = verb(given)
            kept = [one for one in given if one.prev_logprobs is not None or one.rewards is not None]
            if buffer.auto_save and len(kept) == buffer._trajectory_counter - had:
                self.given.update(zip(range(had, had + len(kept)), kept, strict=True))
            return made


_watches: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()


# -- what is in it ------------------------------------------------------------------------------------------------


def _is_held(buffer: Any, number: int) -> bool:
    """True if its data is anywhere: without auto_save only what is in the cache is."""
    cache = buffer._flat_trajectory_cache
    return number in buffer._trajectory_file_path or (cache is not None and number in cache.cache)


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if value is not None}


def _loaded(buffer: Any, number: int, weights: str, wait: Wait) -> Any:
    """Its file, which RLinf may still be writing."""
    pending = buffer.auto_save and buffer._trajectory_file_path[number] == buffer.auto_save_path
    while True:
        try:
            return buffer._load_trajectory(number, weights)
        except Exception:
            if not pending or wait.over:
                raise
            wait.pause()


def _state(buffer: Any, numbers: list[int], index: Mapping[int, Any], held: Mapping[int, Item]) -> dict[str, Any]:
    cache = buffer._flat_trajectory_cache
    window = {
        "size": buffer._window_cache_size,
        "version": buffer._window_cache_version,
        "ids": np.array(buffer._window_cache_ids, np.int64),
        "ends": np.array(buffer._window_cache_cumulative_ends, np.int64),
    }
    slots = (
        None
        if cache is None
        else {
            "max_size": cache.max_size,
            "slot_length": cache._traj_num_samples,
            "last_slot": cache._last_slot,
            "ids": np.array(list(cache.cache), np.int64),
            "slots": np.array(list(cache.cache.values()), np.int64),
            "rows": None if cache._buffer is None else mapped(cache._buffer, lambda t: (t.dtype, tuple(t.shape[1:]))),
        }
    )
    return {
        "system": SYSTEM,
        "seed": buffer.seed,
        "trajectory_format": buffer.trajectory_format,
        "counter": buffer._trajectory_counter,
        "ids": np.array(numbers, np.int64),
        "lost": {n: dict(index[n]) for n in numbers if n in index and n not in held},
        "listed": np.array([n for n in numbers if n in index and isinstance(index[n]["shape"], list)], np.int64),
        "live": {
            "size": buffer.size,
            "total_samples": buffer._total_samples,
            "index_version": buffer._index_version,
            "generator": buffer.random_generator,
            "numpy": np.random.get_state(),
            "window": window,
            "cache": slots,
        },
    }


# -- filled again -------------------------------------------------------------------------------------------------


def fill(buffer: Any, found: Trajectories) -> list[Numbered]:
    """Fill an empty buffer; the trajectories that are in it (without their trees)."""
    cache, state = buffer._flat_trajectory_cache, found.state.get("live")
    slots = None if cache is None or state is None else _restored_cache(cache, state.get("cache"))
    room = 0 if cache is None or slots is not None else cache.max_size
    order = sorted(found.numbers, key=listed_at(found.state))
    newest: dict[int, Any] = dict.fromkeys(order[max(0, len(order) - room) :])
    out = []
    for one in found:
        trajectory = _trajectory_class(buffer)()
        for name, value in one.tree.items():
            setattr(trajectory, name, value)
        if buffer.auto_save:
            buffer._save_trajectory(trajectory, one.number, one.entry["model_weights_id"])
            buffer._trajectory_file_path[one.number] = buffer.auto_save_path
        if slots is not None and one.number in slots:
            value = buffer._flatten_trajectory(trajectory)
            cache._traj_key_lengths[one.number] = cache._get_key_lengths(value)
            cache._insert_into_buffer(value, cache._buffer, slots[one.number] * cache._traj_num_samples)
        elif one.number in newest:
            newest[one.number] = buffer._flatten_trajectory(trajectory)
        out.append(one._replace(tree={}))
    for number, flat in newest.items():
        cache.put(number, flat)
    kept = [one for one in out if _is_held(buffer, one.number)]
    _set_index(buffer, kept, found.state)
    _set_rest(buffer, found, whole=len(kept) == len(out))
    if buffer.auto_save:
        buffer._save_metadata()
        buffer._save_trajectory_index()
    return kept


def _restored_cache(cache: Any, state: Mapping[str, Any] | None) -> dict[int, int] | None:
    """Number -> slot of a cache with its slots as they were, and nothing in them; None if it has another size now."""
    if state is None or state["max_size"] != cache.max_size:
        return None
    cache.clear()
    slots = dict(zip(state["ids"].tolist(), state["slots"].tolist(), strict=True))
    if state["rows"] is not None:
        cache._traj_num_samples = state["slot_length"]
        rows = cache.max_size * state["slot_length"]
        cache._buffer = mapped(state["rows"], lambda row: torch.zeros((rows, *row[1]), dtype=row[0]))
    cache.cache.update(slots)
    cache._slot_to_id.update({slot: number for number, slot in slots.items()})
    cache._last_slot = state["last_slot"]
    return slots


def _trajectory_class(buffer: Any) -> Any:
    """The class of the module that has the buffer's class, wherever this version of RLinf keeps it."""
    modules = (sys.modules[kind.__module__] for kind in type(buffer).__mro__ if kind.__module__ in sys.modules)
    return next(module.Trajectory for module in modules if hasattr(module, "Trajectory"))


def _set_index(buffer: Any, kept: list[Numbered], state: Mapping[str, Any]) -> None:
    entries = {one.number: one.entry for one in kept} | dict(state.get("lost", {}))
    for number in entries.keys() & set(np.asarray(state.get("listed", ())).tolist()):
        entries[number]["shape"] = list(entries[number]["shape"])
    numbers = sorted(entries, key=listed_at(state))
    with buffer._index_lock:
        buffer._trajectory_index = {n: entries[n] for n in numbers}
        buffer._trajectory_id_list = numbers
        buffer.size = len(numbers)
        buffer._total_samples = sum(entries[n]["num_samples"] for n in numbers)
        buffer._trajectory_counter = max(int(state.get("counter", 0)), max(numbers, default=-1) + 1)
        buffer._index_version = 1


def _set_rest(buffer: Any, found: Trajectories, *, whole: bool) -> None:
    """Seed, generators, and of a whole buffer version and window: as they were, else from the share's seed."""
    state = found.state.get("live")
    buffer.seed = found.seed
    if state is None:
        buffer.random_generator = torch.Generator()
        buffer.random_generator.manual_seed(buffer.seed)
        return
    buffer.random_generator = state["generator"]
    np.random.set_state(state["numpy"])
    if whole and "window" in state:
        buffer._index_version = state["index_version"]
        buffer.size, buffer._total_samples = state["size"], state["total_samples"]
        _set_window(buffer, state["window"])


def _set_window(buffer: Any, window: Mapping[str, Any] | None) -> None:
    ids, ends = (window["ids"].tolist(), window["ends"].tolist()) if window else ([], [])
    buffer._window_cache_size = window["size"] if window else None
    buffer._window_cache_version = window["version"] if window else None
    buffer._window_cache_ids, buffer._window_cache_cumulative_ends = ids, ends
    buffer._window_cache_cumulative_ends_tensor = torch.as_tensor(ends, dtype=torch.long) if ends else None
    buffer._window_cache_total_samples = ends[-1] if ends else 0
