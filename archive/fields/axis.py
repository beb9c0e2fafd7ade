"""Pure, no I/O: the common part of all kinds of axis, and their records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from archive.arrays import Ints, Pieces
from archive.base import FieldError, layout, show
from archive.fields import dtypes
from archive.fields.derived import Bools
from archive.fields.nests import Array, Ragged
from archive.fields.schema import FieldSpec, Path, ShardSchema

Value = Array | Ragged
V = TypeVar("V", Array, Ragged)


class Layout(NamedTuple):
    """The places of the steps of some blocks in one shard, the same for all of their fields."""

    order: Ints | None  # the arrived step at each row; None: in the order of arrival
    start: Ints  # of each segment: its first row
    length: Ints  # of each segment: its steps
    block_length: Ints  # of each block: its steps
    block_segment: Ints  # of each block: the segment that it is of, where each is of one


class Extent(NamedTuple):
    """The places of a field's rows, for each segment, where they are not one a step."""

    start: Ints
    rows: Ints


# a field as it lies in a shard: its array and maybe a companion, by zarr path, and its extent if it needs one
Stored = tuple[dict[str, Array], Extent | None]


class Cuts(NamedTuple):
    """Steps [lo, hi) of some segments, in the requested order; those of one episode are together."""

    episode: Ints  # number of the episode
    segment: Ints  # number of the segment
    lo: Ints
    hi: Ints
    more: Bools  # mask: a field with more rows than steps goes on here, as no later step of the episode is wanted
    start: Ints  # first row of the segment in its shard, of fields of one row a step
    length: Ints  # steps of the segment
    extent: Extent  # of the field in the segment

    def pick(self, index: Any) -> Cuts:
        """The cuts at these places."""
        *columns, extent = self
        return Cuts._make([*(column[index] for column in columns), Extent(*(edge[index] for edge in extent))])


class Slices(NamedTuple):
    """Rows [start, stop) of one stored array, many times, and their places.

    into: "" for the field's own rows, else a name by which the axis finds them again.  at: the first row there; of the
    field's own rows, counted from the first one of that cut.
    """

    array: str
    like: Array  # no rows, of the array's dtype and shape
    into: str
    cut: Ints  # the cut of each
    start: Ints
    stop: Ints
    at: Ints


class Located(NamedTuple):
    """The rows that reading a field takes: their number in each cut, and those of stored arrays."""

    rows: Ints
    runs: Sequence[Slices]


class Fetched(NamedTuple):
    """The rows of a field that were fetched. at: the first of the field's own rows of each cut."""

    cuts: Cuts
    located: Located
    at: Ints
    rows: Mapping[str, Pieces]


@dataclass(frozen=True)
class Axis(ABC, Generic[V]):
    """One field on its kind of axis; `V` is the type of its values in stored form.

    whole: its rows belong to a run of steps of one episode, so that blocks of several episodes cannot have it.
    of_steps: its rows say how many steps there are, be they none.
    """

    kind: ClassVar[str]
    whole: ClassVar[bool] = False
    of_steps: ClassVar[bool] = True

    spec: FieldSpec

    @classmethod
    def claims(cls, leaf: Any) -> bool:
        """True if an undeclared leaf is on this axis; a step axis takes leaves that no other claims."""
        return False

    @classmethod
    @abstractmethod
    def normalised(cls, path: Path, leaf: Any, extra: int) -> tuple[FieldSpec, V]:
        """The spec of a leaf, and its stored form; FieldError if it cannot be stored."""

    @classmethod
    def json(cls, path: Path, leaf: Any, extra: int) -> tuple[FieldSpec, V]:
        """The same for a leaf of any JSON values; FieldError if they cannot be on this axis."""
        raise FieldError(f"a field of JSON values is not {cls.kind!r}: each step's value may be a list as it is")

    def steps(self, value: V) -> int | None:
        """The number of steps of these rows; None if they do not show it."""
        return None

    def steps_at_a_guess(self, value: V) -> int | None:
        """The number of steps of an episode of these rows, if no field shows it; None if these do not either."""
        return None

    def check(self, value: V, steps: int, *, last: bool) -> None:
        """FieldError unless these steps have such rows. last: the episode's last step is among them."""

    def takes_none_of(self, given: Value) -> bool:
        """True if steps without a value, of unknown kind, may be of this field."""
        return not isinstance(given, Ragged)

    @abstractmethod
    def nothing(self, steps: int) -> V:
        """Steps without a value, or no rows where each step has one."""

    @abstractmethod
    def cut(self, value: V, lo: int, hi: int, steps: int) -> V:
        """The rows of steps [lo, hi) out of those of so many steps."""

    @abstractmethod
    def lay_out(self, parts: Sequence[V], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        """The field in the form of a shard, from its values in each block.

        arrays: of the fields that are laid out already; those that follow another one (`next_of`) come last.
        """

    @abstractmethod
    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The rows of stored arrays that make up the field in these cuts, of segments of this schema.

        known: the rows of `companions`; then each cut is of one step, and only needed rows are named.
        """

    def companions(self, cuts: Cuts) -> Sequence[Slices]:
        """Rows with the places of those of single steps, to be fetched first."""
        return ()

    def complete(self, fetched: Fetched) -> None:
        """Put rows into place that were fetched beside the field's own."""

    @abstractmethod
    def build(self, fetched: Fetched, episodes: Ints, convert: Callable[[Array], Array]) -> list[V]:
        """The field of each episode, from completed rows. episodes: its first cut, and one past the last cut of all.

        convert: applied to the rows; it gives them the user's form.
        """


def empty_rows(spec: FieldSpec) -> Array:
    """No rows of a field, in their stored form: its dtype and shape."""
    return _no_rows(spec.dtype, spec.shape)


@lru_cache(maxsize=1024)
def _no_rows(dtype: str, shape: tuple[int, ...]) -> Array:
    rows = np.zeros((0, *shape), dtypes.to_numpy(dtype))
    return dtypes.to_stored(rows)[0].reshape(0, *dtypes.stored_trailing(dtype, shape))


def own_runs(spec: FieldSpec, start: Ints, stop: Ints) -> Located:
    """Rows [start, stop) of the field's own array in each cut, and no others."""
    every = np.arange(len(start))
    runs = Slices(spec.name, empty_rows(spec), "", every, start, stop, np.zeros(len(start), np.int64))
    return Located(stop - start, [runs])


def end_to_end(runs: Slices) -> Slices:
    """The same rows, one range after the other."""
    counts = runs.stop - runs.start
    return runs._replace(at=np.cumsum(counts) - counts)


def stored(path: Path, array: Array) -> tuple[Array, str]:
    """The plain array for the store, and the logical dtype; FieldError, naming the field, if zarr cannot have it."""
    plain, dtype = dtypes.to_stored(array)
    if plain.ndim > layout.MAX_NDIM:  # bytes of other dtypes than zarr's own take one more
        raise FieldError(
            f"field {show(path)!r} has {plain.ndim} dimensions; at most {layout.MAX_NDIM} can be stored: reshape it"
        )
    return plain, dtype
