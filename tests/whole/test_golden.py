"""Archives that an earlier version wrote, kept in tests/golden, still read the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import format_reader
from tests.support.golden import (
    ARCHIVES,
    CHECKPOINTS,
    DEFAULTS,
    EPISODES,
    GOLDEN,
    LABELS,
    MAX_BYTES,
    PROVENANCE,
    STATE,
    SUMMARIES,
    TAGS,
    added,
    differences,
    stream,
    write,
)

# -- reading it back -----------------------------------------------------------------------------------------------


@pytest.fixture(params=ARCHIVES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A copy, so that no test can change what is kept."""
    import archive

    return archive.open(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


WANTED = {name: added(name, steps) for name, steps in EPISODES.items()}


def test_every_episode_reads_as_it_was_written(golden: Any) -> None:
    assert {episode.id for episode in golden.episodes} == EPISODES.keys()
    for name, steps in WANTED.items():
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


def test_labels_and_tags_read_as_they_were_given(golden: Any) -> None:
    said = {episode.id: dict(episode.labels) for episode in golden.episodes}
    assert said == {name: LABELS.get(name, {}) for name in EPISODES}
    told = {
        name: {"commit": tag.commit, "checkpoint": tag.checkpoint, "run": tag.run, "by": tag.by}
        for name, tag in golden.tags.items()
    }
    assert told == TAGS


def test_what_was_let_go_of_is_gone_and_the_rest_is_sound(golden: Any) -> None:
    from archive.maintain import verify

    assert verify(golden, deep=True).sound
    assert "gone" not in golden.episodes
    kinds = [commit.kind for commit in golden.commits]
    assert kinds[10:] == [*["late"] * 3, "forget", "undo", "forget", "tag", "prune", "tag"]
    assert json.loads(golden.late_fields["provenance"].to_pylist()[-2]) == PROVENANCE
    assert golden.prune(older_than="0s", force=True).empty


def test_a_golden_archive_can_be_written_to_and_resumed_from(golden: Any) -> None:
    with golden.writer(session="third", resume=golden.checkpoints.latest) as w:
        w.append(stream(1, 7, 9), env_ids=1, last=True)
    wanted, before = stream(1, 0, 9), WANTED["env 1"]["reward"]
    wanted["reward"][: len(before)] = before
    assert list(differences(golden.episodes["env 1"].read(), wanted)) == []
    read = format_reader.read(Path(golden.url.removeprefix("file://")))["episodes"]["env 1"]
    assert read["fields"]["reward"]["data"] == wanted["reward"].tobytes().hex()


def test_the_newest_writer_still_writes_this_content(tmp_path: Path) -> None:
    import archive

    for layout in ("packed", "directory"):
        write(str(tmp_path / layout), layout)
        arc = archive.open(tmp_path / layout)
        for name, steps in WANTED.items():
            assert list(differences(arc.episodes[name].read(), steps, name)) == []


@pytest.mark.parametrize("name", ARCHIVES)
def test_golden_archives_are_small(name: str) -> None:
    held = [path for path in (GOLDEN / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in held) < MAX_BYTES
