"""RLinf's live TrajectoryReplayBuffer: its trajectories into a writer, and a buffer filled again from a share.

Works on `rlinf.data.replay_buffer` and `rlinf.data.storage.replay` alike: it is the same class, moved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from archive.adapters import Saved
from archive.adapters.rlinf.numbers import NUMBER, SYSTEM, Numbered, Trajectories, listed_at
from archive.adapters.rlinf.trajectory import to_steps, tree_of
from archive.base import IntegrityError, UsageError, Wait
from archive.fields import mapped

if TYPE_CHECKING:
    from archive.write import Buffer


def cache_state(cache: Any) -> dict[str, Any] | None:
    """Which trajectory is in which slot, and what the slots are made of; not what they hold."""
    if cache is None:
        return None
    return {
        "max_size": cache.max_size,
        "slot_length": cache._traj_num_samples,
        "last_slot": cache._last_slot,
        "ids": np.array(list(cache.cache), np.int64),
        "slots": np.array(list(cache.cache.values()), np.int64),
        "rows": None if cache._buffer is None else mapped(cache._buffer, lambda t: (t.dtype, tuple(t.shape[1:]))),
    }


@dataclass
class ExactCache:
    """A cache with its slots as they were, waiting for what they hold."""

    cache: Any
    slots: Mapping[int, int]

    def put(self, number: int, trajectory: Any, flatten: Callable[[Any], dict[str, Any]]) -> None:
        """Fill the slot of a trajectory, if it has one."""
        if number not in self.slots:
            return
        value = flatten(trajectory)
        self.cache._traj_key_lengths[number] = self.cache._get_key_lengths(value)
        self.cache._insert_into_buffer(value, self.cache._buffer, self.slots[number] * self.cache._traj_num_samples)


def restore_cache(cache: Any, state: Mapping[str, Any] | None) -> ExactCache | None:
    """The cache's slots as they were; None if it is of another size now."""
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
    return ExactCache(cache, slots)


SAVING_S = 30.0  # how long files that RLinf writes in the background are waited for
_PUBLIC = ("_trajectory_index", "_trajectory_id_list", "_trajectory_file_path", "_flat_trajectory_cache")


class _Seen(NamedTuple):
    """A trajectory that is in an archive."""

    entry: Any  # of the buffer's index: another object where the number was given anew
    archive_id: str
    episode_id: str
    original: int | None


_seen: WeakKeyDictionary[Any, dict[int, _Seen]] = WeakKeyDictionary()


def check_buffer(buffer: Any) -> None:
    """Refuse what is not RLinf's buffer."""
    if not all(hasattr(buffer, name) for name in _PUBLIC):
        raise UsageError(f"a TrajectoryReplayBuffer of RLinf is expected, not {type(buffer).__name__}")


def collect(buffer: Any, archive_id: str, on_missing: str, part: Buffer) -> Saved:
    """Add to a writer's buffer the trajectories that it has not seen, and take out of it what left RLinf's."""
    with buffer._index_lock:
        numbers, index = list(buffer._trajectory_id_list), dict(buffer._trajectory_index)
    seen, live = _seen.setdefault(buffer, {}), set(part.live["episode_id"].to_pylist())
    wait = Wait(SAVING_S, 0.02)
    held: dict[int, _Seen] = {}
    for number in numbers:
        entry, known = index.get(number), seen.get(number)
        if entry is None or not _is_held(buffer, number):
            continue
        if known and known.entry is entry and known.archive_id == archive_id and known.episode_id in live:
            held[number] = known
        elif (tree := _tree(buffer, number, entry, wait, on_missing)) is not None:
            known = _Seen(entry, archive_id, to_steps(tree, number).add(part), number)
            held[number] = seen[number] = known
    part.remove(live - {known.episode_id for known in held.values()})
    _seen[buffer] = held
    renumbered = {known.episode_id: number for number, known in held.items() if known.original != number}
    return Saved(attributes={NUMBER: renumbered} if renumbered else {}, state=_state(buffer, numbers, index, held))


def remember(buffer: Any, archive_id: str, restored: Iterable[Numbered]) -> None:
    """What a buffer was restored from is in that archive."""
    _seen[buffer] = {
        one.number: _Seen(buffer._trajectory_index[one.number], archive_id, one.episode_id, one.original)
        for one in restored
    }


def empty(buffer: Any) -> None:
    """As it was made: what `clear()` leaves of the window and its version is taken back, too."""
    buffer.clear()
    buffer._index_version = 0
    _set_window(buffer, None)
    _seen.pop(buffer, None)


def fill(buffer: Any, found: Trajectories) -> list[Numbered]:
    """Fill an empty buffer; the trajectories that are in it (without their trees)."""
    live = found.state.get("live")
    cache = buffer._flat_trajectory_cache
    exact = restore_cache(cache, live["cache"]) if live and cache is not None else None
    room = 0 if cache is None or exact is not None else cache.max_size
    order = sorted(found.numbers, key=listed_at(found.state))
    newest: dict[int, Any] = dict.fromkeys(order[max(0, len(order) - room) :])
    out = []
    for one in found:
        trajectory = _trajectory(buffer, one.tree)
        if buffer.auto_save:
            buffer._save_trajectory(trajectory, one.number, one.entry["model_weights_id"])
            buffer._trajectory_file_path[one.number] = buffer.auto_save_path
        if exact is not None:
            exact.put(one.number, trajectory, buffer._flatten_trajectory)
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


def _trajectory(buffer: Any, tree: Mapping[str, Any]) -> Any:
    made = _trajectory_class(buffer)()
    for name, value in tree.items():
        setattr(made, name, value)
    return made


def _trajectory_class(buffer: Any) -> Any:
    """That of the module that has the buffer's class, wherever this version of RLinf keeps it."""
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
        buffer._trajectory_counter = int(state.get("counter", max(numbers, default=-1) + 1))
        buffer._index_version = 1


def _set_rest(buffer: Any, found: Trajectories, *, whole: bool) -> None:
    """Seed, generators, and of a whole buffer version and window: as they were, else from the share's seed."""
    live = found.state.get("live")
    buffer.seed = found.seed
    if live is None:
        buffer.random_generator = torch.Generator()
        buffer.random_generator.manual_seed(buffer.seed)
        return
    buffer.random_generator = live["generator"]
    np.random.set_state(live["numpy"])
    if not whole:
        return
    buffer._index_version = live["index_version"]
    buffer.size, buffer._total_samples = live["size"], live["total_samples"]
    _set_window(buffer, live["window"])


def _set_window(buffer: Any, window: Mapping[str, Any] | None) -> None:
    ids, ends = (window["ids"].tolist(), window["ends"].tolist()) if window else ([], [])
    buffer._window_cache_size = window["size"] if window else None
    buffer._window_cache_version = window["version"] if window else None
    buffer._window_cache_ids, buffer._window_cache_cumulative_ends = ids, ends
    buffer._window_cache_cumulative_ends_tensor = torch.as_tensor(ends, dtype=torch.long) if ends else None
    buffer._window_cache_total_samples = ends[-1] if ends else 0


def _state(buffer: Any, numbers: list[int], index: Mapping[int, Any], held: Mapping[int, _Seen]) -> dict[str, Any]:
    live = {
        "size": buffer.size, "total_samples": buffer._total_samples, "index_version": buffer._index_version,
        "generator": buffer.random_generator, "numpy": np.random.get_state(),
        "window": {
            "size": buffer._window_cache_size, "version": buffer._window_cache_version,
            "ids": np.array(buffer._window_cache_ids, np.int64),
            "ends": np.array(buffer._window_cache_cumulative_ends, np.int64),
        },
        "cache": cache_state(buffer._flat_trajectory_cache),
    }  # fmt: skip
    return {
        "system": SYSTEM,
        "seed": buffer.seed,
        "trajectory_format": buffer.trajectory_format,
        "counter": buffer._trajectory_counter,
        "ids": np.array(numbers, np.int64),
        "lost": {n: dict(index[n]) for n in numbers if n in index and n not in held},
        "listed": np.array([n for n in numbers if n in index and isinstance(index[n]["shape"], list)], np.int64),
        "live": live,
    }


def _is_held(buffer: Any, number: int) -> bool:
    """Whether its data is anywhere: without auto_save only what is in the cache is."""
    cache = buffer._flat_trajectory_cache
    return number in buffer._trajectory_file_path or (cache is not None and number in cache.cache)


def _tree(buffer: Any, number: int, entry: Mapping[str, Any], wait: Wait, on_missing: str) -> dict[str, Any] | None:
    """What RLinf would save of a trajectory: from its file, which is whole, else from the cache."""
    try:
        if number in buffer._trajectory_file_path:
            tree = tree_of(_loaded(buffer, number, entry["model_weights_id"], wait))
            return {key: value for key, value in tree.items() if value is not None}
    except Exception as e:  # what half a file leads to is torch's to say
        if buffer._flat_trajectory_cache is None or number not in buffer._flat_trajectory_cache.cache:
            if on_missing == "skip":
                return None
            raise IntegrityError(
                f"trajectory {number} of the replay buffer cannot be read from {buffer._trajectory_file_path[number]} "
                f"({e}); put its file back, or save with on_missing='skip'"
            ) from e
    return _from_cache(buffer, number, entry)


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


def _from_cache(buffer: Any, number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    flat, envs = buffer._flat_trajectory_cache.get(number), entry["shape"][1]
    tree = {key: entry[key] for key in ("max_episode_length", "model_weights_id")}
    steps: dict[str, Any] = mapped(flat, lambda rows: rows.reshape(-1, envs, *rows.shape[1:]))
    return tree | steps
