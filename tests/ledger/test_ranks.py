"""A ledger of several ranks: who does what again, on as many and on others."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

import archive
import resharding
from archive.ledger import Group, Rollout
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import steps

SIBLINGS = 2


def world(arc: archive.Archive, ranks: int, resume: Any = None) -> list[archive.Writer]:
    """The writers of a session of so many ranks; resume: rank -> what it goes on from."""
    options = [
        {"rank": r, "world_size": ranks} if resume is None else {"rank": r, "resume": resume(r)} for r in range(ranks)
    ]
    session = f"session-{len(arc.refresh().commits)}"
    return [reopened(arc).writer(session=session, **one) for one in options]


def saved(writers: list[archive.Writer], step: int, **more: Any) -> None:
    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(lambda w: w.checkpoint(step, wait=True, **more), writers))
    for w in writers:
        w.close()


def together(parts: Iterable[list[Any]]) -> list[Any]:
    return sorted(chain.from_iterable(parts))


def left_by_four(**more: Any) -> tuple[archive.Archive, list[Rollout], list[Group], dict[str, int]]:
    """An archive in which four ranks had prompts in flight; what is left, and who held the episodes."""
    arc = fresh()
    writers = world(arc, 4)
    left: list[Rollout] = []
    ready: list[Group] = []
    held: dict[str, int] = {}
    for w in writers:
        keys = [f"{w.rank}-{i}" for i in range(5)]
        ledger = w.ledger("prompts")
        ledger.draw(keys, siblings=SIBLINGS, cursor={"rank": w.rank})
        ledger.start(keys[:3])
        names = [w.add_episode(steps([10 * w.rank + i])) for i in range(4)]
        held |= dict.fromkeys(names, w.rank)
        for key, sibling, name in zip([keys[0], keys[1], keys[1], keys[4]], [1, 0, 1, 0], names, strict=True):
            ledger.seal(key, sibling, name)
        missing = [(keys[0], 0), (keys[2], 0), (keys[2], 1), (keys[3], 0), (keys[3], 1), (keys[4], 1)]
        left += [Rollout(*one) for one in missing]
        ready.append(Group(keys[1], names[1:3]))
    saved(writers, 1, **more)
    return reopened(arc), left, ready, held


@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
def test_each_is_done_again_by_one_rank_where_its_siblings_are(ranks: int) -> None:
    arc, left, ready, _ = left_by_four()
    plan = resharding.plan(arc.checkpoints["step-1"], world_size=ranks)
    writers = world(arc, ranks, plan.share)
    ledgers = [w.ledger("prompts") for w in writers]
    parts = [ledger.to_reissue() for ledger in ledgers]
    assert together(parts) == sorted(left)
    assert all(ledger.to_reissue(all_ranks=True) == ledgers[0].to_reissue(all_ranks=True) for ledger in ledgers)
    assert together(ledger.to_train() for ledger in ledgers) == ready
    assert together(ledger.to_reissue("group") for ledger in ledgers) == sorted({one.key for one in left})
    for w, ledger, part in zip(writers, ledgers, parts, strict=True):
        live = set(w.live["episode_id"].to_pylist())
        for key in {one.key for one in part} | {group.key for group in ledger.to_train()}:
            assert not ledger.sealed(key) or ledger.sealed(key)[min(ledger.sealed(key))] in live
        assert ledger.cursors == {rank: {"rank": rank} for rank in range(4)}
    sizes = [len(part) for part in parts]
    assert ranks > 4 or max(sizes) <= 2 * -(-len(left) // ranks), "no rank has it all"
    for w in writers:
        w.close()


@pytest.mark.parametrize("replay", [True, False])
def test_the_same_ranks_go_on_where_they_were(replay: bool) -> None:
    arc, left, ready, _ = left_by_four(save_replay=replay)
    ck = arc.checkpoints["step-1"]
    writers = world(arc, 4, lambda rank: ck)
    ledgers = [w.ledger("prompts") for w in writers]
    assert together(ledger.to_reissue() for ledger in ledgers) == sorted(left)
    assert together(ledger.to_train() for ledger in ledgers) == ready
    if replay:
        assert all(str(group.key).startswith(str(w.rank)) for w in writers for group in w.ledger("prompts").to_train())
    for w in writers:
        w.close()


@pytest.mark.parametrize("trains", [(), (0,), (1,), (0, 1)])
def test_a_key_that_two_ranks_drew_is_one_round_for_those_who_go_on(trains: tuple[int, ...]) -> None:
    arc = fresh()
    writers = world(arc, 2)
    for w in writers:
        ledger = w.ledger("prompts")
        ledger.draw("a", siblings=1 + w.rank)
        for sibling in range(1 + w.rank):
            ledger.seal("a", sibling, w.add_episode(steps([w.rank]), episode_id=f"{w.rank}-{sibling}"))
        if w.rank in trains:
            ledger.train("a")
    saved(writers, 1)
    ck = reopened(arc).checkpoints["step-1"]
    writers = world(arc, 3, resharding.plan(ck, world_size=3).share)
    ledgers = [w.ledger("prompts") for w in writers]
    assert together(ledger.to_train() for ledger in ledgers) == ([] if trains else [Group("a", ["1-0", "1-1"])])
    assert together(ledger.to_reissue() for ledger in ledgers) == []
    assert len(reopened(arc).episodes) == 3, "none is lost"
    for w in writers:
        w.close()
