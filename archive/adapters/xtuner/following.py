"""A manager, or a replay buffer, whose prompts are kept in a writer's ledger from now on; and what earlier sessions
left, brought back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import Report, as_given, several
from archive.adapters.xtuner import hooks, prompts
from archive.adapters.xtuner import manager as managers
from archive.adapters.xtuner import storage as storages
from archive.adapters.xtuner.leftovers import Brought, Leftovers
from archive.adapters.xtuner.restoring import maker_of, undisturbed
from archive.adapters.xtuner.watching import Watch
from archive.base import UsageError
from archive.index import EpisodeIndex, Snapshot
from archive.read import Episodes, Reader

if TYPE_CHECKING:
    from archive import Writer

LEDGER = "prompts"


async def follow(
    objects: Any, writer: Writer, *, ledger: str = LEDGER, siblings: bool = True, refs: str = "put",
    classes: Iterable[type] | Mapping[str, type] = (),
) -> Any:  # fmt: skip
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
        buffer = managers.buffer_of(target)
        hooks.detach(buffer)
        storages.allow(buffer, classes)
        async with buffer._lock:
            watch = Watch(buffer, writer, name, writer.ledger(ledger), siblings=siblings)
            out[name] = await _bring_back(target, watch, name, maker_of(buffer, refs))
            hooks.attach(target, watch)
    return as_given(objects, out)


async def begin(given: Mapping[str, Any], writer: Writer, ledger: str | None) -> None:
    """Follow those that are not yet, if the writer keeps a journal or a ledger is named."""
    if ledger is None and not _keeps_journal(writer):
        return
    for name, target in given.items():
        watch = hooks.watch_of(managers.buffer_of(target))
        if watch is None or watch.writer is not writer:
            await follow({name: target}, writer, ledger=ledger or LEDGER)


def _keeps_journal(writer: Writer) -> bool:
    try:
        return writer.durable_until is not None
    except UsageError:
        return False


async def _bring_back(target: Any, watch: Watch, name: str, maker: Any) -> Report:
    buffer = managers.buffer_of(target)
    items = await storages.items_of(buffer)
    origin = storages.origin_of(buffer, name)
    writer = watch.writer

    def work() -> Brought:
        log = writer._log
        snapshot = Snapshot(writer._storage, log.catch_up())
        episodes = Episodes(Reader(snapshot), EpisodeIndex(snapshot))
        placed = _placed(origin, name)
        left = Leftovers(watch, items, placed, episodes, maker, partial(_is_valid, target))
        return left.brought()

    brought = await undisturbed(work)
    if brought.changed:
        following = storages.counters(buffer)
        watch.number(brought, following)
        await storages.fill(buffer, brought.items, following)
    managers.go_on(target, watch.ledger.cursors.get(writer.rank))
    await undisturbed(partial(watch.adopt, brought.items, brought.prompts))
    rollouts = sum(len(item.item) for item in brought.added)
    return Report(len(brought.added), rollouts, brought.counts, tuple(brought.notes))


def _placed(origin: Any, name: str) -> set[str]:
    """The prompts whose groups a plan dealt out, to whichever rank."""
    if origin is None or name not in origin.buffers:
        return set()
    live = origin.episodes.filter(buffer=name)
    return {ep.metadata[prompts.PROMPT] for ep in live if prompts.PROMPT in ep.metadata}


def _is_valid(target: Any, task_name: str, group: Sequence[Any]) -> bool:
    """Whether a group whose rollouts are all there may be trained on, as its strategy says."""
    for runner in target.task_runners if managers.is_manager(target) else ():
        is_valid = getattr(runner.produce_strategy, "is_valid_sample_fn", None)
        if runner.task_name == task_name and is_valid is not None:
            return bool(is_valid(list(group)))
    return True
