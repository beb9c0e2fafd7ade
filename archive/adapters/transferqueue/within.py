"""What is done within the controller's process, by its own thread of requests: no other request comes in between.

TransferQueue's requests for checkpoints name a path. A path that is a token of ours stands for a state in memory
instead; any other goes on to TransferQueue, so that its own checkpoints work as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Within(NamedTuple):
    """Functions of a controller."""

    begin: Callable[[Any, str, Any], None]  # token, state to load (None: to be saved)
    end: Callable[[Any, str], Any]  # token; the state that was saved
    grow: Callable[[Any], None]


def functions() -> Within:
    """Functions in a function, so that Ray sends their code: the controller's host needs no archive installed."""

    def taken(controller: Any) -> Any:
        import copy

        manager = controller.index_manager
        names = ("partition_to_indexes", "reusable_indexes", "global_index_counter", "allocated_indexes")
        return {
            "partitions": {name: partition.to_snapshot() for name, partition in controller.partitions.items()},
            "index_manager": {name: copy.deepcopy(getattr(manager, name)) for name in names},
            "sampler": copy.deepcopy(controller.sampler.save_checkpoint()),
            "sampler_class": type(controller.sampler).__name__,
        }

    def put(controller: Any, state: Any) -> None:
        from collections import defaultdict

        controller.sampler.load_checkpoint(state["sampler"])  # first: it is the one that may refuse
        for name, value in state["index_manager"].items():
            setattr(controller.index_manager, name, value)
        controller.index_manager.partition_to_indexes = defaultdict(set, state["index_manager"]["partition_to_indexes"])
        controller.partitions = state["partitions"]

    def listen(controller: Any) -> dict[str, Any]:
        states: dict[str, Any] = {}
        save, load = controller.save_checkpoint, controller.load_checkpoint

        def on_save(path: str) -> None:
            if path not in states:
                save(path)
            else:
                states[path] = taken(controller)

        def on_load(path: str) -> None:
            if path not in states:
                load(path)
            else:
                put(controller, states[path])

        controller.save_checkpoint, controller.load_checkpoint = on_save, on_load
        return states

    def begin(controller: Any, token: str, state: Any) -> None:
        if not hasattr(controller, "archive_states"):
            controller.archive_states = listen(controller)
        controller.archive_states[token] = state

    def end(controller: Any, token: str) -> Any:
        return controller.archive_states.pop(token, None)

    def grow(controller: Any) -> None:
        for name, partition in controller.partitions.items():
            known = {*partition.global_indexes, *controller.index_manager.get_indexes_for_partition(name)}
            partition.ensure_samples_capacity(max(known, default=-1) + 1)

    return Within(begin, end, grow)
