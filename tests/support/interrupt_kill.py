"""Run as a program: an operation is killed at its k-th storage operation; somebody looks, does it again, and looks.

Usage: python -m tests.support.interrupt_kill FOLDER ONE_IN NAME... Prints a JSON line for each kill: where, and what
had been said. Processes are forked off this one, which has only imported things, so that many kills take little time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pandas  # noqa: F401 (imported once, ahead of all forks)
import pyarrow.parquet  # noqa: F401
import pytest
import zarr  # noqa: F401

pytest.register_assert_rewrite(
    "tests.support.operations", "tests.support.operated_jobs", "tests.support.operated_rings"
)

from tests.support.backends import Backend  # noqa: E402
from tests.support.checkpoint_kill import code_of, die_at, forked  # noqa: E402
from tests.support.operations import OPERATIONS, Operation  # noqa: E402
from tests.support.said import Said  # noqa: E402
from tests.support.sampling import SEED  # noqa: E402


def killed(operation: Operation, root: Backend, said: Said, k: int) -> int:
    """Do it, and die at the k-th storage operation, if there are so many."""
    die_at(k)
    operation.act(root, said)
    os._exit(0)


def come_back(operation: Operation, root: Backend, said: Said) -> None:
    """What was said is there; what was not is done again."""
    operation.check(root, said)
    operation.act(root, said)
    assert operation.done <= set(said.words), said.words
    operation.check(root, said)


def once(operation: Operation, folder: Path, k: int) -> tuple[bool, list[str]]:
    """Whether it was killed there, and what had been said."""
    at = folder / f"{k}"
    root, said = Backend(str(at / "root"), name="local"), Said(at / "said")
    shutil.copytree(folder / "prepared", at / "root")
    code = code_of(forked(lambda: killed(operation, root, said, k)))
    assert code in (0, -signal.SIGKILL), (k, code)
    words = said.words
    found = code_of(forked(lambda: come_back(operation, root, said)))
    assert found == 0, (k, words)
    shutil.rmtree(at)
    return code != 0, words


def walk(operation: Operation, folder: Path, one_in: int) -> None:
    """One kill of each `one_in` operations that follow each other, until it lives to its end."""
    (folder / "prepared").mkdir(parents=True)
    prepared = Backend(str(folder / "prepared"), name="local")
    assert code_of(forked(lambda: operation.prepare(prepared))) == 0
    chosen = random.Random(SEED)
    block = 0
    while True:
        k = block * one_in + chosen.randrange(one_in)
        was_killed, words = once(operation, folder, k)
        if not was_killed:
            return
        print(json.dumps({"name": operation.name, "k": k, "said": words}), flush=True)
        block += 1


def main() -> None:
    folder, one_in, *names = sys.argv[1:]
    for operation in OPERATIONS:
        if operation.name in names:
            walk(operation, Path(folder) / operation.name, int(one_in))


if __name__ == "__main__":
    main()
