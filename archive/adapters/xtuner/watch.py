"""The prompts of one replay buffer, as a ledger is told of them: each word together with the episodes that it speaks
of, so that both become durable at once.

XTuner's objects say what they do: each public verb that matters is wrapped on its object, and does what it did.

| verb of XTuner | what it says |
|---|---|
| `Sampler.sample_from_dataloader` | a prompt was drawn |
| `agent_loop.generate_group`, `generate_sample` | rollouts are under way, are there, or failed |
| `produce_strategy.is_valid_sample_fn` | a group was filtered out |
| `storage.put`, `update`, `delete` | a group came, expired, was taken |
| `ReplayBuffer.put` | a group was too old to be kept |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.adapters import Item, part_of
from archive.adapters.xtuner import groups, live
from archive.adapters.xtuner.groups import COMPLETED, DONE, EXPIRED, KEPT, PROMPT, RETRY, plain

if TYPE_CHECKING:
    from archive import Writer
    from archive.ledger import Ledger

SIDE = ".prompts"  # of a buffer's name: the buffer of prompts, and of finished rollouts whose siblings are not
ENDED = ("trained", "dropped")  # states of prompts that are done with
FAILED, FILTERED = "failed", "filtered"


class Prompt(NamedTuple):
    """A prompt that is not done with. aside: its episodes in the buffer of prompts, its own and those of finished
    rollouts."""

    siblings: int
    aside: list[str]


class Watch:
    """Tells the ledger of a writer of what is drawn, started, finished, put, taken and given up."""

    def __init__(self, buffer: Any, writer: Writer, name: str, ledger: Ledger, *, siblings: bool) -> None:
        """siblings: each rollout becomes durable when it is finished, not only its group."""
        self.writer = writer
        self.ledger = ledger
        self.main = part_of(writer, name)
        self.side = writer.buffer(name + SIDE)
        self.status = live.Maker(buffer).classes.named
        self.arrived: set[int] = set()  # groups (by identity) that the storage was given and nobody asked about yet
        self._siblings = siblings
        self._known = live.known_of(buffer, self.main)
        self._held: dict[int, Any] = {}  # uid -> its item, as it was last told of
        self._said: dict[int, Any] = {}  # uid -> its attributes, as the journal has them
        self._cuts = -1  # checkpoints so far
        self._prompts: dict[str, Prompt] = {}
        self._lost: dict[str, list[list[Any]]] = {}  # task -> groups whose rollouts were cancelled

    def _open(self, group: Iterable[Any]) -> str | None:
        """The prompt that a group is of, if it is not done with."""
        key = groups.key_of(group)
        return None if key is None or self.ledger.state(key) in (None, *ENDED) else key

    # -- drawing -------------------------------------------------------------------------------------------------------

    def drawn(self, group: Sequence[Any], task_name: str, cursor: Any = None) -> str:
        """A prompt was drawn; its key, which is also the id of the episode that it is kept as."""
        number = getattr(group[0], "group_id", None)
        key = f"{task_name}/{number}@{self.writer.session}.{self.writer.rank}"
        while self.ledger.state(key) is not None or key in self._prompts:  # as two samplers of a task count alike
            key += "+"
        count = groups.mark(group, key)
        encoded = groups.encode(groups.as_drawn(group), task_name, live.resolve)
        with self.writer.together():
            self.side.add_episode(encoded.fields, episode_id=key, metadata=encoded.metadata | {PROMPT: key})
            self.ledger.draw([key], siblings=count, cursor=cursor)
        self._prompts[key] = Prompt(count, [key])
        return key

    def started(self, group: Sequence[Any]) -> None:
        """Its rollouts that are not there yet are under way."""
        key = self._open(group)
        if key is not None:
            with self.writer.together():
                for sibling in sorted(set(groups.siblings_of(group)) - set(self.ledger.sealed(key))):
                    self.ledger.start([key], sibling)

    def cancelled(self, group: Sequence[Any], task_name: str) -> None:
        """Its rollouts won't come: the sampler gives it again."""
        again = [r if groups.is_completed(r) else self.retried(r) for r in group]
        self._lost.setdefault(task_name, []).append(again)

    def retried(self, rollout: Any) -> Any:
        """A rollout as it was drawn, to be made again."""
        again = groups.without_response(rollout)
        again.status = self.status(RETRY)
        return again

    def lost(self, task_name: str) -> list[Any] | None:
        """A group that was cancelled, to be made again."""
        waiting = self._lost.get(task_name)
        return waiting.pop(0) if waiting else None

    # -- finishing -----------------------------------------------------------------------------------------------------

    def finished(self, made: Any, task_name: str) -> None:
        """A rollout (or the entries of one) came back, while its siblings may be under way."""
        entries = made if isinstance(made, list) else [made]
        key = self._open(entries) if self._siblings else None
        new = [] if key is None else [s for s in groups.completed(entries) if s not in self.ledger.sealed(key)]
        if key is None or not new:
            return
        encoded = groups.encode(entries, task_name, live.resolve)
        kept = {PROMPT: key, KEPT: {"rollouts": groups.volatile(entries)}}
        with self.writer.together():
            name = self.side.add_episode(encoded.fields, update_count=encoded.updates, metadata=encoded.metadata | kept)
            self._prompts[key].aside.append(name)
            self._seal(key, new, name)

    def put(self, item: Any, uid: int) -> None:
        """A group came into the replay buffer, as this item."""
        self.arrived.add(id(item.item))
        item = dataclasses.replace(item, uid=uid, timestamp_id=uid)
        key, status = groups.key_of(item.item), plain(item.status)
        if key is None or key not in self._prompts:
            key = self.drawn(item.item, item.task_name)
        self._held[uid] = item
        if status in DONE:
            self.dropped(item.item, str(status))
            return
        with self.writer.together():
            there = self._reopened(key, item.item)
            if status == COMPLETED or set(there) - set(self.ledger.sealed(key)):
                self._put_whole(item, key, there)

    def _put_whole(self, item: Any, key: str, there: Sequence[int]) -> None:
        self._known[item.uid] = live.append(item, self.main, live.mark_of(item))
        self._seal(key, there, self._known[item.uid].episode_id)
        prompt = self._prompts[key]
        if plain(item.status) == COMPLETED:
            for sibling in sorted(set(range(prompt.siblings)) - set(there)):
                self.ledger.drop([key], "not in its group", sibling=sibling)
        self.side.remove([name for name in prompt.aside if name != key], missing="ignore")
        prompt.aside[:] = [key]

    def _seal(self, key: str, siblings: Iterable[int], episode_id: str) -> None:
        sealed = self.ledger.sealed(key)
        for sibling in siblings:
            if sealed.get(sibling, episode_id) != episode_id:
                self.ledger.reopen([key], sibling)
            self.ledger.seal([key], sibling, [episode_id])

    def _reopened(self, key: str, group: Sequence[Any]) -> list[int]:
        """The siblings that are whole; of others that were, as of those that expired, none counts as sealed."""
        there = groups.completed(group)
        for sibling in sorted(set(self.ledger.sealed(key)) - set(there)):
            self.ledger.reopen([key], sibling)
        return there

    def changed(self, items: Iterable[Any]) -> None:
        """Groups in the replay buffer aged, or expired."""
        attributes: dict[str, dict[str, Any]] = {}
        if self._cuts != self.main.cuts:  # the newest checkpoint has them as they were then
            self._said, self._cuts = {}, self.main.cuts
        with self.writer.together():
            for item in items:
                uid = int(item.uid)
                if uid not in self._held:
                    continue
                self._held[uid] = dataclasses.replace(item)
                key = None if plain(item.status) == COMPLETED else self._open(item.item)
                if key is not None and set(self.ledger.sealed(key)) - set(self._reopened(key, item.item)):
                    self._forget(uid)
                elif uid in self._known and self._said.get(uid) != (now := live.attributes_of(item)):
                    self._said[uid] = now
                    for name, value in now.items():
                        attributes.setdefault(name, {})[self._known[uid].episode_id] = value
            if self.main.journaled and attributes:
                self.main.journal(attributes=attributes)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def left(self, uids: Iterable[int], update_count: int | None) -> None:
        """Groups were taken out of the replay buffer: to be trained on, to be made again, or given up for their age."""
        trained = []
        with self.writer.together():
            for uid in map(int, uids):
                item, _ = self._held.pop(uid, None), self._said.pop(uid, None)
                key = None if item is None else self._open(item.item)
                if item is None or key is None:
                    continue
                if plain(item.status) == COMPLETED and all(map(groups.is_completed, item.item)):
                    trained.append(key)
                    continue
                self._forget(uid)
                if plain(item.status) != EXPIRED and any(plain(r.status) == EXPIRED for r in item.item):
                    self.dropped(item.item, EXPIRED)
            if trained:
                self.ledger.train(trained, update_count)
                self._end(trained)

    def dropped(self, group: Sequence[Any], reason: str) -> None:
        """A group was given up: it failed, was filtered out, or is too old."""
        key = self._open(group)
        if key is not None:
            with self.writer.together():
                self.ledger.drop([key], reason)
                self._end([key])

    def _forget(self, uid: int) -> None:
        """Its rollouts are made again: what is live of it may no longer come back beside them."""
        seen = self._known.pop(uid, None)
        if seen is not None:
            self.main.remove([seen.episode_id])

    def _end(self, keys: Iterable[str]) -> None:
        for key in keys:
            if (prompt := self._prompts.pop(key, None)) is not None:
                self.side.remove(prompt.aside, missing="ignore")

    # -- resuming ------------------------------------------------------------------------------------------------------

    def adopt(self, items: Iterable[Any], found: Mapping[str, int]) -> None:
        """Go on with the groups in the replay buffer, and with these prompts of so many siblings; what else is kept
        aside is another's."""
        aside = self.aside
        for key, count in found.items():
            sealed = self.ledger.sealed(key).values()
            self._prompts[key] = Prompt(count, [name for name in dict.fromkeys((key, *sealed)) if name in aside])
        self.side.remove(sorted(aside - {name for one in self._prompts.values() for name in one.aside}))
        for item in items:
            own, uid = groups.key_of(item.item), int(item.uid)
            if own is not None and own in found and set(groups.completed(item.item)) <= set(self.ledger.sealed(own)):
                self._held[uid] = dataclasses.replace(item)
                continue
            self._known.pop(uid, None)
            self.put(item, uid)
            self.arrived.discard(id(item.item))

    @property
    def aside(self) -> set[str]:
        """The episodes in the buffer of prompts."""
        return set(self.side.live["episode_id"].to_pylist())

    def came_back(self, uid: int, item: Any, episode_id: str) -> None:
        """A group of this uid is live as that episode."""
        self._known[uid] = Item(live.mark_of(item), episode_id)


# -- hooks -------------------------------------------------------------------------------------------------------------


class Hooks:
    """The wrapped verbs of one replay buffer and its manager."""

    def __init__(self, target: Any, watch: Watch) -> None:
        self.watch = watch
        self._undo: list[Callable[[], None]] = []
        self._of_buffer(target, live.buffer_of(target), watch)
        for runner in live.runners_of(target):
            self._of_sampler(target, runner.sampler, runner.task_name, watch)
            self._of_strategy(runner.produce_strategy, watch)
            if getattr(runner, "agent_loop", None) is not None:
                self._of_loop(runner, runner.agent_loop, watch)

    def _set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of this object alone."""
        own = vars(target)
        undo = partial(object.__setattr__, target, name, own[name]) if name in own else partial(_unset, target, name)
        object.__setattr__(target, name, value)  # task runners are frozen
        self._undo.append(undo)

    def _wrap(self, target: Any, wrapper: Callable[..., Any]) -> None:
        """Have the verb of the wrapper's name called by it: it is given the verb first."""
        self._set(target, wrapper.__name__, partial(wrapper, getattr(target, wrapper.__name__)))

    def undo(self) -> None:
        """Make all verbs XTuner's own again."""
        while self._undo:
            self._undo.pop()()

    def _of_buffer(self, target: Any, buffer: Any, watch: Watch) -> None:
        async def put(verb: Any, item: Any) -> Any:
            uid = await verb(item)
            watch.put(item, int(uid))
            return uid

        async def update(verb: Any, items: Any) -> Any:
            result = await verb(items)
            watch.changed(items)
            return result

        async def delete(verb: Any, uids: Any) -> Any:
            watch.left(uids, live.train_step(target))
            return await verb(uids)

        for verb in (put, update, delete):
            self._wrap(live.storage_of(buffer), verb)

        async def put_group(verb: Any, group: Any, *args: Any, **options: Any) -> Any:
            result = await verb(group, *args, **options)
            if id(group) in watch.arrived:
                watch.arrived.discard(id(group))
            elif group:
                watch.dropped(group, EXPIRED)
            return result

        self._set(buffer, "put", partial(put_group, buffer.put))

    def _of_sampler(self, manager: Any, sampler: Any, task: str, watch: Watch) -> None:
        retry = watch.status(RETRY)

        def sample_from_dataloader(verb: Any, *args: Any, **options: Any) -> Any:
            group = verb(*args, **options)
            watch.drawn(group, task, live.samplers_state(manager))
            return group

        async def sample(verb: Any, task_name: str, *args: Any, **options: Any) -> Any:
            again = watch.lost(task_name)
            statuses = (args[0] if args else options.get("group_status")) or ()
            if again is None and retry not in statuses:  # synchronous strategies never ask for these
                taken = await manager.replay_buffer.get(1, task_name=task_name, group_status=retry)
                again = taken[0] if taken else None
            return await verb(task_name, *args, **options) if again is None else again

        self._wrap(sampler, sample_from_dataloader)
        self._wrap(sampler, sample)

    def _of_strategy(self, strategy: Any, watch: Watch) -> None:
        def is_valid_sample_fn(verb: Any, group: Any, *args: Any, **options: Any) -> Any:
            answer = verb(group, *args, **options)
            if not answer:
                watch.dropped(group, FILTERED)
            return answer

        if getattr(strategy, "is_valid_sample_fn", None) is not None:
            self._wrap(strategy, is_valid_sample_fn)

    def _of_loop(self, runner: Any, loop: Any, watch: Watch) -> None:
        async def generate_sample(verb: Any, rollout: Any, *args: Any, **options: Any) -> Any:
            made = await verb(rollout, *args, **options)
            watch.finished(made, runner.task_name)
            return made

        self._set(runner, "agent_loop", WatchedLoop(loop, watch, runner.task_name))
        generate = getattr(loop, "generate_sample", None)
        if generate is not None and not hasattr(generate, "remote"):  # in another process rollouts come by groups
            self._wrap(loop, generate_sample)


def _unset(target: Any, name: str) -> None:
    object.__delattr__(target, name)


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
        if any(plain(r.status) == FAILED for r in made):
            self._watch.dropped(made, FAILED)
        return made

    async def pause(self, *args: Any, **options: Any) -> Any:
        """Ask it to stop."""
        pause = getattr(self._loop.pause, "remote", self._loop.pause)
        return await pause(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def detach(buffer: Any) -> None:
    """Follow it no longer."""
    memory = live.memory(buffer)
    if memory.follower is not None:
        memory.follower.undo()
    memory.follower = None
