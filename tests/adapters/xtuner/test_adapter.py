"""XTuner's replay buffers through the archive: exact, incremental, by public fields,
whatever the storage and policy."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict

import archive
from archive.adapters import xtuner
from archive.adapters.xtuner.live import counters
from archive.base.errors import ArchiveError, StateError, UsageError
from tests.support import xtuner_buffers
from tests.support.backends import make_backend
from tests.support.worlds import STORES, WORLDS, save_world, shares
from tests.support.xtuner_buffers import (
    FIFOReplayPolicy,
    NaiveStorage,
    PandasStorage,
    ReplayBuffer,
    RolloutState,
    StalenessReplayPolicy,
    Status,
    buffer,
    contents,
    fresh,
    group_of,
    rollout,
    saved,
    share_of,
    uploaded,
)

KINDS = [(s, p) for s in (NaiveStorage, PandasStorage) for p in (FIFOReplayPolicy, StalenessReplayPolicy)]


def odd_group(number: int) -> list[RolloutState]:
    """What else a rollout may hold."""
    deep: dict[str, Any] = {
        "empty": {}, "$xt.ref": [1], "score": np.float32(1.5), "many": list(range(100)),
        "image": np.ones((3, 40, 40), np.uint8), "bf": torch.arange(2000, dtype=torch.bfloat16), "set": {3, 1},
        "bytes": b"\x00\xff", "nan": float("nan"), "status": Status.FILTERED, "numbered": {7: "a"},
        "text": "long " * 300,
    }  # fmt: skip
    bare = RolloutState(message=[], mm_info={"pixel_values": np.zeros((0, 4), np.float32)})
    bare.response = "\ud800 alone"
    return [
        rollout(
            number, 0, extra_fields=deep, position_ids=np.arange(900).reshape(3, 300), logprobs=[0.5, 1], tokens=None
        ),
        rollout(number, 1, extra_fields={}, prompt_ids=[], response=None, response_ids=[2**40, 1], reward=None),
        bare,
    ]


async def filled(rb: ReplayBuffer, numbers: range, task: str = "math") -> ReplayBuffer:
    for n in numbers:
        await rb.put(group_of(n, seq_staleness=n % 3), task)
    return rb


@pytest.mark.parametrize(("storage", "policy"), KINDS)
def test_a_buffer_comes_back_as_it_was(storage: type, policy: type) -> None:
    rb = asyncio.run(filled(buffer(storage, policy), range(6)))
    for i, status in enumerate(Status):
        asyncio.run(rb.put([*odd_group(20 + i)], "code", status))
    asyncio.run(rb.get(2, "math", Status.COMPLETED))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer(storage, policy)
    report = asyncio.run(xtuner.restore(again, share_of(ck)))
    assert (report.episodes, report.notes) == (11, ())
    assert contents(again) == contents(rb)
    assert counters(again) == counters(rb)
    for status in Status:
        assert asyncio.run(again.count("code", status)) == 1


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((NaiveStorage, PandasStorage), 2)))
def test_order_is_data_so_another_class_restores_it(before: type, after: type) -> None:
    rb = asyncio.run(filled(buffer(before, StalenessReplayPolicy), range(7)))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer(after, StalenessReplayPolicy)
    asyncio.run(xtuner.restore(again, ck, rank=0))
    wanted = [[r.rollout_id for r in g] for g in asyncio.run(rb.get(7, "math", Status.COMPLETED))]
    assert [[r.rollout_id for r in g] for g in asyncio.run(again.get(7, "math", Status.COMPLETED))] == wanted
    assert wanted[0][0] == 20, "the stalest first"


def test_ids_of_consumed_groups_are_not_given_out_again() -> None:
    rb = asyncio.run(filled(buffer(), range(5)))
    asyncio.run(rb.get(5, "math", Status.COMPLETED))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(ck)))
    asyncio.run(filled(again, range(5, 6)))
    assert [c[:2] for c in contents(again)] == [(6, 6)]


def test_expiry_goes_on_the_same() -> None:
    rb = asyncio.run(filled(buffer(), range(4)))
    asyncio.run(rb.refresh_staleness(5, 100))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer(PandasStorage)
    asyncio.run(xtuner.restore(again, share_of(ck)))
    for each in (rb, again):
        asyncio.run(filled(each, range(4, 6)))
        asyncio.run(each.refresh_staleness(7, 4))
    assert contents(again) == contents(rb)
    assert asyncio.run(again.count("math", Status.EXPIRED)) == 6


def test_a_save_uploads_what_is_new_and_what_changed() -> None:
    arc = fresh()
    rb = asyncio.run(filled(buffer(), range(6)))
    with arc.writer() as w:
        first = saved(rb, w)
        asyncio.run(rb.refresh_staleness(9, 100))  # ages all, changes the content of none
        second = saved(rb, w, 2)
        assert uploaded(arc, first.number) == 0
        (item, *_) = asyncio.run(rb._storage.get({"uid": 3}))
        item.item[1].response_ids.append(7)
        asyncio.run(filled(rb, range(6, 7)))
        asyncio.run(rb.get(1, "math", Status.COMPLETED))
        third = saved(rb, w, 3)
    assert uploaded(arc, second.number) == 2, "one is new, one was revised"
    ids = third.episodes.table["episode_id"].to_pylist()
    assert len(set(ids)) == 6
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(third)))
    assert contents(again) == contents(rb)
    old = buffer()
    asyncio.run(xtuner.restore(old, share_of(second)))
    assert [r.response_ids for r in old._storage._items[3].item] == [r.response_ids for r in group_of(2)]


def test_after_a_resume_only_what_is_new_is_uploaded() -> None:
    arc = fresh()
    rb = asyncio.run(filled(buffer(), range(6)))
    with arc.writer() as w:
        first = saved(rb, w)
    again, share = buffer(), share_of(first)
    asyncio.run(xtuner.restore(again, share))
    asyncio.run(filled(again, range(6, 8)))
    with archive.open(arc.url).writer(resume=share) as w:
        second = saved(again, w, 2)
    assert uploaded(arc, first.number) == 2
    third = buffer()
    asyncio.run(xtuner.restore(third, share_of(second)))
    assert contents(third) == contents(again)


def test_after_a_move_only_what_is_new_is_uploaded() -> None:
    owners = [asyncio.run(filled(buffer(), range(rank * 10, rank * 10 + 3))) for rank in range(2)]
    arc = fresh()
    ck = save_world(arc.url, owners, lambda rb, w, step: asyncio.run(xtuner.save(rb, w, step=step)))
    moved = [(buffer(), archive.open(arc.url).writer(resume=share, session="two")) for share in shares(ck, 3)]
    for (rb, w), share in zip(moved, shares(ck, 3), strict=True):
        asyncio.run(xtuner.restore(rb, share))
        asyncio.run(filled(rb, range(30, 31)))
        pending = asyncio.run(xtuner.save(rb, w, step=2))
    assert len(pending.result(60).episodes) == 9
    for _, w in moved:
        w.close()
    assert uploaded(arc, ck.number) == 3


def test_groups_are_episodes_to_look_at() -> None:
    arc = fresh()
    rb = asyncio.run(filled(buffer(), range(4)))
    with arc.writer() as w:
        ck = saved(rb, w)
    (ep,) = ck.episodes.filter(where="metadata.group_id = 2")
    data = ep.read(["rollout_id", "tokens", "logprobs", "response", "response_model_steps"])
    assert data["rollout_id"].tolist() == [20, 21]
    assert [t.tolist() for t in data["tokens"]] == [r.tokens for r in group_of(2)]
    assert data["response"].tolist() == ["answer 2.0", "answer 2.1"]
    assert (ep.total_reward, ep.update_counts, ep.metadata["task_name"]) == (1.0, (4, 6), "math")
    assert ep.attributes["status"] == "completed"
    assert ep.attributes["staleness"] == 2


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("m", "n"), WORLDS)
def test_from_m_owners_to_n(request: pytest.FixtureRequest, tmp_path: Path, store: str, m: int, n: int) -> None:
    backend = make_backend(request, store, tmp_path)
    owners = [asyncio.run(filled(buffer(), range(rank * 10, rank * 10 + 3 + rank))) for rank in range(m)]
    for rb in owners:
        asyncio.run(rb.get(1, "math", Status.COMPLETED))

    def save(rb: ReplayBuffer, w: Any, step: int) -> Any:
        return asyncio.run(xtuner.save(rb, w, step=step))

    ck = save_world(backend.url, owners, save, storage_options=backend.storage_options)
    same = [buffer() for _ in owners]
    for rank, rb in enumerate(same):
        asyncio.run(xtuner.restore(rb, ck, rank=rank))
        assert contents(rb) == contents(owners[rank])
    targets = [buffer(PandasStorage) for _ in range(n)]
    for rb, share in zip(targets, shares(ck, n), strict=True):
        asyncio.run(xtuner.restore(rb, share))
    kept = [c for rb in targets for c in contents(rb)]
    assert sorted(map(repr, (c[2:] for c in kept))) == sorted(repr(c[2:]) for rb in owners for c in contents(rb))
    highest = max(counters(rb)["uid"] for rb in owners)
    for rb in targets:
        uids = [c[0] for c in contents(rb)]
        assert len(set(uids)) == len(uids)
        assert min(uids) >= highest, "ids that some owner gave out are not given out again"
        assert counters(rb)["uid"] > max(uids)


def test_a_buffer_that_holds_groups_is_not_overwritten_by_accident() -> None:
    rb = asyncio.run(filled(buffer(), range(2)))
    with fresh().writer() as w:
        ck = saved(rb, w)
    other = asyncio.run(filled(buffer(), range(7, 9)))
    before = contents(other)
    with pytest.raises(UsageError, match="already holds 2 groups"):
        asyncio.run(xtuner.restore(other, share_of(ck)))
    assert contents(other) == before
    asyncio.run(xtuner.restore(other, share_of(ck), existing="replace"))
    assert contents(other) == contents(rb)


def test_several_buffers_in_one_checkpoint() -> None:
    named = {"replay": asyncio.run(filled(buffer(), range(3))), "eval": asyncio.run(filled(buffer(), range(5)))}
    with fresh().writer() as w:
        ck = saved(named, w)  # type: ignore[arg-type]
    again = {"replay": buffer(), "eval": buffer(PandasStorage)}
    reports = asyncio.run(xtuner.restore(again, share_of(ck)))
    assert {k: r.episodes for k, r in reports.items()} == {"replay": 3, "eval": 5}
    assert contents(again["eval"]) == contents(named["eval"])


def test_what_cannot_be_saved_is_named_and_nothing_is_committed() -> None:
    arc = fresh()
    rb = buffer()
    asyncio.run(rb.put([rollout(0, 0, extra_fields={"made_by": object()})], "math"))
    with arc.writer() as w:
        with pytest.raises(StateError, match=r"made_by.* is a object"):
            saved(rb, w)
        assert len(arc.checkpoints) == 0


def test_a_renamed_task_is_no_blocker() -> None:
    rb = asyncio.run(filled(buffer(), range(3), "old"))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(ck), tasks={"old": "new"}))
    assert asyncio.run(again.count("new", Status.COMPLETED)) == 3


def test_another_class_of_rollouts_is_no_blocker(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = asyncio.run(filled(buffer(), range(2)))
    responses = [rollout(number, 0).response_ids for number in range(2)]
    with fresh().writer() as w:
        ck = saved(rb, w)

    class Later(BaseModel):
        model_config = ConfigDict(extra="forbid")
        rollout_id: int | None = None
        response_ids: list[int] | None = None
        status: Status = Status.INIT
        note: str = "new"

    monkeypatch.setattr(xtuner_buffers, "RolloutState", Later)
    again = buffer()
    report = asyncio.run(xtuner.restore(again, share_of(ck)))
    ((first, _), _) = asyncio.run(again.get(2, "math", Status.COMPLETED))
    assert isinstance(first, Later)
    assert (first.response_ids, first.note) == (responses[first.rollout_id // 10], "new")
    assert "4 values of 'Later.logprobs' had no field here" in report.notes


def test_other_episodes_are_refused() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"obs": np.zeros((3, 2))})
        ck = w.checkpoint(1).result()
    with pytest.raises(ArchiveError, match="no XTuner replay buffer"):
        asyncio.run(xtuner.restore(buffer(), share_of(ck)))
