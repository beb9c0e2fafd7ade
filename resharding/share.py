"""Shares: the steps of one target rank, streamed in bounded memory, ids renumbered, with columns and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Mask, Steps, ascending, group_of, numbers, offsets_of, sums
from archive.base import ArchiveError, NotFoundError, cached_property, level_of, logger, size
from archive.checkpoint import MAIN_BUFFER, Checkpoint, resumption
from archive.fields import NODES, FieldSpec, Path, dtypes, unflatten
from archive.observe import add, operation
from archive.read import Destination, Episode, Episodes, Selection, Shown, Spans
from archive.write import BufferResume, Resume, live_steps
from resharding.placement import Rules
from resharding.renumber import Roles, renumber, renumber_places, renumber_rows, roles_of
from resharding.source import SourceBuffer

if TYPE_CHECKING:
    from resharding.plans import Plan

_READ = "rank %d of %d read %d episodes, %d steps of buffer %r of %r, which %d ranks saved: %s in %d requests, %.1f s"


@dataclass(frozen=True)
class ShareLayout:
    """The places of a share's episodes: one entry each, in order of env row and position."""

    env_id: Ints
    position: Ints
    length: Ints
    open: Mask
    headless: Mask
    source_rank: Ints
    source_env: Ints


class ShareEpisode(Episode):
    """An episode of a share. `read()` has env ids and episode ids renumbered if steps moved; `lineage` has the old
    ones."""

    env: int
    place: int
    lineage: dict[str, Any]
    renumbered: bool
    roles: Roles

    def read(self, *given: Any, **how: Any) -> dict[str, Any]:
        """The same as `Episode.read`, with its arguments."""
        return self._renumber(super().read(*given, **how))

    def _renumber(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.renumbered:
            renumber(data, self.roles, self.env, self.place, self.id)
        return data


class ShareBuffer:
    """One target rank's share of one buffer: its episodes in order, ids renumbered, with their columns.

    saved: without derived columns.
    """

    def __init__(self, plan: Plan, rank: int, name: str, *, saved: bool = False) -> None:
        self.plan, self.rank, self.name, self._saved = plan, rank, name, saved

    def __reduce__(self) -> Any:
        return partial(ShareBuffer, saved=self._saved), (self.plan, self.rank, self.name)

    @cached_property
    def _source(self) -> SourceBuffer:
        return self.plan.sources[self.name]

    @cached_property
    def _parts(self) -> Steps:
        """The steps of units that this rank gets."""
        parts = self.plan.placements[self.name].parts
        return parts.pick(np.flatnonzero(parts["target"] == self.rank))

    @cached_property
    def _pieces(self) -> tuple[Ints, Steps]:
        """(first piece of each part and one past the last, pieces)."""
        return self._source.cut(self._parts)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it is read from."""
        return self.plan.checkpoint

    @property
    def rules(self) -> Rules:
        """The rules by which the plan deals this buffer out."""
        return self.plan.placements[self.name].rules

    @property
    def dropped(self) -> Steps:
        """Steps of this buffer's units that no rank gets, and the reason."""
        return self.plan.dropped_steps(self.name)

    @property
    def seed(self) -> int:
        """A seed for this rank's random generators, where they can't go on as they were."""
        return self.plan.seed(self.rank)

    @cached_property
    def layout(self) -> ShareLayout:
        """Env row, position and length of each episode, in order; masks of open and headless ones."""
        parts = self._parts
        units = self._source.units.pick(parts.stream)
        opened: Any = units["open"] & (parts.hi == units.hi)
        headless: Any = units["headless"] | (parts.lo > 0)
        where = parts["env"], parts["position"], parts.length
        return ShareLayout(*where, opened, headless, units["rank"], units["env"])

    @cached_property
    def moved(self) -> Mask:
        """Mask of the episodes that get ids of the target when they are read: all, unless nothing moves.

        Even if nothing moves now, steps that an earlier resume dealt to other ranks or env rows have in the
        archive the ids of their first writing, and in the buffers those that they got then.
        """
        if not self.plan.is_identity:
            return np.ones(len(self), bool)
        live = self.checkpoint.live
        session = np.array(live["session"].cast("string").to_pylist(), object)
        pairs = (("rank", "stream_rank"), ("env_id", "stream_env"))
        elsewhere = np.any([numbers(live[now]) != numbers(live[origin]) for now, origin in pairs], axis=0)
        offsets, pieces = self._pieces
        return sums(np.isin(session, session[elsewhere])[pieces["run"]].astype(np.int64), offsets) > 0

    @cached_property
    def next_positions(self) -> dict[int, int]:
        """Env row -> the offset of the next step there."""
        if self.plan.is_identity:
            staged = self.checkpoint.staged(self.rank).index.buffers.get(self.name)
            return dict(staged.next_positions) if staged else {}
        ends = self._parts["position"] + np.maximum(self._parts.length, 1)
        out: dict[int, int] = {}
        for env, end in zip(self._parts["env"].tolist(), ends.tolist(), strict=True):
            out[env] = max(end, out.get(env, 0))
        return out

    @cached_property
    def episodes(self) -> Episodes:
        """The share's episodes, in order, as the checkpoint has them (ids not renumbered)."""
        offsets, pieces = self._pieces
        ck = self.checkpoint
        reader = ck.reader.as_written() if self._saved else ck.reader
        numbers = self._source.number[self._parts.stream]
        return Episodes(reader, ck.index, numbers, Spans(offsets, pieces.stream, pieces.lo, pieces.hi), ck)

    @cached_property
    def _ids(self) -> list[str]:
        ids: list[str] = self.episodes.columns(["episode_id"])["episode_id"].to_pylist()
        return ids

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def steps(self) -> int:
        return int(self._parts.length.sum())

    def __iter__(self) -> Iterator[ShareEpisode]:
        where, moved, roles = self.layout, self.moved, self._roles
        kind, start, stop = self.schema_numbers.tolist(), self._parts.lo.tolist(), self._parts.hi.tolist()
        for i, ep in enumerate(self.episodes):
            own = ShareEpisode.__new__(ShareEpisode)
            own.__dict__.update(ep.__dict__)
            own.env, own.place, own.renumbered = int(where.env_id[i]), i, bool(moved[i])
            own.roles = roles[kind[i]]
            own.lineage = {
                "episode_id": ep.id,
                "rank": int(where.source_rank[i]),
                "env_id": int(where.source_env[i]),
                "start": start[i],
                "stop": stop[i],
            }
            yield own

    # -- fields ------------------------------------------------------------------------------------

    @cached_property
    def _shown(self) -> Shown:
        """The schemas of its steps, with derived columns."""
        return self.episodes.reader.shown(self.episodes.step_spans())

    @cached_property
    def _kinds(self) -> tuple[Ints, list[tuple[int, ...]]]:
        """The kind of each episode, by number, and the schemas that the steps of each kind have."""
        view = self._shown
        if len(view.schemas) == 1:
            return np.zeros(len(self), np.int64), [(0,)]
        known: dict[tuple[int, ...], int] = {}
        every = [tuple(sorted(set(view.code[a:b].tolist()))) for a, b in pairwise(view.spans.offsets.tolist())]
        return np.array([known.setdefault(key, len(known)) for key in every], np.int64), list(known)

    @property
    def schema_numbers(self) -> Ints:
        """A number for each episode; episodes of one number have the same fields."""
        return self._kinds[0]

    @cached_property
    def _roles(self) -> list[Roles]:
        """The fields that are ids, of each kind of episode."""
        roles = [roles_of(one) for one in self._shown.schemas]
        return [{path: role for code in key for path, role in roles[code].items()} for key in self._kinds[1]]

    def row_specs(self) -> dict[Path, FieldSpec] | None:
        """The spec of each field, if all steps have the same ones, of numbers and of one row a step; None otherwise.
        Derived columns that some of the steps lack are left out."""
        view = self._shown
        there = ascending(view.code[view.spans.hi > view.spans.lo]).tolist()  # schemas of at least one step
        found = [{spec.path: replace(spec, next_of="") for spec in view.schemas[code].fields} for code in there]
        late = {path for code in there for path in view.late[code]}
        left_out = {path for path in late if not all(path in specs for specs in found)}
        found = [{path: spec for path, spec in specs.items() if path not in left_out} for specs in found]
        alike = found and all(specs == found[0] for specs in found) and all(map(_is_rows, found[0].values()))
        return found[0] if alike else None

    # -- reading -------------------------------------------------------------------------------------------------------

    def stream(self, fields: Any = None, *, max_bytes: int = 2**28) -> Iterator[tuple[ShareEpisode, dict[str, Any]]]:
        """(episode, its steps) in order, fetched in batches, so that about `max_bytes` are held; each chunk once."""
        with _reading(self, whole=fields is None):
            for ep, (_, steps) in zip(self, self.episodes.stream(fields, max_bytes=max_bytes), strict=True):
                yield ep, ep._renumber(steps)

    def read(self, fields: Any = None) -> list[dict[str, Any]]:
        """The steps of all its episodes, in order, fetched together."""
        return [data for _, data in self.stream(fields, max_bytes=2**40)]

    def read_into(self, arrays: Mapping[Path, np.ndarray[Any, Any]], starts: Ints, places: Ints) -> None:
        """Put the steps of all episodes into rows of arrays, each chunk once, ids renumbered.

        Step starts[i], counted over all episodes, and those up to step starts[i + 1] go to row places[i] and on.
        """
        into = Destination(unflatten(arrays), starts, places)
        with _reading(self, whole=True):
            self.episodes.reader.read_into(self.episodes.spans(), Selection(list(arrays)), into)
        lengths, env = self.layout.length, self.layout.env_id
        step = np.arange(int(lengths.sum()))
        run = group_of(starts, step)
        row = places[run] + step - starts[run]
        for number, roles in enumerate(self._roles):
            mine = self.moved & (self.schema_numbers == number)
            for path, role in roles.items():
                chosen = np.repeat(mine & (env >= 0) if role == "env_id" else mine, lengths)
                numbers = np.repeat(env if role == "env_id" else np.arange(len(self)), lengths)
                renumber_places(arrays[path], row[chosen], numbers[chosen], path)

    def renumber_rows(self, batch: dict[str, Any], numbers: Ints) -> dict[str, Any]:
        """A batch whose item i is of the share's episode numbers[i], with env ids and episode ids renumbered."""
        if not self.moved.any():
            return batch
        kind = self.schema_numbers[numbers]
        for one in ascending(kind).tolist():
            own = (kind == one) & self.moved[numbers]
            env, place = np.where(own, self.layout.env_id[numbers], -1), np.where(own, numbers, -1)
            if own.any():
                renumber_rows(batch, self._roles[one], env, place, [self._ids[n] for n in numbers.tolist()])
        return batch

    def cost(self) -> dict[str, int]:
        """Requests and bytes of reading this buffer's share; bytes of its own steps; bytes of the shards it touches."""
        episodes, reader = self.episodes, self.episodes.reader
        plan = reader.plan(episodes.spans())
        return {
            "requests": plan.requests,
            "bytes": plan.fetched_bytes,
            "shard_bytes": reader.shard_bytes(episodes.step_spans()),
            "needed_bytes": episodes.nbytes,
        }

    # -- columns, attributes and state -------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Name -> one value for each live step, in the share's order."""
        saved, pieces = self.checkpoint.buffers.get(self.name), self._pieces[1]
        return {} if saved is None else {name: self._source.column(name, pieces) for name in saved["columns"]}

    @cached_property
    def attributes(self) -> dict[str, dict[str, Any]]:
        """Name -> {episode id: value}, of its own episodes."""
        own = set(self._ids)
        out: dict[str, dict[str, Any]] = {}
        for rank in ascending(self.layout.source_rank).tolist() if len(self) else ():
            for name, values in self.checkpoint.attributes(rank, self.name).items():
                out.setdefault(name, {}).update({k: v for k, v in values.items() if k in own})
        return out

    @property
    def state(self) -> Any:
        """The state of the same rank, if nothing moves; else None: see `source_states`."""
        return self.checkpoint.state(self.rank, self.name) if self.plan.is_identity else None

    @property
    def source_states(self) -> dict[int, Any]:
        """Source rank -> its state, of all ranks."""
        return {rank: self.checkpoint.state(rank, self.name) for rank in self.checkpoint.ranks}

    # -- resuming ------------------------------------------------------------------------------------------------------

    def buffer_resume(self) -> BufferResume:
        """The contents that a writer of this buffer goes on with; none for a checkpoint without buffers."""
        if not self.checkpoint.replay_saved:
            return BufferResume(live_steps(), [], [], {}, {})
        offsets, pieces = self._pieces
        counts = np.diff(offsets)
        env, position = np.repeat(self._parts["env"], counts), pieces["position"]
        if not self.plan.is_identity:  # a beginning without steps stands where its first step does
            begins = offsets_of(pieces.length)
            position = np.repeat(self._parts["position"] - begins[offsets[:-1]], counts) + begins[:-1]
        opened, to_close = self._open()
        index, live, at = self.checkpoint.index, self.checkpoint.live, (env, position, self.next_positions, opened)
        resume = resumption.take_over(index, live, pieces, *at, lambda: self.checkpoint.whole_index, to_close=to_close)
        # told once, by one rank: its next checkpoint has it in `discarded`
        dropped = self.plan.dropped_of(self.name) if self.rank == 0 else {}
        ranks = ascending(pieces["rank"][pieces.length > 0]).tolist()
        kinds = partial(resumption.column_kinds, self.checkpoint, self.name, ranks)
        return replace(resume, dropped=dropped, column_kinds=kinds)

    def _open(self) -> tuple[dict[int, str], list[str]]:
        """Open episodes: those that go on, by env row, and those that are closed here."""
        if self.plan.is_identity:
            staged = self.checkpoint.staged(self.rank).index.buffers.get(self.name)
            return dict(staged.open_episodes) if staged else {}, []
        where = self.layout
        last = {int(env): i for i, env in enumerate(where.env_id)}
        opened: dict[int, str] = {}
        to_close = []
        for i in np.flatnonzero(where.open).tolist():
            env = int(where.env_id[i])
            if self.rules.unfinished == "continue" and last[env] == i and env >= 0:
                opened[env] = self._ids[i]
            else:
                to_close.append(self._ids[i])
        return opened, to_close


class Share(ShareBuffer):
    """The share of one target rank of a plan; by itself it is that of the main buffer."""

    def __init__(self, plan: Plan, rank: int, *, saved: bool = False) -> None:
        """saved: see `as_saved`."""
        main = MAIN_BUFFER if MAIN_BUFFER in plan.placements else next(iter(plan.placements), MAIN_BUFFER)
        super().__init__(plan, rank, main, saved=saved)
        self._buffers: dict[str, ShareBuffer] = {}

    def __reduce__(self) -> Any:
        return partial(Share, saved=self._saved), (self.plan, self.rank)

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def progress(self) -> Any:
        return self.checkpoint.progress

    @property
    def unconsumed(self) -> list[Any]:
        """The items that were drawn but not trained on, for the data source to give again."""
        return self.checkpoint.unconsumed

    @property
    def buffers(self) -> list[str]:
        return list(self.plan.placements)

    def buffer(self, name: str) -> ShareBuffer:
        """The share of one buffer."""
        if name not in self.plan.placements:
            raise NotFoundError(f"the plan has no buffer {name!r}; it has: {', '.join(self.plan.placements) or 'none'}")
        if name not in self._buffers:
            self._buffers[name] = ShareBuffer(self.plan, self.rank, name, saved=self._saved)
        return self._buffers[name]

    def as_saved(self) -> Share:
        """The share as the job had it, without derived columns.

        Adapters put this into live buffers, which go on with steps without such columns.
        """
        return Share(self.plan, self.rank, saved=True)

    def __bool__(self) -> bool:
        """True, even if this rank gets no episode: it has a state, a progress and a place to go on from."""
        return True

    def cost(self) -> dict[str, int]:
        """Requests and bytes of reading all its buffers."""
        costs = [self.buffer(name).cost() for name in self.buffers]
        return {key: sum(c[key] for c in costs) for key in ("requests", "bytes", "needed_bytes", "shard_bytes")}

    def to_resume(self, rank: int | None = None) -> Resume:
        """The contents that a writer goes on with: `arc.writer(resume=share)`."""
        ck = self.checkpoint
        buffers = {name: self.buffer(name).buffer_resume() for name in self.buffers}
        taken = (
            self.plan.seen,
            ck.number,
            self.plan.origin or ck.origin,
            ck.name,
            None,
            ck.world_size,
            self.plan.holders,
        )
        return Resume(self.rank, self.world_size, ck.run, buffers, *taken, takes_all=self.plan.takes_all)

    def __repr__(self) -> str:
        return f"<Share {self.rank} of {self.world_size} of {self.checkpoint.name!r}: {self.steps} steps>"


def _is_rows(spec: FieldSpec) -> bool:
    """True if a field has no data, or rows of numbers, one a step, that are in memory as they are stored."""
    if spec.axis in NODES:
        return True
    like = np.zeros((0, *spec.shape), dtypes.to_numpy(spec.dtype))
    return spec.axis == "step" and dtypes.as_stored(like, spec.dtype) is not None


@contextmanager
def _reading(buffer: ShareBuffer, *, whole: bool) -> Iterator[None]:
    """Time and count reading a buffer of a share, within the block, for logs and metrics. whole: all its fields, so
    that the plan can be compared. Other reads over the same connection count, too."""
    ck, world_size = buffer.checkpoint, buffer.plan.world_size
    storage = ck.snapshot.storage
    before = storage.stats.snapshot()
    with operation(
        "resume", current=False, run=ck.run, checkpoint=ck.name, buffer=buffer.name, rank=buffer.rank,
        world_size=world_size, saved_by=ck.world_size, episodes=len(buffer), steps=buffer.steps,
    ) as done:  # fmt: skip
        yield
        taken = storage.stats - before
        done.note(bytes=taken.bytes_in, requests=taken.requests)
    told = len(buffer), buffer.steps, buffer.name, ck.name, ck.world_size, size(taken.bytes_in), taken.requests
    logger.log(level_of(buffer.rank, INFO), _READ, buffer.rank, world_size, *told, done.seconds)
    if whole:
        with suppress(ArchiveError):  # the data has been read: missing objects do not matter here
            cost, store = ShareBuffer.cost(buffer), storage.root.protocol
            add("archive.resume.needed", cost["needed_bytes"], store=store)
            add("archive.resume.received", taken.bytes_in, store=store)
            add("archive.resume.planned", cost["requests"], store=store)
            add("archive.resume.requests", taken.requests, store=store)
