"""Live replay buffers as their parts: storage, writer, samplers; held still while they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from archive.adapters import common
from archive.base import MissingPackageError, StateError, UsageError

INSTALL = "'torchrl>=0.14' tensordict"
# of a buffer, to hold it still and take it apart; releases before 0.14 lack some
NEEDED = (
    "synchronize",
    "empty",
    "_capture_prefetch_state",
    "_clear_prefetch_queue_locked",
    "_futures_lock",
    "_replay_lock",
    "_write_lock",
    "_sampler",
    "_storage",
    "_writer",
    "_batch_size",
)


def module(name: str = "") -> Any:
    """A module of torchrl.data.replay_buffers (or that package), or what to install."""
    return common.system(f"torchrl.data.replay_buffers{'.' + name if name else ''}", INSTALL)


@dataclass(frozen=True)
class Parts:
    """One replay buffer. `samplers`: the one it draws with, and where it has one, the one that owns the priorities."""

    rb: Any
    storage: Any
    writer: Any
    samplers: dict[str, Any]
    name: str

    @property
    def round_robin(self) -> bool:
        return isinstance(self.writer, module("writers").RoundRobinWriter)

    @property
    def max_value(self) -> bool:
        return isinstance(self.writer, module("writers").TensorDictMaxValueWriter)


def parts_of(rb: Any, name: str) -> Parts:
    """The parts of a buffer; what can't be taken apart is refused."""
    replay = module("replay_buffers")
    if isinstance(rb, replay.ReplayBufferEnsemble):
        raise UsageError(
            f"buffer {name!r} is an ensemble: give its members by name, as in {{'{name}-0': rb[0], '{name}-1': rb[1]}}"
        )
    if not isinstance(rb, replay.ReplayBuffer):
        raise UsageError(
            f"buffer {name!r} is a {type(rb).__name__}; give a ReplayBuffer of this process (of a remote one, "
            "the process that owns it saves)"
        )
    if not getattr(rb, "initialized", True):
        rb._init()
    if lacking := [one for one in NEEDED if not hasattr(rb, one)]:
        raise MissingPackageError(
            f"buffer {name!r} is a {type(rb).__name__} of torchrl {version('torchrl')}, which has no "
            f"{', '.join(lacking)}: pip install {INSTALL} (tested: 0.14.0 and 0.14.1)"
        )
    samplers = {"sampler": rb._sampler}
    owner = getattr(rb, "_prioritized_sampler", None)
    if owner is not None:
        samplers["prioritized_sampler"] = owner
    parts = Parts(rb, rb._storage, rb._writer, samplers, name)
    storage, storages = parts.storage, module("storages")
    if not isinstance(storage, storages.TensorStorage | storages.ListStorage):
        raise UsageError(
            f"buffer {name!r} has a {type(storage).__name__}; tensor storages (lazy or memory-mapped) and lists are "
            "saved, others keep their data elsewhere"
        )
    if getattr(storage, "shared_init", False) and not storage.initialized and storage._init_event.is_set():
        storage._wait_for_init()  # takes up the memory that another process has made for it
    return parts


def state_dict_of(owner: Any, what: str) -> dict[str, Any]:
    """The state of a part of a buffer, by its own `state_dict()`."""
    try:
        return dict(owner.state_dict())
    except NotImplementedError as e:
        raise UsageError(f"the {what} {type(owner).__name__} has no state_dict(), so its state cannot be saved") from e


def load_state(owner: Any, state: Any) -> None:
    """Give a part of a buffer the state that one like it had."""
    try:
        owner.load_state_dict(state)
    except (RuntimeError, KeyError, TypeError, ValueError) as e:
        raise StateError(
            f"the saved state does not fit the buffer's {type(owner).__name__}: {e}; give a buffer that is made alike"
        ) from e


@contextmanager
def held(rb: Any) -> Iterator[Sequence[Any]]:
    """Nobody writes, samples or prefetches meanwhile; what the prefetch queue holds."""
    with rb._capture_prefetch_state(clone_queue=False) as state, rb._write_lock:
        yield state["queue"]
