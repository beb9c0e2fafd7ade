"""The golden archive with a journal: a run with a ledger that died, was recovered, resumed, and died again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.ledger import Rollout
from archive.maintain import verify
from tests.support.golden import GOLDEN, MAX_BYTES, differences
from tests.support.golden_journal import (
    BEYOND,
    CHECKPOINTS,
    COMMITTED,
    CURSOR,
    EPISODES,
    NAME,
    PROMPTS,
    STATE,
    TRAINED,
    write,
)


@pytest.fixture(params=["golden", "written"])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> archive.Archive:
    """A copy of the golden archive, or one that was just written."""
    if request.param == "golden":
        shutil.copytree(GOLDEN / NAME, tmp_path / NAME)
    else:
        write(str(tmp_path / NAME))
    return archive.open(tmp_path / NAME)


def check_episodes(found: Any, names: tuple[str, ...]) -> None:
    assert sorted(episode.id for episode in found) == sorted(names)
    for name in names:
        assert list(differences(found[name].read(), EPISODES[name], name)) == []


def states(view: Any) -> dict[str, str]:
    return {key: view.state(key) for key in PROMPTS}


def test_episodes_and_checkpoints_read_as_they_were_written(golden: archive.Archive) -> None:
    check_episodes(golden.episodes, COMMITTED)
    for ck, (name, wanted) in zip(golden.checkpoints, CHECKPOINTS.items(), strict=True):
        assert ck.name.startswith(name)
        assert (ck.step, ck.progress, [e.id for e in ck.episodes]) == (10, wanted["progress"], wanted["episodes"])
        np.testing.assert_array_equal(ck.column("priority", 0), wanted["priority"])
        assert list(differences(ck.state(0), STATE)) == []
    recovered = golden.checkpoints.latest.record.recovered
    assert recovered is not None
    assert (recovered.name, {rank: tail.next for rank, tail in recovered.tails.items()}) == ("step-10", {0: 3})


def test_ledgers_stand_as_they_were_left(golden: archive.Archive) -> None:
    wanted = {key: one["state"] for key, one in PROMPTS.items()}
    assert states(golden.ledger("prompts")) == wanted
    assert states(golden.checkpoints.latest.ledger("prompts")) == wanted
    assert golden.ledger("prompts").to_reissue() == [Rollout("q", 0), Rollout("q", 1)]
    assert golden.ledger("prompts").cursor == CURSOR
    before = archive.open(golden.url, commit=3)  # the run's session is still the one that trained
    assert states(before.ledger("prompts")) == {key: one["state"] for key, one in TRAINED.items()}


def test_the_tail_that_nobody_has_recovered_is_there_and_goes_on(golden: archive.Archive) -> None:
    (tail,) = golden.tails().ranks
    assert (tail.start, tail.next, tail.episodes, tail.ledger, tail.ended) == (0, 1, 1, 1, "missing")
    assert verify(golden, deep=True).sound
    plan = resharding.plan(golden.checkpoints.latest, 2)
    check_episodes(golden.refresh().episodes, (*COMMITTED, *BEYOND))
    writers = [golden.writer(session="third", resume=plan.share(rank)) for rank in range(2)]
    for w in writers:
        pending = w.checkpoint(20)
    check_episodes(pending.result().episodes, ("p/1", "q/0"))
    assert golden.refresh().ledger("prompts").to_reissue() == [Rollout("q", 1)]
    for w in writers:
        w.close()


def test_it_is_small() -> None:
    held = sum(path.stat().st_size for path in (GOLDEN / NAME).rglob("*") if path.is_file())
    assert held < MAX_BYTES / 2
