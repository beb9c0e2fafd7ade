"""What becomes of the prompts of one replay buffer, said in a ledger: each word together with the episodes that it
speaks of, so that both become durable at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archive.adapters import part_of
from archive.adapters.xtuner import groups, prompts, storage
from archive.adapters.xtuner.manager import DONE, RETRY, distinct, without_response
from archive.adapters.xtuner.prompts import ENDED, EXPIRED, Held, Prompt
from archive.adapters.xtuner.rollouts import Classes

if TYPE_CHECKING:
    from archive import Writer
    from archive.adapters.xtuner.leftovers import Brought
    from archive.ledger import Ledger

SIDE = ".prompts"  # of a buffer's name: the buffer of prompts, and of finished rollouts whose siblings are not


class Watch:
    """Says in the ledger of a writer what is drawn, started, finished, put, taken and given up."""

    def __init__(self, buffer: Any, writer: Writer, name: str, ledger: Ledger, *, siblings: bool) -> None:
        """siblings: each rollout becomes durable when it is finished, not only its group."""
        self.writer = writer
        self.ledger = ledger
        self.main = part_of(writer, name)
        self.side = writer.buffer(name + SIDE)
        self.siblings = siblings
        self.aside: set[str] = set(self.side.live["episode_id"].to_pylist())
        self.arrived: set[int] = set()  # groups (by identity) that the storage was given and nobody asked about yet
        self._known = storage.seen(buffer, writer, name)
        self._classes: Classes = storage.buffer_classes(buffer)[1]
        self._held: dict[int, Held] = {}
        self._prompts: dict[str, Prompt] = {}
        self._lost: dict[str, list[list[Any]]] = {}  # task -> groups whose rollouts were cancelled

    # -- drawing ------------------------------------------------------------------------------------------------

    def drawn(self, group: Sequence[Any], task_name: str, cursor: Any = None) -> str:
        """A prompt was drawn; its key, which is also the id of the episode that it is kept as."""
        number = getattr(group[0], "group_id", None)
        key = f"{task_name}/{number}@{self.writer.session}.{self.writer.rank}"
        while self.ledger.state(key) is not None or key in self._prompts:  # as two samplers of a task count alike
            key += "+"
        count = prompts.mark(group, key)
        plain = [without_response(rollout) for rollout in distinct(group)]
        encoded = groups.encode(plain, task_name, storage.resolve)
        with self.writer.together():
            self.side.add_episode(encoded.fields, episode_id=key, metadata=encoded.metadata | {prompts.PROMPT: key})
            self.ledger.draw([key], siblings=count, cursor=cursor)
        self.aside.add(key)
        self._prompts[key] = Prompt(count, [])
        return key

    def started(self, group: Sequence[Any]) -> None:
        """Its rollouts that are not there yet are under way."""
        key = prompts.key_of(group)
        if key is None or self.ledger.state(key) in (None, *ENDED):
            return
        with self.writer.together():
            for sibling in sorted(set(prompts.siblings_of(group)) - set(self.ledger.sealed(key))):
                self.ledger.start([key], sibling)

    def cancelled(self, group: Sequence[Any], task_name: str) -> None:
        """Its rollouts won't come: the sampler gives it again."""
        again = [r if groups.is_completed(r) else self.retried(r) for r in group]
        self._lost.setdefault(task_name, []).append(again)

    def retried(self, rollout: Any) -> Any:
        """A rollout as it was drawn, to be made again."""
        again = without_response(rollout)
        again.status = self.status(RETRY)
        return again

    def status(self, name: str) -> Any:
        """The status of that name, as rollouts have it here."""
        return self._classes.named(name)

    def lost(self, task_name: str) -> list[Any] | None:
        """A group that was cancelled, to be made again."""
        waiting = self._lost.get(task_name)
        return waiting.pop(0) if waiting else None

    # -- finishing ----------------------------------------------------------------------------------------------

    def finished(self, made: Any, task_name: str) -> None:
        """A rollout (or the entries of one) came back, while its siblings may be under way."""
        entries = made if isinstance(made, list) else [made]
        key = prompts.key_of(entries)
        if not self.siblings or key is None or self.ledger.state(key) in (None, *ENDED):
            return
        new = [s for s in prompts.completed(entries) if s not in self.ledger.sealed(key)]
        if new:
            with self.writer.together():
                self._seal(key, new, self._add_aside(key, entries, task_name))

    def _add_aside(self, key: str, entries: Sequence[Any], task_name: str) -> str:
        encoded = groups.encode(entries, task_name, storage.resolve)
        kept = {prompts.PROMPT: key, prompts.KEPT: {"rollouts": groups.volatile(entries)}}
        name = self.side.add_episode(encoded.fields, update_count=encoded.updates, metadata=encoded.metadata | kept)
        self.aside.add(name)
        self._prompts[key].parts.append(name)
        return name

    def put(self, item: Any, uid: int) -> None:
        """A group came into the replay buffer, as this item."""
        self.arrived.add(id(item.item))
        item = dataclasses.replace(item, uid=uid, timestamp_id=uid)
        key = prompts.key_of(item.item)
        if key is None or key not in self._prompts:
            key = self.drawn(item.item, item.task_name)
        self._held[uid] = Held(key, groups.plain(item.status), item.item)
        if groups.plain(item.status) in DONE:
            self.dropped(item.item, str(groups.plain(item.status)))
            return
        with self.writer.together():
            there = self._reopened(key, item.item)
            if groups.plain(item.status) == groups.COMPLETED or set(there) - set(self.ledger.sealed(key)):
                self._put_whole(item, key, there)

    def _put_whole(self, item: Any, key: str, there: Sequence[int]) -> None:
        self._known[item.uid] = storage.write_one(item, self.main, None, ())
        self._seal(key, there, self._known[item.uid].episode_id)
        prompt = self._prompts[key]
        if groups.plain(item.status) == groups.COMPLETED:
            for sibling in sorted(set(range(prompt.siblings)) - set(there)):
                self.ledger.drop([key], "not in its group", sibling=sibling)
        self._remove_aside(prompt.parts)
        prompt.parts.clear()

    def _seal(self, key: str, siblings: Iterable[int], episode_id: str) -> None:
        sealed = self.ledger.sealed(key)
        for sibling in siblings:
            if sealed.get(sibling, episode_id) != episode_id:
                self.ledger.reopen([key], sibling)
            self.ledger.seal([key], sibling, [episode_id])

    def _reopened(self, key: str, group: Sequence[Any]) -> list[int]:
        """The siblings that are whole; of others that were, as of those that expired, none counts as sealed."""
        there = prompts.completed(group)
        for sibling in sorted(set(self.ledger.sealed(key)) - set(there)):
            self.ledger.reopen([key], sibling)
        return there

    def changed(self, item: Any) -> None:
        """A group in the replay buffer aged, or expired."""
        held = self._held.get(int(item.uid))
        if held is None:
            return
        status = groups.plain(item.status)
        if status != groups.COMPLETED and self.ledger.state(held.key) not in (None, *ENDED):
            with self.writer.together():
                before = len(self.ledger.sealed(held.key))
                if len(self._reopened(held.key, item.item)) < before:
                    self._forget(int(item.uid))
        self._held[int(item.uid)] = Held(held.key, status, item.item)

    # -- leaving ------------------------------------------------------------------------------------------------

    def left(self, uids: Iterable[int], update_count: int | None) -> None:
        """Groups were taken out of the replay buffer: to be trained on, to be made again, or given up for their age."""
        trained = []
        with self.writer.together():
            for uid in map(int, uids):
                held = self._held.pop(uid, None)
                if held is None or self.ledger.state(held.key) in (None, *ENDED):
                    continue
                if held.status == groups.COMPLETED and all(map(groups.is_completed, held.group)):
                    trained.append(held.key)
                    continue
                self._forget(uid)
                if held.status != EXPIRED and any(groups.plain(r.status) == EXPIRED for r in held.group):
                    self.dropped(held.group, EXPIRED)
            if trained:
                self.ledger.train(trained, update_count)
                self._end(trained)

    def dropped(self, group: Sequence[Any], reason: str) -> None:
        """A group was given up: it failed, was filtered out, or is too old."""
        key = prompts.key_of(group)
        if key is None or self.ledger.state(key) in (None, *ENDED):
            return
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
            prompt = self._prompts.pop(key, None)
            if prompt is not None:
                self._remove_aside([key, *prompt.parts])

    def _remove_aside(self, ids: Iterable[str]) -> None:
        gone = self.aside.intersection(ids)
        self.side.remove(sorted(gone))
        self.aside -= gone

    def saved(self, items: Iterable[Any]) -> None:
        """A checkpoint without the replay buffer begins: what was trained on is in no buffer."""
        storage.take_out(items, self.main, self._known)

    # -- resuming -----------------------------------------------------------------------------------------------

    def number(self, brought: Brought, following: dict[str, int]) -> None:
        """Give places in the replay buffer to groups that come back, after all that were given out."""
        for item in brought.added:
            for name in following:
                setattr(item, name, following[name])
                following[name] += 1
        live = set(self.main.live["episode_id"].to_pylist())
        for place, name in brought.seen.items():
            if name in live:
                item = brought.items[place]
                self._known[item.uid] = storage.seen_as(item, name)

    def adopt(self, items: Iterable[Any], found: Mapping[str, Prompt]) -> None:
        """Go on with what is in the replay buffer, and with these prompts; what else is kept aside is another's."""
        self._prompts.update(found)
        ours = {name for key, one in found.items() for name in (key, *one.parts)}
        self._remove_aside(self.aside - ours)
        for item in items:
            key, uid = prompts.key_of(item.item), int(item.uid)
            if key is not None and key in found and set(prompts.completed(item.item)) <= set(self.ledger.sealed(key)):
                self._held[uid] = Held(key, groups.plain(item.status), item.item)
                continue
            self._known.pop(uid, None)
            self.put(item, uid)
            self.arrived.discard(id(item.item))
