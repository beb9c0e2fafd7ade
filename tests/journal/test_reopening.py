"""What a recovery must not make of what was journaled: an episode open again, values of another dtype."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.archives import fresh
from tests.support.journals import NEVER_S, die


@pytest.mark.parametrize("saved", [True, False])
def test_an_episode_that_was_replaced_is_open_nowhere(saved: bool) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.arange(2)}, env_ids=2, first=True, episode_ids="X")
    if saved:
        w.checkpoint(1, wait=True)
    w.sync()
    w.close_episodes([2])
    w.add_episode({"x": np.arange(100, 105)}, episode_id="X", replace=True)
    w.sync()
    die(w)
    with arc.refresh().writer(resume=arc.recover()) as again:
        again.append({"x": np.array([777])}, env_ids=2)
    assert arc.refresh().episodes["X"].read()["x"].tolist() == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("order", [1, -1])
def test_an_episode_without_steps_changes_no_column(order: int) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode({"x": np.zeros(0)}, episode_id="none")
    w.add_episode({"x": np.zeros(2)}, episode_id="two")
    given = {"none": np.zeros(0, np.int64), "two": np.array([2**60 + 1, 2**60 + 3])}
    w.journal(columns={"p": dict([*given.items()][::order])})
    w.sync()
    die(w)
    found = arc.recover().column("p", 0)
    assert found.dtype == np.int64
    assert found.tolist() == [2**60 + 1, 2**60 + 3]


def test_a_column_of_the_same_bytes_and_another_dtype_is_another() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": np.zeros(2)})
        for step, dtype in enumerate(("M8[s]", "M8[D]", "m8[ms]"), start=1):
            w.checkpoint(step, columns={"p": np.array([1, 2], "i8").view(dtype)}, wait=True)
    dtypes = [arc.refresh().checkpoints[f"step-{step}"].column("p", 0).dtype for step in (1, 2, 3)]
    assert dtypes == [np.dtype("M8[s]"), np.dtype("M8[D]"), np.dtype("m8[ms]")]
