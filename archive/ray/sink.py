"""The datasink: tasks put the shards of their episodes, and hand back the rows; the driver makes one commit of these.

A task that is done again puts other shards. Only what the last one hands back is committed, and no task deletes
anything: what is left over is found by a prune.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink
from ray.data.datasource.datasink import WriteResult
from ray.data.extensions import ArrowVariableShapedTensorType

from archive import Archive, Commit
from archive import open as open_archive
from archive.arrays import Ints
from archive.base import DuplicateEpisodeError, FieldError, UnsafePathError, UsageError, unescape_path
from archive.checkpoint import MAIN_BUFFER
from archive.fields import Path, Ragged, Schema, to_path, unflatten
from archive.index import COLUMNS, METADATA_COLUMN
from archive.log import Change, CommitLog, Place, new_session
from archive.ray.blocks import AFTER
from archive.ray.reading import ALIASES, OWN
from archive.ray.source import SHARED
from archive.shard import SHARD_BYTES
from archive.store import Storage
from archive.tables import MOST_RANKS
from archive.write import RankRows, Staging

GROUP = "__steps"  # the column with the rows of an episode, as Arrow's bytes
_FACTS = (METADATA_COLUMN, "label.", OWN)  # begin the names of columns that `read` makes

logger = logging.getLogger("archive")


@dataclass(frozen=True)
class DatasetColumns:
    """The columns that rows of a dataset have, and what each is. by_step: a row is a step, else an episode.  metadata:
    columns whose values are metadata."""

    episode_id: str | None
    step: str | None
    by_step: bool
    fields: tuple[str, ...] | None
    metadata: tuple[str, ...]
    facts: Mapping[str, str]  # argument of add_episode -> column
    schema: Schema

    @property
    def named(self) -> list[str]:
        """The columns that must be there."""
        own = [name for name in (self.episode_id, self.step) if name is not None]
        return [*own, *(self.fields or ()), *self.metadata, *self.facts.values()]

    def check(self, names: Sequence[str]) -> None:
        """UsageError if a column is not among those of a dataset."""
        lacking = [name for name in self.named if name not in names]
        if lacking:
            raise UsageError(f"the dataset has no column {lacking[0]!r}; it has: {', '.join(names)}")

    def of_fields(self, table: pa.Table) -> list[str]:
        """The columns of fields: those given, else all whose values are arrays, or with a row a step all that are
        nothing else."""
        names = self._found(table) if self.fields is None else list(self.fields)
        _check_paths([name for name in names if not name.endswith(AFTER)])
        if self.fields is not None:
            names += [name + AFTER for name in self.fields if name + AFTER in table.column_names]
        return names

    def _found(self, table: pa.Table) -> list[str]:
        other = {*self.named, *COLUMNS, *ALIASES} if not self.by_step else {*self.named}
        names = [name for name in table.column_names if name not in other and not name.startswith(_FACTS)]
        kinds = [table.schema.field(name).type for name in names]
        found = names if self.by_step else [n for n, kind in zip(names, kinds, strict=True) if _has_arrays(kind)]
        if self.by_step and not found:
            raise UsageError(f"the steps have no column that is a field, of {', '.join(table.column_names)}")
        if names and not found and not any(map(pa.types.is_null, kinds)):
            raise UsageError(
                f"no column has lists or tensors, the fields of a row that is an episode: {', '.join(names)}; did you "
                "mean unit='step'? fields=[] writes episodes without data"
            )
        return found

    def steps(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The nest of an episode's fields, from their values by column."""
        rest = {name: value for name, value in leaves.items() if value is not None and not name.endswith(AFTER)}
        out: dict[Path, Any] = {}
        for name, value in rest.items():
            path, after = _path(name), leaves.get(name + AFTER)
            if after is not None:
                value = np.concatenate([value, after])
            out[path] = [_json(f"column {name!r}", text) for text in value] if path in self.schema.json else value
        return unflatten(out)


def columns(
    unit: str,
    episode_id: str | None,
    step: str | None,
    fields: Sequence[str] | None,
    metadata: Sequence[str],
    schema: Schema | None,
    **facts: str | None,
) -> DatasetColumns:
    """The columns of a dataset; see `archive.ray.write`."""
    by_step = unit == "step"
    if unit not in ("episode", "step") or (by_step and episode_id is None):
        raise UsageError(f"unit={unit!r}, episode_id={episode_id!r}: give 'episode', or 'step' with the column of ids")
    given = {name: column for name, column in facts.items() if column is not None}
    own, step = None if fields is None else tuple(fields), step if by_step else None
    return DatasetColumns(episode_id, step, by_step, own, tuple(metadata), given, schema or Schema())


def _check_paths(names: Sequence[str]) -> None:
    """FieldError for two columns that are one field, or of which one is a field and the other a field within it."""
    taken: dict[Path, str] = {}
    for name in names:
        first = taken.setdefault(_path(name), name)
        if first != name:
            raise FieldError(f"columns {first!r} and {name!r} are the same field; leave one out with fields=")
    for path, name in taken.items():
        for end in range(1, len(path)):
            if path[:end] in taken:
                raise FieldError(
                    f"column {taken[path[:end]]!r} is a field, and cannot have the field {name!r} within it; rename "
                    "one, or leave it out with fields="
                )


def _json(where: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as e:
        raise FieldError(f"{where} has a value that is no JSON ({e})") from e


def _path(name: str) -> Path:
    """The keys of a field from the name of its column: as `read` names them, or as slashes divide it."""
    try:
        return unescape_path(name)
    except UnsafePathError:
        return to_path(name)


# -- values of Arrow's as arrays ---------------------------------------------------------------------------------------


def _has_arrays(kind: Any) -> bool:
    return isinstance(kind, pa.BaseExtensionType) or pa.types.is_nested(kind)


def array_of(column: pa.Array) -> Any:
    """One value a step: an array, or Ragged of values of several lengths; None if there is no value at all."""
    kind = column.type
    if len(column) and column.null_count == len(column):
        return None
    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} of its steps have no value")
    if isinstance(kind, ArrowVariableShapedTensorType):
        parts = list(column.to_numpy(zero_copy_only=False))
        return Ragged(np.concatenate(parts) if parts else np.zeros(0), np.array([len(one) for one in parts], np.int64))
    if isinstance(kind, pa.BaseExtensionType):
        of_arrow = hasattr(column, "to_numpy_ndarray") and type(column).__module__.startswith("pyarrow")
        return column.to_numpy_ndarray() if of_arrow else column.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind):
        inner = _elements(column)
        return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return Ragged(_elements(column), column.value_lengths().to_numpy().astype(np.int64))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.to_pylist(), object)
    return column.to_numpy(zero_copy_only=False)


def _elements(column: pa.Array) -> Any:
    inner = array_of(column.flatten())
    if inner is None:
        raise ValueError("its lists hold nulls alone")
    return inner


def values_of(column: pa.Array) -> list[Any]:
    """The value of each row, which is an episode: an array or one value; None without one."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType) and not column.null_count:
        return list(array_of(column) if not isinstance(kind, ArrowVariableShapedTensorType) else column.to_numpy(False))
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return [array_of(one.values) if one.is_valid else None for one in column]
    return [np.asarray(one) if isinstance(one, (int, float)) else one for one in column.to_pylist()]


# -- rows a step -------------------------------------------------------------------------------------------------------


def together(columns: DatasetColumns, group: pa.Table) -> pa.Table:
    """One row of the rows of an episode, in the order of its steps."""
    columns.check(group.column_names)
    names = group[columns.episode_id].slice(0, 1)
    if columns.step is not None:
        group = group.take(_order(f"episode {names[0].as_py()!r}", group[columns.step]))
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, group.schema) as stream:
        stream.write_table(group)
    return pa.table({columns.episode_id: names, GROUP: pa.array([out.getvalue().to_pybytes()], pa.large_binary())})


def _order(episode: str, column: pa.ChunkedArray) -> Ints:
    """The places of steps, first to last; UsageError unless they are numbers, each one more than the last."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise UsageError(f"the steps of {episode} are {kind}, not numbers; nothing was committed")
    steps = column.to_numpy()
    if column.null_count or not np.isfinite(steps).all():
        raise UsageError(f"{episode} has a row without a number of its step; nothing was committed")
    order: Ints = np.argsort(steps, kind="stable")
    steps = steps[order]
    wrong = np.flatnonzero(steps[1:] - steps[:-1] != 1)
    if len(wrong):
        here, after = steps[wrong[0] : wrong[0] + 2]
        if here == after:
            raise UsageError(f"{episode} has step {here} twice; nothing was committed")
        raise UsageError(
            f"{episode} has no step between {here} and {after}, and steps are never joined over a gap; nothing was "
            "committed: number them anew, or make the parts episodes of their own"
        )
    return order


def _grouped(columns: DatasetColumns, data: bytes) -> GivenEpisode:
    """The episode of such a row."""
    table = pa.ipc.open_stream(data).read_all().combine_chunks()
    by_name = {name: _whole(table[name]) for name in table.column_names}
    leaves: dict[str, Any] = {}
    for name in columns.of_fields(table):
        column, axis = by_name[name], columns.schema.axes.get(_path(name))
        if axis == "free":
            leaves[name] = values_of(column.slice(0, 1))[0]
        else:
            of_last = name.endswith(AFTER)
            leaves[name] = values_of(column[-1:])[0] if of_last else _named(name, array_of, column)
    facts = {}
    for argument, name in columns.facts.items():
        per_step = argument in ("model_weights_uuid", "update_count")
        facts[argument] = _named(name, array_of, by_name[name]) if per_step else by_name[name][-1].as_py()
    metadata = {name: by_name[name][0].as_py() for name in columns.metadata}
    return GivenEpisode(_id(columns, by_name, 0), columns.steps(leaves), facts, metadata)


class GivenEpisode(NamedTuple):
    """An episode as `add_episode` takes it."""

    id: str | None
    steps: dict[str, Any]
    facts: dict[str, Any]
    metadata: dict[str, Any]


def _episodes(columns: DatasetColumns, table: pa.Table) -> Iterable[GivenEpisode]:
    """The episodes of a block."""
    if not table.num_rows:  # it may have no columns either
        return
    if GROUP in table.column_names:
        for data in table[GROUP]:
            yield _grouped(columns, data.as_py())
        return
    columns.check(table.column_names)
    names = columns.of_fields(table)
    used = dict.fromkeys([*names, *columns.named])
    by_name = {name: _whole(table[name]) for name in used}
    values = {name: _named(name, values_of, by_name[name]) for name in names}
    for i in range(table.num_rows):
        steps = columns.steps({name: of[i] for name, of in values.items()})
        facts = {argument: _fact(by_name[name][i]) for argument, name in columns.facts.items()}
        yield GivenEpisode(_id(columns, by_name, i), steps, facts, {n: by_name[n][i].as_py() for n in columns.metadata})


def _fact(value: Any) -> Any:
    """A value of the episode, also as a list of one, or one a step."""
    if not (value.is_valid and hasattr(value, "values")):
        return value.as_py()
    return value[0].as_py() if len(value) == 1 else array_of(value.values)


def _id(columns: DatasetColumns, by_name: Mapping[str, Any], row: int) -> str | None:
    if columns.episode_id is None:
        return None
    found = by_name[columns.episode_id][row].as_py()
    if found is None:
        raise UsageError(f"a row has no {columns.episode_id!r}: give each an id, or episode_id=None for new ones")
    return str(found)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    found = found.chunk(0) if isinstance(found, pa.ChunkedArray) and found.num_chunks == 1 else found
    return found.dictionary_decode() if pa.types.is_dictionary(found.type) else found


def _named(name: str, call: Callable[[pa.Array], Any], column: pa.Array) -> Any:
    try:
        return call(column)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise FieldError(f"column {name!r} is no field of episodes: {e}; leave it out with fields=") from e


# -- the datasink ------------------------------------------------------------------------------------------------------


class ArchiveDatasink(Datasink):  # type: ignore[misc]
    """An archive as a sink of Ray Data. `commit`: the commit that it made."""

    def __init__(
        self, arc: Archive, columns: DatasetColumns, run: str, *, replace: bool, compression: str | None
    ) -> None:
        self._storage: Storage = arc.storage
        self._layout = arc.layout
        self._columns = columns
        self._run = run
        self._replace = replace
        self._compression = compression
        self._seen = arc.head.sighting
        self._session = new_session()
        self._archive: Archive | None = arc
        self.commit: Commit | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_archive": None, "commit": None}  # which tasks do not need

    def get_name(self) -> str:
        return "Archive"

    @property
    def min_bytes_per_write(self) -> int:
        """A task gets about a shard of rows."""
        return SHARD_BYTES

    def on_write_start(self, schema: Any = None) -> None:
        names = getattr(schema, "names", None)
        if names is not None and GROUP not in names:
            self._columns.check(names)

    def write(self, blocks: Iterable[Any], ctx: Any) -> RankRows:
        """Put the episodes of some blocks into shards; the rows of these."""
        place = Place(ctx.task_idx, MOST_RANKS, self._run, self._session)
        columns, made = self._columns, (self._storage, self._layout, place, MAIN_BUFFER)
        staging, ids = Staging(*made, columns.schema, self._compression), set[str]()
        try:
            for block in blocks:
                for one in _episodes(columns, BlockAccessor.for_block(block).to_arrow()):
                    if one.id in ids:
                        raise _twice(one.id)
                    if one.id is not None:
                        ids.add(one.id)
                    metadata = _metadata(one)
                    staging.buffer.add_episode(
                        one.steps, episode_id=one.id, metadata=metadata, replace=self._replace, **one.facts
                    )
            return staging.finish(self._seen)
        finally:
            staging.close()

    def on_write_complete(self, write_result: Any) -> Any:
        """Commit the rows that tasks handed back, all of them at once."""
        rows = RankRows.joined(write_result.write_returns)
        assert self._archive is not None
        if rows.size:
            begun = rows.segments.filter(pc.is_null(rows.segments["predecessor"]))["episode_id"].value_counts()
            twice = begun.filter(pc.greater(begun.field("counts"), 1)).field("values")
            if len(twice):
                raise _twice(pc.min(twice).as_py())
            log = CommitLog(self._storage, self._archive.id, self._archive.head)
            given = {"segments": rows.segments, "chunks": rows.chunks}
            change = Change("merge", lambda parent, attempt: (given, {}), session=self._session, ids_at=0)
            self.commit = log.commit(f"ray/{self._session}", change)
        return write_result

    def on_write_failed(self, error: Exception) -> None:
        logger.warning("nothing of the dataset was committed at %s: %s", self._storage.url, error)


def _twice(episode_id: str) -> DuplicateEpisodeError:
    return DuplicateEpisodeError(
        f"the dataset has the episode {episode_id!r} twice; nothing was committed: give each row an id of its own, or "
        "unit='step' where a row is a step"
    )


def _metadata(one: GivenEpisode) -> dict[str, Any] | None:
    """Metadata by key: the column "metadata" is the JSON text of all, others are a key each."""
    given, where = one.metadata, f"column 'metadata' of episode {one.id!r}"
    whole = _json(where, given.get("metadata") or "{}")
    if not isinstance(whole, dict):
        raise FieldError(f"{where} is JSON of {type(whole).__name__}, not of an object with keys")
    keys = {name.removeprefix(METADATA_COLUMN): value for name, value in given.items() if name != "metadata"}
    return (whole | {name: value for name, value in keys.items() if value is not None}) or None


def write(
    dataset: Any, url: Any, columns: DatasetColumns, *, run: str, replace: bool, compression: str | None,
    storage_options: Mapping[str, Any] | None, concurrency: int | None, ray_remote_args: Any,
) -> Commit:  # fmt: skip
    """Write a dataset as one commit; see `archive.ray.write`."""
    if "write_returns" not in WriteResult.__dataclass_fields__:
        raise UsageError(
            "archive.ray.write needs Ray 2.41 or newer: in earlier ones, tasks that write hand back nothing"
        )
    if not isinstance(url, Archive):
        Storage.connect(url, storage_options).check_shared(SHARED)
    arc = url if isinstance(url, Archive) else open_archive(url, create=True, storage_options=storage_options)
    arc.storage.check_shared(SHARED)
    arc.check_writable()
    sink = ArchiveDatasink(arc.refresh(), columns, run, replace=replace, compression=compression)
    if columns.by_step:
        with _by_sorting(dataset.context):
            grouped = dataset.groupby(columns.episode_id).map_groups(partial(together, columns), batch_format="pyarrow")
            grouped.write_datasink(sink, concurrency=concurrency, ray_remote_args=ray_remote_args)
    else:
        dataset.write_datasink(sink, concurrency=concurrency, ray_remote_args=ray_remote_args)
    return sink.commit or arc.refresh().head


@contextmanager
def _by_sorting(context: Any) -> Iterator[None]:
    """Ray groups the rows of datasets of this context by a sort: its newer way fails at blocks that a filter left
    without rows."""
    kept = getattr(context, "shuffle_strategy", None)
    if kept is not None:
        context.shuffle_strategy = type(kept)("sort_shuffle_pull_based")
    try:
        yield
    finally:
        if kept is not None:
            context.shuffle_strategy = kept


__all__ = ["ArchiveDatasink", "DatasetColumns", "columns", "write"]
