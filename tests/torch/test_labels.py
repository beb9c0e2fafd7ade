"""Labels of episodes as priorities and keys of a sampler."""

from __future__ import annotations

import uuid

import pytest

import archive
from archive.base.errors import UsageError
from tests.support.archives import with_checkpoints

torch = pytest.importorskip("torch", reason="the sampler needs torch")
from archive.torch import Sampler  # noqa: E402


@pytest.fixture
def arc() -> archive.Archive:
    arc = with_checkpoints(f"memory://{uuid.uuid4().hex}")
    return arc.label({"e1": {"quality": 2.5, "good": True, "note": "x"}})


@pytest.mark.parametrize("name", ["label.quality", "label.good"])
@pytest.mark.parametrize("unit", ["step", "episode"])
def test_a_label_is_a_priority_of_all_steps_of_its_episode(arc: archive.Archive, name: str, unit: str) -> None:
    for source in (arc, arc.checkpoints.latest):
        how = {"unit": unit, "strategy": "prioritized", "priorities": name}
        sampler = Sampler(source, ["reward"], batch_size=20, index=True, **how)
        assert set(sampler.sample()["_index"].tolist()) <= ({1} if unit == "episode" else {3, 4, 5})


@pytest.mark.parametrize("name", ["label.note", "label.never"])
def test_a_label_without_numbers_is_no_priority(arc: archive.Archive, name: str) -> None:
    with pytest.raises(UsageError, match=r"no numbers .* label\.good, label\.note, label\.quality"):
        Sampler(arc, ["reward"], strategy="prioritized", priorities=name)


def test_a_label_is_the_key_of_a_group(arc: archive.Archive) -> None:
    arc.label({"e0": {"task": "a"}, "e1": {"task": "b"}, "e2": {"task": "a"}})
    with Sampler(arc, ["reward"], unit="group", group="label.task", batch_size=1) as sampler:
        assert len(sampler) == 2
