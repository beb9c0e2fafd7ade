"""Commits, small objects and tables: seeds, other ones under right checksums, and what reads them."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from archive import tables
from archive.base import CorruptStateError, layout
from archive.checkpoint import rounds
from archive.ledger import keys
from archive.log import About, Claim, Pin, commits
from archive.store import smallfiles
from archive.testing import crashed_job
from tests.support.fuzzing.mutating import mutated_bytes, mutated_json, mutated_table, parquet
from tests.support.nonsense import filled, sealed


def text_of(changed: str) -> bytes:
    return changed.encode("utf-8", "surrogatepass")


# -- commits and small objects -----------------------------------------------------------------------------------------


@cache
def archives() -> tuple[Path, Path]:
    """One with everything in it, and one that a crash left with journals; made once."""
    tmp = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, tmp)
    crashed_job(str(tmp / "crashed"))
    return filled(tmp / "filled"), tmp / "crashed"


def commit_seeds(tmp: Path) -> list[Any]:
    found = [path.read_bytes() for root in archives() for path in sorted(root.glob("commits/*/*.json"))]
    return [json.loads(data.split(b"\n")[0]) for data in found]


def mutated_commit(seed: Any, rng: Random) -> tuple[bytes, int]:
    data = sealed(text_of(mutated_json(seed, rng)))
    return (data if rng.random() < 0.9 else mutated_bytes(data, rng)), seed["number"]


def read_commit(given: tuple[bytes, int]) -> None:
    commit = commits.loads(*given, "memory://x")
    repr(commit), commit.to_json(), commit.all_files, commit.base_urls
    if commit.checkpoint is not None:
        commit.checkpoint.mark(commit.session, commit.number)


SMALL = {"about": About, "claim": Claim, "pin": Pin, "answer": rounds.Answer}


def small_seeds(tmp: Path) -> list[Any]:
    root = archives()[0]
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
    found = [(path.name.split(".")[-2], path) for root in archives() for path in sorted(root.glob("manifest/*"))]
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


def commit_file(seed: Any) -> tuple[bytes, int]:
    return sealed(json.dumps(seed).encode()), seed["number"]


def small_file(seed: tuple[str, Any]) -> tuple[str, bytes]:
    return seed[0], json.dumps(seed[1]).encode()
