"""Pure, no I/O: which position and which episode each appended row gets.

A stream is what one session appends for one env row. Rows of many env rows arrive mixed, in time order within each;
episodes begin at a `first`, after a `last`, where an episode id changes and where positions jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, Mask, group_of, offsets_of, run_starts
from archive.base import Undo, UsageError
from archive.write.episodes import NONE, Begun, Ends, EpisodeRecords, NewEpisodes
from archive.write.rowruns import NO_ROWS, Cuts, EnvRuns, Groups, RowRuns, cuts_at


class Rows(NamedTuple):
    """Appended rows as the caller gave them; masks and ids are per row or None."""

    env_ids: Ints | EnvRuns
    first: Mask | None = None
    last: Mask | None = None
    terminated: Mask | None = None
    truncated: Mask | None = None
    episode_ids: Sequence[str | None] | None = None
    positions: Ints | None = None  # None: the next ones, or what the env runs say

    @property
    def envs(self) -> Ints:
        """The env rows, each once."""
        return self.env_ids.env if isinstance(self.env_ids, EnvRuns) else np.unique(self.env_ids)

    def first_of(self, env: int) -> int:
        """The number of the first row of an env row."""
        if isinstance(self.env_ids, EnvRuns):
            return int(self.env_ids.length[self.env_ids.env < env].sum())
        return int(np.flatnonzero(self.env_ids == env)[0])

    def position_of(self, i: int) -> int | None:
        """The position that was given to row i, the first of its env row; None if it gets the next one."""
        if isinstance(self.env_ids, EnvRuns):
            at = int(group_of(offsets_of(self.env_ids.length), np.array(i)))
            return int(self.env_ids.position[at])
        return None if self.positions is None else int(self.positions[i])

    def begins(self, i: int, open_id: str, next_position: int) -> bool:
        """Whether row i, the first of its env row, begins an episode though one is open."""
        name = None if self.episode_ids is None else self.episode_ids[i]
        jumps = self.position_of(i) not in (None, next_position)
        return bool(jumps or (self.first is not None and self.first[i]) or (name is not None and name != open_id))


class Assigned(NamedTuple):
    """Where the rows belong. order: the place of each row of `runs` among those that were given, None if the same."""

    runs: RowRuns
    order: Ints | None = None

    @property
    def positions(self) -> Ints:
        """Of each row, as given."""
        return self._as_given(self.runs.positions)

    @property
    def episodes(self) -> Ints:
        """Of each row, as given: its number among the records."""
        return self._as_given(self.runs.episodes)

    @property
    def as_given(self) -> RowRuns:
        """The rows as they were given."""
        if self.order is None:
            return self.runs
        return RowRuns.of(self._as_given(np.repeat(self.runs.env, self.runs.length)), self.positions, self.episodes)

    def _as_given(self, values: Ints) -> Ints:
        if self.order is None:
            return values
        out = np.empty_like(values)
        out[self.order] = values
        return out


class Streams:
    """Next position and open episode of every env row of one buffer on one rank."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._slots: dict[int, int] = {}
        self._next = np.zeros(0, np.int64)
        self._open = np.zeros(0, np.int64)
        self.records = EpisodeRecords(self._undo)
        self.epoch = 0  # how many slabs have been sent
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

    def assign(self, rows: Rows, new: NewEpisodes) -> Assigned:
        """Positions and episodes of appended rows; begun episodes are recorded, and where those before them end.

        What is done takes time by runs of rows of one episode, not by rows.
        """
        groups, positions = self._placed(rows)
        cuts = self._cuts(rows, groups, positions)
        begun, starts = len(self.records), cuts.starts
        episodes = np.where(starts, begun - 1 + np.cumsum(starts), groups.opened[cuts.group])
        length = np.diff(cuts.row, append=groups.offset[-1])
        runs = RowRuns(groups.env[cuts.group], cuts.position, length, episodes)
        ends = _ends(rows, groups, cuts, self.epoch)
        self._begin(rows, groups, cuts, ends, new)
        self._break_off(groups, cuts, runs)
        self._finish(episodes, ends, begun)
        self._advance(groups, cuts, runs, ends)
        return Assigned(runs, groups.order)

    def _placed(self, rows: Rows) -> tuple[Groups, Ints | None]:
        """The rows by env row, and the position of each where that was given row by row."""
        groups = self._grouped(rows.env_ids)
        heads = groups.offset[:-1]
        if rows.positions is None:
            _check_unused(groups.position, groups.next, groups.env)
            return groups, None
        positions = groups.sorted(np.asarray(rows.positions, np.int64))
        least = np.r_[0, positions[:-1] + 1] if len(positions) else positions
        least[heads] = groups.next
        _check_unused(positions, least, np.repeat(groups.env, np.diff(groups.offset)))
        return groups._replace(position=positions[heads]), positions

    def _grouped(self, env_ids: Ints | EnvRuns) -> Groups:
        if isinstance(env_ids, EnvRuns):
            return self._group(None, env_ids.env, offsets_of(env_ids.length))._replace(position=env_ids.position)
        order = None if (env_ids[1:] >= env_ids[:-1]).all() else np.argsort(env_ids, kind="stable")
        ordered = env_ids if order is None else env_ids[order]
        starts = run_starts(ordered)
        return self._group(order, ordered[starts], np.append(starts, len(ordered)))

    def _group(self, order: Ints | None, env: Ints, offset: Ints) -> Groups:
        slot = np.array([self.slot(e) for e in env.tolist()], np.int64)
        following = self._next[slot]
        return Groups(order, env, offset, slot, following, self._open[slot], following)

    def _cuts(self, rows: Rows, groups: Groups, positions: Ints | None) -> Cuts:
        first, last = groups.flagged(rows.first), groups.flagged(rows.last)
        jump = NO_ROWS if positions is None else 1 + np.flatnonzero(np.diff(positions) != 1)
        cuts = cuts_at(groups, positions, first, last, jump)
        if rows.episode_ids is None:
            return cuts
        changed = self._changed_ids(rows.episode_ids, groups, cuts)
        return cuts_at(groups, positions, first, last, jump, changed)

    def _changed_ids(self, ids: Sequence[str | None], groups: Groups, cuts: Cuts) -> Ints:
        """Rows with another id than their episode so far; None goes on with it."""
        begins = set(cuts.row[cuts.starts].tolist())
        heads = dict(zip(groups.offset[:-1].tolist(), groups.opened.tolist(), strict=True))
        out: list[int] = []
        current: str | None = None
        for i in range(len(ids)):
            name = ids[i if groups.order is None else int(groups.order[i])]
            if i in heads:
                current = None if heads[i] == NONE else self.records.id_of(heads[i])
            if i in begins:
                current = name
            elif name is not None and name != current:
                out.append(i)
                current = name
        return np.array(out, np.int64)

    def _begin(self, rows: Rows, groups: Groups, cuts: Cuts, ends: Ends, new: NewEpisodes) -> None:
        at = np.flatnonzero(cuts.starts)
        whole = cuts.first if rows.first is not None else (cuts.fresh | cuts.changed) & ~cuts.jump
        begun = Begun(new, groups.env[cuts.group[at]], cuts.position[at], ~whole[at], ends.pick(at))
        if rows.episode_ids is None:
            self.records.begin(begun)
        else:
            row = cuts.row[at] if groups.order is None else groups.order[cuts.row[at]]
            names = [rows.episode_ids[i] for i in row.tolist()]
            self.records.add(*[begun.record(i, *new.named(name)) for i, name in enumerate(names)])

    def _break_off(self, groups: Groups, cuts: Cuts, runs: RowRuns) -> None:
        """Episodes that ended without a last step, because another began or positions jumped."""
        for i in np.flatnonzero(cuts.starts & ~cuts.fresh).tolist():
            group = cuts.group[i]
            number = int(groups.opened[group] if cuts.head[i] else runs.episode[i - 1])
            record = self.records[number]
            if record.end is None:
                self._undo.attributes(record, "broken", "reason", "end", "ended")
                self._undo.length(self._broken_off)
                record.broken, record.reason = True, "gap" if cuts.jump[i] else "interrupted"
                end = groups.next[group] if cuts.head[i] else runs.position[i - 1] + runs.length[i - 1]
                record.end, record.ended = int(end), self.epoch
                self._broken_off.append(number)

    def _finish(self, episodes: Ints, ends: Ends, begun: int) -> None:
        """Episodes that were open before the call, and whose last steps are in it."""
        for i in np.flatnonzero((episodes < begun) & (ends.position != NONE)).tolist():
            record = self.records[int(episodes[i])]
            self._undo.attributes(record, "terminated", "truncated", "end", "ended")
            ends.mark(i, record)

    def _advance(self, groups: Groups, cuts: Cuts, runs: RowRuns, ends: Ends) -> None:
        """What comes next in each env row, and what is open there."""
        tails = group_of(cuts.row, groups.offset[1:] - 1)
        self._undo.rows(self._next, groups.slot)
        self._undo.rows(self._open, groups.slot)
        self._next[groups.slot] = (runs.position + runs.length)[tails]
        self._open[groups.slot] = np.where(ends.position == NONE, runs.episode, NONE)[tails]


def _ends(rows: Rows, groups: Groups, cuts: Cuts, epoch: int) -> Ends:
    """Where and how each run ends its episode."""
    row = groups.flagged(rows.last)
    run = group_of(cuts.row, row)
    ends = Ends.none(len(cuts.row), epoch)
    ends.position[run] = cuts.position[run] + row - cuts.row[run] + 1
    chosen = row if groups.order is None else groups.order[row]
    if rows.terminated is not None:
        ends.terminated[run] = rows.terminated[chosen]
    if rows.truncated is not None:
        ends.truncated[run] = rows.truncated[chosen]
    return ends


def _check_unused(positions: Ints, least: Ints, env: Ints) -> None:
    bad = np.flatnonzero(positions < least)
    if len(bad):
        i = int(bad[0])
        raise UsageError(
            f"position {positions[i]} of env {env[i]} was used before (the next is {least[i]}); positions only grow "
            "and are never used twice"
        )
