"""Seeds of what other systems left in an archive, of trees of state, texts and URLs, and of whole archives of which one
object is another, under checksums that are right all the way up; other ones, and what reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import archive
from archive.base import CorruptStateError, jsontree, records
from archive.fields import Ragged, dtypes, schema, trees
from archive.store import Storage, local_path
from archive.store.root import split_file
from tests.support.fuzzing.manifests import table_seeds
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json, mutated_table, mutated_text, parquet
from tests.support.fuzzing.objects import attempted
from tests.support.nonsense import everything, filled, look_after

WHERE = "sample 'a'"


# -- TransferQueue -----------------------------------------------------------------------------------------------------


def sample_seeds(tmp: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    import torch

    from archive.adapters.transferqueue import stored

    values = {"t": torch.ones(2, 3), "one": torch.tensor(1.5), "text": "a", "tree": {"a": [1, np.arange(3)], "b": None}}
    found = [stored.encode(i, one, where=WHERE) for i, one in enumerate((values, {"x": torch.arange(3)}, {}))]
    return [(_as_read(one.fields), one.metadata) for one in found]


def _as_read(value: Any) -> Any:
    """A sample's fields as an episode gives them back."""
    if isinstance(value, dict):
        return {key: _as_read(one) for key, one in value.items()}
    return [value.values] if isinstance(value, Ragged) else value


def mutated_sample(seed: tuple[dict[str, Any], dict[str, Any]], rng: Random) -> tuple[dict[str, Any], str]:
    """Other metadata, and fields that are gone, other ones', or trees of something else."""
    fields, metadata = seed
    fields = dict(fields)
    if fields and rng.random() < 0.6:
        name = rng.choice(sorted(fields))
        other = [np.zeros(0), np.arange(3), "x", None, [], {}, ["[]"], [json.loads("[1, {}]")], *fields.values()]
        fields[name] = rng.choice(other)
    return fields, mutated_json(metadata, rng) if rng.random() < 0.7 else json.dumps(metadata)


def read_sample(given: tuple[dict[str, Any], str]) -> None:
    from archive.adapters.transferqueue import stored

    metadata = records.parse_object(given[1], what="metadata", error=CorruptStateError)
    stored.decode(given[0], metadata, where=WHERE)


def controller_seeds(tmp: Path) -> list[Any]:
    fields = {"f": {"dtype": "float32", "shape": [2], "is_nested": False, "is_non_tensor": False}}
    numbers = {"global_indexes": np.arange(2), "shaped": np.arange(2), "dimensions": np.ones(2, np.int64),
               "sizes": np.full(2, 2), "tuples": np.ones(2, bool)}  # fmt: skip
    partition = {
        "created_at": 0.0, "production_status": np.ones((2, 1)), "consumption_status": {},
        "field_name_mapping": {"f": 0}, "field_custom_backend_meta": {}, "global_indexes": np.arange(2),
        "keyed": np.arange(1), "pre_allocated_global_indexes": np.zeros(0, np.int64),
        "field_metadata": {"f": fields["f"] | numbers},
    }  # fmt: skip
    manager = {
        "partition_to_indexes": {"p": np.arange(2)}, "reusable_indexes": np.arange(1), "global_index_counter": 2,
        "allocated_indexes": np.arange(2),
    }  # fmt: skip
    tree = {
        "system": "transferqueue", "format": 1, "storage_saved": True, "sampler_class": "S", "sampler": {},
        "partitions": {"p": partition}, "index_manager": manager,
    }  # fmt: skip
    return [trees.flatten(tree)]


def read_controller(given: tuple[str, dict[str, Any]]) -> None:
    from archive.adapters.transferqueue import stored

    skeleton = records.parse(given[0], what="x", error=CorruptStateError)
    stored.check_tree(trees.unflatten(skeleton, given[1]), where="x")


# -- videos ------------------------------------------------------------------------------------------------------------


def packet_seeds(tmp: Path) -> list[list[bytes]]:
    from archive.adapters import video

    pictures = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3), np.uint8)
    return [[packet.tobytes() for packet in video.encode(pictures, every=every)] for every in (1, 4)]


def mutated_packets(seed: list[bytes], rng: Random) -> list[bytes]:
    packets = list(seed)
    at = rng.randrange(len(packets))
    match rng.randrange(4):
        case 0:
            del packets[at]
        case 1:
            packets[at:at] = [rng.choice((b"", b"\0\0\1\x65", packets[-1], bytes(100)))]
        case _:
            packets[at] = mutated_bytes(packets[at], rng)
    return packets


def read_packets(packets: list[bytes]) -> None:
    from archive.adapters import video

    given = [np.frombuffer(packet, np.uint8) for packet in packets]
    video.decode(given)


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
    skeleton = records.parse(given[0], what="x", error=CorruptStateError)
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
    schema.described([text]), found.digest
    for spec in found.fields:
        if spec.axis not in schema.NODES:
            attempted(lambda spec=spec: dtypes.stored_trailing(spec.dtype, spec.shape))
            attempted(lambda spec=spec: dtypes.from_stored(np.zeros((3, 2), np.uint8), spec.dtype))
            attempted(lambda spec=spec: spec.name)


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


Change = tuple[str, bytes]  # key of an object, and what it is now


def whole_seeds(tmp: Path) -> Sequence[Path]:
    return [filled(tmp / "root")]


def mutated_whole(root: Path, rng: Random) -> tuple[Path, list[Change]]:
    return root, _changes(root, rng)


def _changes(root: Path, rng: Random) -> list[Change]:
    """A table that the newest commit names, one that a row of another names, or a commit itself."""
    newest = sorted(root.glob("commits/*/*.json"))[-1]
    commit = json.loads(newest.read_bytes().split(b"\n")[0])
    if rng.random() < 0.1:
        return [(str(newest.relative_to(root)), _sealed(mutated_json(commit, rng)))]
    kinds = [kind for kind in commit if isinstance(commit[kind], list) and commit[kind] and "path" in commit[kind][0]]
    ref = rng.choice(commit[rng.choice(("segments", rng.choice(kinds)))])
    table = pq.read_table(root / ref["path"])
    changes = []
    paths = [path for path in set(table["chunks"].to_pylist()) if path] if "chunks" in table.column_names else []
    if paths and rng.random() < 0.4:
        named = rng.choice(sorted(paths))
        data = parquet(mutated_table(pq.read_table(root / named), rng), rng)
        changes.append((named, data))
        table = _with_reference(table, named, data)
    else:
        table = mutated_table(table, rng)
    data = parquet(table, rng)
    ref |= {"bytes": len(data), "crc32c": int(google_crc32c.value(data)), "rows": table.num_rows}
    return [*changes, (ref["path"], data), (str(newest.relative_to(root)), _sealed(json.dumps(commit)))]


def _with_reference(table: Any, path: str, data: bytes) -> Any:
    """The table, which says what a chunk file's bytes must be, as it is now."""
    for name, value in (("chunks_bytes", len(data)), ("chunks_crc32c", int(google_crc32c.value(data)))):
        column = table[name]
        values = [
            value if where == path else old
            for where, old in zip(table["chunks"].to_pylist(), column.to_pylist(), strict=True)
        ]
        table = table.set_column(table.schema.get_field_index(name), name, _column(values, column.type))
    return table


def _column(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, kind)


def _sealed(text: str) -> bytes:
    line = text.encode("utf-8", "surrogatepass")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def read_whole(given: tuple[Path, list[Change]]) -> None:
    """Change the objects of an archive, read all of it, and put them back."""
    root, changes = given
    before = {key: (root / key).read_bytes() for key, _ in changes}
    for key, data in changes:
        (root / key).write_bytes(data)
    try:
        for everybody in (everything, look_after):
            attempted(lambda everybody=everybody: everybody(root))
    finally:
        for key, data in before.items():
            (root / key).write_bytes(data)
