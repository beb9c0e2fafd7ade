"""The columns of a dataset, and blocks of those rows that meet a predicate.

The predicate's columns are read first, and the rest of those episodes alone that have a row left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from ray.data.block import BlockAccessor

from archive import Episodes
from archive.arrays import Ints, ascending
from archive.base import escape_path, show
from archive.fields import FieldSpec, Ragged, dtypes, flatten, lookup, unflatten
from archive.ray import blocks
from archive.ray.blocks import Frame, Unit
from archive.read import Destination, Selection, derivations, sizes
from archive.read.chunks import LastChunks

BLOCK_BYTES = 2**26  # of a block, about
ALIASES = {"update_count": "update_count_max"}
OWN = "episode."  # begins the name of a column of ours that is called as a field is
ROW = "__row"
STUB = "__bsp_stub"  # Ray's name for the column of a block of rows without columns


class Field(NamedTuple):
    """A field that some episodes have. everywhere: all have it, of one kind; partial: it is null for those that lack
    it."""

    spec: FieldSpec
    everywhere: bool
    partial: bool

    @property
    def is_plain(self) -> bool:
        """True if many episodes can be read into one array."""
        return self.everywhere and self.spec.axis == "step" and dtypes.to_numpy(self.spec.dtype).kind not in "OUT"


@dataclass(frozen=True)
class RowReading:
    """The rows to make of episodes. own: column -> column of the episodes' table, or "step", "mask".  predicate: of
    rows; wanted: the columns to give, None for all; called: their names, where a Ray leaves it to the source to rename
    them."""

    unit: Unit
    own: Mapping[str, str]
    fields: Mapping[str, Field]
    derived: tuple[Any, ...]
    missing: Any
    predicate: Any = None
    wanted: tuple[str, ...] | None = None
    called: tuple[str, ...] | None = None

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

    def of(self, wanted: Sequence[str] | None) -> RowReading:
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
                yield self._called(block)
        if not some:
            yield self.empty(episodes)

    def empty(self, episodes: Episodes) -> pa.Table:
        """A block without rows, of the columns of others."""
        return self._called(self.table(episodes[:0]))

    def _called(self, block: pa.Table) -> pa.Table:
        same = self.called is None or len(self.called) != block.num_columns
        return block if same else block.rename_columns(list(self.called or ()))

    def _in_turn(self) -> tuple[RowReading | None, RowReading]:
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
        self, episodes: Episodes, first: RowReading | None, rest: RowReading, tails: tuple[LastChunks, LastChunks]
    ) -> pa.Table:
        """The rows that meet the predicate."""
        if first is None:
            return rest.table(episodes, tails[1])
        table = first.table(episodes, tails[0])
        rows = met(table, self.predicate)
        frame = self.unit.frame(episodes.lengths())
        left = ascending(frame.episode[rows])
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
                given = blocks.held(spec, [self._leaf(nest, field) for nest in nests])
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

    def _leaf(self, nest: dict[str, Any], field: Field) -> Any:
        """The leaf of a field; None where there is no such field. A stand-in is of the field's dtype, though none of
        those that were read with it has the field. A list without values may be of another."""
        spec, found = field.spec, lookup(nest, field.spec.path)
        if found is None or isinstance(found, dict):
            return None
        if field.everywhere or spec.scalar:
            return found
        if not len(found.lengths if isinstance(found, Ragged) else found):
            return blocks.no_rows(spec)
        if field.partial or not isinstance(found, np.ndarray):
            return found
        if spec.dtype in ("str", "json"):
            return found if spec.dtype == "str" and found.dtype.kind in "OU" else found.tolist()
        is_same = (found.dtype, found.shape[1:]) == (dtypes.to_numpy(spec.dtype), spec.shape)
        return found if is_same else Selection(missing=self.missing).filled_as(spec, show(spec.path), len(found))

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
