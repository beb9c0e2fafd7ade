"""Chunks are the bytes that zarr makes, and are read as zarr reads them; memory that is used again is never shared."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs.vlen import VLenUTF8
from zarr.buffer import cpu
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, VLenUTF8Codec, ZstdCodec
from zarr.storage import MemoryStore

import archive
from archive.arrays import Steps, end_to_end, memory
from archive.arrays.ranges import merge_runs
from archive.base.errors import CorruptChunkError
from archive.shard import codecs, groups, packing, writer
from archive.write import slabs
from archive.write.blocks import Block, ShardSchema, weighed

KINDS = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"]


def numbers(kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).integers(0, 100, shape).astype(kind)


def stored(members: list[packing.Member]) -> list[tuple[Any, ...]]:
    return [(m.name, bytes(m.data) + m.tail, m.array, m.chunk, m.rows, m.crc32c) for m in members]


def by_zarr(
    arrays: dict[str, np.ndarray[Any, Any]], rows: dict[str, int], compression: str | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The zarr.json and the chunks by name that zarr makes of arrays in chunks of so many rows."""
    made: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(made), attributes={"a": 1}, zarr_format=3)
    name, _, level = (compression or "").partition(":")
    between = {"": [], "zstd": [ZstdCodec(level=int(level or 1))], "gzip": [GzipCodec(level=int(level or 1))]}[name]
    for path, array in arrays.items():
        texts = array.dtype == object
        group.create_array(
            path, shape=array.shape, dtype=np.dtypes.StringDType() if texts else array.dtype,
            chunks=(rows[path], *(max(1, n) for n in array.shape[1:])), filters=[],
            serializer=VLenUTF8Codec() if texts else BytesCodec(endian="little"), compressors=[*between, Crc32cCodec()],
            config={"write_empty_chunks": True, "order": "C"},
        )[...] = array.astype(np.dtypes.StringDType()) if texts else array  # fmt: skip
    found = {key: value.to_bytes() for key, value in made.items()}
    return {key: json.loads(data) for key, data in found.items() if key.endswith("zarr.json")}, {
        key: data for key, data in found.items() if not key.endswith("zarr.json")
    }


def undated(data: bytes) -> bytes:
    """A gzip chunk without the time of day in its header, and without the checksum of that."""
    return data[:4] + bytes(4) + data[8:-4]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd:1", "zstd:5", "gzip:1"])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (1000,), (997, 3), (50, 2, 0), (33, 4, 5, 6)])
def test_a_shard_has_the_bytes_that_zarr_makes(compression: str | None, shape: tuple[int, ...], copy: bool) -> None:
    arrays = {f"x/{kind.replace('?', 'b')}": numbers(kind, shape) for kind in KINDS}
    arrays["turned"] = np.asfortranarray(numbers("f4", shape))
    arrays["text"] = np.array(["a", "longer text", ""] * 5, object)
    arrays["deep/er/texts"] = np.array([["a", "nul\0"], ["", "Grüße"], ["x", "y"]], object)
    members = writer.encode(arrays, attributes={"a": 1}, compression=compression, chunk_bytes=500, copy=copy)
    view = groups.ShardView(bytes(members[0].data))
    nodes, chunks = by_zarr(arrays, {path: view.describe(path).chunk_rows for path in arrays}, compression)
    ours = {m.name: json.loads(bytes(m.data)) for m in members if m.chunk < 0}
    inline = ours["zarr.json"].pop("consolidated_metadata")["metadata"]
    for node in (*ours.values(), *inline.values()):
        node.pop("dimension_names", None)
    assert ours == nodes
    for path, node in inline.items():
        node.pop("consolidated_metadata", None)
        assert list(node) == list(nodes[f"{path}/zarr.json"])
        assert node == nodes[f"{path}/zarr.json"]
    found = {m.name: bytes(m.data) + m.tail for m in members if m.chunk >= 0}
    same = undated if (compression or "").startswith("gzip") else bytes
    assert {name: same(data) for name, data in found.items()} == {name: same(data) for name, data in chunks.items()}


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:1"])
def test_what_is_read_is_what_zarr_reads(compression: str | None) -> None:
    arrays = {"x": numbers("f4", (997, 3)), "t": np.array(["a", "Grüße", ""] * 332 + ["z"], object)}
    members = writer.encode(arrays, attributes={}, compression=compression, chunk_bytes=500, copy=False)
    stored = {m.name: bytes(m.data) + m.tail for m in members}
    ranges = [(0, 5), (5, 5), (5, 400), (390, 997)]
    group = zarr.open_group(MemoryStore({k: cpu.Buffer.from_bytes(v) for k, v in stored.items()}), mode="r")
    view = groups.ShardView(stored["zarr.json"])
    found = {path: view.read_many(path, ranges, stored) for path in arrays}
    for path, array in arrays.items():
        for ours, (start, stop) in zip(found[path], ranges, strict=True):
            np.testing.assert_array_equal(ours, np.asarray(group[path][start:stop]))  # type: ignore[index]
            np.testing.assert_array_equal(ours, array[start:stop])
    assert not np.shares_memory(found["x"][2], found["x"][3])


@pytest.mark.parametrize("compression", ["zstd:1", "gzip:1"])
def test_a_chunk_that_says_or_holds_another_size_takes_no_memory(compression: str) -> None:
    """Zeros are tiny when they are compressed: what is in there is bounded before it is made."""
    codec = codecs.compressor(compression)
    for count, dtype in ((1 << 27, "u1"), (100, "u1"), (90, "u1"), (1 << 27, "O"), (1, "O")):
        array = codecs.StoredArray("x", np.dtype(dtype), (99,), 99, codec.codec_id)
        data = codec.encode(bytes(count))
        data += codecs.checksum(data).to_bytes(4, "little")
        tracemalloc.start()
        with pytest.raises(CorruptChunkError):
            codecs.decoded(array, data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert dtype == "O" or peak < 1 << 20


def test_texts_that_say_they_are_more_than_rows_are_refused() -> None:
    array = codecs.StoredArray("t", np.dtype(object), (2,), 2, "")
    good = VLenUTF8().encode(np.array(["ab", "c"], object))
    for data in (b"\xff" * 4 + good[4:], (3).to_bytes(4, "little") + good[4:], good[:-1], good[:9], good[:3], b""):
        with pytest.raises(CorruptChunkError):
            codecs.decoded(array, bytes(data) + codecs.checksum(bytes(data)).to_bytes(4, "little"))


def test_what_a_shard_shares_is_not_copied() -> None:
    array = numbers("u1", (4096, 16))
    (chunk,) = [m for m in writer.encode({"x": array}, attributes={}, compression=None, chunk_bytes=1 << 20, copy=False)
                if m.chunk == 0]  # fmt: skip
    assert np.shares_memory(np.frombuffer(chunk.data, np.uint8), array)


def block(rows: int, first: int = 0) -> Block:
    data = {"a": np.arange(first, first + rows, dtype=np.int32), "b": np.full((rows, 3), first, np.uint8)}
    runs = Steps(*(np.array([of]) for of in (0, 0, rows)), episode=np.zeros(1, np.int64))
    return Block(ShardSchema(()), data, weighed(runs))


def test_steps_copied_into_an_arena_lie_end_to_end_and_are_not_the_callers() -> None:
    piece = memory.Memory(1 << 16, keep=1).take()
    mine, given = slabs.Arena(piece, block(5)), [block(5), block(7, 5), block(1, 12)]
    copies = [mine.copy(b) for b in given]
    for original in given:
        for value in original.data.values():
            value[...] = 0  # type: ignore[index]
    parts = [c.data["a"] for c in copies if c is not None]
    joined = end_to_end(parts)  # type: ignore[arg-type]
    assert joined.tolist() == list(range(13))
    assert np.shares_memory(joined, piece)


def test_an_arena_that_is_full_or_of_other_rows_says_so() -> None:
    mine = slabs.Arena(np.empty(7 * 10 + 2 * 64, np.uint8), block(1))
    assert mine.copy(block(8)) is not None
    assert mine.copy(block(3)) is None
    other = block(1)
    other.data["b"] = np.zeros((1, 4), np.uint8)
    assert mine.copy(other) is None


def test_arrays_that_do_not_lie_end_to_end_are_copied() -> None:
    whole = np.arange(10)
    for parts in ([whole[:4], whole[5:]], [whole[5:], whole[:5]], [whole[:4], whole[4:].copy()], [whole[::2]] * 2):
        joined = end_to_end(parts)
        assert joined.tolist() == np.concatenate(parts).tolist()
        assert not np.shares_memory(joined, whole)
    assert np.shares_memory(end_to_end([whole[:4], whole[4:]]), whole)


def test_memory_is_used_again_only_when_nobody_refers_to_it() -> None:
    pieces = memory.Memory(1 << 12, keep=2)
    first = pieces.take()
    view = memoryview(first[10:20])
    address = first.__array_interface__["data"][0]
    second = pieces.take()
    assert not np.shares_memory(first, second)
    del first
    assert pieces.take().__array_interface__["data"][0] != address  # the view still refers to it
    del view
    assert pieces.take().__array_interface__["data"][0] == address


def test_runs_that_touch_stay_apart_where_each_is_wanted_for_itself() -> None:
    starts, stops = np.array([5, 0, 3, 9, 9]), np.array([8, 3, 5, 12, 10])
    apart = [a.tolist() for a in merge_runs(starts, stops, touching=False)]
    assert apart == [[0, 3, 5, 9], [3, 5, 8, 12]]
    assert [a.tolist() for a in merge_runs(starts, stops)] == [[0, 9], [8, 12]]


def test_a_shelf_holds_what_fits_and_leaves_the_rest_where_it_is() -> None:
    piece = np.zeros(10, np.uint8)
    shelf = memory.Shelf(piece)
    given = [b"abcd", b"", b"efghij", b"k"]
    held = [shelf.hold(data) for data in given]
    assert [bytes(one) for one in held] == given
    assert bytes(piece) == b"abcdefghij"
    assert held[-1] is given[-1]


def test_compressed_chunks_on_a_shelf_are_the_same_bytes() -> None:
    arrays, piece = {"x": numbers("i4", (997, 3)), "y": numbers("u2", (997, 50))}, np.zeros(1 << 17, np.uint8)
    given: dict[str, Any] = {"attributes": {}, "compression": "zstd:1", "chunk_bytes": 500, "copy": False}
    members = writer.encode(arrays, **given, hold=memory.Shelf(piece).hold)
    assert stored(members) == stored(writer.encode(arrays, **given))
    chunks = [m for m in members if m.array]
    assert all(np.shares_memory(np.frombuffer(m.data, np.uint8), piece) for m in chunks)


def test_memory_that_compressed_shards_share_keeps_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", 9 << 20)
    episodes = [np.random.default_rng(i).integers(0, 256, (100, 300, 300), np.uint8) for i in range(5)]
    with archive.create(tmp_path / "a").writer(compression="zstd:1") as w:
        for episode in episodes:
            w.add_episode({"x": episode})
    assert len({p.name for p in tmp_path.rglob("shards/**/*.zip")}) == 5
    for found, episode in zip(archive.open(tmp_path / "a").episodes.read(), episodes, strict=True):
        np.testing.assert_array_equal(found["x"], episode)
