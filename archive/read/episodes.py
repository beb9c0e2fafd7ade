"""Episodes of an archive or a checkpoint: a table, which reads no data, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from archive.arrays import Ints, numbers, times
from archive.base import NotFoundError, UsageError, logger, one_line, package, size, unescape_path
from archive.fields import schema
from archive.index import COLUMNS, METADATA_COLUMN, Met, matching
from archive.observe import operation
from archive.read import derivations, notes, sizes
from archive.read.chosen import Attributes, Chosen
from archive.read.chunks import LastChunks
from archive.read.episode import Ahead, Episode
from archive.read.reader import Destination
from archive.read.selection import Selection

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa


__all__ = ["Attributes", "Episode", "Episodes"]

_BATCH = 1024


class Episodes(Chosen, Sequence["Episode"]):
    """Some episodes, in order: a sequence of Episode, a table (`.table`, `.to_pandas()`), and one read for all.

    notes: sentences on episodes that the filter left out, because they have no value.
    """

    notes: tuple[str, ...] = ()

    def filter(
        self,
        *,
        episode_id: Any = None,
        model_weights_uuid: Any = None,
        update_count: Any = None,
        complete: bool | None = None,
        buffer: Any = None,
        rank: Any = None,
        env_id: Any = None,
        session: Any = None,
        run: Any = None,
        where: Any = None,
    ) -> Episodes:
        """The episodes that meet all conditions. Reads no data.

        episode_id, model_weights_uuid, buffer, run, session, rank, env_id: one value or several. update_count: a
        number, or (start, stop), half-open. Weights and update counts match if any segment of the episode does; run and
        session are those of its newest one.
        where: a condition over the table's columns, such as "return > 10 and metadata.task = 'push'" or
        "label.success = true", or an Arrow expression. Episodes without a value are left out, by the condition and by
        its negation; they are counted in `notes` of the result, and in the log.
        """
        found, notes = self._found(
            complete, where, episode_id=episode_id, model_weights_uuid=model_weights_uuid, update_count=update_count,
            buffer=buffer, rank=rank, env_id=env_id, session=session, run=run,
        )  # fmt: skip
        out = self.pick(found)
        out.notes = notes
        return out

    def places_of(self, *, complete: bool | None = None, where: Any = None, **conditions: Any) -> Ints:
        """The places of the episodes that meet all conditions, which are those of `filter`."""
        return self._found(complete, where, **conditions)[0]

    def _found(self, complete: bool | None, where: Any, **conditions: Any) -> tuple[Ints, tuple[str, ...]]:
        """The places of the episodes that meet all conditions, and notes on those left out for lack of a value."""
        mask = self.episode_index.mask(**conditions)
        places = np.flatnonzero(mask if self._given is None else mask[self.numbers])
        if complete is not None:
            places = places[self.pick(places)._complete() == bool(complete)]
        if where is None:
            return places, ()
        met = self.pick(places)._meeting(where)
        return places[met.mask], met.notes

    def _meeting(self, condition: Any) -> Met:
        """The episodes that meet a condition over the columns of their table."""
        checked = isinstance(condition, str)
        met = matching(condition, lambda name: self._column(name, checked), len(self), self._names_in)
        for note in met.notes:
            loud = met.negated or note.startswith("none")
            logger.log(WARNING if loud else INFO, "%s (%s)", note, self.reader.snapshot.storage.url)
        return met

    def _names_in(self, expression: str) -> list[str]:
        """The columns that the text of an Arrow expression may name."""
        names = [
            *self.episode_index.names,
            *(self.episode_index.metadata_names if METADATA_COLUMN in expression else ()),
        ]
        return [name for name in names if name in expression]

    def _column(self, name: str, compared: bool) -> Any:
        if compared:
            self.episode_index.check_comparable(name)
        return self.columns([name])[name]

    def label(self, labels: Mapping[str, Any] | None = None, /, *, by: str | None = None, **more: Any) -> Self:
        """Set labels on all of them: `eps.label(success=True, by="anna")`; they show here, and in their archive. A
        value None removes a label.

        The newest value of a key counts; earlier ones stay in `ep.label_history`. by: the author.  labels: keys
        that are no Python names. Values as of `arc.label`. Writes one small object and a commit, beside running
        writers.
        """
        notes.label_all(self, {**(labels or {}), **more}, by)
        return self

    def map(
        self, fn: Callable[..., Any], fields: Any = None, adds: Sequence[Any] | None = None, *, engine: str = "local",
        job: str | None = None, commit_every: str | None = "10min", only: str = "all", on_error: str = "raise",
        workers: int | None = None, num_cpus: float | None = None, num_gpus: float | None = None,
        batch_size: int | None = None, max_bytes: int = 2**28, missing: Any = "error", derive: Any = (),
        provenance: Any = None, by: str | None = None, progress: Callable[[int, int], None] | bool = False,
    ) -> Self:  # fmt: skip
        """Add derived columns, which a function makes of the steps of each episode:
        `eps.map(fn, fields=["reward"], adds=["advantage"])`.

        fn: called with the steps of one episode after the other, a nested dict of the `fields`; returns a dict of
        arrays, one row a step, as for `arc.add_fields`. A class is made once a worker, and then called.  adds: the
        fields that it must return; None: any that it returns.  The function's name, its version and a digest of its
        text are stored as the provenance of the columns, with `provenance`, as JSON.  missing, derive: as for `read`.

        engine: "local", here or in `workers` processes of this machine, or "ray", `workers` actors of `num_cpus` and
        `num_gpus` each (None: as many as the cluster has room for).

        job: a name under which finished batches are kept: after whatever stopped it, the same call goes on, and no
        batch is done twice. Results are committed every `commit_every` (None: at the end), whatever was compacted,
        forgotten or written beside; see `arc.jobs`. Without a name all is committed at the end, or nothing.
        only: "missing": episodes that lack a column; "stale": and those whose columns another version of the function
        made. Fields that were written with the steps stay, and so does what others add meanwhile, with "missing".
        on_error: "skip" leaves out episodes at which the function fails: `arc.jobs[...].failed` lists them.
        batch_size: the most episodes in a batch; 1 suits a function that takes seconds.  max_bytes: about what a worker
        holds of the steps.  progress: True draws a bar, or tells in lines where there is no terminal; a function is
        called with (batches done, batches).
        """
        from archive.jobs import Crew, Terms, map_columns

        if max_bytes < 1:
            raise UsageError(f"max_bytes={max_bytes}: give a number of bytes above 0")
        adds = adds if adds is None or isinstance(adds, str) else list(adds)
        map_columns(
            self, fn, Terms(fields, adds, missing, derive, on_error, max_bytes),
            Crew(engine, workers, num_cpus, num_gpus), job=job, only=only, commit_every=commit_every,
            batch_size=batch_size, provenance=provenance, by=by, progress=progress,
        )  # fmt: skip
        return self

    def _complete(self) -> Any:
        return numbers(self.columns(("complete",))["complete"])

    @property
    def table(self) -> pa.Table:
        """One row for each episode: id, length, return, weights, update counts, flags, place, metadata (JSON), commit,
        and a column `label.<key>` for each key of a label and `metadata.<name>` for each name in metadata that has
        values ("tools.calls": the key calls of the object tools), or for the 100 most frequent."""
        return self.columns([*self.episode_index.names, *self.episode_index.metadata_names])

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas DataFrame (needs pandas)."""
        return self.table.to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """The table as a Polars DataFrame (needs polars)."""
        pl = package("polars", "to_polars()", "polars")
        return pl.DataFrame(pl.from_arrow(self.table))  # type: ignore[no-any-return]

    @overload
    def __getitem__(self, key: int | str) -> Episode: ...
    @overload
    def __getitem__(self, key: slice | Any) -> Episodes: ...
    def __getitem__(self, key: Any) -> Episode | Episodes:
        if isinstance(key, str):
            return self._by_id(key)
        if isinstance(key, (int, np.integer)):
            place = range(len(self))[int(key)]
            return self._episodes([place])[0]
        return self.pick(np.arange(len(self))[key])

    def __contains__(self, key: object) -> bool:
        """True if an episode (or one of that id) is among these."""
        name = key.id if isinstance(key, Episode) else key
        return isinstance(name, str) and len(self.filter(episode_id=name)) > 0

    def _by_id(self, name: str) -> Episode:
        found = self.filter(episode_id=name)
        if not len(found):
            raise NotFoundError(
                f"there is no episode {name!r} among these {len(self)} of {self.reader.snapshot.storage.url}; "
                "`archive episodes` lists them"
            )
        return found._episodes([0])[0]

    def __iter__(self) -> Iterator[Episode]:
        """The episodes in order. Reading them whole, one after the other, reads the next ones ahead,
        in bounded memory."""
        ahead = Ahead(self)
        for start in range(0, len(self), _BATCH):
            yield from self._episodes(range(start, min(start + _BATCH, len(self))), ahead)

    def _episodes(self, places: Sequence[int], ahead: Ahead | None = None) -> list[Episode]:
        part = self.pick(np.array(places, np.int64))
        table = part.columns(COLUMNS)
        rows = table.drop_columns(["created_at"]).to_pylist()
        for row, at in zip(rows, times(table["created_at"]), strict=True):
            row["created_at"] = at
        return [
            Episode(part, i, row, None if ahead is None else (ahead, place))
            for i, (row, place) in enumerate(zip(rows, places, strict=True))
        ]

    def read(
        self, fields: Any = None, *, missing: Any = "error", ragged: str = "list", derive: Any = (), out: Any = None
    ) -> list[dict[str, Any]]:
        """The steps of all of them, a nested dict each, fetched together: each chunk is read once.

        fields: names ("obs/image", or "obs" for all below); None for all.  missing: "error", "skip" or a fill value,
        for episodes that lack a field asked for.  derive: fields computed from others, see `archive.fields.derived`.
        out: a nest of arrays or CPU tensors to decode into, of some of the fields or all: each has the rows of all
        episodes end to end, in the dtype and shape in which they were archived. The result shares their memory;
        other fields come in memory of their own. FieldError for one that does not fit; after another error
        their content is undefined.
        """
        selection = Selection(fields, missing, ragged)
        if derive:
            return derivations.read_all(self, selection, derive, out)
        into = None if out is None else Destination(out)
        with operation("read", episodes=len(self)):
            return self.reader.read(self.spans(), selection, into=into)

    def stream(
        self,
        fields: Any = None,
        *,
        max_bytes: int = 2**28,
        missing: Any = "error",
        ragged: str = "list",
        derive: Any = (),
    ) -> Iterator[tuple[Episode, dict[str, Any]]]:
        """Pairs (episode, its steps) in order, in batches, so that about `max_bytes` are held; each chunk once.

        An episode of more than a quarter of `max_bytes` is a batch of its own. The other arguments are those of `read`.
        """
        if max_bytes < 1:
            raise UsageError(f"max_bytes={max_bytes}: give a number of bytes above 0")
        selection, tails = Selection(fields, missing, ragged), LastChunks()
        for start, stop in sizes.runs(self.sizes(None if derive else fields), max_bytes // 4):
            run = self[start:stop]
            if derive:
                data = derivations.read_all(run, selection, derive)
            else:
                data = self.reader.read(run.spans(), selection, tails)
            data.reverse()
            for ep in run:
                yield ep, data.pop()

    def sizes(self, fields: Any = None) -> Ints:
        """Bytes of the steps of each, uncompressed, in these fields (None: all); no data is read.
        Text counts as 8 a value."""
        return self.reader.sizes(self.step_spans(), Selection(fields))

    @property
    def fields(self) -> dict[str, str]:
        """Field -> dtype, shape of a row and kind of axis, of all of them; no data is read."""
        return schema.described(self.schema_texts)

    @property
    def next_of(self) -> dict[schema.Path, schema.Path]:
        """Field -> the field whose next row it repeats, by their schemas; no data is read."""
        specs = [spec for one in self.schemas for spec in one.fields if spec.next_of]
        return {spec.path: unescape_path(spec.next_of) for spec in specs}

    @property
    def nbytes(self) -> int:
        """Bytes of their steps, uncompressed; no data is read. Text counts as 8 a value, as its length is not known."""
        return int(self.sizes().sum())

    @property
    def size_told(self) -> str:
        """The value of `nbytes` for people, with a note on text."""
        text = any(told.partition("[")[0] in sizes.TEXT for told in self.fields.values())
        return size(self.nbytes) + (" and text" if text else "")

    @property
    def schemas(self) -> list[schema.ShardSchema]:
        """The distinct schemas of their steps, as `schema_texts` has them; no data is read."""
        return [schema.loads(text) for text in self.schema_texts]

    def plot(self, ax: Any = None, label: str | None = None, y: str = "return") -> Any:
        """Draw returns over update count, and lengths; Matplotlib's two Axes. Reads no data.

        ax: Axes to draw into, one for the returns or the two that an earlier call gave; then those are given back.
        label: what these are called there: `axes = a.plot(label="a"); b.plot(axes, label="b")`.  y: another column of
        numbers than the return, such as "label.quality".
        """
        from archive.view import plots

        return plots.episodes(self.table, ax, label, y)

    def to_html(self, title: str = "Episodes") -> str:
        """A page of its own: distributions, and a row for each to sort and filter; beyond 200,000 rows, the
        newest. Reads no data."""
        from archive.view import pages

        return pages.episodes(self, title)

    def _repr_html_(self) -> str:
        from archive.view import notebook

        snapshot = self.reader.snapshot
        about = {"at": snapshot.storage.url, "commit": snapshot.commit.number, "uncompressed": self.size_told}
        return notebook.episodes(about, self.table, self.fields)

    def __repr__(self) -> str:
        snapshot = self.reader.snapshot
        return one_line(f"<{len(self)} episodes at {snapshot.storage.url}, commit {snapshot.commit.number}>")
