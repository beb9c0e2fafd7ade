"""A manager, or a replay buffer, whose prompts are kept in a writer's ledger from now on; and what earlier sessions
left, brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import Report, as_given, several
from archive.adapters.xtuner import groups, live
from archive.adapters.xtuner.groups import COMPLETED, EXPIRED, KEPT, PROMPT, RETRY, plain
from archive.adapters.xtuner.live import Maker, undisturbed
from archive.adapters.xtuner.watch import ENDED, FILTERED, Hooks, Watch, detach
from archive.index import EpisodeIndex, Snapshot
from archive.read import Episodes, Reader

if TYPE_CHECKING:
    from archive import Writer

LEDGER = "prompts"


async def follow(
    objects: Any,
    writer: Writer,
    *,
    ledger: str = LEDGER,
    siblings: bool = True,
    refs: str = "put",
    classes: Iterable[type] | Mapping[str, type] = (),
) -> Any:
    """From now on keep what becomes of prompts in `writer.ledger(ledger)`: of a manager, a replay buffer, or several by
    name. Call it after `restore`, with the writer that resumes.

    First what earlier sessions left is brought back into the replay buffer: groups that were finished and not trained
    on; and, for the sampler to take again, groups of which some rollouts or all are missing, with those that are there.
    The samplers stand where the ledger says. Returns a Report of it (for a dict a dict).

    siblings: finished rollouts become durable one by one, not only when their group is.  refs, classes: as in
    `restore`, which remembers its classes.
    """
    out = {}
    for name, target in several(objects).items():
        buffer = live.buffer_of(target)
        detach(buffer)
        live.memory(buffer).allow(classes)
        async with buffer._lock:
            watch = Watch(buffer, writer, name, writer.ledger(ledger), siblings=siblings)
            out[name] = await _bring_back(target, watch, name, Maker(buffer, refs))
            live.memory(buffer).follower = Hooks(target, watch)
    return as_given(objects, out)


async def begin(given: Mapping[str, Any], writer: Writer, ledger: str | None) -> None:
    """Follow those that are not yet, if the writer keeps a journal or a ledger is named."""
    if ledger is None and not writer.journaled:
        return
    for name, target in given.items():
        follower = live.memory(live.buffer_of(target)).follower
        if follower is None or follower.watch.writer is not writer:
            await follow({name: target}, writer, ledger=ledger or LEDGER)


# -- leftovers ---------------------------------------------------------------------------------------------------------


async def _bring_back(target: Any, watch: Watch, name: str, maker: Maker) -> Report:
    buffer, writer = live.buffer_of(target), watch.writer
    items = await live.items_of(buffer)
    left = Leftovers(watch, maker, partial(_is_valid, target))

    def work() -> None:
        snapshot = Snapshot(writer._storage, writer._log.catch_up())
        left.bring(items, _placed(live.memory(buffer).origin, name), Episodes(Reader(snapshot), EpisodeIndex(snapshot)))

    await undisturbed(work)
    if left.changed:
        following = live.counters(buffer)
        live.renumber(left.added, following)
        in_buffer = set(watch.main.live["episode_id"].to_pylist())
        for place, episode_id in left.seen.items():
            if episode_id in in_buffer:
                watch.came_back(left.items[place].uid, left.items[place], episode_id)
        await live.fill(buffer, left.items, following)
    live.restore_samplers(target, watch.ledger.cursors.get(writer.rank) or {}, ahead=True)
    await undisturbed(partial(watch.adopt, left.items, left.prompts))
    return Report(len(left.added), sum(len(item.item) for item in left.added), left.counts, tuple(left.notes))


def _placed(origin: Any, name: str) -> set[str]:
    """The prompts whose groups a plan dealt out, to whichever rank."""
    if origin is None or origin[0] != name or name not in origin[1].buffers:
        return set()
    return {ep.metadata[PROMPT] for ep in origin[1].episodes.filter(buffer=name) if PROMPT in ep.metadata}


def _is_valid(target: Any, task_name: str, group: Sequence[Any]) -> bool:
    """True if a group whose rollouts are all there may be trained on, as its strategy says."""
    for runner in live.runners_of(target):
        is_valid = getattr(runner.produce_strategy, "is_valid_sample_fn", None)
        if runner.task_name == task_name and is_valid is not None:
            return bool(is_valid(list(group)))
    return True


@dataclass(frozen=True)
class Part:
    """An episode, as rollouts by sibling. is_group: it was in a replay buffer, so that nothing of it is to be done."""

    task_name: str
    is_group: bool
    rollouts: Mapping[int, list[Any]]


@dataclass
class Leftovers:
    """The groups that a rank goes on with, made of its ledger and of the episodes that this names."""

    watch: Watch
    maker: Maker
    is_valid: Callable[[str, Sequence[Any]], bool]
    items: list[Any] = field(default_factory=list)  # what the replay buffer is to hold
    added: list[Any] = field(default_factory=list)  # those that were not there
    prompts: dict[str, int] = field(default_factory=dict)  # key -> siblings
    seen: dict[int, str] = field(default_factory=dict)  # place among the items -> the live episode that has it
    counts: dict[str, int] = field(default_factory=lambda: {"finished": 0, "partly": 0, "again": 0, "ended": 0})
    notes: list[str] = field(default_factory=list)
    changed: bool = False

    def bring(self, items: Sequence[Any], placed: set[str], episodes: Episodes) -> None:
        """Find the groups that are there, less what is done with, and those that are missing.

        placed: prompts whose groups are in some rank's replay buffer.
        """
        ledger, here = self.watch.ledger, {}
        for item in items:
            key = groups.key_of(item.item)
            if key is not None and ledger.state(key) in ENDED:
                self.counts["ended"] += 1
                self.changed = True
                continue
            self.items.append(item)
            if key is not None:
                here[key] = item
        lacking = [key for key, it in here.items() if set(ledger.sealed(key)) - set(groups.completed(it.item))]
        ours = [str(group.key) for group in ledger.to_train()] + [str(key) for key in ledger.to_reissue("group")]
        wanted = lacking + [key for key in dict.fromkeys(ours) if key not in here and key not in placed]
        parts = self._read(wanted, episodes)
        for key in wanted:
            self._bring(key, here.get(key), parts)
        for key, item in here.items():
            if ledger.state(key) is not None:
                self.prompts[key] = 1 + max(groups.siblings_of(item.item))

    def _read(self, keys: Sequence[str], episodes: Episodes) -> dict[str, Part]:
        """The episodes of these prompts, by id."""
        ids = dict.fromkeys(name for key in keys for name in (key, *self.watch.ledger.sealed(key).values()))
        chosen = episodes.filter(episode_id=list(ids)) if ids else ()
        found = zip(chosen, chosen.read(), strict=True) if isinstance(chosen, Episodes) else ()
        return {episode.id: self._part(episode.metadata, fields) for episode, fields in found}

    def _part(self, metadata: Mapping[str, Any], fields: Mapping[str, Any]) -> Part:
        kept = metadata.get(KEPT)
        volatile = kept["rollouts"] if kept else [[RETRY, 0]] * metadata["size"]
        rollouts = self.maker.decoder.group(fields, metadata, volatile)
        is_group = kept is not None and kept.get("status") == COMPLETED
        return Part(metadata["task_name"], is_group, groups.siblings_of(rollouts))

    def _bring(self, key: str, item: Any, parts: Mapping[str, Part]) -> None:
        sealed = self.watch.ledger.sealed(key)
        found = [parts[name] for name in (key, *sealed.values()) if name in parts]
        there = {s: parts[name].rollouts[s] for s, name in sealed.items() if name in parts}
        whole = self.watch.ledger.state(key) == "sealed"
        if not found or (key not in parts and not whole):
            self.notes.append(f"prompt {key!r} is not in the archive any more: it is left out")
            return
        before = groups.siblings_of(item.item) if item is not None else {}
        rollouts = {**(parts[key].rollouts if key in parts else {}), **before, **there}
        if not whole:
            waiting = {plain(entry.status) for entries in rollouts.values() for entry in entries}
            status: str | None = EXPIRED if EXPIRED in waiting and RETRY not in waiting else RETRY
        elif all(part.is_group for part in found if part is not parts.get(key)):
            status = COMPLETED
        else:
            status = self._judged(key, found[0].task_name, rollouts)
        if status is None:
            self.counts["ended"] += 1
            return
        group = _in_order(rollouts)
        self.changed = True
        self.counts["finished" if status == COMPLETED else "partly" if sealed else "again"] += 1
        if item is not None:
            item.item, item.status = group, self.watch.status(status)
            return
        staleness = max((int(getattr(r, "seq_staleness", 0) or 0) for r in group), default=0)
        made = self.maker.item(group, task_name=found[0].task_name, status=status, staleness=staleness)
        sealed = self.watch.ledger.sealed(key)
        if status == COMPLETED and len(set(sealed.values())) == 1:
            self.seen[len(self.items)] = next(iter(sealed.values()))
        self.items.append(made)
        self.added.append(made)
        self.prompts[key] = 1 + max(groups.siblings_of(group))

    def _judged(self, key: str, task_name: str, rollouts: dict[int, list[Any]]) -> str | None:
        """The status with which a group goes on whose rollouts came one by one; None if it is filtered out."""
        group = _in_order(rollouts)
        if any(getattr(entry, "reward", None) is None for entry in group):
            last = max(rollouts)  # rewards are given to whole groups when their last rollout comes: so it comes again
            self.watch.ledger.reopen([key], last)
            rollouts[last] = [self.watch.retried(entry) for entry in rollouts[last][:1]]
            return RETRY
        if not self.is_valid(task_name, group):
            self.watch.ledger.drop([key], FILTERED)
            return None
        return COMPLETED


def _in_order(rollouts: Mapping[int, Sequence[Any]]) -> list[Any]:
    return [entry for sibling in sorted(rollouts) for entry in rollouts[sibling]]
