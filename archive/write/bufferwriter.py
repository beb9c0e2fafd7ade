"""Writing one buffer of one rank: steps come in as episodes or as streams of env rows, and leave by eviction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Memory
from archive.base import FieldError, Losses, NotFoundError, UsageError, check_text, logger
from archive.fields import Fields, Kinds, Schema, ShardSchema
from archive.manifest import BufferResume, KnownEpisode, LiveRuns, LiveSet, Place, Stream
from archive.shard import SHARD_BYTES
from archive.tables import NO_ENV
from archive.write import cut, intake
from archive.write.blocks import Block
from archive.write.cut import Cut
from archive.write.departures import Departures, Range
from archive.write.episodes import EpisodeRecord, Ids, SegmentRows
from archive.write.intake import Part, Weights
from archive.write.pipeline import Changes
from archive.write.rowruns import EnvRuns, RowRuns
from archive.write.slabs import Collected, slab_bytes
from archive.write.streams import Assigned, Rows, Streams
from archive.write.works import Describe, rows_alone

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS_BYTES = 16 * 1024 * 1024  # a piece of memory for columns; larger ones have their own


class BufferWriter:
    """The verbs of a writer for one of its buffers. Calls are serialised by the writer's lock.

    `Buffer.exclusive()` hands it out to code that keeps a live buffer in step with the archive: beside the verbs such
    code needs `declare`, `next_position`, `knows` and `live_runs`, and nothing else of it; and `empty(shape, dtype)`,
    memory for what it appends as `owned`, used before where there is such: new pages cost more than the copy. So is
    `column(shape, dtype)`, for what a checkpoint copies.
    """

    def __init__(
        self, name: str, place: Place, schema: Schema, memory: Memory, ids: Ids, changes: Changes, *,
        journaled: bool = False,
    ) -> None:  # fmt: skip
        """journaled: what leaves it is taken note of, for `departures.take()`."""
        self.name = name
        self.place = place
        self.schema = schema
        self.empty = memory.empty
        self.column = Memory(_COLUMNS_BYTES, keep=4).empty
        self._changes = changes
        self._undo = changes.undo
        self.streams = Streams(self._undo)
        self.departures = Departures(place.session, place.rank, self._undo)
        self._departed = self.departures if journaled else None
        self.live_set = LiveSet(undo=self._undo, departed=self._departed)
        self._ids = ids
        self._rows_of = SegmentRows(name, place, self.streams.records, ids)
        self._weights = Weights()
        self._collected = Collected(
            changes, memory, self._shard_bytes, self._describing, lambda shard: intake.reward_field(self.schema, shard),
            lambda: SHARD_BYTES,
        )  # fmt: skip
        self._kinds = Kinds(name)
        self._closed: list[int] = []
        self._steps_at_send = 0  # live ones, when a shard was last sent off
        self.losses = Losses(self._undo)
        self._foreign: list[Stream] = []  # streams of other ranks and sessions that have live steps here

    # -- looking ------------------------------------------------------------------------------------------------

    def declare(self, schema: Schema) -> None:
        """Say what the fields mean of steps that are added from now on."""
        self._undo.attributes(self, "schema")
        self.schema = schema

    def next_position(self, env_id: int) -> int:
        """Position that the next step of an env row gets; 0 for one that has none."""
        return self.streams.next_position(int(env_id))

    def knows(self, env_id: int) -> bool:
        """Whether an env row has had steps, or was resumed."""
        return self.streams.knows(int(env_id))

    @property
    def journaled(self) -> bool:
        """Whether its writer keeps a journal."""
        return self._departed is not None

    def live_runs(self) -> tuple[LiveRuns, list[str]]:
        """The live steps as runs of one episode each, in live order; and the episode id of each run."""
        runs = self.live_set.runs()
        return runs, [self.streams.records.id_of(i) for i in runs.episode.tolist()]

    def addresses(self, runs: LiveRuns) -> list[Range]:
        """Where the steps of live runs were written, run by run."""
        return self.departures.addresses(runs)

    def live_rows(self) -> pa.Table:
        """The live steps as rows of the live table."""
        return cut.live_table(self.name, (self.place.session, self.place.rank), self.live_set.runs(), self._foreign)

    @property
    def pending_bytes(self) -> int:
        """Bytes of steps that are not handed in yet."""
        return self._collected.nbytes

    @property
    def pending_steps(self) -> int:
        """Steps that are not handed in yet."""
        return self._collected.steps

    # -- adding -------------------------------------------------------------------------------------------------

    def add_episode(
        self, steps: Any, *, model_weights_uuid: Any, update_count: Any, env_id: int | None, episode_id: str | None,
        terminated: bool | None, truncated: bool | None, metadata: dict[str, Any] | None, replace: bool,
        first: bool, last: bool, schema: Schema | None = None,
    ) -> str:  # fmt: skip
        fields, shard = intake.steps(steps, schema or self.schema, self._kinds.known)
        intake.check_rows(fields, last=last)
        if replace and not intake.has_steps(fields):
            self._ids.check_new(episode_id)
        weights = intake.weights(model_weights_uuid, update_count, self._weights, fields)
        metadata = intake.own_metadata(metadata)
        env = NO_ENV if env_id is None else int(intake.env_ids(env_id, 1)[0])
        if self.streams.open_episode(env) is not None:
            raise UsageError(f"env {env} has an open episode; close it first with close_episodes([{env}])")
        known = self.streams.records.number_of(episode_id) if replace and episode_id is not None else None
        if known is not None and known in self.streams.open_episodes().values():
            raise UsageError(
                f"episode {episode_id!r} is open, and cannot be replaced before it is closed: close_episodes()"
            )
        name, replaces = self._ids.episodes(metadata, shard.digest, replace=replace).named(episode_id)
        record = EpisodeRecord(name, env, metadata=metadata, replaces=replaces, fields=shard.digest)
        self._kinds.add(shard, fields.vague)
        record.headless, record.terminated, record.truncated = not first, terminated, truncated
        start = self.streams.next_position(env)
        count = fields.length
        # an episode without steps takes a position too, so that it can be live and be named: its first one is the next
        record.begin = start if count or last else start + 1
        record.end, record.ended = start + count if last else None, self.streams.epoch
        index = self._register(record)
        self.streams.start_at(env, start + max(1, count), None if last or env == NO_ENV else index)
        self.live_set.add(env, np.array([start]), np.array([count]), np.array([index]))
        runs = RowRuns(*(np.full(min(1, count), of) for of in (env, start, count, index)))
        self._collected.keep(Block(shard, fields.data, runs, weights.uuid, weights.update_count, index, env, start))
        return record.id

    def append(
        self, steps: Any, *, env_ids: Any = None, first: Any = None, last: Any = None, episode_ids: Any = None,
        terminated: Any = None, truncated: Any = None, model_weights_uuid: Any = None, update_count: Any = None,
        metadata: dict[str, Any] | None = None, positions: Any = None, owned: bool = False,
        declared: Schema | None = None,
    ) -> Ints:  # fmt: skip
        """As `Buffer.append`.  owned: the arrays are the buffer's from now on.  declared: what these fields mean, where
        that is not what the buffer's schema says."""
        fields, schema = intake.steps(steps, declared or self.schema, self._kinds.known)
        weights = intake.weights(model_weights_uuid, update_count, self._weights, fields)
        metadata = intake.own_metadata(metadata)
        rows = intake.rows(fields.length, env_ids, first, last, episode_ids, terminated, truncated, positions)
        assigned = self._assigned(rows, fields, schema, metadata)
        self._keep(fields, schema, weights, assigned.as_given, owned=owned)
        return assigned.positions

    def append_parts(
        self, parts: Iterable[Part], env_runs: EnvRuns, *, first: Any, last: Any, episode_ids: Any, terminated: Any,
        truncated: Any, metadata: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        """As `append`, of steps that come in parts, each of which is the buffer's from now on; env_runs: of all parts.

        Positions and episodes of all are found when the first is there.
        """
        metadata = intake.own_metadata(metadata)
        rows = intake.rows(
            int(env_runs.length.sum()), env_runs, first, last, episode_ids, terminated, truncated, positions=None
        )
        runs: RowRuns | None = None
        alike: intake.Alike | None = None
        for part in parts:
            more = alike and alike.more(part.steps)
            if more is None:
                fields, schema = intake.steps(part.steps, self.schema, self._kinds.known)
                alike = intake.Alike.of(part.steps, fields)
            else:
                fields = more
            weights = intake.weights(part.model_weights_uuid, part.update_count, self._weights, fields)
            if runs is None:
                runs = self._assigned(rows, fields, schema, metadata).runs
            self._keep(fields, schema, weights, runs.among(part.of), owned=True)

    def _assigned(self, rows: Rows, fields: Fields, schema: ShardSchema, metadata: dict[str, Any]) -> Assigned:
        """Positions and episodes of these rows, which are live from now on."""
        if intake.has_whole_fields(fields):
            intake.check_single(fields, rows)
        self._check_same_fields(rows, schema)
        self._kinds.add(schema, fields.vague)
        with self._ids.undone_on_error():
            assigned = self.streams.assign(rows, self._ids.episodes(metadata, schema.digest, replace=False))
        self._undo.attributes(self, "_closed")
        self._closed = [*self._closed, *self.streams.take_broken_off()]
        runs = assigned.runs
        self.live_set.add(runs.env, runs.position, runs.length, runs.episode)
        return assigned

    def _keep(self, fields: Fields, schema: ShardSchema, weights: Weights, runs: RowRuns, *, owned: bool) -> None:
        episode = int(runs.episode[0]) if intake.has_whole_fields(fields) and fields.length else None
        block = Block(schema, fields.data, runs, weights.uuid, weights.update_count, episode)
        self._collected.keep(block, owned=owned)

    def _check_same_fields(self, rows: Rows, schema: ShardSchema) -> None:
        if self._kinds.is_only(schema):
            return
        for env in rows.envs.tolist():
            index = self.streams.open_episode(env)
            record = self.streams.records[index] if index is not None else None
            if record is None or record.fields in ("", schema.digest):
                continue
            if rows.begins(rows.first_of(env), record.id, self.streams.next_position(env)):
                continue
            if not self._kinds.only_guesses_differ(record.fields, schema):
                raise FieldError(
                    f"the steps of env {env} differ in fields, dtypes or shapes from the earlier steps of its open "
                    f"episode {record.id!r} ({self._kinds.difference(record.fields, schema)}); give the same fields "
                    "for all steps of an episode, or close it first"
                )
            if self._collected.has(record.fields):
                self._collected.submit(record.fields)  # the earlier steps are written first
            self._undo.attributes(record, "fields")
            record.fields = schema.digest

    def _register(self, record: EpisodeRecord) -> int:
        replaced = self.streams.records.number_of(record.id) if record.replaces else None
        if replaced is not None:
            self.live_set.remove(np.array([replaced]))
            self._undo.attributes(self, "_closed")
            self._closed = [i for i in self._closed if i != replaced]
            earlier = self.streams.records[replaced].fields
            if earlier != record.fields and self._collected.has(earlier):
                self._collected.submit(earlier)  # the newest revision is the one written last
        return self.streams.records.add(record)

    def _shard_bytes(self, piece: Block) -> int:
        """Of env rows that advance together, and so are evicted together, a shard holds a slab of time."""
        rows, step_bytes = self.streams.env_rows, max(1, piece.nbytes // max(1, piece.length))
        return slab_bytes(self._steps_at_send * step_bytes, rows, step_bytes, SHARD_BYTES) if rows > 1 else SHARD_BYTES

    def _describing(self) -> Describe:
        """What describes the segments of the blocks that are sent off now."""
        self._undo.attributes(self, "_steps_at_send")
        self._undo.attributes(self.streams, "epoch")
        self._steps_at_send = self.live_set.steps_at_most
        epoch = self.streams.epoch
        self.streams.epoch += 1
        return partial(self._rows_of.describe, epoch)

    # -- leaving ------------------------------------------------------------------------------------------------

    def evict(self, env_id: int | None, before: int | None, positions: Any) -> None:
        env = NO_ENV if env_id is None else int(env_id)
        limit = self.streams.next_position(env)
        if (before is None) == (positions is None):
            raise UsageError("evict() takes before=POSITION or positions=[...], one of them")
        if before is not None:
            self.live_set.evict_before(env, min(int(before), limit))
            return
        if isinstance(positions, (tuple, range, slice)):
            start, stop = intake.position_range(positions, limit)
            self.live_set.evict_range(env, start, stop)
            return
        array = np.asarray(positions, np.int64).reshape(-1)
        if len(array) and (int(array.min()) < 0 or int(array.max()) >= limit):
            raise UsageError(f"env {env} has positions 0 to {limit}; {int(array.max())} cannot be evicted")
        self.live_set.evict(env, array)

    def evict_before(self, env_ids: Ints, positions: Ints) -> None:
        """All steps of these env rows before these positions, of which none is beyond the next, have left."""
        self.live_set.evict_all_before(env_ids, positions)

    def remove(self, episode_ids: str | Iterable[str], missing: str = "error") -> int:
        names = [episode_ids] if isinstance(episode_ids, str) else list(episode_ids)
        found = [(n, self.streams.records.number_of(n)) for n in names]
        numbers = [number for _, number in found if number is not None]
        if missing not in ("error", "ignore"):
            raise UsageError(f"missing={missing!r}: give 'error', or 'ignore' to remove those that are there")
        if len(numbers) < len(found) and missing == "error":
            unknown = next(n for n, number in found if number is None)
            raise NotFoundError(
                f"episode {unknown!r} is not in buffer {self.name!r}; w.live lists what is, and "
                "remove(ids, missing='ignore') passes over what is not; nothing was removed"
            )
        return self.live_set.remove(np.array(numbers, np.int64))

    def close_episodes(
        self, env_ids: Any, terminated: bool | None, truncated: bool | None, reason: str | None
    ) -> list[str]:
        """End the open episodes of these env rows (all, if None) without another step; their ids."""
        opened = self.streams.open_episodes()
        wanted = list(opened) if env_ids is None else np.atleast_1d(np.asarray(env_ids, np.int64)).tolist()
        closed = []
        for env in wanted:
            index = self.streams.close(env)
            if index is None:
                continue
            record = self.streams.records[index]
            self._undo.attributes(record, "terminated", "truncated", "reason", "end", "ended")
            self._undo.length(self._closed)
            record.terminated, record.truncated, record.reason = terminated, truncated, reason
            record.end, record.ended = self.streams.next_position(env), self.streams.epoch
            self._closed.append(index)
            closed.append(record.id)
        return closed

    # -- checkpoints --------------------------------------------------------------------------------------------

    def cut(self, *, columns: Any, attributes: Any, state: Any, incomplete: str) -> Cut:
        """This buffer as it stands, copied, for a checkpoint."""
        opened = {env: self.streams.records.id_of(i) for env, i in self.streams.open_episodes().items()}
        made = cut.make(
            self.name, (self.place.session, self.place.rank), self.live_set.runs(), self.streams.records, self._foreign,
            (self.streams.positions(), opened), columns=columns, attributes=attributes, state=state,
            incomplete=incomplete, empty=self.column,
        )  # fmt: skip
        return replace(made, discarded=self.losses.unreported(made.discarded))

    def overwritten(self, episodes: int, steps: int) -> None:
        """So many steps left the buffer before they were appended: counted, and a warning the first time."""
        if not self.losses.mark():
            logger.warning(
                "buffer %r: %d steps of %d env rows were overwritten before they were appended, and are lost to the "
                "archive; append more often, or make the ring longer. More of them are counted in `discarded` of the "
                "checkpoints",
                self.name, steps, episodes,
            )  # fmt: skip
        self.losses.add("overwritten", episodes, steps)

    def resume(self, resume: BufferResume) -> None:
        """Take over live steps, positions and open episodes; the buffer must be new."""
        places = [self._known(episode) for episode in resume.episodes]
        index = np.array(places, np.int64)
        runs = resume.runs._replace(episode=index[resume.runs.episode])
        self.live_set = LiveSet(runs, self._undo, self._departed)
        self._foreign = list(resume.streams)
        self.departures.resume(runs, self._foreign, resume.next_positions)
        for reason, counts in resume.dropped.items():
            self.losses.add(reason, counts["episodes"], counts["steps"])
        for env, position in resume.next_positions.items():
            place = resume.open_episodes.get(env)
            self.streams.start_at(env, position, None if place is None else places[place])
        for place in resume.to_close:
            record = self.streams.records[places[place]]
            record.truncated, record.reason = True, "resumed"
            record.end, record.ended = record.begin + record.stored, self.streams.epoch
            self._closed.append(places[place])

    def _known(self, episode: KnownEpisode) -> int:
        record = EpisodeRecord(episode.id, episode.env_id, headless=episode.headless, begin=episode.begin)
        record.stored, rest = episode.stored, episode.unfinished
        if rest is None:
            record.end, record.broken, record.sealed = episode.begin + episode.stored, episode.broken, True
        else:
            record.predecessor, record.returned = rest.predecessor, rest.returned
            record.metadata = dict(rest.metadata)
        return self.streams.records.add(record)

    # -- writing ------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Everything pending is ready for the store."""
        self._collected.submit_all()
        if self._closed:
            self._undo.attributes(self, "_closed")
            closed, self._closed = self._closed, []
            self._changes.add(rows_alone("segments", lambda: self._rows_of.closing(closed)))

    @property
    def live(self) -> pa.Table:
        """(env_id, position, length, episode_id), the order that columns follow."""
        import pyarrow as pa

        runs, names = self.live_runs()
        env = pa.array(runs.env, mask=runs.env == NO_ENV)
        return pa.table(
            {
                "env_id": env,
                "position": runs.position,
                "length": runs.length,
                "episode_id": pa.array(names, pa.string()),
            }
        )

    def set_weights(self, uuid: Any, update_count: int | None) -> None:
        self._undo.attributes(self, "_weights")
        self._weights = Weights(
            None if uuid is None else check_text(str(uuid), "model_weights_uuid"),
            None if update_count is None else intake.update_count(update_count),
        )
