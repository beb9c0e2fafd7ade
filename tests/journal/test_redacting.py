"""Redaction of what was journaled: no object that stays names an episode of which nothing is to be left."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
import resharding
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.ticks import NEVER_S

SECRET = "of-a-person"


def naming(arc: archive.Archive, name: str) -> list[str]:
    """The objects that hold this text, but for requests for checkpoints."""
    keys = [one.key for one in arc.storage.scan("")]
    return [key for key, data in zip(keys, arc.storage.get_all(keys), strict=True) if name.encode() in data]


def episode(n: int, base: int) -> dict[str, Any]:
    return {"obs": np.arange(base, base + n)}


def test_nothing_in_a_journal_names_what_was_redacted() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.append(episode(3, 0), env_ids=0, last=[False] * 3, episode_ids=[SECRET] * 3)
    w.sync()
    w.close_episodes([0], truncated=True, reason="enough")  # the row that ends it comes with another's steps
    w.add_episode(episode(4, 10), episode_id="beside")
    w.sync()
    w.add_episode(episode(4, 20), episode_id="third")
    w.journal(attributes={"q": {SECRET: 1, "third": 2}})
    w.sync()
    w.add_episode(episode(4, 30), episode_id="fourth")
    w.remove([SECRET])
    w.checkpoint(1, wait=True)
    w.close()
    with arc.writer(resume=arc.refresh().checkpoints.latest) as other:
        other.checkpoint(2, wait=True)
    arc.refresh()
    plan = arc.forget(archive.Keep(last=1), ids=[SECRET], redact=True, dry_run=False)
    assert not plan.obstacles
    arc.prune("0s", dry_run=False, force=True)
    found = archive.open(arc.url)
    assert sorted(found.episodes.table["episode_id"].to_pylist()) == ["beside", "fourth", "third"]
    assert found.episodes["beside"].read()["obs"].tolist() == [10, 11, 12, 13]
    assert found.episodes["third"].read()["obs"].tolist() == [20, 21, 22, 23]
    assert [key for key in naming(found, SECRET) if key.startswith("journal/")] == []


def of_another_session(*, beyond: bool) -> archive.Archive:
    """An episode that a second session has in its buffer, and names in its journal beside the steps of others; then it
    is evicted everywhere. beyond: it is named in what lies beyond the newest checkpoint, too."""
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(episode(3, 0), episode_id=SECRET)
        first = w.checkpoint(1, wait=True).result()
    w = arc.writer(resume=first, journal_s=NEVER_S)
    prompts = w.ledger("prompts")
    prompts.draw(["p"], siblings=2)
    w.add_episode(episode(4, 10), episode_id="beside")
    prompts.seal("p", 0, episode_id=SECRET)
    w.journal(attributes={"q": {SECRET: 1}})
    w.sync()
    w.remove([SECRET])
    w.checkpoint(2, wait=True)  # its staged object has the row of the ledger, so that it must go, too
    w.checkpoint(3, wait=True)
    if beyond:
        prompts.seal("p", 1, episode_id=SECRET)
        w.sync()
    die(w)
    return arc.refresh()


def test_what_a_later_session_journaled_of_it_goes_too() -> None:
    arc = of_another_session(beyond=False)
    plan = arc.forget(archive.Keep(last=1), ids=[SECRET], redact=True, dry_run=False)
    assert not plan.obstacles, plan.obstacles
    arc.prune("0s", dry_run=False, force=True)
    found = archive.open(arc.url)
    assert found.episodes["beside"].read()["obs"].tolist() == [10, 11, 12, 13]
    assert [key for key in naming(found, SECRET) if not key.startswith("commits/")] == []


def test_what_can_still_be_recovered_stands_in_its_way() -> None:
    arc = of_another_session(beyond=True)
    plan = arc.forget(archive.Keep(last=1), ids=[SECRET], redact=True)
    assert any("journal" in one for one in plan.obstacles), plan.obstacles
    plan_of_latest = resharding.plan(arc.checkpoints.latest, 1, tails="ignore")
    with arc.writer(resume=plan_of_latest.share(0)) as w:
        w.checkpoint(4, wait=True)
    plan = arc.refresh().forget(archive.Keep(last=1), ids=[SECRET], redact=True, dry_run=False)
    assert not plan.obstacles, plan.obstacles
