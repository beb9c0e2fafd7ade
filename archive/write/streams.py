"""Pure, no I/O: the offset and the episode of each appended row.

A stream is what one session appends for one env row. Rows of many env rows arrive mixed, in time order within each;
episodes begin at a `first`, after a `last`, where an episode id changes and where positions jump. Rows are given by
ranges in their order: `Steps` of env rows by offset, each with the number of its episode. The state of streams is
replaced or appended to, never overwritten, so that a refused call can be cut off again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask, Steps, ascending, group_of, offsets_of, run_starts
from archive.base import UsageError
from archive.write.changes import kept
from archive.write.episodes import NONE, End, EpisodeRecords, Ids, Lot, end_of


class AppendedRows(NamedTuple):
    """Appended rows as the caller gave them; masks and ids are per row or None."""

    env_ids: Ints | Steps  # of each row, or ranges of distinct env rows, in ascending order, end to end
    first: Mask | None = None
    last: Mask | None = None
    terminated: Mask | None = None
    truncated: Mask | None = None
    episode_ids: Any = None  # an array of strings or None
    positions: Ints | None = None  # None: the next ones, or those of the ranges

    @property
    def envs(self) -> Ints:
        """The env rows, each once."""
        return self.env_ids.stream if isinstance(self.env_ids, Steps) else ascending(self.env_ids)

    def sorted(self, order: Ints) -> AppendedRows:
        """The columns of the rows in this order, but for their env rows."""
        given = {name: value for name, value in self._asdict().items() if name != "env_ids" and value is not None}
        return self._replace(**{name: value[order] for name, value in given.items()})

    def begins(self, env: int, open_id: str, next_position: int) -> bool:
        """True if the first row of an env row begins an episode though one is open."""
        position: int | None = None
        if isinstance(self.env_ids, Steps):
            at = int(np.flatnonzero(self.env_ids.stream == env)[0])
            i, position = int(self.env_ids.length[:at].sum()), int(self.env_ids.lo[at])
        else:
            i = int(np.flatnonzero(self.env_ids == env)[0])
            position = None if self.positions is None else int(self.positions[i])
        name = None if self.episode_ids is None else self.episode_ids[i]
        jumps = position not in (None, next_position)
        return bool(jumps or (self.first is not None and self.first[i]) or (name is not None and name != open_id))


class _Groups(NamedTuple):
    """Rows in order of their env rows: group i, of env row env[i], begins at row head[i]."""

    order: Ints | None  # the place of each row among the given ones; None if it is the same
    env: Ints
    head: Ints
    rows: int
    slot: Ints
    following: Ints  # next offset in the env row, before these rows
    opened: Ints  # the open episode there, or NONE


class Streams:
    """The next offset and open episode of every env row of one buffer on one rank."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}  # env row -> its place in the two arrays, for every one that was ever used
        self._next = np.zeros(0, np.int64)
        self._open = np.zeros(0, np.int64)
        self.records = EpisodeRecords()
        self.epoch = 0  # the number of slabs that were sent
        self.ended: list[int] = []  # episodes that ended without a step; replaced, or appended to
        self.kept = kept(self, "_next", "_open", "epoch", grown=("slots", "ended"))

    def _slots_of(self, envs: Ints) -> Ints:
        names = envs.tolist()
        found = list(map(self.slots.get, names))
        if None in found:
            for env in names:
                self.slots.setdefault(env, len(self.slots))
            lacks = len(self.slots) - len(self._next)
            if lacks > 0:
                more = max(64, len(self._next), lacks)
                self._next = np.concatenate([self._next, np.zeros(more, np.int64)])
                self._open = np.concatenate([self._open, np.full(more, NONE, np.int64)])
            found = list(map(self.slots.get, names))
        return np.array(found, np.int64)

    def following(self, envs: Ints) -> Ints:
        """The next offset of each env row; -1 for one that was never used."""
        return np.array([self.next_position(env) if env in self.slots else -1 for env in envs.tolist()], np.int64)

    def next_position(self, env_id: int) -> int:
        return int(self._next[self.slots[env_id]]) if env_id in self.slots else 0

    def positions(self) -> dict[int, int]:
        """Env id -> next offset, of every env row ever used."""
        return {env: int(self._next[slot]) for env, slot in sorted(self.slots.items())}

    def start_at(self, env_id: int, position: int, episode: int | None = None) -> None:
        """Go on from a resumed buffer: its next offset, and its open episode."""
        slot = self._slots_of(np.array([env_id]))
        self._set(slot, np.array([position]), np.array([NONE if episode is None else episode]))

    def _set(self, slot: Ints, following: Ints, opened: Ints) -> None:
        ahead, now = self._next.copy(), self._open.copy()
        ahead[slot], now[slot] = following, opened
        self._next, self._open = ahead, now

    def open_episode(self, env_id: int) -> int | None:
        slot = self.slots.get(env_id)
        return None if slot is None or self._open[slot] == NONE else int(self._open[slot])

    def open_episodes(self) -> dict[int, int]:
        """Env id -> index of its open episode."""
        return {env: int(self._open[slot]) for env, slot in sorted(self.slots.items()) if self._open[slot] != NONE}

    def close(self, env_id: int, **how: Any) -> int | None:
        """End the open episode of an env row here, without a step; its number."""
        number = self.open_episode(env_id)
        if number is not None:
            position = self.next_position(env_id)
            self.start_at(env_id, position)
            self.end(number, position, **how)
        return number

    def end(self, number: int, position: int, **how: Any) -> None:
        """End an episode there, without a further step. how: the fields of an End."""
        self.records.close(number, End(position, self.epoch, **how))
        self.ended.append(number)

    def assign(self, rows: AppendedRows, ids: Ids, metadata: dict[str, Any], fields: str) -> tuple[Steps, Steps]:
        """Offsets and episodes of appended rows, in order of their env rows, and as they were given. Begun episodes, of
        these fields, are recorded, and the ends of those before them.

        The time it takes depends on the number of ranges of one episode, not of rows.
        """
        groups = self._grouped(rows.env_ids)
        rows = rows if groups.order is None else rows.sorted(groups.order)
        begin, positions, jump = _placed(rows, groups)
        first, last, names = rows.first, rows.last, rows.episode_ids
        fresh = np.zeros(groups.rows, bool)
        if last is not None:
            fresh[1:] = last[:-1]
        fresh[groups.head] = groups.opened == NONE
        starts = fresh
        for why in (first, jump):
            starts = starts if why is None else starts | why
        if names is not None:
            starts = starts | self._changed(names, groups, starts)
        edge = starts.copy()
        edge[groups.head] = True
        row = np.flatnonzero(edge)
        group = group_of(groups.head, row)
        lo = begin[group] + row - groups.head[group] if positions is None else positions[row]
        started, count = starts[row], len(self.records)
        episode = np.where(started, count - 1 + np.cumsum(started), groups.opened[group])
        runs = Steps(groups.env[group], lo, lo + np.diff(row, append=groups.rows), episode=episode)
        ends = _ends(rows, row, lo)
        at = np.flatnonzero(started)
        if len(at):
            headless = np.zeros(len(at), bool) if jump is None else jump[row[at]]
            headless = headless if first is None else ~first[row[at]]
            of_these = None if ends is None else ends[:, at]
            lot = Lot(count, ids, metadata, fields, runs.stream[at], lo[at], headless, of_these, self.epoch)
            self.records.begin(lot, None if names is None else names[row[at]].tolist())
        self._break_off(groups, runs, row, started & ~fresh[row], jump)
        opened = episode
        if ends is not None:
            ended = ends[0] != NONE
            for i in np.flatnonzero((episode < count) & ended).tolist():
                end = end_of(ends[:, i], self.epoch)
                assert end is not None
                self.records.close(int(episode[i]), end)
            opened = np.where(ended, NONE, episode)
        tail = group_of(row, np.append(groups.head, groups.rows)[1:] - 1)
        self._set(groups.slot, runs.hi[tail], opened[tail])
        return runs, runs if groups.order is None else runs.each().pick(np.argsort(groups.order)).merged()

    def _grouped(self, env_ids: Ints | Steps) -> _Groups:
        order: Ints | None = None
        if isinstance(env_ids, Steps):
            env, head = env_ids.stream, offsets_of(env_ids.length)
            head, rows = head[:-1], int(head[-1])
        else:
            if not (env_ids[1:] >= env_ids[:-1]).all():
                order = np.argsort(env_ids, kind="stable")
                env_ids = env_ids[order]
            head, rows = run_starts(env_ids), len(env_ids)
            env = env_ids[head]
        slot = self._slots_of(env)
        return _Groups(order, env, head, rows, slot, self._next[slot], self._open[slot])

    def _changed(self, ids: Any, groups: _Groups, starts: Mask) -> Mask:
        """Rows with another id than their episode so far; None goes on with it."""
        out = np.zeros(groups.rows, bool)
        heads = dict(zip(groups.head.tolist(), groups.opened.tolist(), strict=True))
        current: str | None = None
        for i, (name, starting) in enumerate(zip(ids.tolist(), starts.tolist(), strict=True)):
            if i in heads:
                current = None if heads[i] == NONE else self.records.id_of(heads[i])
            out[i] = not starting and name is not None and name != current
            if starting or out[i]:
                current = name
        return out

    def _break_off(self, groups: _Groups, runs: Steps, row: Ints, broken: Mask, jump: Mask | None) -> None:
        """End episodes without a last step where another begins, or offsets jump."""
        for i in np.flatnonzero(broken).tolist():
            group = int(group_of(groups.head, row[i]))
            if row[i] == groups.head[group]:
                number, end = groups.opened[group], groups.following[group]
            else:
                number, end = runs["episode"][i - 1], runs.hi[i - 1]
            reason = "gap" if jump is not None and jump[row[i]] else "interrupted"
            self.end(int(number), int(end), reason=reason, broken=True)


def _placed(rows: AppendedRows, groups: _Groups) -> tuple[Ints, Ints | None, Mask | None]:
    """The offset of the first row of each group; of each row, where that was given; and a mask of jumps."""
    if rows.positions is None and not isinstance(rows.env_ids, Steps):
        return groups.following, None, None
    jump = np.zeros(groups.rows, bool)
    positions: Ints | None = None
    if isinstance(rows.env_ids, Steps):
        begin = rows.env_ids.lo
        _check_unused(begin, groups.following, groups.env)
    else:
        assert rows.positions is not None
        positions = rows.positions
        begin = positions[groups.head]
        least = np.r_[0, positions[:-1] + 1][: groups.rows]
        least[groups.head] = groups.following
        _check_unused(positions, least, np.repeat(groups.env, np.diff(groups.head, append=groups.rows)))
        jump[1:] = np.diff(positions) != 1
    jump[groups.head] = (begin != groups.following) & (groups.following != 0)
    return begin, positions, jump


def _ends(rows: AppendedRows, row: Ints, lo: Ints) -> Ints | None:
    """The ends of ranges in the form of a Lot, where some end their episodes."""
    at = None if rows.last is None else np.flatnonzero(rows.last)
    if at is None or not len(at):
        return None
    run, out = group_of(row, at), np.full((3, len(row)), NONE)
    out[0, run] = lo[run] + at - row[run] + 1
    for i, given in enumerate((rows.terminated, rows.truncated), 1):
        if given is not None:
            out[i, run] = given[at]
    return out


def _check_unused(positions: Ints, least: Ints, env: Ints) -> None:
    bad = np.flatnonzero(positions < least)
    if len(bad):
        i = int(bad[0])
        raise UsageError(
            f"position {positions[i]} of env {env[i]} was used before (the next is {least[i]}); positions only grow "
            "and are never used twice"
        )
