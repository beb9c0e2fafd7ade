"""XTuner's objects told to say what they do: each verb that matters is wrapped on its object, and does what it did.

| verb of XTuner | what it says |
|---|---|
| `Sampler.sample_from_dataloader` | a prompt was drawn |
| `agent_loop.generate_group`, `generate_sample` | rollouts are under way, are there, or failed |
| `produce_strategy.is_valid_sample_fn` | a group was filtered out |
| `storage.put`, `update`, `delete` | a group came, expired, was taken |
| `ReplayBuffer.put` | a group was too old to be kept |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from archive.adapters.xtuner import groups
from archive.adapters.xtuner import manager as managers
from archive.adapters.xtuner import storage as storages
from archive.adapters.xtuner.prompts import EXPIRED
from archive.adapters.xtuner.watching import Watch

FAILED, FILTERED = "failed", "filtered"


class Hooks:
    """The wrapped verbs of one replay buffer and its manager."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._undo: list[Callable[[], None]] = []

    def wrap(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of this object alone."""
        own = vars(target)
        before = own.get(name)
        had = name in own
        object.__setattr__(target, name, value)  # task runners are frozen
        undo = (lambda: object.__setattr__(target, name, before)) if had else lambda: object.__delattr__(target, name)
        self._undo.append(undo)

    def undo(self) -> None:
        """All verbs are XTuner's own again."""
        while self._undo:
            self._undo.pop()()


_hooks: weakref.WeakKeyDictionary[Any, Hooks] = weakref.WeakKeyDictionary()


def watch_of(buffer: Any) -> Watch | None:
    """Who watches a replay buffer, if somebody does."""
    found = _hooks.get(buffer)
    return None if found is None else found.watch


def detach(buffer: Any) -> None:
    """Watch it no longer."""
    found = _hooks.pop(buffer, None)
    if found is not None:
        found.undo()


def attach(target: Any, watch: Watch) -> None:
    """Watch a manager, or a replay buffer."""
    buffer = managers.buffer_of(target)
    detach(buffer)
    hooks = _hooks[buffer] = Hooks(watch)
    _wrap_storage(hooks, storages.storage_of(buffer), target)
    _wrap_put(hooks, buffer)
    for runner in target.task_runners if managers.is_manager(target) else ():
        _wrap_sampler(hooks, target, runner)
        _wrap_strategy(hooks, runner)
        if getattr(runner, "agent_loop", None) is not None:
            _wrap_loop(hooks, runner)


def _wrap_storage(hooks: Hooks, storage: Any, target: Any) -> None:
    put, update, delete, watch = storage.put, storage.update, storage.delete, hooks.watch

    async def watched_put(item: Any) -> Any:
        uid = await put(item)
        watch.put(item, int(uid))
        return uid

    async def watched_update(items: Any) -> Any:
        result = await update(items)
        for item in items:
            watch.changed(item)
        return result

    async def watched_delete(uids: Any) -> Any:
        watch.left(uids, managers.train_step(target))
        return await delete(uids)

    hooks.wrap(storage, "put", watched_put)
    hooks.wrap(storage, "update", watched_update)
    hooks.wrap(storage, "delete", watched_delete)


def _wrap_put(hooks: Hooks, buffer: Any) -> None:
    put, watch = buffer.put, hooks.watch

    async def watched_put(group: Any, *args: Any, **options: Any) -> Any:
        result = await put(group, *args, **options)
        if id(group) in watch.arrived:
            watch.arrived.discard(id(group))
        elif group:
            watch.dropped(group, EXPIRED)
        return result

    hooks.wrap(buffer, "put", watched_put)


def _wrap_sampler(hooks: Hooks, manager: Any, runner: Any) -> None:
    sampler, watch = runner.sampler, hooks.watch
    draw, sample = sampler.sample_from_dataloader, sampler.sample
    retry = watch.status(managers.RETRY)

    def watched_draw(*args: Any, **options: Any) -> Any:
        group = draw(*args, **options)
        watch.drawn(group, runner.task_name, managers.samplers_state(manager))
        return group

    async def watched_sample(task_name: str, *args: Any, **options: Any) -> Any:
        again = watch.lost(task_name)
        if again is None and retry not in _statuses(args, options):  # synchronous strategies never ask for these
            taken = await manager.replay_buffer.get(1, task_name=task_name, group_status=retry)
            again = taken[0] if taken else None
        return await sample(task_name, *args, **options) if again is None else again

    hooks.wrap(sampler, "sample_from_dataloader", watched_draw)
    hooks.wrap(sampler, "sample", watched_sample)


def _statuses(args: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
    return (args[0] if args else options.get("group_status")) or ()


def _wrap_strategy(hooks: Hooks, runner: Any) -> None:
    strategy, watch = runner.produce_strategy, hooks.watch
    is_valid = getattr(strategy, "is_valid_sample_fn", None)
    if is_valid is None:
        return

    def watched(group: Any, *args: Any, **options: Any) -> Any:
        answer = is_valid(group, *args, **options)
        if not answer:
            watch.dropped(group, FILTERED)
        return answer

    hooks.wrap(strategy, "is_valid_sample_fn", watched)


def _wrap_loop(hooks: Hooks, runner: Any) -> None:
    loop, watch, task_name = runner.agent_loop, hooks.watch, runner.task_name
    hooks.wrap(runner, "agent_loop", WatchedLoop(loop, watch, task_name))
    generate = getattr(loop, "generate_sample", None)
    if generate is None or hasattr(generate, "remote"):  # in another process: its rollouts come by groups
        return

    async def watched(rollout: Any, *args: Any, **options: Any) -> Any:
        made = await generate(rollout, *args, **options)
        watch.finished(made, task_name)
        return made

    hooks.wrap(loop, "generate_sample", watched)


class WatchedLoop:
    """An agent loop, in this process or an actor of Ray, as producers call it."""

    def __init__(self, loop: Any, watch: Watch, task_name: str) -> None:
        self._loop = loop
        self._watch = watch
        self._task_name = task_name

    async def generate_group(self, group: Any, *args: Any, **options: Any) -> Any:
        """The group with its responses."""
        self._watch.started(group)
        generate = getattr(self._loop.generate_group, "remote", self._loop.generate_group)
        try:
            made = await generate(group, *args, **options)
        except BaseException:
            self._watch.cancelled(group, self._task_name)
            raise
        if any(groups.plain(r.status) == FAILED for r in made):
            self._watch.dropped(made, FAILED)
        return made

    async def pause(self, *args: Any, **options: Any) -> Any:
        """Ask it to stop."""
        pause = getattr(self._loop.pause, "remote", self._loop.pause)
        return await pause(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
