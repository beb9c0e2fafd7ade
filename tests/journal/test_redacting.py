"""Redaction of what was journaled: no object that stays names an episode of which nothing is to be left."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from tests.support.archives import fresh
from tests.support.journals import NEVER_S


def naming(arc: archive.Archive, name: str) -> list[str]:
    """The objects that hold this text, but for requests for checkpoints."""
    keys = [one.key for one in arc.storage.scan("")]
    return [key for key, data in zip(keys, arc.storage.get_all(keys), strict=True) if name.encode() in data]


def episode(n: int, base: int) -> dict[str, Any]:
    return {"obs": np.arange(base, base + n)}


def test_nothing_in_a_journal_names_what_was_redacted() -> None:
    arc = fresh()
    secret = "of-a-person"
    w = arc.writer(journal_s=NEVER_S)
    w.append(episode(3, 0), env_ids=0, last=[False] * 3, episode_ids=[secret] * 3)
    w.sync()
    w.close_episodes([0], truncated=True, reason="enough")  # the row that ends it comes with another's steps
    w.add_episode(episode(4, 10), episode_id="beside")
    w.sync()
    w.add_episode(episode(4, 20), episode_id="third")
    w.journal(attributes={"q": {secret: 1, "third": 2}})
    w.sync()
    w.add_episode(episode(4, 30), episode_id="fourth")
    w.remove([secret])
    w.checkpoint(1, wait=True)
    w.close()
    with arc.writer(resume=arc.refresh().checkpoints.latest) as other:
        other.checkpoint(2, wait=True)
    arc.refresh()
    plan = arc.forget(archive.Keep(last=1), ids=[secret], redact=True, dry_run=False)
    assert not plan.obstacles
    arc.prune("0s", dry_run=False, force=True)
    found = archive.open(arc.url)
    assert sorted(found.episodes.table["episode_id"].to_pylist()) == ["beside", "fourth", "third"]
    assert found.episodes["beside"].read()["obs"].tolist() == [10, 11, 12, 13]
    assert found.episodes["third"].read()["obs"].tolist() == [20, 21, 22, 23]
    assert [key for key in naming(found, secret) if key.startswith("journal/")] == []
