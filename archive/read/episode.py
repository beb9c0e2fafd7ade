"""One episode of an archive or a checkpoint: its facts, without reading data, and its steps on demand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from archive.arrays import Ints
from archive.base import MAX_PAGE_BYTES, ArchiveError, frozen, jsontree
from archive.fields import schema, to_tensors
from archive.observe import operation
from archive.read import derivations, notes
from archive.read.chosen import Chosen
from archive.read.reader import Destination
from archive.read.selection import Selection
from archive.read.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa

    from archive.view import notebook

AHEAD_BYTES = 32 * 1024 * 1024
MAX_EPISODES = 256
OF_ROW = ("terminated", "truncated", "reason", "env_id", "rank", "run", "session", "buffer", "created_at", "commit")
_ANNOTATE = (
    "add the episode again with the new one (and its weights, update count and flags, which belong to a revision), "
    "w.add_episode(ep.read(), episode_id=ep.id, replace=True, metadata={**ep.metadata, ...}), or change "
    "copy.deepcopy(ep.metadata)"
)

Key = tuple[Any, ...]


class Ahead:
    """Steps that are read ahead, shared by the episodes of one iteration. Once two in a row were read, the next read
    brings two more, then four, up to AHEAD_BYTES; so at most as much is read in vain as was asked for."""

    def __init__(self, some: Chosen) -> None:
        self._some = some
        self._bytes: Ints | None = None
        self._lock = threading.Lock()  # never waited for: after a fork it may be held for ever
        self._held: dict[int, dict[str, Any]] = {}
        self._key: Key = ()
        self._next = -1
        self._count = 1

    def read(self, place: int, selection: Selection) -> dict[str, Any] | None:
        """The steps of the episode at that place, which are not kept any longer; None if it should be read alone."""
        key = _key(selection)
        if key is None or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._found(place, key, selection)
        finally:
            self._lock.release()

    def _found(self, place: int, key: Key, selection: Selection) -> dict[str, Any] | None:
        follows = key == self._key and place == self._next
        self._key, self._next = key, place + 1
        if follows and place in self._held:
            return self._held.pop(place)
        self._held = {}
        if not follows:
            self._count = 1
            return None
        self._count = min(2 * self._count, MAX_EPISODES)
        if self._bytes is None:
            self._bytes = self._some.reader.sizes(self._some.step_spans())
        taken = np.cumsum(self._bytes[place : place + self._count])
        run = place + np.arange(int((taken <= AHEAD_BYTES).sum()))
        if len(run) < 2:
            return None
        try:
            data = self._some.reader.read(self._some.pick(run).spans(), selection)
        except ArchiveError:  # of any of them: reading that one raises it again
            self._count = 1
            return None
        self._held = dict(enumerate(data[1:], place + 1))
        return data[0]


class Episode:
    """One trajectory: its facts, and its steps on demand."""

    def __init__(self, some: Chosen, place: int, row: dict[str, Any], ahead: tuple[Ahead, int] | None = None) -> None:
        """The episode at a place of some; ahead: of the iteration that it comes from, and its place there."""
        self._some = some
        self._place = place
        self._row = row
        self._ahead = ahead

    @property
    def attributes(self) -> dict[str, Any]:
        """Values that change after writing, as of the checkpoint;
        empty for an episode that is not of a checkpoint. Read-only."""
        found = {} if self._some._attributes is None else self._some._attributes.values
        mine = {name: values[self.id] for name, values in found.items() if self.id in values}
        out: dict[str, Any] = frozen(
            mine, "give attributes= to the next checkpoint(), or change copy.deepcopy(attributes)"
        )
        return out

    @property
    def id(self) -> str:
        return str(self._row["episode_id"])

    @property
    def length(self) -> int:
        """Number of steps (of live steps, for an episode of a checkpoint)."""
        return int(self._row["length"])

    @property
    def complete(self) -> bool:
        """True if both its first and its last step are there."""
        return bool(self._row["complete"])

    @property
    def update_count(self) -> int | None:
        """The update count of its newest steps; `update_counts` has the range, `weights` those of each step."""
        low, high = self._row["update_count_min"], self._row["update_count_max"]
        newest: int | None = high if low == high else self._newest("update_count")
        return high if newest is None else newest

    @property
    def update_counts(self) -> tuple[int, int] | None:
        """(start, stop) of the update counts of its steps, half-open."""
        low, high = self._row["update_count_min"], self._row["update_count_max"]
        return None if low is None else (low, high + 1)

    @property
    def model_weights_uuid(self) -> str | None:
        """The weights of its newest steps; `model_weights_uuids` has all, `weights` those of each step."""
        every = self.model_weights_uuids
        newest: str | None = self._newest("model_weights_uuid") if len(every) > 1 else None
        return newest or (every[-1] if every else None)

    @property
    def weights(self) -> pa.Table:
        """One row for each step: the weights that made it, and the update count: columns `model_weights_uuid` and
        `update_count`, null where unknown. Reads no data."""
        return self.alone().weights()

    def _newest(self, name: str) -> Any:
        """The value at the newest step that has one; None without one."""
        known = self.weights[name].drop_null()
        return known[-1].as_py() if len(known) else None

    @property
    def model_weights_uuids(self) -> list[str]:
        return list(self._row["model_weights_uuids"] or [])

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was given with the episode. Read-only: adding the episode again with replace=True changes
        it."""
        text = self._row["metadata"]
        out: dict[str, Any] = frozen(jsontree.loads(text) if text else {}, _ANNOTATE)
        return out

    @property
    def labels(self) -> dict[str, Any]:
        """Its labels, set after it was written: `arc.label({ep.id: {"success": True}})`. Read-only."""
        out: dict[str, Any] = frozen(self._some.episode_index.labels.of(self._number), "say it by ep.label(key=value)")
        return out

    @property
    def label_history(self) -> list[dict[str, Any]]:
        """The history of its labels, oldest first: key, value (None: removed), by, created_at, commit."""
        return self._some.episode_index.labels.history(self._number)

    def label(self, labels: Mapping[str, Any] | None = None, /, *, by: str | None = None, **more: Any) -> Self:
        """Set labels on it; see `Episodes.label`."""
        notes.label_all(self.alone(), {**(labels or {}), **more}, by)
        return self

    @property
    def total_reward(self) -> float | None:
        """Sum of the reward field over the whole episode, the table's "return"."""
        value: float | None = self._row["return"]
        return value

    def __getattr__(self, name: str) -> Any:
        if name in OF_ROW:
            return self._row[name]
        raise AttributeError(f"an Episode has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_some": self.alone(), "_place": 0, "_ahead": None}

    @property
    def fields(self) -> dict[str, str]:
        """Field -> dtype, shape of a row and kind of axis; no data is read."""
        return schema.described(self.alone().schema_texts)

    @property
    def specs(self) -> dict[schema.Path, schema.FieldSpec]:
        """The spec of each field, by its keys; no data is read."""
        return {spec.path: spec for text in self.alone().schema_texts for spec in schema.loads(text).fields}

    def spans(self, start: int = 0, stop: int | None = None) -> Spans:
        """Its segments with the steps [start, stop) of each; empty ones stay, for fields of the whole episode."""
        whole = self.alone().spans()
        if start == 0 and stop is None:
            return whole
        first, last, _ = slice(start, stop).indices(self.length)
        return whole.cut(np.array([first]), np.array([last]))

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
        """Steps [start, stop) as a nested dict of numpy arrays; only their chunks are read, and those that the
        fields to `derive` (see `archive.fields.derived`) need beyond them.

        out: a nest of arrays or CPU tensors to decode into, see `Episodes.read`.
        """
        with operation("read.episode", episode=self.id):
            return self._read(Selection(fields, missing, ragged), start, stop, derive, out)

    def _read(self, selection: Selection, start: int, stop: int | None, derive: Any, out: Any) -> dict[str, Any]:
        if out is not None and not derive:
            (filled,) = self._some.reader.read(self.spans(start, stop), selection, into=Destination(out))
            return filled
        if derive:
            return derivations.read_all(self.alone(), selection, derive, out, start, stop)[0]
        if self._ahead is not None and start == 0 and stop is None:
            ahead, place = self._ahead
            if (found := ahead.read(place, selection)) is not None:
                return found
        (found,) = self._some.reader.read(self.spans(start, stop), selection)
        return found

    def alone(self) -> Chosen:
        """This episode, as a selection."""
        return self._some.pick(np.array([self._place]))

    @property
    def _number(self) -> int:
        """Its number in the index of all episodes."""
        return int(self._some.numbers[self._place])

    @property
    def bounds(self) -> derivations.Bounds:
        """The ranges of its steps without a gap in time: one, unless some were evicted."""
        return derivations.Bounds(self.alone())

    def to_torch(
        self, fields: Any = None, start: int = 0, stop: int | None = None, *, missing: Any = "error", derive: Any = ()
    ) -> dict[str, Any]:
        """The same as `read`, with tensors; strings and JSON stay as they are."""
        out: dict[str, Any] = to_tensors(self.read(fields, start, stop, missing=missing, derive=derive))
        return out

    def plot(self, fields: Any = None, start: int = 0, stop: int | None = None) -> Any:
        """Draw the curves of its numbers and a strip of its pictures; Matplotlib's Axes. Reads these fields."""
        from archive.view import plots

        return plots.episode(self.read(fields, start, stop), self.id)

    def to_html(self, fields: Any = None, *, tokenizer: Any = None, max_bytes: int | None = MAX_PAGE_BYTES) -> str:
        """A page of its own that plays it: pictures, messages, curves, text. Loads nothing when opened.

        tokenizer: makes text of token ids: a function of a list of ids, an object with such a `decode`, or the
        name of a tokenizer (package tokenizers or transformers).  max_bytes: of the page, None for no bound; pictures,
        values and text beyond it are left out, and named on the page.
        """
        from archive.view import pages

        return pages.episode(self, self.alone(), fields, tokenizer, max_bytes)

    def watch(
        self,
        fields: Any = None,
        height: int = 640,
        *,
        tokenizer: Any = None,
        max_bytes: int | None = MAX_PAGE_BYTES,
    ) -> notebook.Framed:
        """The page of `to_html` within a notebook's cell, `height` pixels high."""
        from archive.view import notebook

        return notebook.Framed(self.to_html(fields, tokenizer=tokenizer, max_bytes=max_bytes), height)

    @property
    def about(self) -> dict[str, Any]:
        """The facts about it, for people."""
        from archive.view import notebook

        row = self._row
        how = "terminated" if row["terminated"] else "truncated" if row["truncated"] else None
        return {
            "id": self.id, "steps": self.length, "return": self.total_reward, "complete": self.complete,
            "ended by": row["reason"] or how, "weights": self.model_weights_uuids, "updates": notebook.updates_of(row),
            "buffer": row["buffer"], "rank": row["rank"], "env row": row["env_id"], "run": row["run"],
            "session": row["session"], "commit": row["commit"], "created at": row["created_at"],
            "labels": [f"{key} = {value}" for key, value in self.labels.items()],
        }  # fmt: skip

    def _repr_html_(self) -> str:
        from archive.view import notebook

        return notebook.episode(self.about, self.fields, self.metadata, self.attributes)

    def __repr__(self) -> str:
        flags = "" if self.complete else " incomplete"
        made_by = f"weights={self.model_weights_uuid!r} update={self.update_count}"
        return f"<Episode {self.id!r} length={self.length}{flags} {made_by}>"


def _key(selection: Selection) -> Key | None:
    """A key that tells selections apart; None for one whose stand-in for missing fields is not plain."""
    if not isinstance(selection.missing, (str, int, float)):
        return None
    names = None if selection.names is None else tuple(n if isinstance(n, str) else tuple(n) for n in selection.names)
    return names, repr(selection.missing), selection.ragged
