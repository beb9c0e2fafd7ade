"""Has an operation go wrong at one place after the other, and looks at what is left: see `operations`.

Run as a program, an operation is killed at its k-th storage operation; somebody looks, does it again, and looks:
`python -m tests.support.interrupting FOLDER ONE_IN NAME...` prints a JSON line for each kill: where, and what had been
said. Processes are forked off this one, which has only imported things.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 (imported once, ahead of all forks)
import pyarrow.parquet  # noqa: F401
import pytest
import zarr  # noqa: F401

from archive.base import AccessDeniedError, ArchiveError, IntegrityError, StorageError, StorageFullError
from archive.testing import faults
from tests.support.backends import Backend
from tests.support.kills import code_of, die_at, forked, killed, of_blocks
from tests.support.operations import (
    OPERATIONS,
    Operation,
)
from tests.support.said import Said

GOT_OVER = ("reset", "throttle", "lose_answer")
REFUSED: Mapping[str, type[StorageError]] = {"fail": StorageError, "deny": AccessDeniedError, "full": StorageFullError}
OF_BYTES = ("truncate", "corrupt")
KINDS = (*GOT_OVER, *REFUSED, *OF_BYTES)
NEVER = 1 << 40
ENDING_S = 10.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at which operation on the store; of those that bring bytes where it is about these."""

    kind: str
    k: int

    @property
    def op(self) -> str:
        return "get" if self.kind in OF_BYTES else "any"


class Interrupted:
    """An operation and what lies there before it, to be had on fresh roots beside the first one."""

    def __init__(self, operation: Operation, first: Backend, folder: Path) -> None:
        self._operation, self._first, self._folder = operation, first, folder
        operation.prepare(first)
        storage = first.connect()
        self._there = {one.key: storage.get(one.key) for one in storage.scan("")}
        self._count = 0
        self.errors: Counter[tuple[str, str]] = Counter()  # kind, error -> how often

    def faults(self) -> list[Fault]:
        """Each that there is, by letting the operation go on to its end once."""
        with self._fresh() as (root, said), _never(root, "any") as any_, _never(root, "get") as gets:
            self._operation.act(root, said)
        return [Fault(kind, k + 1) for kind in KINDS for k in range((gets if kind in OF_BYTES else any_).seen)]

    def meet(self, fault: Fault) -> bool:
        """Let it go wrong there, look, and do it again; whether it came to that."""
        with self._fresh() as (root, said):
            with faults.at(root.url, op=fault.op, k=fault.k, what=fault.kind) as injected:
                error = self._outcome(root, said)
            if error is None:
                assert self._operation.done <= set(said.words)
            else:
                check_error(fault.kind, error)
                self.errors[fault.kind, type(error).__name__] += 1
            self._operation.check(root, said)
            if error is not None:
                self._complete(root, said)
            assert not temporaries(root)
        return bool(injected.hits)

    def _outcome(self, root: Backend, said: Said) -> ArchiveError | None:
        try:
            self._operation.act(root, said)
        except ArchiveError as error:
            return error
        return None

    def _complete(self, root: Backend, said: Said) -> None:
        self._operation.act(root, said)
        assert self._operation.done <= set(said.words)
        self._operation.check(root, said)

    @contextmanager
    def _fresh(self) -> Iterator[tuple[Backend, Said]]:
        self._count += 1
        root = replace(self._first, url=f"{self._first.url}-{self._count}")
        for key, data in self._there.items():
            root.plant(key, data)
        yield root, Said(self._folder / f"said-{self._count}")
        root.clear()


def _never(root: Backend, op: str) -> Any:
    """Counts operations."""
    return faults.at(root.url, op=op, k=NEVER)


def check_error(kind: str, error: ArchiveError) -> None:
    """It is what it should be for a fault of this kind, and says what led to it."""
    if kind in GOT_OVER:
        raise AssertionError(f"{kind} is not got over") from error
    causes = list(_causes(error))
    if kind in REFUSED:
        assert any(isinstance(one, REFUSED[kind]) for one in causes), causes
        assert "injected" in str(causes[-1]), causes
        assert not isinstance(causes[-1], ArchiveError), "what the store said is kept as the cause"
    else:
        assert any(isinstance(one, (IntegrityError, StorageError)) for one in causes), causes


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def temporaries(root: Backend) -> list[Path]:
    """Files on disk that were never given their names."""
    return list(Path(root.url).rglob(".*.tmp")) if root.name == "local" else []


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no open file more at the end than at the beginning."""
    gc.collect()
    threads, files = _threads(), _open_files()
    yield
    gc.collect()
    for one in _threads() - threads:
        one.join(ENDING_S)
    left = _threads() - threads
    assert not left, left
    assert not (more := _open_files() - files), more


def _threads() -> set[threading.Thread]:
    """All but those of the pool that zarr has once in a process."""
    return {one for one in threading.enumerate() if not one.name.startswith("asyncio_")}


def _open_files() -> Counter[str]:
    """What the file descriptors of this process are."""
    out: Counter[str] = Counter()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            out[str(one.readlink())] += 1
    return out


pytest.register_assert_rewrite(
    "tests.support.operations", "tests.support.operated_jobs", "tests.support.operated_rings"
)


def act_and_die(operation: Operation, root: Backend, said: Said, k: int) -> None:
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
    was_killed = killed(lambda: act_and_die(operation, root, said, k))
    words = said.words
    found = code_of(forked(lambda: come_back(operation, root, said)))
    assert found == 0, (k, words)
    shutil.rmtree(at)
    return was_killed, words


def walk(operation: Operation, folder: Path, one_in: int) -> None:
    """One kill of each `one_in` operations that follow each other, until it lives to its end."""
    (folder / "prepared").mkdir(parents=True)
    prepared = Backend(str(folder / "prepared"), name="local")
    assert code_of(forked(lambda: operation.prepare(prepared))) == 0
    for k in of_blocks(one_in):
        was_killed, words = once(operation, folder, k)
        if not was_killed:
            return
        print(json.dumps({"name": operation.name, "k": k, "said": words}), flush=True)


def main() -> None:
    folder, one_in, *names = sys.argv[1:]
    for operation in OPERATIONS:
        if operation.name in names:
            walk(operation, Path(folder) / operation.name, int(one_in))


if __name__ == "__main__":
    main()
