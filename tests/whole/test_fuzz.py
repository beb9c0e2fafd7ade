"""Whatever a parser is given, it answers or raises an error of the library, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archive import tables
from archive.adapters import lerobot, npz
from archive.base import CorruptManifestError, CorruptStateError, IntegrityError, UnsafePathError
from archive.tables.declared import COUNT
from tests.support.archives import fresh
from tests.support.dataset_files import flat, write_flat, write_lerobot
from tests.support.fuzzing import bombs, objects
from tests.support.parsers import PARSERS
from tests.support.places import ROOT
from tests.support.sampling import fresh_seed

QUICK = ("commit", "small", "tables", "staged", "journal", "shard", "packed", "tree", "json", "schema", "condition",
         "duration", "url", "plan", "ledger", "npz")  # fmt: skip
FEW, MANY = 10, 50_000  # inputs of each parser, by default and as a soak: 10^6 together


def fuzzed(count: int, seed: int, *names: str) -> str:
    """What a process of its own says that tried so many inputs: no limit of it is this one's."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fuzzing.running", str(count), str(seed), *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    return done.stdout


def escaped(said: str) -> list[str]:
    """The lines that tell of something that is not as it should be."""
    return [line for line in said.splitlines() if line.startswith(" ")]


def test_a_few_invalid_inputs_of_each_parser() -> None:
    pytest.importorskip("torch", reason="trees of state with tensors need torch")
    seed = fresh_seed(20)
    print(f"seed {seed}")
    said = fuzzed(FEW, seed, *QUICK)
    assert escaped(said) == [], said
    assert [line.partition(":")[0] for line in said.splitlines()] == list(QUICK)


@pytest.mark.soak
@pytest.mark.parametrize("name", PARSERS)
def test_many_invalid_inputs(name: str) -> None:
    said = fuzzed(MANY, fresh_seed(20), name)
    assert escaped(said) == [], said


@pytest.mark.parametrize("column", [0, 1])
def test_a_member_whose_name_no_table_can_hold(column: int, tmp_path: Path) -> None:
    key, data = objects.journal_seeds(tmp_path)[0]
    index, body = objects.parts_of(data)
    next(one for one in index["members"] if one[1])[column] = "\ud800"
    with pytest.raises(CorruptStateError, match="no member"):
        objects.read_journal((key, objects.with_index(data, json.dumps(index), body)))


@pytest.mark.parametrize("template", ["data/{chunk_index:999999999d}", "{chunk_index.__class__}", "{0}", "../x"])
def test_templates_of_names_do_nothing_else(template: str, tmp_path: Path) -> None:
    robot = write_lerobot(tmp_path / "robot", data_path=template)
    with pytest.raises((IntegrityError, UnsafePathError)):
        lerobot.import_dataset(robot, fresh())


def test_values_that_a_file_cannot_hold_are_not_made(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path = write_flat(tmp_path / "x.h5", flat())
    with h5py.File(path, "a") as file:
        file.create_dataset("more", (10**15,), "<f8", chunks=(1000,))
    with pytest.raises(IntegrityError, match="which the file cannot hold"):
        npz.import_dataset(path, fresh())


def test_members_of_a_file_that_are_all_one_are_not_inflated(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(next(iter(bombs.npz_bombs([])))["x.npz"])
    with pytest.raises(IntegrityError, match="which the file cannot hold"):
        npz.import_dataset(path, fresh())


def test_texts_that_swell_row_by_row() -> None:
    data = bombs.long_texts(1 << 12, 1 << 20)
    assert len(data) < 1 << 16
    with pytest.raises(CorruptManifestError, match="repeat too long a buffer"):
        tables.loads(data, "live", where="x")


@pytest.mark.parametrize("number", [-1, COUNT.most + 1])
def test_numbers_that_cannot_be(number: int) -> None:
    import pyarrow as pa

    row = {"shard": ["shards/x.zip"], "member": ["x"], "array": ["x"], "chunk": [0], "rows": [1], "offset": [0]}
    data = tables.dumps(tables.from_columns("chunks", row | {"size": [number], "crc32c": pa.array([1], pa.uint32())}))
    with pytest.raises(CorruptManifestError, match="an impossible size"):
        tables.loads(data, "chunks", where="x")


def test_the_limits_are_felt() -> None:
    """A parser that leaks another error, takes time, or memory, is found."""
    from tests.support.fuzzing.running import in_child
    from tests.support.parsers import Parser

    def parse(given: int) -> object:
        if given == 1:
            raise KeyError(given)
        return np.ones(40 << 20).sum() if given == 2 else None

    found = in_child("it", Parser(lambda tmp: [0], lambda seed, rng: rng.randrange(3), parse), 20, 0)
    assert any(what.startswith("KeyError") for what in found.escaped)
    assert any("256 MB" in what for what in found.escaped)
