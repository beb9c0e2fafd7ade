"""The datasource: which episodes and columns are wanted, tasks that read some shards each, and what is pushed to them.

A conjunct of a filter over columns of the episodes' table selects episodes before anything is read. One over fields is
met in the task: what it names is read first, and the rest of those episodes alone that have a row left.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from archive import Archive, Checkpoint, Episodes
from archive import open as open_archive
from archive.arrays import Ints
from archive.base import FieldError, UsageError, escape_path, show, usable_cores
from archive.fields import NODES, FieldSpec, Path, dtypes, flatten, lookup, parse, unflatten
from archive.index import EpisodeIndex, Snapshot
from archive.ray import blocks
from archive.ray.blocks import Frame, Unit
from archive.read import Destination, Reader, Selection, Spans, derivations, sizes
from archive.read.chunks import LastChunks
from archive.shard import SHARD_BYTES
from archive.tables import coded

BLOCK_BYTES = 2**26  # of a block, about
LEAST_TASK_BYTES = 2**22  # less is not worth a task, unless asked for
TASKS_PER_CORE = 4
MOST_OPEN = 4  # sources that a process keeps open
ALIASES = {"update_count": "update_count_max"}
OWN = "episode."  # begins the name of a column of ours that is called as a field is
ROW = "__row"
STUB = "__bsp_stub"  # Ray's name for the column of a block of rows without columns


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


class Task(NamedTuple):
    """Some episodes by number, the live steps of each where they are a checkpoint's, and the rows to make of them."""

    frozen: Frozen
    numbers: Ints | range
    live: Spans | None
    reading: Reading
    limit: int | None

    def blocks(self) -> Iterator[pa.Table]:
        reader, index = self.frozen.opened()
        numbers = np.asarray(self.numbers, np.int64)
        yield from self.reading.blocks(Episodes(reader, index, numbers, self.live), self.limit)


def packed(numbers: Ints) -> Ints | range:
    """Numbers as they pickle smallest."""
    first = int(numbers[0]) if len(numbers) else 0
    if np.array_equal(numbers, np.arange(first, first + len(numbers))):
        return range(first, first + len(numbers))
    return numbers.astype(np.min_scalar_type(int(numbers.max())))


# -- what is read of them ----------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field that some episodes have. everywhere: all have it; partial: it is null for those that lack it."""

    spec: FieldSpec
    everywhere: bool
    partial: bool

    @property
    def is_plain(self) -> bool:
        """True if many episodes can be read into one array."""
        return self.everywhere and self.spec.axis == "step" and dtypes.to_numpy(self.spec.dtype).kind not in "OUT"


@dataclass(frozen=True)
class Reading:
    """The rows to make of episodes. own: column -> column of the episodes' table, or "step", "mask".  predicate: of
    rows; wanted: the columns to give, None for all."""

    unit: Unit
    own: Mapping[str, str]
    fields: Mapping[str, Field]
    derived: tuple[Any, ...]
    missing: Any
    predicate: Any = None
    wanted: tuple[str, ...] | None = None

    @property
    def names(self) -> list[str]:
        """The columns that it has by themselves; those of derived fields are known once they are computed."""
        own = list(self.own)
        for name, field in self.fields.items():
            own += [name] if self.unit.kind == "episode" or field.spec.axis != "offset" else [name, name + blocks.AFTER]
        return own

    def knows(self, name: str) -> bool:
        """True if there is a column of this name."""
        return name in self.names or any(_within(name, one) for one in self.derived)

    def of(self, wanted: Sequence[str] | None) -> Reading:
        """The same with these columns alone, and no more read than they need."""
        if wanted is None:
            return self
        fields = {n: f for n, f in self.fields.items() if n in wanted or n + blocks.AFTER in wanted}
        derived = tuple(one for one in self.derived if any(_within(name, one) for name in wanted))
        own = {name: source for name, source in self.own.items() if name in wanted}
        return replace(self, own=own, fields=fields, derived=derived, wanted=tuple(wanted))

    def sizes(self, episodes: Episodes) -> Ints:
        """Bytes of the rows of each episode, about."""
        overlap = max(1, self.unit.length // self.unit.stride)
        names = None if self.derived else [field.spec.path for field in self.fields.values()]
        return overlap * episodes.sizes(names) + 8 * len(self.own) * self.unit.counts(episodes.lengths())

    def blocks(self, episodes: Episodes, limit: int | None) -> Iterator[pa.Table]:
        """The blocks of these episodes, of which the first `limit` rows are wanted; one at least."""
        if limit is not None and self.predicate is None:
            rows = np.cumsum(self.unit.counts(episodes.lengths()))
            episodes = episodes[: int(np.searchsorted(rows, limit)) + 1]
        first, rest = self._in_turn()
        some, tails = False, (LastChunks(), LastChunks())
        for start, stop in sizes.runs(self.sizes(episodes), BLOCK_BYTES):
            block = self._met(episodes[start:stop], first, rest, tails)
            if block.num_rows:
                some = True
                yield block
        if not some:
            yield self.table(episodes[:0])

    def _in_turn(self) -> tuple[Reading | None, Reading]:
        """The columns that the predicate needs, and the others."""
        bare = replace(self, predicate=None)
        if self.predicate is None:
            return None, bare
        named = names_in(self.predicate)
        if self.wanted is None and self.derived:  # whose columns are not known yet
            return bare.of(named), bare
        wanted = self.names if self.wanted is None else self.wanted
        return bare.of(named), bare.of([name for name in wanted if name not in named])

    def _met(
        self, episodes: Episodes, first: Reading | None, rest: Reading, tails: tuple[LastChunks, LastChunks]
    ) -> pa.Table:
        """The rows that meet the predicate."""
        if first is None:
            return rest.table(episodes, tails[1])
        table = first.table(episodes, tails[0])
        rows = met(table, self.predicate)
        frame = self.unit.frame(episodes.lengths())
        left = np.unique(frame.episode[rows])
        found = {name: table[name].take(pa.array(rows)) for name in table.column_names}
        if len(left) and rest.wanted != ():
            more, place = rest.table(episodes[left], tails[1]), np.cumsum(np.isin(frame.episode, left)) - 1
            found |= {name: more[name].take(pa.array(place[rows])) for name in more.column_names}
        order = dict.fromkeys([*self.names, *found]) if self.wanted is None else self.wanted
        return _table({name: found[name] for name in order if name in found}, len(rows))

    def table(self, episodes: Episodes, tails: LastChunks | None = None) -> pa.Table:
        """The rows of these episodes, whether or not they meet the predicate."""
        frame = self.unit.frame(episodes.lengths())
        made = self._own(episodes, frame)
        plain, nests = self._read(episodes, frame, tails)
        for field in [*self.fields.values(), *self._computed(nests)]:
            spec = field.spec
            if spec.name in plain:
                given = blocks.whole(plain[spec.name], frame.lengths)
            else:
                given = blocks.held(spec, [_leaf(nest, spec.path) for nest in nests])
            made |= blocks.columns(spec, given, frame, self.unit, partial=field.partial)
        made = made if self.wanted is None else {name: made[name] for name in self.wanted if name in made}
        return _table(made, len(frame.episode))

    def _read(
        self, episodes: Episodes, frame: Frame, tails: LastChunks | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Fields that lie in one array for all these episodes, and the nest of each episode."""
        if not len(episodes) or not (self.fields or self.derived):
            return {}, [{} for _ in range(len(episodes))]
        selection = Selection([field.spec.path for field in self.fields.values()], self.missing, "flat")
        if self.derived:
            return {}, derivations.read_all(episodes, selection, self.derived)
        steps = int(frame.lengths.sum())
        plain = {
            name: np.empty((steps, *field.spec.shape), dtypes.to_numpy(field.spec.dtype))
            for name, field in self.fields.items()
            if field.is_plain
        }
        into = Destination(unflatten({self.fields[name].spec.path: array for name, array in plain.items()}))
        return plain, episodes.reader.read(episodes.spans(), selection, tails, into if plain else None)

    def _computed(self, nests: Sequence[dict[str, Any]]) -> list[Field]:
        """The derived fields, as they came out."""
        leaves = flatten(nests[0]) if nests and self.derived else ()
        specs = (FieldSpec(path, "step", shape=leaf.shape[1:]) for path, leaf in leaves if isinstance(leaf, np.ndarray))
        return [Field(one, True, False) for one in specs if any(_within(one.name, by) for by in self.derived)]

    def _own(self, episodes: Episodes, frame: Frame) -> dict[str, Any]:
        names = [source for source in self.own.values() if source not in ("step", "mask")]
        table = plain_table(episodes, list(dict.fromkeys(names)))
        each = len(frame.episode) != len(episodes) or self.unit.kind != "episode"
        out: dict[str, Any] = {}
        for name, source in self.own.items():
            if source == "step":
                out[name] = pa.array(frame.start)
            elif source == "mask":
                out[name] = blocks.mask_column(frame, self.unit)
            else:
                out[name] = table[source].take(pa.array(frame.episode)) if each else table[source]
        return out


def plain_table(episodes: Episodes, names: Sequence[str]) -> pa.Table:
    """Columns of the episodes' table, texts as such."""
    table = episodes.columns(names)
    for at, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(at, table.column_names[at], column.cast(column.type.value_type))
    return table


def _table(columns: Mapping[str, Any], rows: int) -> pa.Table:
    return pa.table(dict(columns) or {STUB: pa.nulls(rows)})


def _leaf(nest: dict[str, Any], path: Path) -> Any:
    """The leaf at a path; None where there is no such field."""
    found = lookup(nest, path)
    return None if isinstance(found, dict) else found


def _within(name: str, derivation: Any) -> bool:
    own = escape_path(derivation.name)
    return name == own or name.startswith(f"{own}/")


# -- expressions -------------------------------------------------------------------------------------------------------


def conjuncts(expression: Any) -> list[Any]:
    """The parts of an expression of Ray's that must all be true."""
    if getattr(getattr(expression, "op", None), "name", "") == "AND":
        return [*conjuncts(expression.left), *conjuncts(expression.right)]
    return [] if expression is None else [expression]


def names_in(expression: Any) -> list[str]:
    """The columns that an expression of Ray's names."""
    if type(expression).__name__ == "ColumnExpr":
        return [expression.name]
    parts: Sequence[Any] = expression if isinstance(expression, (list, tuple)) else ()
    if dataclasses.is_dataclass(expression):
        parts = [getattr(expression, field.name) for field in dataclasses.fields(expression)]
    return list(dict.fromkeys(name for part in parts for name in names_in(part)))


def met(table: pa.Table, expression: Any) -> Ints:
    """The rows that meet an expression, by Ray's own evaluation: as a filter that is not pushed."""
    numbered = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    rows: Ints = BlockAccessor.for_block(numbered).filter(expression)[ROW].to_numpy()
    return rows


# -- the datasource ----------------------------------------------------------------------------------------------------


class ArchiveDatasource(Datasource):  # type: ignore[misc]
    """Episodes as a source of Ray Data."""

    def __init__(self, episodes: Episodes, reading: Reading) -> None:
        super().__init__()
        self._projection_map = self._predicate_expr = None  # of a Ray that does not push
        self._episodes = episodes.frozen()
        self._reading = reading
        self._planned: dict[str, tuple[Episodes, Reading]] = {}

    def get_name(self) -> str:
        return "Archive"

    def supports_projection_pushdown(self) -> bool:
        return True

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
        nbytes, frozen = reading.sizes(episodes), Frozen.of(self._episodes)
        rows = reading.unit.counts(episodes.lengths())
        schema = None if reading.derived else reading.table(episodes[:0]).schema
        tasks = []
        for places in by_shard(episodes, nbytes, parallelism):
            some = episodes[places]
            task = Task(frozen, packed(some.numbers), some._live, reading, per_task_row_limit)
            count = int(rows[places].sum()) if reading.predicate is None else None
            tasks.append(_read_task(task, count, int(nbytes[places].sum()), schema, per_task_row_limit))
        return tasks

    def _plan(self) -> tuple[Episodes, Reading]:
        """The episodes that may have rows, and what is left to be done with them."""
        wanted = None if self._projection_map is None else [*self._projection_map]
        key = f"{wanted} {self._predicate_expr}"
        if key not in self._planned:
            episodes, left = self._episodes, None
            for one in conjuncts(self._predicate_expr):
                sources = [self._reading.own.get(name) for name in names_in(one)]
                if sources and not {None, "step", "mask"} & {*sources}:
                    table = plain_table(episodes, list(dict.fromkeys(map(str, sources))))
                    named = {name: table[str(of)] for name, of in zip(names_in(one), sources, strict=True)}
                    episodes = episodes[met(pa.table(named), one)]
                else:
                    left = one if left is None else left & one
            whole = replace(self._reading, predicate=left)
            self._planned[key] = episodes, whole if wanted is None else self._with(whole, wanted)
        return self._planned[key]

    def _with(self, reading: Reading, wanted: list[str]) -> Reading:
        """The wanted columns; what the predicate names stays known, and is read for it alone."""
        named = names_in(reading.predicate)
        return replace(reading.of([*wanted, *(n for n in named if n not in wanted)]), wanted=tuple(wanted))


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
    edges = np.unique(np.concatenate([[0], np.minimum(cuts, len(order)), [len(order)]]))
    return [order[lo:hi] for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def _read_task(task: Task, rows: int | None, nbytes: int, schema: Any, limit: int | None) -> ReadTask:
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
    return ArchiveDatasource(episodes, Reading(rows, own, found, tuple(parse(derive)), left_out))


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
    check_shared(episodes.reader.snapshot.storage)
    return episodes


def _is_address(url: Any) -> bool:
    return not isinstance(url, (Archive, Episodes, Checkpoint))


def check_shared(storage: Any) -> None:
    """UsageError for a store that other processes do not see."""
    if storage.root.protocol == "memory":
        raise UsageError(
            f"{storage.url} is in the memory of this process, and Ray's workers are others: use a folder that all of "
            "them see, or an object store"
        )


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
    selection.absent(episodes.schemas)
    found: dict[Path, FieldSpec] = {}
    for spec in (spec for one in every for spec in one.values() if spec.axis not in NODES):
        other = found.setdefault(spec.path, spec)
        kinds = [(s.axis, s.dtype, s.shape, s.scalar) for s in (spec, other)]
        if kinds[0] != kinds[1]:
            raise FieldError(
                f"field {show(spec.path)!r} is {other.described} in some episodes and {spec.described} in others, and "
                "a dataset has one kind of each: leave it out with fields=, or choose episodes with where="
            )
    out = {}
    for path, spec in found.items():
        everywhere = all(path in one and one[path].axis not in NODES for one in every)
        out[spec.name] = Field(spec, everywhere, not everywhere and selection.leaves_out)
    return out


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
