"""Whatever goes wrong with a store at any operation of all that is done to an archive: nothing that was acknowledged is
lost, nothing damaged comes back, nothing is left behind, and what was interrupted can be done again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.backends import make_backend
from tests.support.interrupting import Interrupted, nothing_left
from tests.support.kills import said_by
from tests.support.operations import OPERATIONS, Operation
from tests.support.sampling import ALL, few_of, sampled


@pytest.mark.parametrize(("store", "count"), [("memory", 300), *few_of([("memory", ALL), ("local", ALL)], 0)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_whatever_goes_wrong(
    operation: Operation, store: str, count: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    one = Interrupted(operation, make_backend(request, store, tmp_path), tmp_path)
    found = one.faults()
    with nothing_left():
        met = [one.meet(fault) for fault in sampled(found, count)]
    assert sum(met) >= len(met) / 2  # ranks that wait for each other ask as often as it takes


@pytest.mark.parametrize(
    ("names", "count"), [(("append and commit", "forget"), 50), *few_of([((str(one),), ALL) for one in OPERATIONS], 0)]
)
def test_killed_anywhere(names: tuple[str, ...], count: int, tmp_path: Path) -> None:
    kills = Counter(kill["name"] for kill in said_by("interrupting", tmp_path, count, *names))
    print(kills)
    assert set(kills) == {*names}
