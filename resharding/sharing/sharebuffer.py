"""One buffer of a share: its episodes in order, ids renumbered, columns and attributes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, group_of, sums
from archive.base import cached_property
from archive.checkpoint import Checkpoint, ColumnRef, resuming
from archive.fields import NODES, FieldSpec, Path, dtypes, unflatten
from archive.manifest import BufferResume, Runs
from archive.read import Destination, Episode, Episodes, Selection, Shown, Spans
from archive.steps import Steps
from resharding.placing import (
    Dropped,
    Parts,
    Rules,
    SourceBuffer,
    cut_pieces,
    gather,
    joined,
    piece_positions,
    read_cost,
)
from resharding.sharing.renumbering import Roles, renumber, renumber_places, renumber_rows, roles_of
from resharding.sharing.telling import read_of

if TYPE_CHECKING:
    from resharding.sharing.share import Share


@dataclass(frozen=True)
class Layout:
    """Where the episodes of a share stand: one entry each, in order of env row and position."""

    env_id: Ints
    position: Ints
    length: Ints
    open: np.ndarray[Any, np.dtype[np.bool_]]
    headless: np.ndarray[Any, np.dtype[np.bool_]]
    source_rank: Ints
    source_env: Ints


class ShareEpisode(Episode):
    """An episode of a share. `read()` has env ids and episode ids renumbered where steps have moved; `lineage` has the
    old ones."""

    env: int
    place: int
    lineage: dict[str, Any]
    renumbered: bool
    roles: Roles

    def read(
        self,
        fields: Any = None,
        start: int = 0,
        stop: int | None = None,
        *,
        missing: Any = "error",
        ragged: str = "list",
        derive: Any = (),
        out: Any = None,
    ) -> dict[str, Any]:
        data = super().read(fields, start, stop, missing=missing, ragged=ragged, derive=derive, out=out)
        return self._renumber(data)

    def _renumber(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.renumbered:
            renumber(data, self.roles, self.env, self.place, self.id)
        return data


class ShareBuffer:
    """One buffer of a share. saved: without the fields that its steps were given after they were written."""

    def __init__(self, share: Share, name: str, *, saved: bool = False) -> None:
        self._share, self.name, self._saved = share, name, saved
        self._plan = share.plan
        placement = self._plan.placements[name]
        self._parts: Parts = placement.parts.pick(np.flatnonzero(placement.parts.target == share.rank))

    @cached_property
    def _source(self) -> SourceBuffer:
        return self._plan.source.buffers[self.name]

    @cached_property
    def _pieces(self) -> tuple[Ints, Steps]:
        """(first piece of each part and one past the last, pieces)."""
        return cut_pieces(self._source, self._parts)

    @property
    def share(self) -> Share:
        """The share that it is of."""
        return self._share

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it is read from."""
        return self._plan.checkpoint

    @property
    def rules(self) -> Rules:
        """How the plan deals this buffer out."""
        return self._plan.rules[self.name]

    @property
    def dropped(self) -> Dropped:
        """Steps of this buffer that no rank gets, and why."""
        return self._plan.placements[self.name].dropped

    @cached_property
    def layout(self) -> Layout:
        """Env row, position and length of each episode, in order; which are open or headless."""
        units = self._plan.source.units(self._source)
        unit, parts = self._parts.unit, self._parts
        ends = parts.hi == self._source.steps[unit]
        return Layout(
            parts.env, parts.position, parts.steps, units.open[unit] & ends, units.headless[unit] | (parts.lo > 0),
            units.rank[unit], units.env[unit],
        )  # fmt: skip

    @cached_property
    def moved(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Episodes that get ids of the target when they are read: all but those where nothing moves.

        Nothing moves now, but sessions whose steps an earlier resume dealt to other ranks or env rows have in the
        archive the ids that they were first written with, and in the buffers those that they got then.
        """
        if not self._plan.is_identity:
            return np.ones(len(self), bool)
        live = self._plan.checkpoint.live
        session = np.array(live["session"].cast("string").to_pylist(), object)
        pairs = (("rank", "stream_rank"), ("env_id", "stream_env"))
        elsewhere = np.any([live[now].to_numpy() != live[origin].to_numpy() for now, origin in pairs], axis=0)
        offsets, pieces = self._pieces
        return sums(np.isin(session, session[elsewhere])[pieces["run"]].astype(np.int64), offsets) > 0

    @cached_property
    def next_positions(self) -> dict[int, int]:
        """Env row -> where the next step goes."""
        if self._plan.is_identity:
            staged = self._plan.checkpoint.staged(self._share.rank).index.buffers.get(self.name)
            return dict(staged.next_positions) if staged else {}
        taken = np.maximum(self._parts.steps, 1)
        out: dict[int, int] = {}
        for env, end in zip(self._parts.env.tolist(), (self._parts.position + taken).tolist(), strict=True):
            out[env] = max(end, out.get(env, 0))
        return out

    @cached_property
    def episodes(self) -> Episodes:
        """The share's episodes, in order, as the checkpoint has them (ids not renumbered)."""
        offsets, pieces = self._pieces
        ck = self._plan.checkpoint
        numbers = self._source.number[self._parts.unit]
        reader = ck.reader.as_written() if self._saved else ck.reader
        return Episodes(reader, ck.index, numbers, Spans(offsets, pieces.stream, pieces.lo, pieces.hi), ck)

    def __len__(self) -> int:
        return len(self._parts.unit)

    @property
    def steps(self) -> int:
        return int(self._parts.steps.sum())

    def __iter__(self) -> Iterator[ShareEpisode]:
        where, roles = self.layout, self._roles
        for i, ep in enumerate(self.episodes):
            own = ShareEpisode.__new__(ShareEpisode)
            own.__dict__.update(ep.__dict__)
            own.env, own.place, own.renumbered = int(where.env_id[i]), i, bool(self.moved[i])
            own.roles = roles[i]
            own.lineage = {
                "episode_id": ep.id, "rank": int(where.source_rank[i]), "env_id": int(where.source_env[i]),
                "start": int(self._parts.lo[i]), "stop": int(self._parts.hi[i]),
            }  # fmt: skip
            yield own

    @cached_property
    def _roles(self) -> list[Roles]:
        """Which fields of each episode are ids; one dict for all episodes of the same schemas."""
        offsets, pieces = self._pieces
        segments = self._plan.checkpoint.reader.segments(pieces.stream)
        roles = [roles_of(one) for one in segments.schemas]
        if len(roles) == 1:
            return roles * len(self)
        known: dict[tuple[int, ...], Roles] = {}
        ends, every, out = offsets.tolist(), segments.schema[segments.places(pieces.stream)].tolist(), []
        for a, b in pairwise(ends):
            key = tuple(every[a:b])
            if key not in known:
                known[key] = {path: role for code in key for path, role in roles[code].items()}
            out.append(known[key])
        return out

    @cached_property
    def schema_numbers(self) -> Ints:
        """Of each episode a number: those of the same one have the same fields."""
        view = self._shown
        if len(view.schemas) == 1:
            return np.zeros(len(self), np.int64)
        known: dict[tuple[int, ...], int] = {}
        every = [tuple(sorted(set(view.code[a:b].tolist()))) for a, b in pairwise(view.spans.offsets.tolist())]
        return np.array([known.setdefault(key, len(known)) for key in every], np.int64)

    @cached_property
    def _shown(self) -> Shown:
        """What fields its steps have."""
        return self.episodes.reader.shown(self.episodes.step_spans())

    @property
    def partly_late(self) -> frozenset[Path]:
        """Fields that were added to some of its steps after they were written, and that others lack."""
        view = self._shown
        found = [{spec.path for spec in view.schemas[code].fields} for code in self._kinds]
        late = frozenset(path for code in self._kinds for path in view.late[code])
        return late - frozenset.intersection(*map(frozenset, found)) if found else late

    @property
    def _kinds(self) -> list[int]:
        """The schemas that some step has, by number."""
        spans = self._shown.spans
        out: list[int] = np.unique(self._shown.code[spans.hi > spans.lo]).tolist()
        return out

    def stream(self, fields: Any = None, *, max_bytes: int = 2**28) -> Iterator[tuple[ShareEpisode, dict[str, Any]]]:
        """(episode, its steps) in order, fetched in batches, so that about `max_bytes` are held; each chunk once."""
        with read_of(self, whole=fields is None):
            for ep, (_, steps) in zip(self, self.episodes.stream(fields, max_bytes=max_bytes), strict=True):
                yield ep, ep._renumber(steps)

    def row_specs(self) -> dict[Path, FieldSpec] | None:
        """What each field is, where all steps have the same ones, of numbers and of one row a step; None otherwise.
        Fields that are `partly_late` are left out."""
        left_out = self.partly_late
        found = [
            {f.path: replace(f, next_of="") for f in self._shown.schemas[code].fields if f.path not in left_out}
            for code in self._kinds
        ]
        alike = found and all(specs == found[0] for specs in found) and all(map(_is_rows, found[0].values()))
        return found[0] if alike else None

    def read_into(self, arrays: Mapping[Path, np.ndarray[Any, Any]], starts: Ints, places: Ints) -> None:
        """Put the steps of all episodes into rows of arrays, each chunk once, ids renumbered.

        Step starts[i], counted over all episodes, and those up to step starts[i + 1] go to row places[i] and on.
        """
        into = Destination(unflatten(arrays), starts, places)
        with read_of(self, whole=True):
            self.episodes.reader.read_into(self.episodes.spans(), Selection(list(arrays)), into)
        lengths, env = self.layout.length, self.layout.env_id
        step = np.arange(int(lengths.sum()))
        run = group_of(starts, step)
        row = places[run] + step - starts[run]
        for roles in {id(roles): roles for roles in self._roles}.values():
            mine = self.moved & np.array([own is roles for own in self._roles], bool)
            for path, role in roles.items():
                chosen = np.repeat(mine & (env >= 0) if role == "env_id" else mine, lengths)
                numbers = np.repeat(env if role == "env_id" else np.arange(len(self)), lengths)
                renumber_places(arrays[path], row[chosen], numbers[chosen], path)

    def read(self, fields: Any = None) -> list[dict[str, Any]]:
        """The steps of all its episodes, in order, fetched together."""
        return [data for _, data in self.stream(fields, max_bytes=2**40)]

    def renumber_rows(self, batch: dict[str, Any], numbers: Ints) -> dict[str, Any]:
        """A batch whose item i is of the share's episode numbers[i], with env ids and episode ids renumbered."""
        if not self.moved.any():
            return batch
        of = {id(self._roles[n]): self._roles[n] for n in np.unique(numbers).tolist()}
        for roles in of.values():
            own = np.array([self._roles[n] is roles for n in numbers.tolist()], bool) & self.moved[numbers]
            env, place = np.where(own, self.layout.env_id[numbers], -1), np.where(own, numbers, -1)
            if own.any():
                renumber_rows(batch, roles, env, place, [self._ids[n] for n in numbers.tolist()])
        return batch

    @cached_property
    def _ids(self) -> list[str]:
        ids: list[str] = self.episodes.columns(["episode_id"])["episode_id"].to_pylist()
        return ids

    @property
    def seed(self) -> int:
        return self._share.seed

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Name -> one value a live step, in the share's order."""
        names = self._plan.checkpoint.buffers[self.name]["columns"]
        return {name: self._column(name) for name in names}

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        """Rows of each source rank's column, fetched once a rank, put in the share's order."""
        _, pieces = self._pieces
        at, rank = pieces["at"], pieces["rank"]
        steps = pieces.length
        parts: list[tuple[Ints, np.ndarray[Any, Any]]] = []
        for source_rank in np.unique(rank[steps > 0]).tolist():
            mine = np.flatnonzero((rank == source_rank) & (steps > 0))
            column = self._plan.checkpoint.column_ref(name, source_rank, self.name)
            runs = joined(at[mine], steps[mine])
            rows = np.concatenate(self._plan.checkpoint.file(column).column_rows(column, runs))
            parts.append((mine, gather(at[mine], steps[mine], runs, rows)))
        if not parts:
            return self._no_rows(name)
        out = np.empty((int(steps.sum()), *parts[0][1].shape[1:]), np.result_type(*(rows.dtype for _, rows in parts)))
        begins = np.cumsum(steps) - steps
        for mine, rows in parts:
            ends = np.cumsum(steps[mine])
            out[np.arange(len(rows)) + np.repeat(begins[mine] - (ends - steps[mine]), steps[mine])] = rows
        return out

    def _no_rows(self, name: str) -> np.ndarray[Any, Any]:
        """No values, of the column's dtype and shape as any rank has it."""
        ck = self._plan.checkpoint
        columns = (ck.staged(rank).index.columns.get(self.name, {}).get(name) for rank in ck.ranks)
        column = next(one for one in columns if one is not None)
        return np.zeros((0, *_logical_shape(column)), dtypes.to_numpy(column.dtype))

    @cached_property
    def attributes(self) -> dict[str, dict[str, Any]]:
        """Name -> {episode id: value}, of its own episodes."""
        own = set(self.episodes.columns(["episode_id"])["episode_id"].to_pylist())
        out: dict[str, dict[str, Any]] = {}
        for rank in np.unique(self.layout.source_rank).tolist() if len(self) else ():
            for name, values in self._plan.checkpoint.attributes(rank, self.name).items():
                out.setdefault(name, {}).update({k: v for k, v in values.items() if k in own})
        return out

    @property
    def state(self) -> Any:
        """The state of the same rank, where nothing moves; else None: see `source_states`."""
        return self._plan.checkpoint.state(self._share.rank, self.name) if self._plan.is_identity else None

    @property
    def source_states(self) -> dict[int, Any]:
        """Source rank -> its state, of all ranks."""
        return {rank: self._plan.checkpoint.state(rank, self.name) for rank in self._plan.checkpoint.ranks}

    def cost(self) -> dict[str, int]:
        """Requests and bytes of reading this buffer's share; bytes of its own steps; bytes of the shards it touches."""
        return read_cost(self.episodes)

    def to_resume(self) -> BufferResume:
        """What a writer of this buffer goes on from; of a checkpoint that skipped the buffers, nothing."""
        if not self._plan.checkpoint.replay_saved:
            return BufferResume(Runs.empty(), [], [], {}, {})
        offsets, pieces = self._pieces
        ck = self._plan.checkpoint
        counts = np.diff(offsets)
        env = np.repeat(self._parts.env, counts)
        moves = not self._plan.is_identity
        position = piece_positions(self._parts, counts, pieces) if moves else pieces["position"]
        opened, to_close = self._open()
        resume = resuming.take_over(ck, pieces, env, position, self.next_positions, opened, to_close=to_close)
        # told once, by one rank: its next checkpoint has it in `discarded`
        return replace(resume, dropped=self._plan.dropped_of(self.name) if self._share.rank == 0 else {})

    def _open(self) -> tuple[dict[int, str], list[str]]:
        """Open episodes: those that go on, by env row, and those that are closed here."""
        every = self._plan.source.open_episodes(self.name)
        if self._plan.is_identity:
            return {env: name for (rank, env), name in every.items() if rank == self._share.rank}, []
        where = self.layout
        ids = self.episodes.columns(["episode_id"])["episode_id"].to_pylist()
        last = {int(env): i for i, env in enumerate(where.env_id)}
        opened: dict[int, str] = {}
        to_close = []
        for i in np.flatnonzero(where.open).tolist():
            env = int(where.env_id[i])
            if self._plan.rules[self.name].unfinished == "continue" and last[env] == i and env >= 0:
                opened[env] = ids[i]
            else:
                to_close.append(ids[i])
        return opened, to_close


def _is_rows(spec: FieldSpec) -> bool:
    """Whether a field has no data, or rows of numbers, one a step, that lie in memory as they are stored."""
    if spec.axis in NODES:
        return True
    like = np.zeros((0, *spec.shape), dtypes.to_numpy(spec.dtype))
    return spec.axis == "step" and dtypes.as_stored(like, spec.dtype) is not None


def _logical_shape(column: ColumnRef) -> tuple[int, ...]:
    """Shape of one row as the user gave it, from that of a stored one."""
    trailing = len(dtypes.stored_trailing(column.dtype, ()))
    shape: tuple[int, ...] = column.shape
    return shape[: len(shape) - trailing]
