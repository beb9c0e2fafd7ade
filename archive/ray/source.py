"""The datasource: which episodes and columns are wanted, tasks that read some shards each, and what is pushed to them.

A conjunct of a filter over columns of the episodes' table selects episodes before anything is read. One over fields is
met in the task: what it names is read first, and the rest of those episodes alone that have a row left.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from archive import Archive, Checkpoint, Episodes
from archive import open as open_archive
from archive.arrays import Ints, ascending
from archive.base import FieldError, UsageError, escape_path, show, usable_cores
from archive.fields import NODES, FieldSpec, Path, parse
from archive.index import EpisodeIndex, Snapshot
from archive.ray.blocks import Unit
from archive.ray.reading import ALIASES, OWN, Field, RowReading, conjuncts, met, names_in, plain_table
from archive.read import Reader, Selection, Spans
from archive.shard import SHARD_BYTES
from archive.tables import coded

LEAST_TASK_BYTES = 2**22  # less is not worth a task, unless asked for
TASKS_PER_CORE = 4
RENAMES = hasattr(Datasource, "get_column_renames")  # of a Ray that also counts rows before they are filtered
SHARED = "use a folder that all of them see, or an object store"
MOST_OPEN = 4  # sources that a process keeps open


# -- the same episodes in another process ------------------------------------------------------------------------------


class Frozen(NamedTuple):
    """The commit that episodes are read from: it pickles as names of objects, without rows."""

    snapshot: Snapshot
    checkpoint: Checkpoint | None

    @classmethod
    def of(cls, episodes: Episodes) -> Frozen:
        snapshot, live = episodes.reader.snapshot, episodes._attributes
        if not isinstance(live, Checkpoint):
            return cls(snapshot, None)
        return cls(snapshot, Checkpoint(snapshot.storage, live.commit, live.served_by, snapshot.annotations))

    @property
    def key(self) -> tuple[Any, ...]:
        commits = [self.snapshot.commit, self.snapshot.annotations.head]
        commits += [] if self.checkpoint is None else [self.checkpoint.commit]
        storage = self.snapshot.storage
        reached = repr((storage.url, storage.root.options, storage.allowed_bases))
        return reached, *((one.number, one.digest) for one in commits)

    def opened(self) -> tuple[Reader, EpisodeIndex]:
        """The reader and the index of all episodes, which a process makes once."""
        found = _open.pop(self.key, None)
        if found is None:
            ck = self.checkpoint
            found = (Reader(self.snapshot), EpisodeIndex(self.snapshot)) if ck is None else (ck.reader, ck.index)
        _open[self.key] = found
        while len(_open) > MOST_OPEN:
            del _open[next(iter(_open))]
        return found


_open: dict[tuple[Any, ...], tuple[Reader, EpisodeIndex]] = {}


class Sent:
    """Episodes that go to other processes: they pickle as numbers as of a commit, with the live steps of a
    checkpoint's."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes: Episodes | None = episodes
        self._state: tuple[Frozen, Ints | range, Spans | None] | None = None

    @property
    def episodes(self) -> Episodes:
        if self._episodes is None:
            assert self._state is not None
            frozen, numbers, live = self._state
            ck, opened = frozen.checkpoint, frozen.opened()
            self._episodes = Episodes(*opened, np.asarray(numbers, np.int64), live, ck)
        return self._episodes

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        if self._episodes is not None:
            state = Frozen.of(self._episodes), packed(self._episodes.numbers), self._episodes._live
        return {"_episodes": None, "_state": state}


class EpisodeTask(NamedTuple):
    """Some episodes, and the rows to make of them, of which `limit` are wanted."""

    sent: Sent
    reading: RowReading
    limit: int | None

    def blocks(self) -> Iterator[pa.Table]:
        yield from self.reading.blocks(self.sent.episodes, self.limit)


def packed(numbers: Ints) -> Ints | range:
    """Numbers as they pickle smallest."""
    first = int(numbers[0]) if len(numbers) else 0
    if np.array_equal(numbers, np.arange(first, first + len(numbers))):
        return range(first, first + len(numbers))
    return numbers.astype(np.min_scalar_type(int(numbers.max())))


# -- the datasource ----------------------------------------------------------------------------------------------------


class ArchiveDatasource(Datasource):  # type: ignore[misc]
    """Episodes as a source of Ray Data."""

    def __init__(self, episodes: Episodes, reading: RowReading) -> None:
        super().__init__()
        self._projection_map: dict[str, str] | None = None  # of a Ray that does not push, as the next
        self._predicate_expr: Any = None
        self._sent = Sent(episodes.frozen())
        self._reading = reading
        self._planned: tuple[Any, Any, Sent, RowReading] | None = None  # for a predicate and a projection

    def get_name(self) -> str:
        return "Archive"

    def supports_projection_pushdown(self) -> bool:
        return hasattr(Datasource, "_combine_projection_map")  # some Rays have another way, which is not taken

    def supports_predicate_pushdown(self) -> bool:
        return True

    def apply_predicate(self, predicate_expr: Any) -> ArchiveDatasource:
        """The source of the rows that meet it; this one, if it names no column of ours: Ray then filters, or fails."""
        if not all(self._reading.knows(name) for name in names_in(predicate_expr)):
            return self
        made: ArchiveDatasource = super().apply_predicate(predicate_expr)
        return made

    def estimate_inmemory_data_size(self) -> int | None:
        episodes, reading = self._plan()
        return int(reading.sizes(episodes).sum())

    def tasks(self) -> int:
        """The number of tasks if nobody asks for another: one a shard, or a few for each core if these are more."""
        cores = ray.cluster_resources().get("CPU", 1) if ray.is_initialized() else usable_cores()
        nbytes = self.estimate_inmemory_data_size() or 0
        return max(1, -(-nbytes // SHARD_BYTES), min(int(TASKS_PER_CORE * cores), nbytes // LEAST_TASK_BYTES))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        episodes, reading = self._plan()
        nbytes, rows = reading.sizes(episodes), reading.unit.counts(episodes.lengths())
        schema = None if reading.derived else reading.empty(episodes).schema
        tasks = []
        for places in by_shard(episodes, nbytes, parallelism):
            task = EpisodeTask(Sent(episodes.pick(places)), reading, per_task_row_limit)
            count = int(rows[places].sum()) if reading.predicate is None and not RENAMES else None
            tasks.append(_read_task(task, count, int(nbytes[places].sum()), schema, per_task_row_limit))
        return tasks

    def _plan(self) -> tuple[Episodes, RowReading]:
        """The episodes that may have rows, and what is left to be done with them."""
        known, predicate, projection = self._planned, self._predicate_expr, self._projection_map
        if known is None or known[0] is not predicate or known[1] is not projection:
            episodes, left = self._selected(predicate)
            reading = replace(self._reading, predicate=left)
            if projection is not None:
                named = [name for name in names_in(left) if name not in projection]  # read for the predicate alone
                reading = replace(reading.of([*projection, *named]), wanted=tuple(projection))
                reading = replace(reading, called=tuple(projection.values()))
            self._planned = known = predicate, projection, Sent(episodes), reading
        return known[2].episodes, known[3]

    def _selected(self, predicate: Any) -> tuple[Episodes, Any]:
        """The episodes that meet the conjuncts over columns of their table, and the other conjuncts."""
        episodes, left = self._sent.episodes, None
        for one in conjuncts(predicate):
            sources = {name: self._reading.own.get(name) for name in names_in(one)}
            if sources and not {None, "step", "mask"} & {*sources.values()}:
                table = plain_table(episodes, list(dict.fromkeys(map(str, sources.values()))))
                named = pa.table({name: table[str(of)] for name, of in sources.items()})
                episodes = episodes.pick(met(named, one))
            else:
                left = one if left is None else left & one
        return episodes, left


def by_shard(episodes: Episodes, nbytes: Ints, parallelism: int) -> list[Ints]:
    """The places of episodes as parts of about as many bytes each: those of a shard together, cut only where a shard
    has more than a part."""
    spans = episodes.step_spans()
    if not len(spans.rows):
        return [np.arange(len(episodes))]
    row = spans.rows[np.minimum(spans.offsets[:-1], len(spans.rows) - 1)]
    code = coded(episodes.reader.snapshot.take(row, ["shard"])["shard"])[1]
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first[group], kind="stable")
    size = np.maximum(nbytes[order], 1)
    ends = np.cumsum(size)
    goals = ends[-1] * np.arange(1, parallelism) / max(1, parallelism)
    heads = np.flatnonzero(np.diff(code[order], prepend=-2))
    before = (ends - size)[heads]
    after = np.minimum(np.searchsorted(before, goals), len(heads) - 1)
    near = np.where(goals - before[after - 1] < before[after] - goals, np.maximum(after - 1, 0), after)
    is_near = np.abs(before[near] - goals) < ends[-1] / max(1, parallelism) / 2
    cuts = np.where(is_near, heads[near], np.searchsorted(ends, goals) + 1)
    edges = ascending(np.concatenate([[0], np.minimum(cuts, len(order)), [len(order)]]))
    return [order[lo:hi] for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def _read_task(task: EpisodeTask, rows: int | None, nbytes: int, schema: Any, limit: int | None) -> ReadTask:
    """The task as this Ray takes it: some have the schema in the metadata, and know no limit of rows."""
    about: dict[str, Any] = {"num_rows": rows, "size_bytes": nbytes, "input_files": None, "exec_stats": None}
    takes = inspect.signature(ReadTask).parameters
    if "schema" in inspect.signature(BlockMetadata).parameters:
        about["schema"] = schema
    given = {"schema": schema, "per_task_row_limit": limit}
    more = {name: value for name, value in given.items() if name in takes}
    return ReadTask(task.blocks, BlockMetadata(**about), **more)


# -- from arguments ----------------------------------------------------------------------------------------------------


def of(
    url: Any, fields: Any, where: Any, windows: Any, unit: str, commit: int | str | None, *,
    columns: Sequence[str] | None, missing: Any, derive: Any, storage_options: Mapping[str, Any] | None,
    allow_bases: bool | Sequence[str],
) -> ArchiveDatasource:  # fmt: skip
    """The source of these rows, as of a commit; see `archive.ray.read`."""
    episodes = _episodes(url, commit, storage_options, allow_bases)
    if where is not None:
        episodes = episodes.filter(where=where)
    rows = _unit(unit, windows)
    found = _fields(episodes, Selection(fields, missing))
    own = _own(episodes, rows, columns, {*found} | {escape_path(one.name) for one in parse(derive)})
    left_out = "skip" if Selection(fields, missing).leaves_out else missing
    return ArchiveDatasource(episodes, RowReading(rows, own, found, tuple(parse(derive)), left_out))


def dataset(
    made: ArchiveDatasource, override_num_blocks: int | None, concurrency: int | None, ray_remote_args: Any
) -> ray.data.Dataset:
    """The dataset of a source."""
    blocks = made.tasks() if override_num_blocks is None else override_num_blocks
    more = {} if concurrency is None else {"concurrency": concurrency}
    return ray.data.read_datasource(made, ray_remote_args=ray_remote_args, override_num_blocks=blocks, **more)


def _episodes(url: Any, commit: Any, options: Mapping[str, Any] | None, allow_bases: Any) -> Episodes:
    if isinstance(url, (list, tuple)):
        if len(url) != 1:
            raise UsageError(f"{len(url)} URLs: give one archive, or `ray.data.Dataset.union` the datasets of several")
        url = url[0]
    given = open_archive(url, storage_options=options, allow_bases=allow_bases) if _is_address(url) else url
    if isinstance(given, Archive):
        given = given if commit is None else given.at(commit)
    elif commit is not None:
        raise UsageError(f"commit={commit!r} goes with an archive or its URL; {type(given).__name__} is of a commit")
    episodes = given if isinstance(given, Episodes) else given.episodes
    episodes.reader.snapshot.storage.check_shared(SHARED)
    return episodes


def _is_address(url: Any) -> bool:
    return not isinstance(url, (Archive, Episodes, Checkpoint))


def _unit(unit: str, windows: Any) -> Unit:
    if unit not in ("episode", "step") or (windows is not None and unit == "step"):
        raise UsageError(f"unit={unit!r}: give 'episode' or 'step'; or windows= alone, and a row is a window")
    if windows is None:
        return Unit(unit)
    try:
        given = windows if isinstance(windows, (Mapping, tuple, list)) else (windows,)
        named = given if isinstance(given, Mapping) else dict(zip(("length", "stride"), given, strict=len(given) > 1))
        return Unit("window", **named)
    except (TypeError, ValueError) as e:
        raise UsageError(f"windows={windows!r}: give a length, (length, stride), or these and pad by name ({e})") from e


def _fields(episodes: Episodes, selection: Selection) -> dict[str, Field]:
    """The fields of a selection by column; FieldError for one that is not of one kind in all episodes."""
    every = [selection.specs(schema) for schema in episodes.schemas]
    if every:
        selection.absent(episodes.schemas)
    filled = [selection.specs(schema) for schema in episodes.pick(np.flatnonzero(episodes.lengths())).schemas]
    specs = [spec for one in filled for spec in one.values() if spec.axis not in NODES]
    others = [spec for one in every for spec in one.values() if spec.axis not in NODES]
    found: dict[Path, FieldSpec] = {}
    for spec in [*specs, *(spec for spec in others if spec.axis not in ("step", "ragged"))]:
        other = found.setdefault(spec.path, spec)
        if _kind(spec) != _kind(other):
            raise FieldError(
                f"field {show(spec.path)!r} is {other.described} in some episodes and {spec.described} in others, and "
                "a dataset has one kind of each: leave it out with fields=, or choose episodes with where="
            )
    for spec in others:  # of no rows in episodes without steps: what a list without values is was not known
        found.setdefault(spec.path, spec)
    out = {}
    for path, spec in found.items():
        everywhere = all(path in one and _kind(one[path]) == _kind(spec) for one in every)
        lacked = any(path not in one or one[path].axis in NODES for one in every)
        out[spec.name] = Field(spec, everywhere, lacked and selection.leaves_out)
    return out


def _kind(spec: FieldSpec) -> tuple[Any, ...]:
    return spec.axis, spec.dtype, spec.shape, spec.scalar


def _own(episodes: Episodes, unit: Unit, columns: Sequence[str] | None, fields: set[str]) -> dict[str, str]:
    """Our columns, and where each comes from."""
    index = episodes.episode_index
    if columns is None:
        columns = [*index.names, *index.metadata_names, *ALIASES] if unit.kind == "episode" else ()
    else:
        episodes[:0].columns([ALIASES.get(name, name) for name in columns])  # or it says which there are
    wanted = ["episode_id", *([] if unit.kind == "episode" else ["step"])]
    wanted += ["mask"] if unit.kind == "window" and unit.pad else []
    wanted += [name for name in columns if name not in wanted]
    return {OWN + name if name in fields else name: ALIASES.get(name, name) for name in wanted}


__all__ = ["ArchiveDatasource", "dataset", "of"]
