"""Everything that reads what others wrote: valid seeds of it, how they are made invalid, and what reads them.

A parser is a line of PARSERS. Whatever it is given, it returns or raises an error of the library, in bounded time and
memory: `tests/support/fuzzing.py` sees to that.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numcodecs.zstd import Zstd

import archive
from archive.base import CorruptStateError, durations, jsontree, layout
from archive.checkpoint import StagedIndex, requests
from archive.checkpoint.staged import StagedFile
from archive.fields import dtypes, schema
from archive.fields.state import trees
from archive.journal import notes
from archive.ledger import keys
from archive.manifest import About, Claim, Pin, commits, expressions, smallfiles, tables
from archive.shard import groups, indexed, packing
from archive.store import Storage, local_path
from archive.store.root import split_file
from archive.testing import crashed_job
from tests.support.fuzzing import foreign
from tests.support.fuzzing.mutating import HOSTILE, mutated_bytes, mutated_json, mutated_table, mutated_text, parquet
from tests.support.nonsense import filled

ROWS = 40


@dataclass(frozen=True)
class Parser:
    """One parser. seeds: makes valid input below an empty folder; mutate: makes invalid input of a seed; parse: reads;
    or reader: makes what reads, below a folder.  bombs: inputs that are tried each time.  plain: the input that a seed
    itself is."""

    seeds: Callable[[Path], Sequence[Any]]
    mutate: Callable[[Any, Random], Any]
    parse: Callable[[Any], object] = repr
    reader: Callable[[Path], Callable[[Any], object]] | None = None
    bombs: Callable[[Sequence[Any]], Sequence[Any]] = lambda seeds: ()
    plain: Callable[[Any], Any] = lambda seed: seed

    def as_input(self, seed: Any) -> Any:
        return self.plain(seed)


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def text_of(changed: str) -> bytes:
    return changed.encode("utf-8", "surrogatepass")


# -- commits and small objects -----------------------------------------------------------------------------------------


@cache
def _archives() -> tuple[Path, Path]:
    tmp = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, tmp)
    crashed_job(str(tmp / "crashed"))
    return filled(tmp / "filled"), tmp / "crashed"


def archives(tmp: Path) -> tuple[Path, Path]:
    """One with everything in it, and one that a crash left with journals; made once."""
    return _archives()


def commit_seeds(tmp: Path) -> list[Any]:
    found = [path.read_bytes() for root in archives(tmp) for path in sorted(root.glob("commits/*/*.json"))]
    return [json.loads(data.split(b"\n")[0]) for data in found]


def mutated_commit(seed: Any, rng: Random) -> tuple[bytes, int]:
    data = sealed(text_of(mutated_json(seed, rng)))
    return (data if rng.random() < 0.9 else mutated_bytes(data, rng)), seed["number"]


def read_commit(given: tuple[bytes, int]) -> None:
    commit = commits.loads(*given, "memory://x")
    repr(commit), commit.to_json(), commit.all_files, commit.base_urls, commit.version
    if commit.checkpoint is not None:
        commit.checkpoint.mark(commit.session, commit.number)


SMALL = {"about": About, "claim": Claim, "pin": Pin, "answer": requests.Answer}


def small_seeds(tmp: Path) -> list[Any]:
    root = archives(tmp)[0]
    found = [("claim", json.loads(path.read_bytes())) for path in root.glob("sessions/*/rank-*.json")]
    answer = {"ready": 3, "session": "s", "round": 1, "rank": 0, "nonce": "n"}
    pin = {"archive": "a", "url": "u", "objects": ["shards/x.zip"]}
    about = json.loads((root / "archive.json").read_bytes())
    return [*found, ("about", about), ("answer", answer), ("pin", pin)]


def mutated_small(seed: tuple[str, Any], rng: Random) -> tuple[str, bytes]:
    data = text_of(mutated_json(seed[1], rng))
    return seed[0], data if rng.random() < 0.8 else mutated_bytes(data, rng)


def read_small(given: tuple[str, bytes]) -> None:
    value = smallfiles.parse(given[1], "x.json", CorruptStateError)
    if given[0] == "about" and isinstance(value, dict):
        layout.check_format(value.get("format"), where="x.json")
    SMALL[given[0]].from_json(value, what="x.json", error=CorruptStateError).to_json()


# -- tables ------------------------------------------------------------------------------------------------------------


def table_seeds(tmp: Path) -> list[tuple[str, pa.Table]]:
    found = [(path.name.split(".")[-2], path) for root in archives(tmp) for path in sorted(root.glob("manifest/*"))]
    out = [(kind, tables.loads(path.read_bytes(), kind, where="")) for kind, path in found]
    newest: dict[str, tuple[str, pa.Table]] = {kind: (kind, table) for kind, table in out if table.num_rows}
    return [*newest.values(), ("ledger", tables.from_columns("ledger", {"key": ["1"], "session": ["s"]}))]


def mutated_table_file(seed: tuple[str, pa.Table], rng: Random) -> tuple[str, bytes]:
    kind, table = seed
    if rng.random() < 0.6:
        return kind, parquet(mutated_table(table, rng), rng)
    data = tables.dumps(table) if rng.random() < 0.5 else parquet(table, rng)
    where = len(data) - struct.unpack("<I", data[-8:-4])[0] - 8
    if rng.random() < 0.7:  # the footer claims things
        return kind, data[:where] + mutated_bytes(data[where:-8], rng) + data[-8:]
    return kind, mutated_bytes(data, rng)


def read_table(given: tuple[str, bytes]) -> None:
    kind, data = given
    table = tables.loads(data, kind, where="x")
    table.to_pylist()
    tables.concat(kind, [table, table])
    if kind == "ledger":
        keys.parsed([text or "" for text in table["key"].to_pylist()])


# -- what ranks staged and journaled -----------------------------------------------------------------------------------


def staged_seeds(tmp: Path) -> list[tuple[str, bytes]]:
    roots = archives(tmp)
    return [(str(p.relative_to(r)), p.read_bytes()) for r in roots for p in sorted(r.glob("states/**/*.zip"))]


def journal_seeds(tmp: Path) -> list[tuple[str, bytes]]:
    root = archives(tmp)[1]
    return [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.glob("journal/**/*.zip"))]


def mutated_object(seed: tuple[str, bytes], rng: Random) -> tuple[str, bytes]:
    """Another index under a right checksum, other members under right checksums, or other bytes."""
    key, data = seed
    if rng.random() < 0.2:
        return key, mutated_bytes(data, rng)
    start, stop = indexed.index_span(data, "")
    index, body = json.loads(data[start:stop].split(b"\n")[0]), data[stop:]
    if rng.random() < 0.5:
        index, body = with_other_member(index, body, rng)
    else:
        index = mutated_json(index, rng)
    text = sealed(text_of(index if isinstance(index, str) else json.dumps(index)))
    return key, data[:18] + len(text).to_bytes(4, "little") * 2 + data[26:start] + text + body


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
        return mutated_table_file((name.split(".")[0], tables.loads(data, name.split(".")[0], where="")), rng)[1]
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
    file = StagedFile(put(*given), given[0])
    index: StagedIndex = file.index
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
    try:
        attempt()
    except archive.ArchiveError:
        pass


def read_journal(given: tuple[str, bytes]) -> None:
    key, data = given
    found = notes.read(data, key, f"memory://{key}", "main", 0)
    gathering = notes.Gathering()
    gathering.add(found)
    for kind in ("segments", "chunks", "ledger"):
        gathering.table(kind).to_pylist()


# -- shards ------------------------------------------------------------------------------------------------------------


def shard_seeds(tmp: Path) -> list[Any]:
    arrays = {
        "x": np.arange(12, dtype=np.float32).reshape(6, 2), "n": np.arange(6), "b": np.ones(6, bool),
        "t": np.array(["a", "bc", "", "d", "e", "f"], object),
    }  # fmt: skip
    out = []
    for compression in ("zstd:1", "gzip:1", None):
        members = groups.encode(arrays, attributes={"a": 1}, compression=compression, chunk_bytes=16)
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
    repr(view.attributes)
    for path in view.paths[:5]:
        attempted(lambda path=path: view.read(path, 0, min(view.describe(path).rows, ROWS), given[1]))


def read_packed_metadata(data: bytes) -> None:
    groups.ShardView(packing.inflate(data)).paths  # noqa: B018


# -- trees and texts ---------------------------------------------------------------------------------------------------


def state() -> Any:
    rng = np.random.default_rng(1)
    return {
        "a": np.arange(3), "f": 1.5, "n": [1, None, True, (2, b"x")], "c": 1j, "inf": float("inf"), 3: "k",
        "big": 1 << 2000, "t": np.array(["2020"], "M8[D]"), "s": np.str_("y"), "i": np.int16(3), "d": np.dtype("f4"),
        "r": rng, "raw": np.zeros(2, [("p", "<i4"), ("q", "<f8", (2,))]), "blob": bytes(5000), "z": np.zeros((0, 3)),
    }  # fmt: skip


def tree_seeds(tmp: Path) -> list[Any]:
    import random

    import torch

    more = {"random": random.Random(1), "torch": torch.Generator(), "tensor": torch.ones(2), "size": torch.Size([1])}
    return [trees.flatten(one) for one in (state(), more, {"legacy": np.random.RandomState(1)})]


def mutated_tree(seed: Any, rng: Random) -> tuple[str, dict[str, Any]]:
    skeleton, arrays = seed
    arrays = dict(arrays)
    if rng.random() < 0.3 and arrays:
        name = rng.choice(sorted(arrays))
        arrays[name] = rng.choice((np.zeros(3, np.uint8), np.zeros(()), np.zeros((2, 0)), arrays[name].reshape(-1)[:1]))
    return mutated_json(skeleton, rng), arrays


def read_tree(given: tuple[str, dict[str, Any]]) -> None:
    from archive.base import plainjson

    skeleton = plainjson.parse(given[0], what="x", error=CorruptStateError)
    trees.unflatten(skeleton, given[1])


def json_seeds(tmp: Path) -> list[Any]:
    value = {"a": [1, 2.5, (3, b"x")], 3: float("nan"), "$": "\ud800", "c": 1j, "big": 1 << 2000, "n": np.arange(3)}
    return [json.loads(jsontree.dumps(value, where=""))]


def schema_seeds(tmp: Path) -> list[Any]:
    found = [table for kind, table in table_seeds(tmp) if kind in ("segments", "late")]
    texts = {text for table in found for text in table["schema"].cast(pa.string()).to_pylist() if text}
    return [json.loads(text) for text in sorted(texts)]


def read_schema(text: str) -> None:
    found = schema.loads(text)
    found.describe(), found.digest
    for spec in found.fields:
        if spec.axis not in schema.NODES:
            attempted(lambda spec=spec: dtypes.stored_trailing(spec.dtype, spec.shape))
            attempted(lambda spec=spec: dtypes.from_stored(np.zeros((3, 2), np.uint8), spec.dtype))
            attempted(lambda spec=spec: spec.name)
    found.row_bytes  # noqa: B018


COLUMNS = ("episode_id", "length", "return", "update_count_max", "terminated", "created_at", "model_weights_uuids")
CONDITIONS = [
    "return > 10 and update_count >= 100", "not (length in (1, 2, 3)) or metadata.goal = 'x'", "id is not null",
    "label.success = true and terminated", "length = -1.5e3 or return <> .5", "return < null", "not not terminated",
    "created_at > '2020-01-01'", "episode_id in ('a', \"b\\\"c\")", "terminated or not terminated and (length > 1)",
]  # fmt: skip
WORDS = (
    *COLUMNS, "and", "or", "not", "in", "is", "null", "true", "false", "(", ")", ",", "=", "!=", "<", "<=", "1", "-1",
    "1e999", "9" * 30, "'x'", '"y"', "metadata.a", "label.", "metadata..", "''", "\\", "'", "model_weights_uuids",
)  # fmt: skip


def mutated_condition(seed: str, rng: Random) -> str:
    words = seed.split(" ")
    for _ in range(rng.choice((1, 2, 3, 8))):
        at = rng.randrange(len(words) + 1)
        match rng.randrange(5):
            case 0:
                del words[at : at + 1]
            case 1:
                words[at : at + 1] = [mutated_text(" ".join(words[at : at + 1]), rng)]
            case 2:
                words[at:at] = words
            case _:
                words[at : at + rng.randrange(2)] = [rng.choice(WORDS)]
    return " ".join(words)[:100_000]


def condition_reader() -> Callable[[str], None]:
    arc = archive.create("memory://conditions")
    with arc.writer() as w:
        for i in range(3):
            w.add_episode({"reward": np.ones(2 + i)}, metadata={"goal": "x", "a": [1]}, update_count=i)
    episodes = arc.refresh().episodes if hasattr(arc.refresh(), "episodes") else arc.episodes
    return lambda text: len(episodes.filter(where=text)) and None


def read_url(text: str) -> None:
    for read in (Storage.connect, split_file, lambda path: local_path(path, "it")):
        attempted(lambda read=read: read(text))


def texts(*seeds: str) -> dict[str, Any]:
    return {"seeds": lambda tmp: list(seeds), "mutate": mutated_text}


def json_text(seed: Any) -> str:
    return json.dumps(seed)


def foreign_parser(seeds: Any, read: Any) -> Parser:
    return Parser(seeds, foreign.mutated_files, reader=lambda tmp: foreign.importer(read, tmp))


PARSERS: dict[str, Parser] = {
    "commit": Parser(
        commit_seeds, mutated_commit, read_commit, plain=lambda seed: (sealed(json.dumps(seed).encode()), seed["number"])
    ),
    "small": Parser(small_seeds, mutated_small, read_small, plain=lambda seed: (seed[0], json.dumps(seed[1]).encode())),
    "tables": Parser(table_seeds, mutated_table_file, read_table, plain=lambda seed: (seed[0], tables.dumps(seed[1]))),
    "staged": Parser(staged_seeds, mutated_object, read_staged),
    "journal": Parser(journal_seeds, mutated_object, read_journal),
    "shard": Parser(shard_seeds, mutated_shard, read_shard, plain=lambda seed: (json.dumps(seed[0]).encode(), seed[1])),
    "packed": Parser(
        lambda tmp: [deflated(json.dumps(one[0]).encode()) for one in shard_seeds(tmp)], mutated_bytes,
        read_packed_metadata,
    ),
    "tree": Parser(tree_seeds, mutated_tree, read_tree, plain=lambda seed: (json.dumps(seed[0]), seed[1])),
    "json": Parser(json_seeds, mutated_json, lambda text: jsontree.loads(text), plain=json_text),
    "schema": Parser(schema_seeds, mutated_json, read_schema, plain=json_text),
    "condition": Parser(lambda tmp: CONDITIONS, mutated_condition, reader=lambda tmp: condition_reader()),
    "duration": Parser(
        **texts("24h", "7d", "90m", "1w", "3s"), parse=lambda text: durations.seconds_of(text, "older_than")
    ),
    "url": Parser(**texts("s3://bucket/a/b", "memory://x", "file:///tmp/x", "/tmp/x", "gs://b@c/d?e=f"), parse=read_url),
    "npz": foreign_parser(foreign.npz_seeds, foreign.read_npz),
    "hdf5": foreign_parser(foreign.hdf5_seeds, foreign.read_npz),
    "lerobot": foreign_parser(foreign.lerobot_seeds, foreign.read_lerobot),
    "film": foreign_parser(foreign.filmed_seeds, foreign.read_film),
    "kept film": foreign_parser(foreign.filmed_seeds, foreign.keep_film),
    "alf": foreign_parser(foreign.alf_seeds, foreign.read_alf),
    "rlinf": foreign_parser(foreign.rlinf_seeds, foreign.read_rlinf),
}  # fmt: skip
