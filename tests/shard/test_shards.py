"""Shards: named arrays to the members of a Zarr group, packed as a ZIP, and row ranges back from fetched bytes."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
import struct
import subprocess
import sys
import types
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.base.errors import CorruptChunkError, FieldError, MissingObjectError, NotFoundError, UsageError
from archive.shard import packing
from archive.shard.codecs import member_name
from archive.shard.groups import ShardView
from archive.shard.packing import Member, Placed, inflate, loose, pack
from archive.shard.writer import encode, rows_per_chunk
from tests.support.sampling import examples

NUMBERS = ["?", *"bBhHiIqQ", "f2", "f4", "f8", "c8", "c16"]
TEXT = np.array(["", "plain", "Grüße", "\U0001f916\U0001f9be", "nul\0inside", "\0", "trailing\0"] * 5, object)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bits of that dtype; NaNs of any payload among the floats."""
    rng = np.random.default_rng(seed)
    if dtype == "?":
        return rng.random(shape) < 0.5
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def fetched(members: Sequence[Member]) -> tuple[bytes, dict[str, bytes | memoryview]]:
    return bytes(members[0].data), {m.name: bytes(m.data) + m.tail for m in members if m.chunk >= 0}


def decode(
    metadata: bytes, chunks: Mapping[str, Any], wanted: Mapping[str, list[tuple[int, int]]]
) -> dict[str, list[np.ndarray[Any, Any]]]:
    view = ShardView(metadata)
    return {path: view.read_many(path, ranges, chunks) for path, ranges in wanted.items()}


def whole(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, list[tuple[int, int]]]:
    return {path: [(0, len(array))] for path, array in arrays.items()}


def round_trip(arrays: Mapping[str, np.ndarray[Any, Any]], **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    metadata, chunks = fetched(encode(arrays, attributes={}, **options))
    return {path: found for path, (found,) in decode(metadata, chunks, whole(arrays)).items()}


def assert_same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Bit for bit, so that NaNs and negative zeros count."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype == object:
        assert found.tolist() == expected.tolist()
        assert all(type(value) is str for value in found.flat)
    else:
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:6"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, compression: str | None) -> None:
    array = numbers(dtype, (131, 5))
    assert_same(round_trip({"x": array}, compression=compression, chunk_bytes=64)["x"], array)


@pytest.mark.parametrize("compression", [None, "zstd:1"])
def test_strings_come_back_as_str(compression: str | None) -> None:
    found = round_trip({"s": TEXT, "table": TEXT.reshape(7, 5)}, compression=compression, chunk_bytes=50)
    assert_same(found["s"], TEXT)
    assert_same(found["table"], TEXT.reshape(7, 5))


@pytest.mark.parametrize("ndim", range(1, 9))
def test_any_number_of_axes(ndim: int) -> None:
    array = numbers("f4", (9, *(2,) * (ndim - 1)))
    assert_same(round_trip({"x": array}, chunk_bytes=array.nbytes // 4)["x"], array)


def test_big_endian_and_strided_input_keeps_its_values() -> None:
    big = np.arange(40, dtype=">i4").reshape(20, 2)
    strided = np.arange(100, dtype="f8").reshape(10, 10).T[::2]
    found = round_trip({"big": big, "strided": strided})
    assert found["big"].dtype == np.dtype("=i4")
    np.testing.assert_array_equal(found["big"], big)
    assert_same(found["strided"], np.ascontiguousarray(strided))


def test_a_plain_chunk_is_little_endian_rows_padded_with_zeros_and_their_crc32c() -> None:
    array = np.arange(10, dtype="i4").reshape(5, 2)
    _, chunks = fetched(encode({"x": array}, attributes={}, compression=None, chunk_bytes=24))
    payload = array[3:].astype("<i4").tobytes() + bytes(8)
    assert set(chunks) == {"x/c/0/0", "x/c/1/0"}
    assert bytes(chunks["x/c/1/0"]) == payload + google_crc32c.value(payload).to_bytes(4, "little")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (4, 0, 2), (0, 0), (1,), (1, 3)])
@pytest.mark.parametrize("dtype", ["f4", "?", "O"])
def test_no_rows_one_row_and_empty_axes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.full(shape, "x" if dtype == "O" else 1, dtype)
    members = encode({"x": array}, attributes={})
    assert sum(m.chunk >= 0 for m in members) == (1 if array.size else 0)
    assert_same(round_trip({"x": array})["x"], array)


def test_nested_groups_share_no_names() -> None:
    arrays = {"a": numbers("i4", (3,)), "b/a": numbers("f4", (4, 2)), "b/c/a": numbers("u1", (5,)), "%2E/__-": TEXT}
    found = round_trip(arrays)
    for path, array in arrays.items():
        assert_same(found[path], array)


def test_metadata_comes_first_and_then_small_fields() -> None:
    arrays = {"big": numbers("u1", (1000, 64)), "obs/small": numbers("u1", (10,)), "mid": numbers("u1", (1000, 2))}
    members = encode(arrays, attributes={}, chunk_bytes=8000)
    names = [m.name for m in members if m.chunk < 0]
    assert names[0] == "zarr.json"
    assert sorted(names[1:]) == ["big/zarr.json", "mid/zarr.json", "obs/small/zarr.json", "obs/zarr.json"]
    chunks = [(m.array, m.chunk) for m in members[len(names) :]]
    assert chunks == [("obs/small", 0), ("mid", 0), *(("big", i) for i in range(8))]


def test_all_zero_data_is_stored() -> None:
    arrays = {"reward": np.zeros(100_000, "f4"), "done": np.zeros(50, bool), "note": np.full(9, "", object)}
    members = encode(arrays, attributes={})
    assert {m.array for m in members if m.chunk >= 0} == set(arrays)
    assert sum(m.chunk >= 0 and m.array == "reward" for m in members) == math.ceil(400_000 / 16_384)


def test_attributes_and_paths_come_from_the_metadata_alone() -> None:
    attributes = {"schema": {"b": [1, 2.5, None], "a": "ü"}, "n": 3}
    root = bytes(encode({"a/x": TEXT}, attributes=attributes)[0].data)
    assert json.loads(root)["attributes"] == attributes
    assert ShardView(root).paths == ["a/x"]


def test_input_may_change_after_encode() -> None:
    array = np.zeros((4096, 8), "u1")
    members = encode({"x": array}, attributes={}, compression=None)
    array[:] = 7
    metadata, chunks = fetched(members)
    assert not decode(metadata, chunks, {"x": [(0, 4096)]})["x"][0].any()


@settings(max_examples=examples(200), deadline=None)
@given(rows=st.integers(0, 10**6), row_bytes=st.integers(0, 10**8), chunk_bytes=st.none() | st.integers(1, 10**8))
def test_chunk_geometry(rows: int, row_bytes: int, chunk_bytes: int | None) -> None:
    total = rows * row_bytes
    per_chunk = rows_per_chunk(rows, total, chunk_bytes)
    target = chunk_bytes or min(max(total // 128, 16 << 10), 128 << 10)
    assert per_chunk >= 1
    assert per_chunk == 1 or per_chunk * row_bytes <= target
    count = math.ceil(rows / per_chunk)
    assert count * per_chunk - rows < max(1, count)  # never more padding than a row per chunk
    if rows and row_bytes:
        fewest = math.ceil(rows / max(1, target // row_bytes))
        assert count <= fewest  # no smaller than the target asks for


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_ranges_come_from_just_the_chunks_they_touch(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 60))
    array = numbers("i2", (rows, 3), rows)
    members = encode({"x": array}, attributes={}, chunk_bytes=data.draw(st.integers(1, 100)))
    metadata, chunks = fetched(members)
    per_chunk = next(m.rows for m in members if m.chunk >= 0)
    bounds = st.lists(st.integers(0, rows), min_size=2, max_size=2).map(lambda pair: (min(pair), max(pair)))
    ranges = data.draw(st.lists(bounds, max_size=4))
    touched = {row // per_chunk for start, stop in ranges for row in range(start, stop)}
    some = {name: stored for name, stored in chunks.items() if int(name.split("/")[2]) in touched}
    found = decode(metadata, some, {"x": ranges})["x"]
    assert len(found) == len(ranges)
    for part, (start, stop) in zip(found, ranges, strict=True):
        assert_same(part, array[start:stop])


class Counting(dict[str, Any]):
    """Counts what is taken from it."""

    def __getitem__(self, name: str) -> Any:
        self.taken = [*getattr(self, "taken", []), name]
        return super().__getitem__(name)


def test_many_ranges_of_one_chunk_decode_it_once() -> None:
    array = numbers("f4", (1000, 3))
    members = encode({"x": array}, attributes={}, chunk_bytes=6000)
    metadata, stored = fetched(members)
    chunks = Counting(stored)
    ranges = [(i * 7, i * 7 + 5) for i in range(142)]
    for part, (start, stop) in zip(decode(metadata, chunks, {"x": ranges})["x"], ranges, strict=True):
        assert_same(part, array[start:stop])
    assert sorted(chunks.taken) == sorted(stored)


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:1"])
@pytest.mark.parametrize("array", [numbers("f4", (500, 3)), TEXT], ids=["numbers", "strings"])
def test_any_flipped_bit_is_an_error_that_names_the_chunk(array: np.ndarray[Any, Any], compression: str | None) -> None:
    members = encode({"obs/x": array}, attributes={}, compression=compression, chunk_bytes=100)
    metadata, chunks = fetched(members)
    name = member_name("obs/x", array.ndim, 2)
    size = len(chunks[name])
    for position in {0, 1, size // 2, size - 5, size - 4, size - 1}:
        damaged = bytearray(chunks[name])
        damaged[position] ^= 0x10
        with pytest.raises(CorruptChunkError, match=f"Chunk 2 of array 'obs/x'.*{name}"):
            decode(metadata, {**chunks, name: bytes(damaged)}, {"obs/x": [(0, len(array))]})


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:3]])
def test_a_chunk_of_wrong_length_is_an_error(damage: Callable[[bytes], bytes]) -> None:
    metadata, chunks = fetched(encode({"x": numbers("f4", (500,))}, attributes={}, chunk_bytes=400))
    with pytest.raises(CorruptChunkError, match="Chunk 4 of array 'x'"):
        decode(metadata, {**chunks, "x/c/4": damage(bytes(chunks["x/c/4"]))}, {"x": [(450, 460), (400, 500)]})


def test_a_valid_chunk_of_another_shape_is_an_error() -> None:
    metadata, chunks = fetched(encode({"x": numbers("f4", (500,)), "y": numbers("f4", (7,))}, attributes={}))
    with pytest.raises(CorruptChunkError, match="array 'x'"):
        decode(metadata, {"x/c/0": chunks["y/c/0"]}, {"x": [(0, 500)]})


@pytest.mark.parametrize("dtype", ["f4", "?", "O"])
def test_a_chunk_not_fetched_is_an_error_and_never_zeros(dtype: str) -> None:
    array = np.full(500, "zero" if dtype == "O" else 0, dtype)
    metadata, chunks = fetched(encode({"obs/x": array}, attributes={}, chunk_bytes=100))
    del chunks["obs/x/c/1"]
    with pytest.raises(MissingObjectError, match="'obs/x/c/1'"):
        decode(metadata, chunks, {"obs/x": [(0, 500)]})
    assert_same(decode(metadata, chunks, {"obs/x": [(0, 5)]})["obs/x"][0], array[:5])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 11), (5, 4), (11, 11)])
def test_rows_outside_the_array_are_an_error(start: int, stop: int) -> None:
    metadata, chunks = fetched(encode({"x": np.arange(10)}, attributes={}))
    with pytest.raises(UsageError, match=f"Rows {start} to {stop} of array 'x'"):
        decode(metadata, chunks, {"x": [(start, stop)]})


def test_unknown_array_is_not_found() -> None:
    metadata, chunks = fetched(encode({"x": np.arange(10)}, attributes={}))
    with pytest.raises(NotFoundError, match=r"no array 'y', only \['x'\]"):
        decode(metadata, chunks, {"y": [(0, 1)]})


@pytest.mark.parametrize("metadata", [b"", b"{}", b"[]", b"\xff", b"null", b'{"consolidated_metadata": null}'])
def test_damaged_metadata_is_an_error(metadata: bytes) -> None:
    with pytest.raises(CorruptChunkError, match=r"zarr\.json of a shard"):
        decode(metadata, {}, {"x": [(0, 1)]})


def hostile(node: dict[str, Any], **changes: Any) -> bytes:
    root = json.loads(bytes(encode({"x": np.arange(10)}, attributes={})[0].data))
    changed = copy.deepcopy(node or root["consolidated_metadata"]["metadata"]["x"]) | changes
    root["consolidated_metadata"]["metadata"]["x"] = {**changed, "node_type": "array"}
    return json.dumps(root).encode()


@pytest.mark.parametrize("disguise", [{}, {"codecs": [{"name": "bytes"}]}])
def test_metadata_from_the_bucket_cannot_reach_unpickling(
    disguise: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """zarr reads format 2, whose filters may unpickle; whether numcodecs then does is a matter of its version."""
    reached: list[Any] = []
    monkeypatch.setattr("numcodecs.pickles.Pickle.decode", lambda self, data, out=None: reached.append(data))
    old = {
        "zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": 0, "order": "C",
        "filters": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 4}],
        "compressor": None, "dimension_separator": "/",
    }  # fmt: skip
    with pytest.raises(CorruptChunkError, match="array 'x' has a format or codec that no archive writes"):
        decode(hostile(old | disguise), {"x/0": b"N."}, {"x": [(0, 1)]})
    assert reached == []


@pytest.mark.parametrize("codecs", [[{"name": "numcodecs.bz2"}], [{"name": "sharding_indexed"}], [{}], None, 3, ["x"]])
def test_codecs_that_no_archive_writes_are_refused(codecs: Any) -> None:
    with pytest.raises(CorruptChunkError, match="array 'x' has a format or codec that no archive writes"):
        decode(hostile({}, codecs=codecs), {}, {"x": [(0, 1)]})


@pytest.mark.parametrize(
    "changes", [{"data_type": "nonsense"}, {"shape": "x"}, {"shape": [10, 2]}, {"chunk_grid": {}}, {"fill_value": {}}]
)
def test_metadata_that_zarr_refuses_is_an_error_that_names_the_array(changes: dict[str, Any]) -> None:
    _, chunks = fetched(encode({"x": np.arange(10)}, attributes={}))
    with pytest.raises(CorruptChunkError, match="array 'x'"):
        decode(hostile({}, **changes), chunks, {"x": [(0, 10)]})


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.0), np.zeros((1,) * 9), np.zeros(3, "M8[s]"), np.array(["a"]), np.array([b"a"]), np.zeros(2, "V3"),
        np.array([None], object), np.array(["a", 1], object), np.array(["\ud800"], object), np.zeros(2, np.longdouble),
    ],
)  # fmt: skip
def test_what_zarr_has_no_type_for_is_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(FieldError, match="Field 'x/y'"):
        encode({"x/y": array}, attributes={})


@pytest.mark.parametrize("path", ["", "/", "a/", "/a", "a//b", "..", "a/../b", "a.b", "zarr.json", "a b", "ä", "a\n"])
def test_paths_that_are_not_escaped_are_refused(path: str) -> None:
    with pytest.raises(FieldError, match="escape"):
        encode({path: np.zeros(2)}, attributes={})


def test_a_field_inside_a_field_is_refused() -> None:
    with pytest.raises(FieldError, match="'a/b/c' lies inside"):
        encode({"a/b/c": np.zeros(2), "a": np.zeros(2)}, attributes={})


@pytest.mark.parametrize("compression", ["lz4:1", "zstd", "zstd:fast", "zstd:999", "gzip:99", ""])
def test_unknown_compression_is_refused(compression: str) -> None:
    with pytest.raises(UsageError, match="none of"):
        encode({"x": np.zeros(2)}, attributes={}, compression=compression)


@pytest.mark.parametrize("attributes", [{"x": float("nan")}, {"x": {1, 2}}, {"x": np.float32(1)}])
def test_attributes_that_are_not_json_are_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be JSON"):
        encode({}, attributes=attributes)


def test_a_view_reads_pickles_and_serves_threads() -> None:
    array = numbers("f4", (20_000, 16))
    metadata, chunks = fetched(encode({"x": array}, attributes={}))
    view: ShardView = pickle.loads(pickle.dumps(ShardView(metadata)))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(view.read_many, "x", [(i * 500, i * 500 + 777)], chunks) for i in range(38)]
        for i, future in enumerate(futures):
            assert_same(future.result()[0], array[i * 500 : i * 500 + 777])


def test_encode_from_several_threads() -> None:
    arrays = [{"x": numbers("u1", (5000, 20), seed), "s": TEXT} for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(lambda fields: encode(fields, attributes={}), arrays))
    for fields, members in zip(arrays, encoded, strict=True):
        assert_same(decode(*fetched(members), {"x": [(0, 5000)]})["x"][0], fields["x"])


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # Python >= 3.12 warns of any fork with threads
import numpy as np
from archive.shard.groups import ShardView
from archive.shard.writer import encode
def once():
    members = encode({"x": np.arange(9000)}, attributes={})
    chunks = {m.name: bytes(m.data) + m.tail for m in members if m.chunk >= 0}
    assert (ShardView(members[0].data).read_many("x", [(0, 9000)], chunks)[0] == np.arange(9000)).all()
once()
child = os.fork()
once()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_both_sides_of_a_fork_go_on() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_import_is_lazy() -> None:
    code = (
        "import archive.shard.groups, archive.shard.packing, sys; "
        "sys.exit('zarr' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- packing


def some_members() -> list[Member]:
    arrays = {"obs/image": numbers("u1", (300, 12, 12)), "reward": np.zeros(300, "f4"), "s": TEXT}
    return encode(arrays, attributes={"k": "v"}, chunk_bytes=4000)


def joined(members: Sequence[Member]) -> tuple[bytes, list[Placed]]:
    buffers, placed = pack(members)
    return b"".join(buffers), placed


def test_the_table_says_where_the_bytes_lie() -> None:
    members = some_members()
    data, placed = joined(members)
    for member, row in zip(members, placed, strict=True):
        stored = data[row.offset : row.offset + row.size]
        assert (row.name, row.array, row.chunk, row.rows) == (member.name, member.array, member.chunk, member.rows)
        assert google_crc32c.value(stored if row.chunk < 0 else stored[:-4]) == row.crc32c
        assert (inflate(stored) if row.chunk < 0 else stored) == bytes(member.data) + member.tail
    assert [row.offset for row in placed] == sorted(row.offset for row in placed)


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:1"])
def test_the_table_tells_whole_chunks_apart(compression: str | None) -> None:
    """The crc32c of bytes that end in their crc32c is always the same number, and would not."""
    members = encode({"x": numbers("f4", (900, 4))}, attributes={}, compression=compression, chunk_bytes=900)
    _, placed = joined(members)
    chunks = [row for row in placed if row.chunk >= 0]
    assert len({row.crc32c for row in chunks}) == len(chunks) > 10


def test_packed_bytes_decode_by_the_table_alone() -> None:
    image = numbers("u1", (300, 12, 12))
    data, placed = joined(some_members())
    parts = {row.name: memoryview(data)[row.offset : row.offset + row.size] for row in placed}
    metadata = inflate(parts.pop("zarr.json"))
    assert_same(decode(metadata, parts, {"obs/image": [(17, 283)]})["obs/image"][0], image[17:283])


def test_a_packed_shard_is_a_zip_with_fixed_dates_and_stored_chunks() -> None:
    members = some_members()
    data, placed = joined(members)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [m.name for m in members]
        for info, member, row in zip(archive.infolist(), members, placed, strict=True):
            assert archive.read(info) == bytes(member.data) + member.tail
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert info.compress_size == row.size
            assert info.compress_type == (zipfile.ZIP_DEFLATED if member.chunk < 0 else zipfile.ZIP_STORED)


def test_chunks_are_not_copied_on_the_way_into_the_file() -> None:
    members = some_members()
    buffers, _ = pack(members)
    assert {id(m.data) for m in members if m.chunk >= 0} <= {id(buffer) for buffer in buffers}


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:6"])
def test_equal_arrays_give_equal_bytes(compression: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1_700_000_000)
    monkeypatch.setattr("gzip.time", types.SimpleNamespace(time=lambda: next(clock)))
    arrays = {"b/x": numbers("f4", (900, 7)), "a": numbers("f4", (900, 7)), "s": TEXT, "z": np.zeros((0, 2))}
    other_order = dict(reversed(arrays.items()))
    first = joined(encode(arrays, attributes={"p": 1, "q": 2}, compression=compression, chunk_bytes=900))
    again = joined(encode(other_order, attributes={"q": 2, "p": 1}, compression=compression, chunk_bytes=900))
    assert first == again


def test_loose_members_are_objects_of_their_own() -> None:
    members = some_members()
    objects, placed = loose(members)
    assert objects == [(m.name, [m.data, m.tail] if m.tail else m.data) for m in members]
    for (name, parts), row in zip(objects, placed, strict=True):
        data = b"".join(parts) if isinstance(parts, list) else parts
        assert (row.name, row.offset, row.size) == (name, 0, len(data))
        assert google_crc32c.value(bytes(data if row.chunk < 0 else data[:-4])) == row.crc32c


def test_an_empty_shard_is_a_readable_zip() -> None:
    data, placed = joined([])
    assert placed == []
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == []


def plain(name: str, data: bytes, chunk: int = 0) -> Member:
    return Member(name, data, name, chunk, 1, google_crc32c.value(data))


def test_more_members_than_a_plain_zip_can_count() -> None:
    members = [plain(f"x/c/{i}", b"%d" % i) for i in range(70_000)]
    data, placed = joined(members)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.read("x/c/69999") == b"69999"
    assert data[-98:-94] == b"PK\x06\x06"  # the end record that counts in 64 bits
    assert struct.unpack("<QQ", data[-98 + 24 : -98 + 40]) == (70_000, 70_000)
    assert data[placed[-1].offset :].startswith(b"69999")


def sizes_in_local_header(data: bytes, row: Placed, *, in_extra: bool) -> tuple[int, int]:
    """Stored and plain bytes as said just before the member: Python's zipfile reads only the directory at the end."""
    header = data[data.rindex(b"PK\x03\x04", 0, row.offset) : row.offset]
    stored, plain_bytes, name_length, extra_length = struct.unpack("<IIHH", header[18:30])
    assert header[30 : 30 + name_length] == row.name.encode()
    assert bool(extra_length) == in_extra
    if in_extra:
        assert stored == plain_bytes == 0xFFFFFFFF
        kind, length, plain_bytes, stored = struct.unpack("<HHQQ", header[30 + name_length :])
        assert (kind, length) == (1, 16)
    return stored, plain_bytes


@pytest.mark.parametrize("limit", [50, 400, 5000])
def test_sizes_and_offsets_beyond_four_gigabytes(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a plain ZIP are taken to be full much earlier, as 4 GB would be slow."""
    real_pack = struct.pack

    def saturating(layout: str, *values: Any) -> bytes:
        return real_pack(layout, *(0xFFFFFFFF if value == limit else value for value in values))

    monkeypatch.setattr(packing, "_MAX_UINT32", limit)
    monkeypatch.setattr(struct, "pack", saturating)
    members = [plain("meta", b"{}" * 300, -1), plain("small", b"s" * 30), plain("large", b"l" * 900)]
    members += [plain(f"tail{i}", b"t" * (100 + i)) for i in range(60)]
    data, placed = joined(members)
    monkeypatch.undo()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {m.name: archive.read(m.name) for m in members} == {m.name: m.data for m in members}
    for member, row in zip(members[1:], placed[1:], strict=True):
        assert data[row.offset : row.offset + row.size] == member.data
        assert sizes_in_local_header(data, row, in_extra=row.size >= limit) == (row.size, row.size)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", lambda b: b"\xff" + b[1:], lambda b: b"{}"]
)
def test_metadata_that_does_not_inflate_is_an_error(damage: Callable[[bytes], bytes]) -> None:
    data, placed = joined(some_members())
    stored = data[placed[0].offset : placed[0].offset + placed[0].size]
    with pytest.raises(CorruptChunkError, match=r"packed zarr\.json"):
        inflate(damage(stored))


def test_inflating_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = squeezer.compress(bytes(10_000)) + squeezer.flush()
    assert inflate(bomb) == bytes(10_000)
    monkeypatch.setattr(packing, "_MAX_METADATA_BYTES", 9_999)
    with pytest.raises(CorruptChunkError):
        inflate(bomb)


def test_members_are_frozen_values() -> None:
    member = plain("x", b"1")
    assert replace(member) == member
    assert hash(Placed("x", "x", 0, 1, 0, 1, 2)) == hash(Placed("x", "x", 0, 1, 0, 1, 2))
