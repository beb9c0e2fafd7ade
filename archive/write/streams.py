"""Pure, no I/O: which position and which episode each appended row gets.

A stream is what one session appends for one env row. Rows of many env rows arrive mixed, in time order within each;
episodes begin at a `first`, after a `last`, where an episode id changes and where positions jump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import run_heads
from archive.base import Undo, UsageError

NONE = -1

Ints = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(slots=True)
class EpisodeRecord:
    """What the writer knows of an episode; `stored` and below are what its written segments add up to."""

    id: str
    env_id: int
    headless: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    replaces: bool = False
    end: int | None = None  # position after its last step, once it has ended
    ended: int = 0  # in which epoch that was
    broken: bool = False  # it ended without a last step (reason says why)
    sealed: bool = False  # a segment row says that it has ended
    terminated: bool | None = None
    truncated: bool | None = None
    reason: str | None = None
    begin: int = 0  # position of its first step in its env row (before the row's live part, if headless)
    fields: str = ""  # digest of its fields, which must not change in the middle
    stored: int = 0
    returned: float | None = None
    predecessor: str | None = None


class Rows(NamedTuple):
    """Appended rows as the caller gave them; masks and ids are per row or None."""

    env_ids: Ints
    first: Mask | None = None
    last: Mask | None = None
    terminated: Mask | None = None
    truncated: Mask | None = None
    episode_ids: Sequence[str | None] | None = None
    positions: Ints | None = None

    def begins(self, i: int, open_id: str, next_position: int) -> bool:
        """Whether row i, the first of its env row, begins an episode though one is open."""
        name = None if self.episode_ids is None else self.episode_ids[i]
        jumps = self.positions is not None and int(self.positions[i]) != next_position
        return bool(jumps or (self.first is not None and self.first[i]) or (name is not None and name != open_id))


class Assigned(NamedTuple):
    positions: Ints
    episodes: Ints  # index into Streams.records


NewEpisode = Callable[[int, str | None], EpisodeRecord]  # (env id, given id) -> record


class Streams:
    """Next position and open episode of every env row of one buffer on one rank."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._slots: dict[int, int] = {}
        self._next = np.zeros(0, np.int64)
        self._open = np.zeros(0, np.int64)
        self.records: dict[int, EpisodeRecord] = {}
        self.epoch = 0  # how many slabs have been sent
        self._count = 0
        self._broken_off: list[int] = []

    def slot(self, env_id: int) -> int:
        slot = self._slots.get(env_id)
        if slot is None:
            self._undo.key(self._slots, env_id)
            slot = self._slots[env_id] = len(self._slots)
            if slot >= len(self._next):
                self._undo.attributes(self, "_next", "_open")
                size = max(64, 2 * slot)
                self._next = np.concatenate([self._next, np.zeros(size - len(self._next), np.int64)])
                self._open = np.concatenate([self._open, np.full(size - len(self._open), NONE, np.int64)])
        return slot

    @property
    def env_rows(self) -> int:
        """How many env rows were ever used."""
        return len(self._slots)

    def knows(self, env_id: int) -> bool:
        """Whether the env row was ever used."""
        return env_id in self._slots

    def next_position(self, env_id: int) -> int:
        return int(self._next[self._slots[env_id]]) if env_id in self._slots else 0

    def positions(self) -> dict[int, int]:
        """Env id -> next position, of every env row ever used."""
        return {env: int(self._next[slot]) for env, slot in sorted(self._slots.items())}

    def start_at(self, env_id: int, position: int, episode: int | None = None) -> None:
        """Go on from a resumed buffer: the next position, and the episode that is open."""
        slot = self.slot(env_id)
        self._undo.rows(self._next, slot)
        self._undo.rows(self._open, slot)
        self._next[slot] = position
        self._open[slot] = NONE if episode is None else episode

    def register(self, *records: EpisodeRecord) -> int:
        """Keep records under the next indices; the first of these."""
        first, after = self._count, self._count + len(records)
        self._undo.attributes(self, "_count")
        self._undo.keys(self.records, range(first, after))
        self.records.update(zip(range(first, after), records, strict=True))
        self._count = after
        return first

    def open_episode(self, env_id: int) -> int | None:
        slot = self._slots.get(env_id)
        return None if slot is None or self._open[slot] == NONE else int(self._open[slot])

    def open_episodes(self) -> dict[int, int]:
        """Env id -> index of its open episode."""
        return {env: int(self._open[slot]) for env, slot in sorted(self._slots.items()) if self._open[slot] != NONE}

    def close(self, env_id: int) -> int | None:
        """The open episode of an env row ends here; its index."""
        index = self.open_episode(env_id)
        if index is not None:
            self._undo.rows(self._open, self._slots[env_id])
            self._open[self._slots[env_id]] = NONE
        return index

    def take_broken_off(self) -> list[int]:
        """Episodes that ended without a last step since this was last asked."""
        self._undo.attributes(self, "_broken_off")
        out, self._broken_off = self._broken_off, []
        return out

    def assign(self, rows: Rows, new_episode: NewEpisode, by_id: dict[str, int]) -> Assigned:
        """Positions and episodes of appended rows; records of begun and ended episodes are updated, `by_id` too."""
        begun = self._count
        order, heads, slots = self._grouped(rows.env_ids)
        positions = self._positions(rows, order, heads, slots)
        last = _sorted(rows.last, order)
        before_last = np.r_[False, last[:-1]]
        opened = self._open[slots]
        fresh = np.where(heads, opened == NONE, before_last)
        jump = np.where(heads, positions != self._next[slots], np.r_[False, np.diff(positions) != 1])
        jump &= ~np.where(heads, self._next[slots] == 0, False)
        first = _sorted(rows.first, order)
        changed = self._changed_ids(rows, order, heads, opened, fresh | first | jump)
        starts = fresh | first | jump | changed
        whole = first if rows.first is not None else (fresh | changed) & ~jump
        episodes = np.where(heads & ~starts, opened, NONE)
        self._begin(rows, order, starts, whole, (positions, episodes), new_episode, by_id)
        episodes = episodes[np.maximum.accumulate(np.where(starts | heads, np.arange(len(starts)), 0))]
        before = np.where(heads, self._next[slots], np.r_[0, positions[:-1] + 1])
        self._break_off(starts & ~fresh, jump, np.where(heads, opened, np.r_[NONE, episodes[:-1]]), before)
        ending = np.flatnonzero(last)
        self._finish(rows, order[ending], episodes[ending], positions[ending], begun)
        tails = np.r_[heads[1:], True] if len(heads) else heads
        self._undo.rows(self._next, slots[tails])
        self._undo.rows(self._open, slots[tails])
        self._next[slots[tails]] = positions[tails] + 1
        self._open[slots[tails]] = np.where(last[tails], NONE, episodes[tails])
        out = Assigned(np.empty_like(positions), np.empty_like(episodes))
        out.positions[order], out.episodes[order] = positions, episodes
        return out

    def _grouped(self, env_ids: Ints) -> tuple[Ints, Mask, Ints]:
        """Order by env row (stable), where each row's group begins, and the slot of each sorted row."""
        if (env_ids[1:] >= env_ids[:-1]).all():
            heads = run_heads(env_ids)
            starts = np.flatnonzero(heads)
            slots = np.array([self.slot(env) for env in env_ids[starts].tolist()], np.int64)
            return np.arange(len(env_ids)), heads, np.repeat(slots, np.diff(starts, append=len(env_ids)))
        unique, inverse = np.unique(env_ids, return_inverse=True)
        slots = np.array([self.slot(int(e)) for e in unique], np.int64)[inverse] if len(unique) else inverse
        order = np.argsort(inverse, kind="stable")
        ordered = slots[order]
        return order, run_heads(ordered), ordered

    def _positions(self, rows: Rows, order: Ints, heads: Mask, slots: Ints) -> Ints:
        index = np.arange(len(order))
        within = index - np.maximum.accumulate(np.where(heads, index, 0))
        if rows.positions is None:
            return self._next[slots] + within
        positions = np.asarray(rows.positions, np.int64)[order]
        least = np.where(heads, self._next[slots], np.r_[0, positions[:-1] + 1] if len(positions) else positions)
        if (positions < least).any():
            bad = int(np.flatnonzero(positions < least)[0])
            raise UsageError(
                f"position {positions[bad]} of env {rows.env_ids[order[bad]]} was used before (the next is "
                f"{least[bad]}); positions only grow and are never used twice"
            )
        return positions

    def _changed_ids(self, rows: Rows, order: Ints, heads: Mask, opened: Ints, begins: Mask) -> Mask:
        """Rows with another id than their episode so far; None goes on with it."""
        out = np.zeros(len(order), bool)
        if rows.episode_ids is None:
            return out
        current: str | None = None
        for i, row in enumerate(order.tolist()):
            name = rows.episode_ids[row]
            if heads[i]:
                current = self._open_id(int(opened[i]))
            if begins[i]:
                current = name
            elif name is not None and name != current:
                out[i], current = True, name
        return out

    def _open_id(self, index: int) -> str | None:
        return self.records[index].id if index in self.records else None

    def _begin(
        self, rows: Rows, order: Ints, starts: Mask, whole: Mask, assigned: tuple[Ints, Ints], new: NewEpisode,
        by_id: dict[str, int],
    ) -> None:  # fmt: skip
        positions, episodes = assigned
        at = np.flatnonzero(starts)
        chosen = order[at]
        given = [None if rows.episode_ids is None else rows.episode_ids[row] for row in chosen.tolist()]
        records = [new(env, name) for env, name in zip(rows.env_ids[chosen].tolist(), given, strict=True)]
        for record, begun, position in zip(records, whole[at].tolist(), positions[at].tolist(), strict=True):
            record.headless, record.begin = not begun, position
        episodes[at] = np.arange(len(at)) + self.register(*records)  # now that none was refused
        self._undo.keys(by_id, [record.id for record in records])
        by_id.update(zip([record.id for record in records], episodes[at].tolist(), strict=True))

    def _break_off(self, seams: Mask, jump: Mask, previous: Ints, before: Ints) -> None:
        """Episodes that ended without a last step, because another began or positions jumped."""
        for i in np.flatnonzero(seams):
            index = int(previous[i])
            record = self.records.get(index)
            if record is not None and record.end is None:
                self._undo.attributes(record, "broken", "reason", "end", "ended")
                self._undo.length(self._broken_off)
                record.broken, record.reason = True, "gap" if jump[i] else "interrupted"
                record.end, record.ended = int(before[i]), self.epoch
                self._broken_off.append(index)

    def _finish(self, rows: Rows, chosen: Ints, episodes: Ints, positions: Ints, begun: int) -> None:
        """Episodes whose last steps are these. Those from number `begun` on are new, and taken back as a whole."""
        terminated, truncated = _values(rows.terminated, chosen), _values(rows.truncated, chosen)
        ends = (positions + 1).tolist()
        for index, end, first, second in zip(episodes.tolist(), ends, terminated, truncated, strict=True):
            record = self.records[index]
            if index < begun:
                self._undo.attributes(record, "terminated", "truncated", "end", "ended")
            record.terminated, record.truncated = first, second
            record.end, record.ended = end, self.epoch


def _values(mask: Mask | None, chosen: Ints) -> list[Any]:
    """The mask's values at the chosen rows, None where there is no mask."""
    return [None] * len(chosen) if mask is None else np.asarray(mask, bool)[chosen].tolist()


def _sorted(mask: Mask | None, order: Ints) -> Mask:
    return np.zeros(len(order), bool) if mask is None else np.asarray(mask, bool)[order]
