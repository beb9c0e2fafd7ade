"""What is known of an episode or a checkpoint cannot be changed by accident: a change would be lost without a word."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import frozen
from archive.base.errors import FieldError, ReadOnlyError

METADATA = {"task": "push", "goal": {"at": [1, {"x": 2}], "pair": (1, [2])}}


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    made = archive.create(tmp_path / "a")
    with made.writer() as w:
        w.add_episode({"reward": np.ones(3)}, episode_id="e", metadata=METADATA)
        w.checkpoint(
            1, attributes={"status": {"e": {"tries": [1]}}}, progress={"samples": 3}, metrics={"loss": 1.0}, wait=True
        )
    return made


def test_metadata_is_read_only_to_the_ground_and_else_like_a_dict(arc: archive.Archive) -> None:
    found = arc.episodes["e"].metadata
    for change in (
        lambda m: m.update(success=True),
        lambda m: m.__setitem__("success", True),
        lambda m: m.pop("task"),
        lambda m: m["goal"].clear(),
        lambda m: m["goal"]["at"].append(1),
        lambda m: m["goal"]["at"][1].setdefault("y", 1),
        lambda m: m["goal"]["pair"][1].sort(),
        lambda m: m.__ior__({"a": 1}),
        lambda m: m["goal"]["at"].__iadd__([1]),
    ):
        with pytest.raises(ReadOnlyError, match="replace=True"):
            change(found)
    assert found == METADATA == arc.episodes["e"].metadata
    assert (repr(found), str(found)) == (repr(METADATA), str(METADATA))
    assert json.loads(json.dumps({**found, "goal": 1})) == {"task": "push", "goal": 1}
    assert type(found | {"success": True}) is dict


def test_copies_may_be_changed_and_pickles_may_not(arc: archive.Archive) -> None:
    found = arc.episodes["e"].metadata
    own = copy.deepcopy(found)
    own["goal"]["at"].append(3)
    assert (type(own), type(own["goal"]["at"]), found) == (dict, list, METADATA)
    again = pickle.loads(pickle.dumps(found))
    assert again == METADATA
    with pytest.raises(ReadOnlyError, match="replace=True"):
        again["goal"].clear()


def test_arrays_within_are_read_only_too() -> None:
    value = frozen({"goal": np.arange(3)}, "")
    with pytest.raises(ValueError, match="read-only"):
        value["goal"][0] = 7
    copy.deepcopy(value)["goal"][0] = 7


@pytest.mark.parametrize(
    "change",
    [
        lambda ck: ck.episodes["e"].attributes.update(status=1),
        lambda ck: ck.episodes["e"].attributes["status"]["tries"].append(2),
        lambda ck: ck.buffers["replay"].update(steps=7),
        lambda ck: ck.metrics.update(loss=0.0),
        lambda ck: ck.lineage.clear(),
    ],
)
def test_what_a_checkpoint_says_is_read_only(arc: archive.Archive, change: Callable[[Any], Any]) -> None:
    ck = arc.checkpoints[0]
    with pytest.raises(ReadOnlyError):
        change(ck)
    assert ck.episodes["e"].attributes == {"status": {"tries": [1]}}
    assert (ck.buffers["replay"]["steps"], ck.metrics) == (3, {"loss": 1.0})


def test_progress_is_ones_own_to_count_on_with(arc: archive.Archive) -> None:
    ck = arc.checkpoints[0]
    ck.progress["samples"] += 1
    assert ck.progress == {"samples": 3}


def test_what_is_known_may_be_handed_in_again(arc: archive.Archive) -> None:
    ep = arc.checkpoints[0].episodes["e"]
    with arc.writer() as w:
        w.add_episode(ep.read(), episode_id="again", metadata=ep.metadata)
        w.checkpoint(
            2,
            state={"of": ep.metadata},
            progress=ep.metadata,
            attributes={"status": {"again": ep.attributes}},
            wait=True,
        )
    ck = arc.refresh().checkpoints[-1]
    assert ck.state(0) == {"of": METADATA}
    assert (ck.progress, arc.episodes["again"].metadata) == (METADATA, METADATA)


@pytest.mark.parametrize("steps", [{}, {"obs": {}}, {"goal": np.zeros(2)}])
def test_annotating_does_not_replace_an_episode_by_nothing(arc: archive.Archive, steps: dict[str, Any]) -> None:
    schema = archive.Schema(axes={"goal": "free"})
    with arc.writer(schema=schema) as w:
        w.add_episode({"reward": np.ones(2)}, episode_id="uncommitted")
        for known in ("e", "uncommitted"):
            with pytest.raises(
                FieldError, match=rf"no steps .*'{known}'.*nothing was changed.*\.read\(\).*replace=True"
            ):
                w.add_episode(steps, episode_id=known, replace=True, metadata={"success": True})
        w.add_episode(steps, episode_id="new", replace=True)  # replaces nothing
        w.add_episode({"reward": np.ones(0)}, episode_id="uncommitted", replace=True)  # of no steps, as it says
    assert {ep.id: ep.length for ep in arc.episodes} == {"e": 3, "new": 0, "uncommitted": 0}
    assert arc.episodes["e"].metadata == METADATA


def test_the_remedy_works(arc: archive.Archive) -> None:
    ep = arc.episodes["e"]
    with arc.writer() as w:
        w.add_episode(ep.read(), episode_id=ep.id, replace=True, metadata={**ep.metadata, "success": True})
    assert arc.episodes["e"].metadata == {**METADATA, "success": True}
    assert arc.episodes["e"].read()["reward"].tolist() == [1, 1, 1]
