"""`with w.exclusive():` what is said within counts as one, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

import archive
from tests.support.archives import fresh

STEP = {"x": np.zeros(1)}


def test_neither_a_commit_nor_a_checkpoint_has_a_part_of_it() -> None:
    arc = fresh()
    with arc.writer() as w:
        with w.exclusive():
            w.append(STEP)
            for refused in (w.commit, lambda: w.checkpoint(1)):
                with pytest.raises(archive.UsageError, match="after the block"):
                    refused()
        w.checkpoint(1, wait=True)
    assert arc.refresh().checkpoints.latest.episodes.read()


def test_one_within_another_is_taken_back_with_it() -> None:
    def call(w: archive.Writer) -> None:
        with w.exclusive():
            with w.exclusive():
                w.append(STEP)
            w.append(STEP)
            raise ZeroDivisionError

    with fresh().writer() as w:
        with pytest.raises(ZeroDivisionError):
            call(w)
        assert w.live.num_rows == 0


def test_several_calls_of_a_ledger_are_taken_back() -> None:
    def call(w: archive.Writer) -> None:
        with w.exclusive():
            for key in ("one", "two"):
                w.ledger("prompts").draw([key])
            raise ZeroDivisionError

    arc = fresh()
    with arc.writer() as w:
        w.ledger("prompts").draw(["known"])
        with pytest.raises(ZeroDivisionError):
            call(w)
        w.ledger("prompts").draw(["one"])
    assert [key for key, _ in arc.refresh().ledger("prompts").to_reissue()] == ["known", "one"]


@pytest.mark.parametrize("given", [[0.2, 1.9], [True, False]])
def test_positions_are_whole_numbers(given: list[float]) -> None:
    with fresh().writer() as w:
        w.append({"x": np.zeros(2)}, env_ids=0)
        with pytest.raises(archive.UsageError, match="must be integers"):
            w.evict(0, positions=np.array(given))
        with pytest.raises(archive.UsageError, match="must be integers"):
            w.append({"x": np.zeros(2)}, env_ids=0, positions=given)
        with pytest.raises(archive.UsageError, match="above the greatest int64"):
            w.append(STEP, env_ids=np.array([2**64 - 1], np.uint64))
        assert w.live["length"].to_pylist() == [2]
