"""On top of the archive: what the fields of a dataset's items are, and reading a batch of them into arrays at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from archive import schema
from archive.deriving import Bounds
from archive.derived import Derivation
from archive.episodes import Episodes
from archive.fields import Selection
from archive.ranges import Ints
from archive.schema import FieldSpec, Path


def schemas_of(episodes: Episodes) -> list[schema.ShardSchema]:
    """The distinct schemas of all segments of some episodes; no data is read."""
    rows = episodes._index.chains.rows_of(episodes.numbers)
    texts = episodes.reader.snapshot.take(rows, ["schema"])["schema"].unique().to_pylist()
    return [schema.loads(text) for text in texts]


def varying_fields(
    episodes: Episodes, selection: Selection, derive: Sequence[Derivation], *, whole: bool
) -> frozenset[Path]:
    """Fields whose rows differ in number from item to item: ragged ones, and in whole episodes all of one row a step."""
    axes = ("step", "offset", "ragged") if whole else ("ragged",)
    found = {
        path
        for one in schemas_of(episodes)
        for path, spec in selection.specs(one).items()
        if spec.axis in axes
    }
    return frozenset(found | ({d.name for d in derive} if whole else set()))


class Batches:
    """Reads windows of one length into arrays of [windows, length, ...]."""

    @classmethod
    def make(
        cls,
        episodes: Episodes,
        selection: Selection,
        derive: Sequence[Derivation],
        bounds: Bounds | None,
        *,
        length: int,
        cache_bytes: int,
    ) -> Self | None:
        """None where some field is not an array of one row a step, the same in all episodes."""
        return None

    def read(self, numbers: Ints, starts: Ints, stops: Ints) -> dict[str, Any]:
        raise NotImplementedError
