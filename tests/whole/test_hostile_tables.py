"""Tables under right checksums whose rows contradict each other, or what they name: every question ends in the
library's own error, soon and in little memory; and what a read or a plan refuses, `verify` finds."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import archive
import resharding
from archive import tables
from archive.base import ArchiveError, CorruptManifestError
from archive.maintain import verify
from archive.tables import TABLES
from tests.support.limits import StuckError, limited, peak_bytes
from tests.support.tampering import change_commit, change_table, set_column

MOST_S, MOST_BYTES = 5.0, 500 << 20
_ROOM_BYTES = 3 << 30  # of addresses: a question that goes wrong ends in a MemoryError, not the machine


def asked(question: Callable[[], Any]) -> tuple[str, Any]:
    """What is wrong with how a question ended ("" if nothing is), and what it said: an ArchiveError, or its answer."""
    before, begun = peak_bytes(reset=True), time.process_time()
    try:
        with limited(2 * MOST_S, _ROOM_BYTES):
            said: Any = question()
    except ArchiveError as e:
        said = e
    except (StuckError, Exception) as e:
        return f"{type(e).__name__}: {e!s:.300}", e
    spent_s, grown = time.process_time() - begun, peak_bytes() - before
    wrong = f"took {spent_s:.1f} s" if spent_s > MOST_S else ""
    return (f"took {grown >> 20} MB" if grown > MOST_BYTES else wrong), said


STEPS = 6
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of three episodes, each in three segments, all of them live."""
    root = tmp_path_factory.mktemp("hostile") / "root"
    with archive.create(str(root), layout="directory").writer(session="s", compression=None) as w:
        for step in range(3):
            for env in range(3):
                tokens = archive.Ragged(np.arange(2 * STEPS), np.full(STEPS, 2))
                given = {"x": np.arange(STEPS, dtype=np.float32), "tokens": tokens}
                w.append(given, env_ids=env, first=step == 0, model_weights_uuid="w")
            w.checkpoint(step, columns={"p": np.arange(3.0 * STEPS * (step + 1))}).result()
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "root")


def rows(kind: str, change: Callable[[pa.Table], pa.Table]) -> Change:
    return lambda root: change_table(root, kind, change)


def one(column: str, value: Any, row: int = 0) -> Callable[[pa.Table], pa.Table]:
    """For a table: one value of a column is another."""

    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value
        return set_column(table, column, pa.array(values, table.schema.field(column).type))

    return change


def every(column: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        kind = table.schema.field(column).type
        return set_column(table, column, pa.array([value] * table.num_rows, kind))

    return change


def times(count: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.concat_tables([table] * count)


def circle(count: int) -> Callable[[pa.Table], pa.Table]:
    """So many rows of one episode, each the predecessor of the next, and the last one that of the first."""

    def change(table: pa.Table) -> pa.Table:
        table = table.slice(0, 1).take(pa.array(np.zeros(count, np.int64)))
        table = set_column(table, "sequence", pa.array(np.arange(count)))
        return set_column(table, "predecessor", pa.array([f"s:0:{(n - 1) % count}" for n in range(count)]))

    return change


def circles(count: int) -> Callable[[pa.Table], pa.Table]:
    """So many episodes of two rows, each of which goes on from the other."""

    def change(table: pa.Table) -> pa.Table:
        table = circle(2 * count)(table)
        table = set_column(table, "episode_id", pa.array([f"e{n // 2}" for n in range(2 * count)]))
        return set_column(table, "predecessor", pa.array([f"s:0:{n ^ 1}" for n in range(2 * count)]))

    return change


def overlapping(count: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.take(pa.array(np.zeros(count, np.int64)))


def of_another(table: pa.Table) -> pa.Table:
    """The newest segment of an episode goes on from one of another episode."""
    sequences = table["predecessor"].to_pylist()
    return set_column(table, "predecessor", pa.array([*sequences[:-1], sequences[-2]]))


def named_often(root: Path) -> None:
    change_commit(root, lambda commit: commit.update(segments=commit["segments"] * 2000))


def member(root: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """A member of the newest shard is another one; its checksum in the chunk table is right."""

    def rechecked(table: pa.Table) -> pa.Table:
        at = next(i for i, one in enumerate(table["member"].to_pylist()) if one == name)
        path = root / table["shard"][at].as_py() / name
        path.write_bytes(change(path.read_bytes()))
        data = path.read_bytes()
        crc = int.from_bytes(data[-4:], "little") if "/c/" in name else int(google_crc32c.value(data))
        return one_value(one_value(table, "size", at, len(data)), "crc32c", at, crc)

    change_table(root, "chunks", rechecked)


def one_value(table: pa.Table, column: str, at: int, value: int) -> pa.Table:
    return one(column, value, at)(table)


def lengths(values: Callable[[Any], Any]) -> Change:
    """The lengths of the tokens of each step are others."""

    def change(data: bytes) -> bytes:
        new = values(np.frombuffer(data[:-4], "<i8").copy()).astype("<i8").tobytes()
        return new + int(google_crc32c.value(new)).to_bytes(4, "little")

    return lambda root: member(root, "tokens%lengths/c/0", change)


def moved(by: int) -> Callable[[Any], Any]:
    """What one step has more another one has less, so that the sum stays."""

    def change(values: Any) -> Any:
        values[0] += by
        values[1] -= by
        return values

    return change


def wrapped(values: Any) -> Any:
    values[:4] = [2**62, 2**62, 2**62, 2**62 + 8]  # their sum is 8 in 64 bits
    return values


def codecs(of: Callable[[list[Any]], list[Any]]) -> Change:
    def change(data: bytes) -> bytes:
        found = json.loads(data)
        for node in found["consolidated_metadata"]["metadata"].values():
            node["codecs"] = of(node["codecs"])
        return json.dumps(found).encode()

    return lambda root: member(root, "zarr.json", change)


GZIP = {"name": "gzip", "configuration": {"level": 5}}
CASES: dict[str, Change] = {
    "a chain in a circle": rows("segments", circle(20_000)),
    "a chain through another episode": rows("segments", of_another),
    "all segments twice": rows("segments", times(2)),
    "a length near 2^47": rows("segments", one("length", 2**47)),
    "lengths near 2^47": rows("segments", every("length", 2**47)),
    "a start near 2^47": rows("segments", one("start", 2**47)),
    "a position near 2^47": rows("segments", one("position", 2**47)),
    "extents near 2^47": rows("segments", every("extents", [{"field": "tokens", "start": 0, "rows": 2**47}])),
    "a segment's rank of 2^31": rows("segments", one("rank", 2**31 - 1)),
    "ranks of 2^31": rows("live", every("rank", 2**31 - 1)),
    "a stream's rank of 2^31": rows("live", one("stream_rank", 2**31 - 1)),
    "a live run near 2^47": rows("live", one("hi", 2**47)),
    "each step live twice": rows("live", times(2)),
    "millions of overlapping live rows": rows("live", overlapping(2_000_000)),
    "circles of two": rows("segments", circles(10_000)),
    "a file that is named often": named_often,
    "codecs without end": codecs(lambda own: [*own[:1], *[GZIP] * 20_000, *own[1:]]),
    "codecs in another order": codecs(lambda own: own[::-1]),
    "negative lengths of tokens": lengths(moved(-4)),
    "lengths of tokens that wrap round": lengths(wrapped),
    "rows of a chunk near 2^47": rows("chunks", every("rows", 2**47)),
    "sizes of chunks near 2^47": rows("chunks", every("size", 2**47)),
    "a shard twice in the chunk table": rows("chunks", times(2)),
}


def reads(root: Path) -> list[Callable[[], Any]]:
    """Whatever asks for steps, or deals them out."""

    def checkpoint() -> archive.Checkpoint:
        return archive.open(str(root)).checkpoints[-1]

    def streamed() -> None:
        for _ in resharding.plan(checkpoint(), world_size=2).share(rank=1).stream():
            pass

    return [
        lambda: archive.open(str(root)).episodes.read(),
        lambda: archive.open(str(root)).episodes.to_pandas(),
        lambda: checkpoint().episodes.read(),
        lambda: str(resharding.plan(checkpoint(), world_size=2)),
        streamed,
        lambda: str(archive.open(str(root)).forget(episodes="unreferenced")),
    ]


@pytest.mark.parametrize("what", CASES)
def test_a_table_that_contradicts_itself(root: Path, what: str) -> None:
    CASES[what](root)
    wrong, refused = [], False
    for question in reads(root):
        problem, said = asked(question)
        wrong += [problem] if problem else []
        refused |= isinstance(said, ArchiveError)
    problem, report = asked(lambda: verify(archive.open(str(root)), deep=True))
    assert [*wrong, *([problem] if problem else [])] == []
    assert refused
    assert isinstance(report, ArchiveError) or not report.sound


def test_what_is_sound_is_found_so(root: Path) -> None:
    assert [asked(question)[0] for question in reads(root)] == [""] * len(reads(root))
    assert verify(archive.open(str(root)), deep=True).sound


def bomb(column: str, groups: int = 40, **how: Any) -> bytes:
    """A table of which one column takes 16 MB in each group of rows, and its file next to nothing."""
    text = "x" * (256 << 10)
    values: list[Any] = [[text] if column == "model_weights_uuids" else text + str(n) for n in range(64)]
    table = tables.from_columns("segments", {"shard": [None] * 64, column: values})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False, **how) as writer:
        for _ in range(groups):
            writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("column", "how"),
    [
        ("metadata", {"use_dictionary": False, "column_encoding": {"metadata": "DELTA_BYTE_ARRAY"}}),
        ("metadata", {"use_dictionary": False}),
        ("reason", {"use_dictionary": False, "column_encoding": {"reason": "DELTA_BYTE_ARRAY"}}),
        ("model_weights_uuids", {"use_dictionary": True}),
    ],
)
def test_columns_that_would_fill_the_memory_are_not_decoded(column: str, how: dict[str, Any]) -> None:
    data = bomb(column, **how)
    problem, said = asked(lambda: tables.loads(data, "segments", where="x", columns=[column]))
    assert (problem, type(said)) == ("", CorruptManifestError)
    assert "take more than" in str(said) or column == "reason"  # texts of a dictionary are encoded otherwise


def test_what_is_written_is_never_taken_for_a_bomb() -> None:
    text = "y" * (1 << 20)
    table = tables.from_columns("labels", {name: [0] * 140 for name in ("rank", "sequence", "created_at", "commit")})
    table = table.drop_columns(["episode_id", "session", "key", "value"])
    given = {"episode_id": "e", "session": "s", "key": "k", "value": [text] * 140}
    table = tables.from_columns("labels", {**{name: table[name] for name in table.column_names}, **given})
    data = tables.dumps(table)
    assert tables.loads(data, "labels", where="x")["value"].to_pylist() == [text] * 140
    assert len(data) > 100 << 20


@pytest.mark.parametrize("kind", TABLES)
def test_tables_without_rows_are_read(kind: str) -> None:
    assert tables.loads(tables.dumps(tables.schema(kind).empty_table()), kind, where="x").num_rows == 0


def test_ids_that_are_no_text(root: Path) -> None:
    arc = archive.open(str(root))
    for ask in (
        lambda: arc.episodes["\ud800"],
        lambda: arc.episodes.filter(episode_id=["a", "\ud800"]),
        lambda: arc.episodes.filter(where="session = '\ud800'"),
        lambda: arc.forget(ids=["\ud800"]),
        lambda: arc.add_fields({"f": {"\ud800": np.arange(3)}}),
        lambda: resharding.plan(arc.checkpoints[-1], world_size=2, filter={"run": "\ud800"}),
    ):
        with pytest.raises(ArchiveError, match="surrogate"):
            ask()


def test_a_plan_of_no_checkpoint() -> None:
    with pytest.raises(archive.UsageError, match="first start"):
        resharding.plan(None)  # type: ignore[arg-type]
