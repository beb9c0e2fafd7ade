"""What ranks staged and journaled, and shards: seeds, other ones under right checksums, and what reads them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd

import archive
from archive import tables
from archive.jobs import Receipt
from archive.jobs.folds import schemas_of
from archive.saved import Delta, Part, PartIndex, TickObject
from archive.shard import encode, groups, indexed, packing
from archive.store import Storage
from tests.support.fuzzing.manifests import archives, mutated_table_file, text_of
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json
from tests.support.nonsense import sealed

ROWS = 40


# -- what ranks staged and journaled -----------------------------------------------------------------------------------


def staged_seeds(tmp: Path) -> list[tuple[str, bytes]]:
    roots = archives()
    return [(str(p.relative_to(r)), p.read_bytes()) for r in roots for p in sorted(r.glob("states/**/*.zip"))]


def journal_seeds(tmp: Path) -> list[tuple[str, bytes]]:
    root = archives()[1]
    return [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.glob("journal/**/*.zip"))]


def mutated_object(seed: tuple[str, bytes], rng: Random) -> tuple[str, bytes]:
    """Another index under a right checksum, other members under right checksums, or other bytes."""
    key, data = seed
    if rng.random() < 0.2:
        return key, mutated_bytes(data, rng)
    index, body = parts_of(data)
    if rng.random() < 0.5:
        index, body = with_other_member(index, body, rng)
    else:
        index = mutated_json(index, rng)
    return key, with_index(data, index if isinstance(index, str) else json.dumps(index), body)


def parts_of(data: bytes) -> tuple[Any, bytes]:
    """The index of an object, and the bytes after it."""
    start, stop = indexed.index_span(data, "")
    return json.loads(data[start:stop].split(b"\n")[0]), data[stop:]


def with_index(data: bytes, index: str, body: bytes) -> bytes:
    """An object with the text of another index, under a right checksum, and other bytes after it."""
    text, start = sealed(text_of(index)), indexed.index_span(data, "")[0]
    return data[:18] + len(text).to_bytes(4, "little") * 2 + data[26:start] + text + body


def with_other_member(index: Any, body: bytes, rng: Random) -> tuple[Any, bytes]:
    """One member is something else; the index says the right place and checksum of all."""
    at = rng.randrange(len(index["members"]))
    out, members = b"", []
    for i, (name, array, chunk, rows, offset, size, _) in enumerate(index["members"]):
        data = body[offset : offset + size]
        data = other_member(name, data, rng) if i == at else data
        crc = int.from_bytes(data[-4:], "little") if array else int(google_crc32c.value(data))
        members.append([name, array, chunk, rows, len(out), len(data), crc])
        out += data
    return index | {"members": members}, out + body[-22:]


def other_member(name: str, data: bytes, rng: Random) -> bytes:
    if name.endswith("zarr.json"):
        plain = json.loads(packing.inflate(data) if data[:1] != b"{" else data)
        return deflated(text_of(mutated_json(plain, rng)))
    if name.endswith(".parquet"):
        return mutated_table_file(
            (name.split(".")[0], tables.loads(data, name.split(".")[0], where="", committed=False)), rng
        )[1]
    if name.endswith(".json"):
        return text_of(mutated_json(json.loads(data), rng))
    return other_chunk(data, rng)


def deflated(data: bytes) -> bytes:
    stream = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def other_chunk(data: bytes, rng: Random) -> bytes:
    """A chunk of other bytes, of more than it should hold, or of none, that ends in its right checksum."""
    body = data[:-4]
    match rng.randrange(4):
        case 0:
            body = bytes(Zstd(level=1).encode(bytes(rng.choice((0, 1, 8, 1000, 1 << 20)))))
        case 1:
            body = zstd_bomb(rng.choice((1 << 20, 1 << 33, 10**15, 2**63)))
        case _:
            body = mutated_bytes(body, rng)
    return body + int(google_crc32c.value(body)).to_bytes(4, "little")


def zstd_bomb(size: int) -> bytes:
    """A frame whose header says that it holds so many bytes; it has one block of 128 KB of zeros."""
    return (
        b"\x28\xb5\x2f\xfd"
        + b"\xe0"
        + size.to_bytes(8, "little")
        + (1 | 1 << 1 | (1 << 17) << 3).to_bytes(3, "little")
        + b"\0"
    )


def put(key: str, data: bytes) -> Storage:
    storage = Storage.connect("memory://fuzzed")
    storage.put(key, data)
    return storage


def read_staged(given: tuple[str, bytes]) -> None:
    file = Part(put(*given), given[0])
    index: PartIndex = file.index
    repr(index), index.objects, index.lengths
    for attempt in (file.check, *(lambda name=name: file.state(name) for name in index.states)):
        attempted(attempt)
    for columns in index.columns.values():
        for column in columns.values():
            attempted(lambda column=column: file.column_rows(column, [(0, min(column.rows, ROWS))]))
    if index.rows is not None:
        attempted(lambda: file.tables("segments", "chunks"))


def attempted(attempt: Callable[[], object]) -> None:
    """Whether a part can be read does not depend on the others."""
    with suppress(archive.ArchiveError):
        attempt()


def read_journal(given: tuple[str, bytes]) -> None:
    key, data = given
    delta = Delta()
    delta.add(Delta.of(TickObject(data, key, f"memory://{key}"), "main", 0))
    for kind in ("segments", "chunks", "ledger"):
        delta.table(kind).to_pylist()


# -- results of jobs ---------------------------------------------------------------------------------------------------


def result_seeds(tmp: Path) -> list[tuple[str, bytes]]:
    """Results of small and of large columns, and of a function that fails at an episode."""
    arc = archive.create(str(tmp / "arc"))
    with arc.writer() as w:
        for i in range(4):
            w.add_episode({"reward": np.arange(3) + i}, episode_id=f"e{i}")

    def made(width: int, steps: Any) -> Any:
        if steps["reward"][0] == 3:
            raise ValueError("no three")
        return {"a": np.ones((3, width)), "t": np.array(["x", "", "yz"], object)}

    for width in (1, 50_000):
        fn = partial(made, width)
        arc.refresh().episodes.map(fn, ["reward"], ["a", "t"], job=f"job{width}", batch_size=2, on_error="skip")
    return [(str(path.relative_to(tmp / "arc")), path.read_bytes()) for path in sorted(tmp.glob("arc/jobs/*/*.zip"))]


def read_result(given: tuple[str, bytes]) -> None:
    key, data = given
    found = Receipt(data, key, f"memory://{key}")
    for kind in ("failed", "late", "chunks"):
        attempted(lambda kind=kind: found.table(kind).to_pylist())
    for name, form in found.index.arrays.items():
        attempted(lambda name=name, form=form: found.values(name, form.shape[0] if form.shape else 0))
    attempted(lambda: [schema.fields for schema in schemas_of(found)])


# -- shards ------------------------------------------------------------------------------------------------------------


def shard_seeds(tmp: Path) -> list[Any]:
    arrays = {
        "x": np.arange(12, dtype=np.float32).reshape(6, 2), "n": np.arange(6), "b": np.ones(6, bool),
        "t": np.array(["a", "bc", "", "d", "e", "f"], object),
    }  # fmt: skip
    out = []
    for compression in ("zstd:1", "gzip:1", None):
        members = encode(arrays, attributes={"a": 1}, compression=compression, chunk_bytes=16)
        data = {member.name: bytes(member.data) + member.tail for member in members}
        out.append((json.loads(data.pop("zarr.json")), {name: one for name, one in data.items() if "/c/" in name}))
    return out


def mutated_shard(seed: Any, rng: Random) -> tuple[bytes, dict[str, bytes]]:
    root, chunks = seed
    chunks = dict(chunks)
    text = json.dumps(root)
    if rng.random() < 0.6:
        text = mutated_json(root, rng)
    else:
        name = rng.choice(sorted(chunks))
        chunks[name] = other_chunk(chunks[name], rng)
    data = text_of(text)
    return (data if rng.random() < 0.9 else mutated_bytes(data, rng)), chunks


def read_shard(given: tuple[bytes, dict[str, bytes]]) -> None:
    view = groups.ShardView(given[0])
    for path in view.paths[:5]:
        attempted(lambda path=path: view.read_many(path, [(0, min(view.describe(path).shape[0], ROWS))], given[1]))


def read_packed_metadata(data: bytes) -> None:
    groups.ShardView(packing.inflate(data)).paths  # noqa: B018


def packed_seeds(tmp: Path) -> list[bytes]:
    return [deflated(json.dumps(root).encode()) for root, _ in shard_seeds(tmp)]


def shard_bombs(seeds: Any) -> list[Any]:
    """Chunks that claim to hold, or hold, far more than they should."""
    root, chunks = seeds[0]
    out = []
    for name in ("x/c/0/0", "t/c/0"):
        for body in (*map(zstd_bomb, (1 << 33, 10**15, 2**63, 2**64 - 1)), bytes(Zstd(level=1).encode(bytes(1 << 24)))):
            data = body + int(google_crc32c.value(body)).to_bytes(4, "little")
            out.append((json.dumps(root).encode(), chunks | {name: data}))
    return out
