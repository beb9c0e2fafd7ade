"""What earlier sessions left of prompts, as groups again: from the ledger, and the episodes that it speaks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archive.adapters.xtuner import groups, prompts
from archive.adapters.xtuner.manager import RETRY
from archive.adapters.xtuner.prompts import ENDED, EXPIRED, Prompt
from archive.adapters.xtuner.restoring import Maker
from archive.adapters.xtuner.watching import Watch
from archive.read import Episodes


@dataclass
class Brought:
    """What a replay buffer holds then. added: those that were not there; seen: place among the items -> the live
    episode that has it."""

    items: list[Any]
    added: list[Any] = field(default_factory=list)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"finished": 0, "partly": 0, "again": 0, "ended": 0})
    notes: list[str] = field(default_factory=list)
    changed: bool = False


@dataclass(frozen=True)
class _Part:
    """An episode, as rollouts by sibling. is_group: it was in a replay buffer, so that nothing of it is to be done."""

    task_name: str
    is_group: bool
    rollouts: Mapping[int, list[Any]]


class Leftovers:
    """Makes groups of what this rank is to go on with."""

    def __init__(
        self, watch: Watch, items: Sequence[Any], placed: set[str], episodes: Episodes, maker: Maker,
        is_valid: Callable[[str, Sequence[Any]], bool],
    ) -> None:  # fmt: skip
        """placed: prompts whose groups are in some rank's replay buffer."""
        self._ledger = watch.ledger
        self._watch = watch
        self._placed = placed
        self._episodes = episodes
        self._maker = maker
        self._is_valid = is_valid
        self._items = list(items)

    def brought(self) -> Brought:
        """The groups that are there, less what is done with, and those that are missing."""
        out = Brought([])
        here: dict[str, Any] = {}
        for item in self._items:
            key = prompts.key_of(item.item)
            if key is not None and self._ledger.state(key) in ENDED:
                out.counts["ended"] += 1
                out.changed = True
                continue
            out.items.append(item)
            if key is not None:
                here[key] = item
        wanted = self._wanted(here)
        parts = self._read(wanted)
        for key in wanted:
            self._bring(key, here.get(key), parts, out)
        for key, item in here.items():
            if self._ledger.state(key) is not None:
                out.prompts[key] = self._prompt(key, item.item)
        return out

    def _wanted(self, here: Mapping[str, Any]) -> list[str]:
        """Prompts that are to be brought back, in order; of those that are here the ones that lack rollouts."""
        ours = [str(group.key) for group in self._ledger.to_train()]
        ours += [str(key) for key in self._ledger.to_reissue("group")]
        lacking = [
            key for key, item in here.items() if set(self._ledger.sealed(key)) - set(prompts.completed(item.item))
        ]
        away = [key for key in dict.fromkeys(ours) if key not in here and key not in self._placed]
        return lacking + away

    def _read(self, keys: Sequence[str]) -> dict[str, _Part]:
        """The episodes of these prompts, by id."""
        ids = dict.fromkeys(name for key in keys for name in (key, *self._ledger.sealed(key).values()))
        if not ids:
            return {}
        chosen = self._episodes.filter(episode_id=list(ids))
        return {
            episode.id: self._part(episode.metadata, fields)
            for episode, fields in zip(chosen, chosen.read(), strict=True)
        }

    def _part(self, metadata: Mapping[str, Any], fields: Mapping[str, Any]) -> _Part:
        kept = metadata.get(prompts.KEPT)
        volatile = kept["rollouts"] if kept else [[RETRY, 0]] * metadata["size"]
        is_group = kept is not None and kept.get("status") == groups.COMPLETED
        return _Part(
            metadata["task_name"], is_group, prompts.siblings_of(self._maker.rollouts(fields, metadata, volatile))
        )

    def _bring(self, key: str, item: Any, parts: Mapping[str, _Part], out: Brought) -> None:
        sealed = self._ledger.sealed(key)
        found = [parts[name] for name in (key, *sealed.values()) if name in parts]
        there = {s: parts[name].rollouts[s] for s, name in sealed.items() if name in parts}
        if not found or (key not in parts and not self._complete(key)):
            out.notes.append(f"prompt {key!r} is not in the archive any more: it is left out")
            return
        before = prompts.siblings_of(item.item) if item is not None else {}
        rollouts = {**(parts[key].rollouts if key in parts else {}), **before, **there}
        task_name = found[0].task_name
        status = self._status(
            key, task_name, rollouts, all(part.is_group for part in found if part is not parts.get(key))
        )
        if status is None:
            out.counts["ended"] += 1
            return
        group = [entry for sibling in sorted(rollouts) for entry in rollouts[sibling]]
        out.changed = True
        out.counts["finished" if status == groups.COMPLETED else "partly" if sealed else "again"] += 1
        if item is not None:
            item.item, item.status = group, self._maker.classes.named(status)
            return
        self._add(key, group, task_name, status, out)

    def _add(self, key: str, group: list[Any], task_name: str, status: str, out: Brought) -> None:
        sealed = self._ledger.sealed(key)
        made = self._maker.of_group(group, task_name, status)
        if status == groups.COMPLETED and len(set(sealed.values())) == 1:
            out.seen[len(out.items)] = next(iter(sealed.values()))
        out.items.append(made)
        out.added.append(made)
        out.prompts[key] = self._prompt(key, group)

    def _status(self, key: str, task_name: str, rollouts: dict[int, list[Any]], is_group: bool) -> str | None:
        """How the group is to go on; None if it is done with. is_group: it was in a replay buffer, complete."""
        if not self._complete(key):
            waiting = {groups.plain(e.status) for s in rollouts for e in rollouts[s]}
            return EXPIRED if EXPIRED in waiting and RETRY not in waiting else RETRY
        if is_group:
            return groups.COMPLETED
        group = [entry for sibling in sorted(rollouts) for entry in rollouts[sibling]]
        if any(getattr(entry, "reward", None) is None for entry in group):
            self._judge_again(key, rollouts)
            return RETRY
        if not self._is_valid(task_name, group):
            self._ledger.drop([key], "filtered")
            return None
        return groups.COMPLETED

    def _judge_again(self, key: str, rollouts: dict[int, list[Any]]) -> None:
        """Rewards are given to whole groups when their last rollout comes: so it is to come again."""
        last = max(rollouts)
        self._ledger.reopen([key], last)
        rollouts[last] = [self._watch.retried(entry) for entry in rollouts[last][:1]]

    def _complete(self, key: str) -> bool:
        return self._ledger.state(key) == "sealed"

    def _prompt(self, key: str, group: Sequence[Any]) -> Prompt:
        sealed = set(self._ledger.sealed(key).values())
        return Prompt(1 + max(prompts.siblings_of(group)), sorted(sealed & self._watch.aside))
