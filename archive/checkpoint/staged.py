"""Reading what a rank staged: its index first, then only the members that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.base import ByteRange, CorruptStateError, IntegrityError, cached_property
from archive.checkpoint import staging
from archive.fields import dtypes
from archive.fields.state import trees
from archive.manifest import ArrayChunks, ShardIndex, tables
from archive.read import fetching
from archive.shard import ShardView, checksum
from archive.store import Storage

Array = np.ndarray[Any, Any]


class StagedFile:
    """One rank's part of a checkpoint. `nonce`: of the object that is meant, where what refers to it says so."""

    def __init__(self, storage: Storage, key: str, nonce: str | None = None) -> None:
        self.storage, self.key, self._nonce = storage, key, nonce
        self.where = storage.full_url(key)

    @cached_property
    def _head(self) -> bytes:
        """The object's first bytes, at least to the end of its index."""
        head = self.storage.get_head(self.key, staging.HEAD_BYTES)
        _, stop = staging.index_span(head, self.where)
        return head if stop <= len(head) else head + self.storage.get(self.key, len(head), stop)

    @cached_property
    def index(self) -> dict[str, Any]:
        start, stop = staging.index_span(self._head, self.where)
        index = staging.load_index(self._head[start:stop], self.where)
        staging.check_place(index, self.key, self._nonce, self.where)
        return index

    @cached_property
    def _base(self) -> int:
        return staging.index_span(self._head, self.where)[1]

    def files(self, names: Sequence[str]) -> list[bytes]:
        """Members that are no part of the Zarr group, by name."""
        places = {m[0]: m for m in self.index["members"]}
        if absent := [n for n in names if n not in places]:
            raise CorruptStateError(f"{self.where} has no member {absent[0]!r}; the state is damaged")
        wanted = [places[n] for n in names]
        inside = [self._base + m[4] + m[5] <= len(self._head) for m in wanted]
        ranges = [self._range(m) for m, here in zip(wanted, inside, strict=True) if not here]
        fetched = iter(self.storage.get_ranges(ranges))
        out = []
        for member, here in zip(wanted, inside, strict=True):
            span = self._range(member)
            out.append(self._head[span.start : span.stop] if here else next(fetched))
        for member, data in zip(wanted, out, strict=True):
            if checksum(data) != member[6]:
                raise CorruptStateError(
                    f"{member[0]!r} in {self.where} does not match its checksum; the state is damaged"
                )
        return out

    def _range(self, member: Sequence[Any]) -> ByteRange:
        start = self._base + member[4]
        return ByteRange(self.key, start, start + member[5])

    def tables(self, *kinds: str) -> list[Any]:
        """Staged rows of manifest tables."""
        files = self.files([f"{kind}.parquet" for kind in kinds])
        return [
            tables.loads(d, kind, where=f"{kind} rows in {self.where}") for d, kind in zip(files, kinds, strict=True)
        ]

    @cached_property
    def arrays_index(self) -> ShardIndex:
        """Where the chunks of the Zarr group lie."""
        groups: dict[str, list[Any]] = {}
        for m in self.index["members"]:
            if m[1] or m[0] == "zarr.json":
                groups.setdefault(m[1], []).append(m)
        arrays = {}
        for name, members in groups.items():
            members.sort(key=lambda m: m[2])
            offset, size, crc = (np.array([m[k] for m in members], np.int64) for k in (4, 5, 6))
            arrays[name] = ArrayChunks(max(1, members[0][3]), offset + self._base, size, crc, [m[0] for m in members])
        return ShardIndex(self.key, True, arrays)

    def rows(self, wanted: dict[str, list[tuple[int, int]]]) -> dict[str, list[Array]]:
        """Rows of arrays of the Zarr group."""
        if not wanted:
            return {}
        runs = {name: tuple(np.array(pairs, np.int64).reshape(-1, 2).T) for name, pairs in wanted.items()}
        reads = self.arrays_index.plan(runs)  # type: ignore[arg-type]
        try:
            chunks = fetching.members(self.key, reads, self.storage.get_ranges(reads.requests), "this rank's state")
            view = ShardView(bytes(chunks.pop("zarr.json")))
            return {name: view.read_many(name, pairs, chunks) for name, pairs in wanted.items()}
        except IntegrityError as e:
            raise CorruptStateError(f"the state in {self.where} is damaged: {e}") from e

    def check(self) -> None:
        """Read every byte; CorruptStateError if one is not as it was written."""
        names = [m[0] for m in self.index["members"] if not m[1]]
        self.files([n for n in names if n.endswith((".parquet", ".json")) and not n.endswith("zarr.json")])
        self.rows({name: [(0, self._rows_of(name))] for name in self.arrays_index.arrays if name})

    def _rows_of(self, array: str) -> int:
        """Rows of an array, by what refers to it."""
        lengths = {p: n for state in self.index["states"].values() for p, n in state["arrays"].items()}
        columns = {c["array"]: c["rows"] for of in self.index["columns"].values() for c in of.values()}
        return int((lengths | columns)[array])

    def state(self, buffer: str) -> Any:
        """The state tree of one buffer; None if it has none."""
        entry = self.index["states"].get(buffer)
        if entry is None:
            return None
        lengths: dict[str, int] = entry["arrays"]
        arrays = self.rows({path: [(0, n)] for path, n in lengths.items()})
        prefix = entry["prefix"]
        plain = {path.removeprefix(prefix): a[0] for path, a in arrays.items()}
        for key in entry["scalars"]:
            plain[key] = plain[key].reshape(())
        return trees.unflatten(entry["skeleton"], plain, where=f"state of buffer {buffer!r} in {self.where}")

    def column_rows(self, entry: dict[str, Any], runs: list[tuple[int, int]]) -> list[Array]:
        """Rows of one column."""
        parts = self.rows({entry["array"]: runs})[entry["array"]] if runs else []
        return [dtypes.from_stored(p, entry["dtype"]) for p in parts]
