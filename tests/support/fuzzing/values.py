"""Trees of state, texts of JSON, schemas, conditions, URLs: seeds, other ones, and what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

import archive
from archive.base import CorruptStateError, jsontree, records
from archive.fields import dtypes, schema
from archive.fields.state import trees
from archive.store import Storage, local_path
from archive.store.root import split_file
from tests.support.fuzzing.manifests import table_seeds
from tests.support.fuzzing.mutating import mutated_json, mutated_text
from tests.support.fuzzing.objects import attempted

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
    found.describe(), found.digest
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
