"""Tools for tests of training code, of stores, and of failures. A root or an archive comes in; the requests of the
code under test, and a check of the archive, go out.

| to | see |
|---|---|
| get a fresh place in each test | fixtures `archive_url` and `archive_s3`, which pytest finds by itself |
| break operations | `faults.at(url, op="create", k=3, what="lose_answer")` |
| count requests and bytes | `trace(arc)` |
| check an archive; make one | `assert_whole(arc)`; `small_archive(url)`, `crashed_job(url)`, `steps` |
| test a store of your own | `StoreContract`, to subclass, with an `EmptyRoot` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archive.testing import faults as faults
    from archive.testing.building import crashed_job as crashed_job
    from archive.testing.building import small_archive as small_archive
    from archive.testing.building import steps as steps
    from archive.testing.contract import StoreContract as StoreContract
    from archive.testing.roots import EmptyRoot as EmptyRoot
    from archive.testing.tracing import Trace as Trace
    from archive.testing.tracing import trace as trace
    from archive.testing.whole import assert_whole as assert_whole

__all__ = [
    "EmptyRoot",
    "StoreContract",
    "Trace",
    "assert_whole",
    "crashed_job",
    "faults",
    "small_archive",
    "steps",
    "trace",
]

_LAZY = {  # name -> the module that has it
    "EmptyRoot": "roots",
    "StoreContract": "contract",
    "Trace": "tracing",
    "assert_whole": "whole",
    "crashed_job": "building",
    "small_archive": "building",
    "steps": "building",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    """Import parts at their first use: pytest imports this module at each start, also where it is not used."""
    from importlib import import_module

    if name == "StoreContract":
        import pytest

        pytest.register_assert_rewrite("archive.testing.contract")  # before it is imported: failures show the values
    if name in _LAZY:
        return getattr(import_module(f"archive.testing.{_LAZY[name]}"), name)
    if name == "faults":
        return import_module("archive.testing.faults")
    raise AttributeError(f"module 'archive.testing' has no attribute {name!r}")
