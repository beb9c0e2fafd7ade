"""Well-formed nonsense under right checksums: every key of every record is dropped, and takes values of each wrong
kind, and so do columns of tables.

What comes of it is the library's error, which names the object, or a value that is as good as another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import archive
from archive import tables
from archive.base import ArchiveError, CorruptCommitError, CorruptStateError, IntegrityError, Record
from archive.checkpoint import rounds
from archive.log import About, Claim, Commit, Pin
from archive.saved import PartIndex
from tests.support.nonsense import everything, filled, index_of, look_after, put_index
from tests.support.sampling import one_in, sampled
from tests.support.tampering import body, change_table, commit_files, seal, set_column

GONE = object()
NONSENSE: tuple[Any, ...] = (
    GONE, None, True, "nonsense", "", -1, 0, 2**63, 10**40, -(10**40), 1.5, float("inf"), float("nan"), [], [[]], {},
    {"a": {"a": []}}, [None],
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("nonsense") / "root")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a document."""
    if at:
        yield at
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*at, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with something else at one place; what is elsewhere is shared with it."""
    key, *rest = place
    out = copy(document)
    if rest:
        out[key] = changed(document[key], tuple(rest), value)
    elif value is GONE:
        del out[key]
    else:
        out[key] = value
    return out


def staged_indexes(root: Path) -> dict[Path, Any]:
    return {path: index_of(path) for path in sorted(root.glob("states/**/*.zip"))}


def documents(root: Path) -> Iterator[tuple[type[Record], Any, type[IntegrityError]]]:
    for path in commit_files(root):
        yield Commit, body(path), CorruptCommitError
    for index in staged_indexes(root).values():
        yield PartIndex, index, CorruptStateError
    for path in root.glob("sessions/*/rank-*.json"):
        yield Claim, json.loads(path.read_bytes()), CorruptStateError
    yield About, json.loads((root / "archive.json").read_bytes()), CorruptCommitError
    yield rounds.Answer, {"ready": 3, "session": "s", "round": 1, "rank": 0, "nonce": "n"}, CorruptStateError
    yield Pin, {"archive": "a", "url": "u", "objects": ["shards/x.zip"]}, CorruptCommitError


def test_what_is_read_is_written_again(root: Path) -> None:
    for kind, document, error in documents(root):
        later = document | {"later": {"any": [1]}}
        assert kind.from_json(document, what="it", error=error).to_json() == document
        assert kind.from_json(later, what="it", error=error).to_json() == later


def test_nonsense_in_every_place_of_every_record(root: Path) -> None:
    refused: list[str] = []
    for kind, document, error in documents(root):
        for place in places(document):
            for value in NONSENSE:
                try:
                    record = kind.from_json(changed(document, place, value), what="the object", error=error)
                except error as e:
                    refused.append(str(e))
                else:
                    json.dumps(record.to_json())
    assert len(refused) > 10_000
    assert all(text.startswith("the object is not what it should be (") for text in refused)
    assert max(map(len, refused)) < 500


@pytest.mark.parametrize("value", [None, [], "x", 1, 2.5, True])
def test_a_document_that_is_no_object(root: Path, value: Any) -> None:
    for kind, _, error in documents(root):
        with pytest.raises(error, match="the object is not what it should be"):
            kind.from_json(value, what="the object", error=error)


REFUSED: tuple[tuple[str, Any], ...] = (
    ("segments", {}), ("segments", None), ("segments.0.path", GONE), ("segments.0.path", 3), ("segments.0.bytes", -1),
    ("segments.0.bytes", "9"), ("segments.0.rows", True), ("runs", []), ("runs", None), ("runs.main", "x"),
    ("created_at", GONE), ("created_at", "yesterday"), ("checkpoint", {"name": "x"}), ("archive", []),
    ("bases", {"0" * 32: {}}), ("bases", {"a": {"url": None}}), ("number", 10**40),
    ("created_at", float("inf")), ("runs.main.sequences", {"x": 1}), ("runs.main.sequences", {"0": float("inf")}),
    ("runs.main.sequences", {"-1": 1}), ("runs.main.sequences", {"0": -1}), ("runs.main.superseded", "first"),
    ("runs.main.keep", {"last": 0}), ("runs.main.keep", {"last": "2"}),
    ("runs.main.keep", {"best": ["loss", "sideways"]}), ("runs.main.latest", None), ("runs.main.latest.commit", "2"),
    ("segments.0.rows", 2**70), ("segments.0.commit", [1]), ("segments.0.crc32c", -1), ("checkpoint.world_size", 2**40),
    ("checkpoint.world_size", 0), ("checkpoint.ranks", []), ("checkpoint.step", 1.5),
    ("checkpoint.metrics", {"loss": "1"}), ("checkpoint.metrics", {"loss": 10**400}),
    ("checkpoint.lineage", {"config": 5}), ("checkpoint.buffers.replay.steps", -1),
    ("checkpoint.discarded", {"open": {"steps": 1}}), ("checkpoint.whole", 1), ("checkpoint.sequences", {"zero": 1}),
    ("added", {"segments": None}), ("live", {}), ("chunks", []), ("message", 5),
    ("let_go", -1), ("let_go", "9"), ("let_go", 2**70), ("undoes", -1), ("undoes", [9]), ("removed", []),
    ("removed", {"objects": -1}), ("removed", {"bytes": "1"}), ("pruned", []), ("pruned", {"path": "manifest/x"}),
    ("forgotten", "manifest/x"), ("labels", [1]), ("late", {}), ("tags", [{}]), ("checkpoint.borrowed", "x"),
    ("checkpoint.borrowed", [1]), ("runs.main.latest.manifest", "9"), ("runs.main.latest.manifest", -1),
)  # fmt: skip


def path_of(document: Any, text: str) -> tuple[Any, ...]:
    return tuple(int(key) if key.isdigit() else key for key in text.split("."))


@pytest.mark.parametrize(
    ("place", "value"), REFUSED, ids=[f"{p}={'gone' if v is GONE else str(v)[:30]}" for p, v in REFUSED]
)
def test_commits_that_cannot_be(root: Path, place: str, value: Any) -> None:
    (document,) = (d for p in commit_files(root) if (d := body(p)).get("checkpoint", {}).get("name") == "step-2")
    with pytest.raises(CorruptCommitError, match=rf"commit 7 is .*{place.partition('.')[0]}|ranks and missing"):
        Commit.from_json(changed(document, path_of(document, place), value), what="commit 7", error=CorruptCommitError)


def misplaced(document: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place of a document, with each of three kinds of nonsense."""
    for place in places(document):
        if place[0] == "members" and len(place) > 1 and place[1] > 1:
            continue  # one is like the other
        for value in (GONE, "nonsense", 0):
            yield place, value


def survives(
    root: Path,
    write: Callable[[Any], None],
    document: Any,
    count: int,
    read: Callable[[Path], None] = everything,
) -> list[str]:
    """Where nonsense made something else than the library's errors, in one of `count` cases."""
    wrong = []
    for place, value in sampled(misplaced(document), count):
        write(changed(document, place, value))
        try:
            read(root)
        except ArchiveError:
            pass
        except Exception as e:
            wrong.append(f"{place} = {str(value)[:20]}: {type(e).__name__}: {e}")
    write(document)
    return wrong


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The archive, for a test that changes it."""
    return shutil.copytree(root, tmp_path / "root")


SAMPLE = one_in(20)  # of about 400


@pytest.mark.parametrize("count", SAMPLE)
@pytest.mark.parametrize(("kind", "read"), [("checkpoint", everything), ("prune", everything), ("prune", look_after)])
def test_nonsense_in_a_commit_that_is_opened(copied: Path, kind: str, read: Callable[[Path], None], count: int) -> None:
    path = [path for path in commit_files(copied) if body(path)["kind"] == kind][-1]
    assert survives(copied, lambda document: seal(path, document), body(path), count, read) == []
    read(copied)


@pytest.mark.parametrize("count", SAMPLE)
@pytest.mark.parametrize("read", [everything, look_after])
def test_nonsense_in_a_commit_that_serves_checkpoints(copied: Path, read: Callable[[Path], None], count: int) -> None:
    path = [path for path in commit_files(copied) if body(path)["kind"] == "forget"][-1]
    assert survives(copied, lambda document: seal(path, document), body(path), count, read) == []
    read(copied)


@pytest.mark.parametrize("count", SAMPLE)
def test_nonsense_in_a_staged_index_that_is_read(copied: Path, count: int) -> None:
    path = next(path for path in staged_indexes(copied) if "step-1" in str(path) and "first" in str(path))

    def put(index: Any) -> None:
        put_index(path, json.dumps(index, separators=(",", ":")).encode())

    assert survives(copied, put, index_of(path), count) == []
    everything(copied)


# -- tables: columns that are gone, of other types, empty, or that name what is not there ------------------------------

KINDS = ("checkpoints", "tags", "labels", "late", "forgotten", "branches")
LATER, NOBODY = 10**6, "nobody"


def values(name: str, kind: pa.DataType) -> list[Any]:
    if pa.types.is_unsigned_integer(kind):
        return [None, 0, LATER]
    if pa.types.is_integer(kind):
        return [None, -1, 0, 3, LATER, 2**31 - 1]
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        return [None, "", NOBODY, "../x", "[1", "\x1b[31m", "null", '{"loss": "x"}']
    return [None]


def table_changes(kind: str) -> Iterator[tuple[str, Callable[[pa.Table], pa.Table]]]:
    """What may be wrong with a table, by what it is."""
    for field in tables.schema(kind):
        name = field.name
        yield f"{name} gone", lambda table, name=name: table.drop_columns([name])
        for other in (pa.int64(), pa.string(), pa.list_(pa.int64()), pa.struct([("a", pa.int8())])):
            yield f"{name} as {other}", lambda table, name=name, other=other: nulls(table, name, other)
        for value in values(name, field.type):
            yield f"{name} = {value!r}", lambda table, name=name, value=value: filled_with(table, name, value)
    yield "no rows", lambda table: table.slice(0, 0)
    yield "all rows twice", lambda table: pa.concat_tables([table, table])


def nulls(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    return set_column(table, name, pa.nulls(table.num_rows, kind))


def filled_with(table: pa.Table, name: str, value: Any) -> pa.Table:
    kind = table.schema.field(name).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return set_column(table, name, pa.array([value] * table.num_rows, plain))


@pytest.mark.parametrize("count", one_in(5))
@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_in_a_table(copied: Path, kind: str, count: int) -> None:
    archive.open(copied).forget(ids=["also extra"], dry_run=False)
    wrong = []
    before = {path: path.read_bytes() for path in (*copied.glob("manifest/*"), commit_files(copied)[-1])}
    for what, change in sampled(table_changes(kind), count):
        change_table(copied, kind, change)
        for read in (everything, look_after):
            try:
                read(copied)
            except ArchiveError:
                pass
            except Exception as e:
                wrong.append(f"{what}, {read.__name__}: {type(e).__name__}: {e}")
        for path, data in before.items():
            path.write_bytes(data)
    assert wrong == []
