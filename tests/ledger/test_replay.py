"""What was trained on comes again, in that order."""

from __future__ import annotations

import time

import numpy as np
import pytest

import archive
import resharding
from archive.replaying import Replay
from tests.support.archives import fresh


def trained(arc: archive.Archive, keys: int = 4, *, ledger: str = "prompts") -> list[list[str]]:
    """A job that trains on keys two by two, the newest first; the ids of the episodes of each batch."""
    out = []
    with arc.writer() as w:
        book = w.ledger(ledger)
        book.draw([f"k{i}" for i in range(keys)], siblings=2)
        made = {}
        for i in range(keys):
            for sibling in (1, 0):
                steps = {"token": np.full(3, 10 * i + sibling)}
                made[i, sibling] = w.add_episode(steps, model_weights_uuid="w", update_count=i)
                book.seal(f"k{i}", sibling, episode_id=made[i, sibling])
        for step, first in enumerate(range(keys - 2, -1, -2)):
            book.train([f"k{first}", f"k{first + 1}"], update_count=100 + step)
            out.append([made[i, s] for i in (first, first + 1) for s in (0, 1)])
            time.sleep(0.002)
    arc.refresh()
    return out


def test_batches_come_in_the_order_of_training() -> None:
    arc = fresh()
    batches = trained(arc)
    replay = archive.replay(arc.runs["main"])
    assert len(replay) == 2
    assert [item.episodes.table["episode_id"].to_pylist() for item in replay] == batches
    assert [(item.step, list(item.keys)) for item in replay] == [(100, ["k2", "k3"]), (101, ["k0", "k1"])]
    assert [steps["token"].tolist() for steps in replay[0].episodes.read()] == [[20] * 3, [21] * 3, [30] * 3, [31] * 3]


def test_from_a_step_on() -> None:
    arc = fresh()
    batches = trained(arc)
    for run in (arc, arc.url):
        assert [i.episodes.table["episode_id"].to_pylist() for i in archive.replay(run, from_step=101)] == batches[1:]
    assert len(archive.replay(arc, from_step=102)) == 0


def test_what_a_resume_left_behind_is_no_part_of_it() -> None:
    arc = fresh()
    with arc.writer(session="first") as w:
        book = w.ledger("prompts")
        book.draw(["a", "b"])
        for key in ("a", "b"):
            book.seal(key, episode_id=w.add_episode({"token": np.ones(2)}, episode_id=key))
        book.train(["a"])
        ck = w.checkpoint(1, wait=True).result()
        book.train(["b"])
    with arc.writer(resume=resharding.plan(ck, world_size=1, tails="ignore").share(0), session="second") as w:
        (left,) = w.ledger("prompts").to_train()
        assert left.key == "b"
        w.ledger("prompts").train(["b"])
    arc.refresh()
    assert [list(item.keys) for item in archive.replay(arc)] == [["a"], ["b"]]


def test_of_several_ranks_rounds_and_without_siblings_that_were_dropped() -> None:
    arc = fresh()
    writers = [arc.writer(rank=rank, world_size=2, session="both") for rank in (0, 1)]
    told: list[tuple[int, list[str], list[str]]] = [(turn, [], []) for turn in range(2)]  # both ranks' are one step
    for turn in range(2):
        for w in writers:
            book, key = w.ledger("prompts"), f"k{w.rank}"
            book.draw([key, "mine"] if w.rank else key, siblings=3)
            names = [w.add_episode({"token": np.ones(2)}, episode_id=f"{key}-{turn}-{s}") for s in range(3)]
            for sibling in (2, 0, 1):
                book.seal(key, sibling, episode_id=names[sibling])
            book.drop(key, "bad", sibling=turn)
            book.train(key, update_count=turn)
            kept = [name for s, name in enumerate(names) if s != turn]
            told[turn] = (turn, told[turn][1] + [key], told[turn][2] + kept)
            if w.rank:
                book.drop("mine", "bad")
            time.sleep(0.002)
    for w in writers:
        w.close()
    arc.refresh()
    found = [(i.step, list(i.keys), i.episodes.table["episode_id"].to_pylist()) for i in archive.replay(arc)]
    assert found == told


def test_errors_say_what_there_is() -> None:
    arc = fresh()
    with pytest.raises(archive.NotFoundError, match="no run"):
        archive.replay(arc)
    with arc.writer() as w:
        w.add_episode({"token": np.ones(2)})
    arc.refresh()
    with pytest.raises(archive.NotFoundError, match=r"has no ledger.*there is: none"):
        archive.replay(arc)
    trained(arc)
    with pytest.raises(archive.NotFoundError, match=r"no ledger 'x'.*there is: prompts"):
        archive.replay(arc, ledger="x")
    trained(arc, ledger="seeds")
    with pytest.raises(archive.UsageError, match="several ledgers"):
        archive.replay(arc)
    assert len(archive.replay(arc, ledger="seeds")) == 2


def test_an_episode_that_was_forgotten_is_named() -> None:
    arc = fresh()
    gone = trained(arc)[0][1]
    with arc.writer() as w:  # of another start of the run: only what its newest session wrote cannot be forgotten
        ck = w.checkpoint(1, wait=True).result()
    assert ck.number
    arc.refresh()
    past = archive.open(arc.url, commit=arc.head.number - 2)
    arc.forget(ids=[gone]).commit()
    with pytest.raises(archive.NotFoundError, match=gone):
        list(Replay(archive.replay(past)._batches, arc.refresh().episodes))
