"""Bulk export: episodes as plain files that other tools read.

In Parquet they are rows, one a step: `episode_id`, `step`, and the fields as columns.

| field | column |
|---|---|
| one row a step | `<field>`; of several axes as one flat list of fixed length a step, complex numbers as two |
| ragged | `<field>`: a list a step, of any length; of more axes the rows are flat lists of fixed length in it |
| offset (T+1 observations) | `<field>` has the rows of the steps; `<field>.after` those beyond, at the last step |
| free (belongs to the episode) | `<field>`: at the first step, a value or the list of its rows; null at the others |
| JSON | text; dtypes that numpy itself does not know (bfloat16) are their bits |

A field that an episode lacks is null. Episodes of no steps have no rows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from archive import Archive
from archive import open as open_archive
from archive.arrays import Ints
from archive.base import FieldError, JobError, UsageError, cached_property, escape_path, show
from archive.fields import Ragged, flatten, json_texts, lists_column, own_dtype, rows_column
from archive.jobs import Agree, Crew, Items, JobCall, JobRequest, Procedure, Progress, Result, frozen_episodes
from archive.log import CommitLog
from archive.read import Episode, Episodes
from archive.store import Storage

FORMATS = ("npz", "parquet")
EPISODES_PER_FILE = 64


def export(
    source: Any, to: Any, *, format: str = "npz", fields: Any = None, missing: Any = "error",
    episodes_per_file: int = EPISODES_PER_FILE, storage_options: Mapping[str, Any] | None = None,
    engine: str = "local", job: str | None = None, workers: int | None = None, num_cpus: float | None = None,
    num_gpus: float | None = None, progress: Progress | bool = False,
) -> list[str]:  # fmt: skip
    """Write episodes to files below the URL `to`; their names, in the episodes' order. Files of the same names are
    replaced.

    source: an archive, its URL, or some Episodes of it.  format: "npz" (arrays `<episode>/<field>`, episodes numbered
    within the file, and `episodes`, a JSON list of what is known of each; ragged fields as `<field>.values` end to end
    and `<field>.lengths`) or "parquet" (one row a step, see the head of this module).
    engine, workers, num_cpus, num_gpus: as of `episodes.map`; other processes must reach `to` by the same URL.
    job: a name under which the archive keeps which files are finished: after whatever stopped it, the same call goes on
    with the others, of the episodes as they were when it began.  progress: True draws a bar; a
    function is called with (files done, files).
    """
    if format not in FORMATS:
        raise UsageError(f"format={format!r}: give one of {', '.join(FORMATS)}")
    if episodes_per_file < 1:
        raise UsageError(f"episodes_per_file={episodes_per_file}: give 1 or more")
    given = source if isinstance(source, (Archive, Episodes)) else open_archive(source, storage_options=storage_options)
    episodes = given if isinstance(given, Episodes) else given.episodes
    target, crew = Storage.connect(to, dict(storage_options or {})), Crew(engine, workers, num_cpus, num_gpus)
    snapshot, how = episodes.reader.snapshot, _FileTerms(target, format, fields, missing)
    for storage in (snapshot.storage, target):
        crew.check(storage, how)
    log = CommitLog(snapshot.storage, snapshot.commit.archive, snapshot.commit)
    ask = JobRequest("export", {**how.to_json(), "episodes_per_file": episodes_per_file})
    call = JobCall.of(
        log,
        job,
        ask,
        snapshot.commit,
        lambda: _cut(episodes.numbers.tolist(), episodes_per_file),
        annotations=snapshot.annotations.head.number,
        checkpoint=episodes.checkpoint,
    )
    of_plan = frozen_episodes(snapshot.storage, call.round) if call.others and call.round else episodes
    call.carry_out(_ExportFiles(of_plan, how), crew, progress)
    call.finish()
    return [how.name(number) for number in range(call.batches)]


def _cut(numbers: list[int], size: int) -> list[list[int]]:
    """The items of each batch: the number of its file, and those of the episodes in it."""
    return [[file, *numbers[at : at + size]] for file, at in enumerate(range(0, len(numbers), size))]


@dataclass(frozen=True)
class _FileTerms:
    """The files to be written: where, and what is in them."""

    target: Storage
    format: str
    fields: Any
    missing: Any

    def to_json(self) -> dict[str, Any]:
        """The arguments as JSON, by which a later call is compared."""
        fields = [self.fields] if isinstance(self.fields, str) else self.fields
        named = None if fields is None else [name if isinstance(name, str) else list(name) for name in fields]
        return {"to": self.target.url, "format": self.format, "fields": named, "missing": repr(self.missing)}

    def name(self, number: int) -> str:
        return f"part-{number:06d}.{self.format}"


class _ExportFiles(Procedure):
    """The files of an export, each written whole. Items are the number of a file, and its episodes' in the index."""

    def __init__(self, episodes: Episodes, how: _FileTerms) -> None:
        self._episodes = episodes
        self._how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._episodes, self._how)

    @cached_property
    def _place(self) -> Ints:
        """The place of each number of the index among the episodes; -1: it has none."""
        numbers = self._episodes.numbers
        out = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
        out[numbers[::-1]] = np.arange(len(numbers))[::-1]
        return out

    def run(self, items: Items, agree: Agree) -> Result:
        file, *numbers = items
        sound = all(type(one) is int and one >= 0 for one in items) and max(numbers, default=-1) < len(self._place)
        if not sound or (self._place[numbers] < 0).any():
            raise JobError(f"the plan of file {file} names an episode that the archive does not have")
        began, part, how = perf_counter(), self._episodes.pick(self._place[numbers]), self._how
        data = part.read(how.fields, missing=how.missing, ragged="flat")
        read, about = perf_counter(), part.table.drop_columns(["created_at"]).to_pylist()
        encoded = _npz(about, data) if how.format == "npz" else _parquet(part, data)
        made = perf_counter()
        how.target.put(how.name(file), encoded)
        seconds = {"read": read - began, "computed": made - read, "put": perf_counter() - made}
        return Result(
            said={"file": how.name(file), "bytes": len(encoded)}, steps=int(part.lengths().sum()), seconds=seconds
        )


def _leaves(steps: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, array) of each field; ragged ones as two, values of JSON fields as text."""
    for path, leaf in flatten(steps):
        name = escape_path(path)
        if isinstance(leaf, Ragged):
            yield f"{name}.values", leaf.values
            yield f"{name}.lengths", leaf.lengths
        elif isinstance(leaf, list):
            yield name, json_texts(leaf).astype(str)
        elif isinstance(leaf, np.ndarray):
            yield name, leaf.astype(str) if leaf.dtype == object else leaf


def _npz(about: Sequence[dict[str, Any]], data: Sequence[dict[str, Any]]) -> bytes:
    """The bytes in numpy's own format; dtypes that it does not know are stored as their bits."""
    arrays = {"episodes": np.array(json.dumps(about))}
    for i, steps in enumerate(data):
        arrays |= {f"{i}/{name}": own_dtype(array) for name, array in _leaves(steps)}
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # a name may not be that of its options, says numpy
    return out.getvalue()


def _parquet(episodes: Episodes, data: Sequence[dict[str, Any]]) -> bytes:
    """The file that holds these episodes, read with ragged="flat"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [_table(ep, steps) for ep, steps in zip(episodes, data, strict=True)]
    try:
        table = pa.concat_tables(parts, promote_options="default")
    except pa.ArrowException as e:
        raise FieldError(
            f"a field differs between episodes in dtype or shape, and a Parquet file has one kind of each: {e}; leave "
            "it out with fields= (--field), or use npz"
        ) from e
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def _table(episode: Episode, steps: dict[str, Any]) -> Any:
    import pyarrow as pa

    length, specs = episode.length, episode.specs
    columns: dict[str, Any] = {"episode_id": pa.array([episode.id] * length), "step": pa.array(np.arange(length))}
    for path, leaf in flatten(steps):
        axis = specs[path].axis if path in specs else "step"
        try:
            columns |= _columns(escape_path(path), leaf, length, axis, path in specs and specs[path].scalar)
        except (pa.ArrowException, TypeError, ValueError) as e:
            raise FieldError(
                f"field {show(path)!r} of episode {episode.id!r} does not go into Parquet ({e}); leave it out with "
                "fields= (--field), or use npz"
            ) from e
    return pa.table(columns)


def _columns(name: str, leaf: Any, length: int, axis: str, scalar: bool) -> dict[str, Any]:
    if isinstance(leaf, Ragged):
        return {name: lists_column(rows_column(leaf.values), leaf.lengths)}
    if isinstance(leaf, list):
        leaf = json_texts(leaf)
    if not isinstance(leaf, np.ndarray):  # an empty dict, or None
        return {}
    if axis == "free":
        return {name: _at(0, rows_column(leaf.reshape(1) if scalar else leaf), length, scalar=scalar)}
    own = {name: rows_column(leaf[:length])}
    return own | ({f"{name}.after": _at(length - 1, rows_column(leaf[length:]), length)} if len(leaf) > length else {})


def _at(step: int, values: Any, length: int, *, scalar: bool = False) -> Any:
    """The values, all of them at one step (as its list, or as its value), null at the others."""
    import pyarrow as pa

    elsewhere = np.arange(length) != step
    if scalar:
        return values.take(pa.array(np.zeros(length, np.int64), mask=elsewhere))
    return lists_column(values if length else values[:0], np.where(elsewhere, 0, len(values)), elsewhere)
