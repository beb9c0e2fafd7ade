"""One buffer of a writer: steps come in as episodes or as streams of env rows, and leave by eviction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from archive.arrays import Ints, Memory, Steps, spans
from archive.base import FieldError, Losses, NotFoundError, UsageError, check_text, logger
from archive.fields import Kinds, Schema
from archive.log import Place
from archive.tables import NO_ENV
from archive.write import intake
from archive.write.blocks import Block, weighed
from archive.write.changes import Changes, kept
from archive.write.episodes import End, EpisodeRecord, Ids, SegmentRows
from archive.write.intake import StepsPart, StepWeights, TakenSteps
from archive.write.live import BufferResume, Cut, Kind, LiveSet
from archive.write.slabs import Slabs
from archive.write.streams import AppendedRows, Streams
from archive.write.works import rows_alone

if TYPE_CHECKING:
    import threading

    import pyarrow as pa

Say = Callable[["Buffer", Any, Any, Any, Any], None]  # columns, attributes, progress and changes
_COLUMNS_BYTES = 16 * 1024 * 1024  # a piece of memory for columns; larger ones have their own


class Buffer:
    """One buffer of a writer: `w.buffer("demo")`; the writer's own verbs are those of its main buffer.

    Code that keeps a live buffer in step with the archive holds this one by `exclusive()`, and uses beside the verbs
    `declare`, `next_position`, `live_runs`, `append_parts` and `undone`; and memory for what it appends as `owned`,
    `empty(shape, dtype)`, which is reused where possible: new pages cost more than the copy. So is
    `column(shape, dtype)`, for the copies of a checkpoint.
    """

    def __init__(
        self, name: str, place: Place, schema: Schema, memory: Memory, ids: Ids, changes: Changes, say: Say, *,
        journaled: bool = False,
    ) -> None:  # fmt: skip
        """say: keeps values for the journal's next flush.  journaled: evictions are noted for it."""
        self._name = name
        self._changes = changes
        self._ids = ids
        self._say = say
        self._place = place
        self._declared = schema
        self.empty = memory.empty
        self.column = Memory(_COLUMNS_BYTES, keep=4).empty
        self.streams = Streams()
        self.live_set = LiveSet((place.session, place.rank), journaled=journaled)
        self.losses = Losses()
        self.column_kinds: Callable[[], Mapping[str, Collection[Kind]]] = dict  # of values that were taken over
        self.cuts = 0  # how many checkpoints it was copied for
        self._segment_rows = SegmentRows(name, place, self.streams.records, ids)
        self._step_weights = StepWeights()
        self.slabs = Slabs(
            changes,
            memory,
            self.streams,
            self.live_set,
            self._segment_rows,
            lambda shard: intake.reward_field(self._declared, shard),
        )
        self._kinds = Kinds(name)
        self._intake = intake.StepIntake(self._kinds)
        changes.parts += [
            kept(self, "_declared", "_step_weights"),
            kept(self.losses, "counts"),
            kept(self._kinds, "_schemas", "_vague", "known"),
            self.streams.kept,
            self.streams.records.kept,
            self.live_set.kept,
            (self.slabs.mark, self.slabs.cut_back),
        ]

    @property
    def name(self) -> str:
        return self._name

    @property
    def schema(self) -> Schema:
        """The meaning of the fields of steps that are added now."""
        return self._declared

    @property
    def journaled(self) -> bool:
        """True if its writer has a journal."""
        return self.live_set.journaled

    def _entered(self) -> threading.RLock:
        """The lock, if the writer may be used from here."""
        return self._changes.entered()

    # -- adding --------------------------------------------------------------------------------------------------------

    def add_episode(
        self,
        steps: Any,
        *,
        model_weights_uuid: Any = None,
        update_count: Any = None,
        env_id: int | None = None,
        episode_id: str | None = None,
        terminated: bool | None = None,
        truncated: bool | None = None,
        metadata: dict[str, Any] | None = None,
        replace: bool = False,
        first: bool = True,
        last: bool = True,
        schema: Schema | None = None,
    ) -> str:
        """Add one whole episode; its id.

        steps: a nest of named arrays, axis 0 the step (see Schema for others; a list of lists is ragged).
        Copied: it may be changed afterwards.
        model_weights_uuid, update_count: one value, one a step, or the name of a field that has them.
        replace: a new revision of an episode of this id, with all of its steps.
        first, last: whether its first and last step are there.
        schema: the meaning of this episode's fields, where it differs from the writer's.
        """
        with self._entered(), self._changes(surface=True):
            taken = self._intake.take(steps, schema or self._declared)
            fields, count = taken.fields, taken.fields.length
            intake.check_rows(fields, last=last)
            if replace and not intake.has_steps(fields):
                self._ids.check_new(episode_id)
            weights = intake.weights(model_weights_uuid, update_count, self._step_weights, fields)
            metadata = intake.own_metadata(metadata)
            env = NO_ENV if env_id is None else int(intake.env_ids(env_id, 1)[0])
            if self.streams.open_episode(env) is not None:
                raise UsageError(f"env {env} has an open episode; close it first with close_episodes([{env}])")
            known = self.streams.records.number_of(episode_id) if replace and episode_id is not None else None
            if known is not None and known in self.streams.open_episodes().values():
                raise UsageError(
                    f"episode {episode_id!r} is open, and cannot be replaced before it is closed: close_episodes()"
                )
            name, replaces = self._ids.named(episode_id, replace=replace)
            self._kinds.add(taken.schema, fields.vague)
            start = self.streams.next_position(env)
            # an episode without steps takes a position too, so that it can be live and be named: its first one is the
            # next
            begin = start if count or last else start + 1
            number = self._register(EpisodeRecord(name, env, begin, not first, metadata, replaces, taken.schema.digest))
            if last:
                end = End(start + count, self.streams.epoch, terminated, truncated)
                self.streams.records.close(number, end)
            self.streams.start_at(env, start + max(1, count), None if last or env == NO_ENV else number)
            one = Steps(*(np.array([of]) for of in (env, start, start + count)), episode=np.array([number]))
            self.live_set.add(one)
            self.slabs.keep(Block(taken.schema, fields.data, weighed(one, *weights), whole=True))
            return name

    def _register(self, record: EpisodeRecord) -> int:
        records = self.streams.records
        replaced = records.number_of(record.id) if record.replaces else None
        if replaced is not None:
            self.live_set.remove(np.array([replaced]))
            self.streams.ended = [i for i in self.streams.ended if i != replaced]
            earlier = records.fields_of(replaced)
            if earlier != record.fields and self.slabs.has(earlier):
                self.slabs.submit(earlier)  # the newest revision is the one written last
        return records.add(record)

    def append(
        self,
        steps: Any,
        *,
        env_ids: Any = None,
        first: Any = None,
        last: Any = None,
        episode_ids: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        model_weights_uuid: Any = None,
        update_count: Any = None,
        metadata: dict[str, Any] | None = None,
        positions: Any = None,
        owned: bool = False,
        declared: Schema | None = None,
    ) -> Ints:
        """Append rows to the streams of env rows; the offset (position) of each row.

        Row i belongs to env `env_ids[i]`: one step of a vector env (None: rows 0 to N), a run of steps of one env (one
        id), or any mix in time order. Episodes begin at `first`, after `last` (or terminated or truncated), where
        `episode_ids` change and where `positions` (default: the next ones) jump; that closes the one before (reason
        "gap"). Of a run of one env, a single True means its first or its last row.
        metadata: of the episodes that begin here.  owned: the buffer takes the arrays over, and does not copy them.
        declared: the meaning of these fields, where it differs from the writer's.
        """
        with self._entered(), self._changes(surface=True):
            taken = self._intake.take(steps, declared or self._declared)
            weights = intake.weights(model_weights_uuid, update_count, self._step_weights, taken.fields)
            metadata = intake.own_metadata(metadata)
            rows = intake.rows(taken.fields.length, env_ids, first, last, episode_ids, terminated, truncated, positions)
            _, given = self._assigned(rows, taken, metadata)
            self._keep(taken, weights, given, owned=owned)
            return spans(given.lo, given.length)

    def append_parts(
        self, parts: Iterable[StepsPart], stretches: Steps, *, first: Any, last: Any, episode_ids: Any,
        terminated: Any, truncated: Any, metadata: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        """Append steps that come in parts, each of which the buffer takes over; stretches: the distinct env rows of all
        parts, in ascending order, end to end.

        Positions and episodes of all parts are assigned with the first one.
        """
        metadata = intake.own_metadata(metadata)
        length = int(stretches.length.sum())
        rows = intake.rows(length, stretches, first, last, episode_ids, terminated, truncated, positions=None)
        runs: Steps | None = None
        for part in parts:
            taken = self._intake.take(part.steps, self._declared)
            weights = intake.weights(part.model_weights_uuid, part.update_count, self._step_weights, taken.fields)
            if runs is None:
                runs, _ = self._assigned(rows, taken, metadata)
            met = runs.meet(part.of)
            self._keep(taken, weights, runs.cut(met.left, met.lo, met.hi), owned=True)

    def _assigned(self, rows: AppendedRows, taken: TakenSteps, metadata: dict[str, Any]) -> tuple[Steps, Steps]:
        """Positions and episodes of these rows, which are now live."""
        if taken.whole:
            intake.check_single(taken.fields, rows)
        if not self._kinds.is_only(taken.schema):
            self._check_same_fields(rows, taken)
        self._kinds.add(taken.schema, taken.fields.vague)
        assigned = self.streams.assign(rows, self._ids, metadata, taken.schema.digest)
        self.live_set.add(assigned[0])
        return assigned

    def _keep(self, taken: TakenSteps, weights: StepWeights, runs: Steps, *, owned: bool) -> None:
        self.slabs.keep(Block(taken.schema, taken.fields.data, weighed(runs, *weights), taken.whole), owned=owned)

    def _check_same_fields(self, rows: AppendedRows, taken: TakenSteps) -> None:
        for env in rows.envs.tolist():
            number = self.streams.open_episode(env)
            before = "" if number is None else self.streams.records.fields_of(number)
            if number is None or before in ("", taken.schema.digest):
                continue
            name = self.streams.records.id_of(number)
            if rows.begins(env, name, self.streams.next_position(env)):
                continue
            if not self._kinds.only_guesses_differ(before, taken.schema):
                raise FieldError(
                    f"the steps of env {env} differ in fields, dtypes or shapes from the earlier steps of its open "
                    f"episode {name!r} ({self._kinds.difference(before, taken.schema)}); give the same fields "
                    "for all steps of an episode, or close it first"
                )
            if self.slabs.has(before):
                self.slabs.submit(before)  # the earlier steps are written first
            self.streams.records.refine(number, taken.schema.digest)

    def weights(self, uuid: Any = None, update_count: int | None = None) -> None:
        """Set the weights that make what is added to this buffer from now on."""
        with self._entered(), self._changes():
            self._set_weights(uuid, update_count)

    def _set_weights(self, uuid: Any, update_count: int | None) -> None:
        self._step_weights = StepWeights(
            None if uuid is None else check_text(str(uuid), "model_weights_uuid"),
            None if update_count is None else intake.update_count(update_count),
        )

    def declare(self, schema: Schema) -> None:
        """Set the meaning of the fields of steps that are added from now on."""
        with self._entered(), self._changes():
            self._declared = schema

    # -- eviction ------------------------------------------------------------------------------------------------------

    def evict(self, env_id: int | None = None, *, before: int | None = None, positions: Any = None) -> None:
        """Report steps of an env row that have left the buffer: all before an offset, those in a range (start, stop),
        half-open, or those in a list or array of offsets."""
        with self._entered(), self._changes():
            env = NO_ENV if env_id is None else int(env_id)
            limit = self.streams.next_position(env)
            if (before is None) == (positions is None):
                raise UsageError("evict() takes before=POSITION or positions=[...], one of them")
            if before is not None:
                lo, hi = np.zeros(1, np.int64), np.array([min(int(before), limit)])
            elif isinstance(positions, (tuple, range, slice)):
                lo, hi = np.array(intake.position_range(positions, limit)).reshape(2, 1)
            else:
                lo = intake.whole_numbers(positions, "positions").reshape(-1)
                hi = lo + 1
                if len(lo) and (int(lo.min()) < 0 or int(lo.max()) >= limit):
                    raise UsageError(f"env {env} has positions 0 to {limit}; {int(lo.max())} cannot be evicted")
            self.live_set.evict(Steps(np.full(len(lo), env), lo, hi))

    def evict_before(self, env_ids: Ints, positions: Ints) -> None:
        """Report that these env rows have lost all steps before these offsets, none of which is beyond the next one."""
        with self._entered(), self._changes():
            self.live_set.evict(Steps(np.array(env_ids), np.zeros_like(positions), np.array(positions)))

    def overwritten(self, episodes: int, steps: int) -> None:
        """Count steps that were overwritten before they were appended; the first time is a warning."""
        with self._entered(), self._changes():
            if not self.losses.counts:
                logger.warning(
                    "buffer %r: %d steps of %d env rows were overwritten before they were appended, and are lost to "
                    "the archive; append more often, or make the ring longer. More of them are counted in `discarded` "
                    "of the checkpoints",
                    self.name,
                    steps,
                    episodes,
                )
            self.losses.add("overwritten", episodes, steps)

    def remove(self, episode_ids: str | Iterable[str], missing: str = "error") -> int:
        """Report that all live steps of these episodes have left the buffer; their number. missing: "ignore" skips ids
        that are not in it; "error" (default): NotFoundError, and nothing is removed.

        A recovery undoes it, with the training, for prompts that were trained on after the checkpoint.
        """
        with self._entered(), self._changes():
            names = [episode_ids] if isinstance(episode_ids, str) else list(episode_ids)
            found = [(n, self.streams.records.number_of(n)) for n in names]
            numbers = [number for _, number in found if number is not None]
            if missing not in ("error", "ignore"):
                raise UsageError(f"missing={missing!r}: give 'error', or 'ignore' to remove those that are there")
            if len(numbers) < len(found) and missing == "error":
                unknown = next(n for n, number in found if number is None)
                raise NotFoundError(
                    f"episode {unknown!r} is not in buffer {self.name!r}; w.live lists its episodes, and "
                    "remove(ids, missing='ignore') skips unknown ids; nothing was removed"
                )
            return self.live_set.remove(np.array(numbers, np.int64))

    def clear(self) -> None:
        """Report that all steps have left the buffer. They stay in the archive."""
        with self._entered(), self._changes():
            self.live_set.clear()

    def close_episodes(
        self,
        env_ids: Any = None,
        *,
        terminated: bool | None = None,
        truncated: bool | None = True,
        reason: str | None = None,
    ) -> list[str]:
        """End the open episodes of these env rows (None: all) without another step; their ids."""
        with self._entered(), self._changes():
            wanted = self.streams.open_episodes() if env_ids is None else np.atleast_1d(np.asarray(env_ids, np.int64))
            envs = np.array(list(wanted), np.int64).tolist()
            how = {"terminated": terminated, "truncated": truncated, "reason": reason}
            numbers = [self.streams.close(env, **how) for env in envs]
            return [self.streams.records.id_of(number) for number in numbers if number is not None]

    # -- queries, and several calls as one -----------------------------------------------------------------------------

    def next_position(self, env_id: int) -> int:
        """The offset of the next step of an env row; 0 for one that has none."""
        with self._entered():
            return self.streams.next_position(int(env_id))

    def steps_at(self, env_ids: Any, positions: Any) -> Steps:
        """The steps at positions of env rows, each a row: of one env row (None: added without one), or of as many as
        there are positions. UsageError for a position that no step has had."""
        with self._entered():
            lo = intake.whole_numbers(positions, "positions").reshape(-1)
            envs = intake.whole_numbers(NO_ENV if env_ids is None else env_ids, "env ids").reshape(-1)
            if len(envs) not in (1, len(lo)):
                raise UsageError(f"{len(envs)} env ids do not fit {len(lo)} positions; give one id, or one a position")
            known, row = np.unique(envs, return_inverse=True)
            limit = np.array([self.streams.next_position(env) for env in known.tolist()], np.int64)[row]
            wrong = np.flatnonzero((lo < 0) | (lo >= limit))
            if len(wrong):
                env, end, at = (int(np.broadcast_to(one, lo.shape)[wrong[0]]) for one in (envs, limit, lo))
                raise UsageError(f"env {env} has positions 0 to {end}, and no step at {at}")
            return Steps(np.broadcast_to(envs, lo.shape), lo, lo + 1)

    def live_runs(self) -> tuple[Steps, list[str]]:
        """The live steps as ranges of one episode each, in live order; and the episode id of each range."""
        with self._entered():
            runs = self.live_set.runs()
            return runs, [self.streams.records.id_of(i) for i in runs["episode"].tolist()]

    @property
    def live(self) -> pa.Table:
        """A table (env_id, position, length, episode_id) of the live steps, in the order of columns."""
        import pyarrow as pa

        runs, names = self.live_runs()
        columns = {
            "env_id": pa.array(runs.stream, mask=runs.stream == NO_ENV),
            "position": runs.lo,
            "length": runs.length,
        }
        return pa.table({**columns, "episode_id": pa.array(names, pa.string())})

    @contextmanager
    def exclusive(self, *, bounded: bool = True) -> Iterator[Self]:
        """This buffer, for this thread alone: several appends and evictions act as one.

        bounded: appending waits while much is being uploaded; else the copies queue up in memory.
        """
        with self._entered(), self._changes(wait=bounded, surface=True):
            within, self._changes.joined = self._changes.joined, True
            try:
                yield self
            finally:
                self._changes.joined = within

    def undone(self, put_back: Callable[[Any], object], before: Any) -> None:
        """Have `put_back(before)` called if the calls within `exclusive()` are undone: for what its user knows of this
        buffer. It may be called twice."""
        self._changes.also(put_back, before)

    @contextmanager
    def together(self) -> Iterator[None]:
        """`with w.together():` makes all records within durable at once, or not at all; other threads wait."""
        with self._entered():
            yield

    def journal(
        self,
        columns: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Any = None,
        *,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Journal values with the next flush (of a writer with `journal_s=`): see `Writer.journal`."""
        with self._entered(), self._changes(surface=True):
            self._say(self, columns, attributes, progress, changes)

    # -- for its writer ------------------------------------------------------------------------------------------------

    def _snapshot(self, *, columns: Any, attributes: Any, state: Any, incomplete: str) -> Cut:
        """A snapshot of this buffer, copied, for a checkpoint."""
        self.cuts += 1
        opened = {env: self.streams.records.id_of(i) for env, i in self.streams.open_episodes().items()}
        made = self.live_set.cut(
            self.name,
            self.streams.records,
            (self.streams.positions(), opened),
            columns=columns,
            attributes=attributes,
            state=state,
            incomplete=incomplete,
            empty=self.column,
        )
        return replaced(made, discarded=self.losses.unreported(made.discarded))

    def _take_over(self, resume: BufferResume) -> None:
        """Take over live steps, positions and open episodes; the buffer must be new."""
        self.column_kinds = resume.column_kinds
        known = [replaced(one, metadata=dict(one.metadata)) for one in resume.episodes]
        places = [self.streams.records.add(record) for record in known]
        runs = resume.runs.beside(episode=np.array(places, np.int64)[resume.runs["episode"]])
        self.live_set.resume(runs, resume.streams, resume.next_positions)
        for number, record in zip(places, known, strict=True):
            if record.sealed:
                end = End(record.begin + record.stored, self.streams.epoch, broken=record.broken)
                self.streams.records.close(number, end)
        for reason, counts in resume.dropped.items():
            self.losses.add(reason, counts["episodes"], counts["steps"])
        for env, position in resume.next_positions.items():
            place = resume.open_episodes.get(env)
            self.streams.start_at(env, position, None if place is None else places[place])
        for place in resume.to_close:
            record = self.streams.records[places[place]]
            self.streams.end(places[place], record.begin + record.stored, truncated=True, reason="resumed")

    def _submit(self) -> None:
        """Hand all pending blocks to the store."""
        self.slabs.submit_all()
        if ended := self.streams.ended:
            self.streams.ended = []
            self._changes.add(rows_alone("segments", lambda: self._segment_rows.closing(ended)))
