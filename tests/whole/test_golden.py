"""Archives that an earlier version wrote, kept in tests/golden, still read the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import (
    ARCHIVES,
    CHECKPOINTS,
    DEFAULTS,
    EPISODES,
    GOLDEN,
    STATE,
    SUMMARIES,
    differences,
    stream,
    write,
)

MAX_BYTES = 200_000


# -- the content ---------------------------------------------------------------------------------------------------


# -- reading it back -----------------------------------------------------------------------------------------------


@pytest.fixture(params=ARCHIVES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A copy, so that no test can change what is kept."""
    import archive

    return archive.open(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def test_every_episode_reads_as_it_was_written(golden: Any) -> None:
    assert {episode.id for episode in golden.episodes} == EPISODES.keys()
    for name, steps in EPISODES.items():
        assert list(differences(golden.episodes[name].read(), steps, name)) == []


def test_summaries_read_as_they_were_written(golden: Any) -> None:
    for name, more in SUMMARIES.items():
        episode, wanted = golden.episodes[name], DEFAULTS | more
        found = {
            "complete": episode.complete, "terminated": episode.terminated, "return": episode.total_reward,
            "weights": episode.model_weights_uuids, "metadata": episode.metadata or None,
        }  # fmt: skip
        assert found == wanted, name


def test_checkpoints_read_as_they_were_written(golden: Any) -> None:
    assert [ck.name for ck in golden.checkpoints] == list(CHECKPOINTS)
    for name, wanted in CHECKPOINTS.items():
        ck = golden.checkpoints[name]
        assert ck.progress == wanted["progress"]
        assert ck.column("priority", 0).tolist() == wanted["priority"].tolist()
        assert [ep.id for ep in ck.episodes] == list(dict.fromkeys(step[4] for step in wanted["live"]))
        for episode in ck.episodes:
            steps = [step[5] for step in wanted["live"] if step[4] == episode.id]
            whole = EPISODES[episode.id]["obs"]
            assert list(differences(episode.read("obs")["obs"], whole[steps[0] : steps[-1] + 1])) == []
    assert list(differences(golden.checkpoints["step-10"].state(0), STATE)) == []


def test_a_golden_archive_can_be_written_to_and_resumed_from(golden: Any) -> None:
    with golden.writer(session="third", resume=golden.checkpoints.latest) as w:
        w.append(stream(1, 7, 9), env_ids=1, last=True)
    assert list(differences(golden.episodes["env 1"].read(), stream(1, 0, 9))) == []


def test_the_newest_writer_still_writes_this_content(tmp_path: Path) -> None:
    import archive

    for layout in ("packed", "directory"):
        write(str(tmp_path / layout), layout)
        arc = archive.open(tmp_path / layout)
        for name, steps in EPISODES.items():
            assert list(differences(arc.episodes[name].read(), steps, name)) == []


def test_golden_archives_are_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < MAX_BYTES
