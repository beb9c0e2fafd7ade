"""Jobs that checkpoint, resume, journal and recover, to be interrupted anywhere: see `operations`."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack
from typing import Any

import numpy as np

import archive
import resharding
from archive.testing import assert_whole, crashed_job, steps
from tests.support.backends import Backend
from tests.support.ranks import SCHEMA, Rank, numbers, priority
from tests.support.said import Said
from tests.support.tampering import same
from tests.support.ticks import NEVER_S

RANKS, FEWER = 4, 3
ENVS, VECTOR_STEPS = 2, 3
TICKS, SAVED_AT = 3, 1
CRASHED = 2


def begin(root: Backend) -> None:
    root.create()


def save_first(root: Backend) -> None:
    """The first checkpoint of a job."""
    begin(root)
    _go_on(root, [].append, RANKS, 1)


def save(root: Backend, said: Said) -> None:
    _go_on(root, said, RANKS, 1)


def resume(root: Backend, said: Said) -> None:
    """The second checkpoint, by as many ranks."""
    _go_on(root, said, RANKS, 2)


def reshard(root: Backend, said: Said) -> None:
    """The second checkpoint, by fewer ranks."""
    _go_on(root, said, FEWER, 2)


def _go_on(root: Backend, said: Callable[[str], object], world_size: int, until: int) -> None:
    """A job of so many ranks, from its newest checkpoint, if there is one, up to the checkpoint of this step."""
    found = root.open().checkpoints.latest
    before = 0 if found is None else found.step
    if found is not None:
        said(f"saved-{before}")
    if before >= until:
        return
    session = uuid.uuid4().hex
    with ExitStack() as stack:
        if found is None:
            ranks = _begun(root, world_size, session, stack)
        else:
            ranks = _resumed(root, found, world_size, session, stack)
        for step in range(before + 1, until + 1):
            for rank in ranks:
                rank.run(VECTOR_STEPS)
            _save(ranks, step)
            said(f"saved-{step}")


def _begun(root: Backend, world_size: int, session: str, stack: ExitStack) -> list[Rank]:
    clock = itertools.count()
    out = []
    for rank in range(world_size):
        arc = root.open()
        writer = stack.enter_context(arc.writer(rank, world_size, session=session, schema=SCHEMA))
        out.append(Rank(arc, writer, {env: [] for env in range(ENVS)}, clock))
    return out


def _resumed(
    root: Backend, found: archive.Checkpoint, world_size: int, session: str, stack: ExitStack
) -> list[Rank]:  # fmt: skip
    plan = resharding.plan(found, world_size)
    clock = itertools.count(_total(found))
    out = []
    for rank in range(world_size):
        arc, share = root.open(), plan.share(rank)
        rows: dict[int, list[int]] = {}
        for env, t in zip(share.layout.env_id.tolist(), _split(share, numbers(share)), strict=True):
            rows.setdefault(env, []).extend(t.tolist())
        writer = stack.enter_context(arc.writer(resume=share, session=session, schema=SCHEMA))
        out.append(Rank(arc, writer, rows, clock))
    return out


def _split(share: Any, t: Any) -> list[Any]:
    ends = np.cumsum([episode.length for episode in share])
    return np.split(t, ends[:-1])


def _save(ranks: Sequence[Rank], step: int) -> None:
    """A checkpoint of all ranks, or the first error of one of them."""
    total = sum(len(rank.live) for rank in ranks)
    pendings = [
        rank.writer.checkpoint(
            step, columns={"priority": priority(rank.live)}, state={"rank": rank.writer.rank, "step": step},
            progress={"steps": total},
        )
        for rank in ranks
    ]  # fmt: skip
    wait([pending.future for pending in pendings], return_when=FIRST_EXCEPTION)
    for pending in pendings:
        if pending.done():
            pending.result()


def _total(ck: archive.Checkpoint) -> int:
    return int(ck.progress["steps"])


def check_job(root: Backend, said: Said) -> None:
    """Each checkpoint is whole, and none lacks that was acknowledged."""
    arc = root.open()
    assert_whole(arc)
    for ck in arc.checkpoints:
        assert ck.whole, ck
        share = resharding.plan(ck, 1).share(0)
        assert sorted(numbers(share).tolist()) == list(range(_total(ck)))
        states = {rank: {"rank": rank, "step": ck.step} for rank in range(ck.world_size)}
        assert share.source_states == states
    told = {int(word.removeprefix("saved-")) for word in said.words}
    assert told <= {ck.step for ck in arc.checkpoints}, told


def tick(root: Backend, said: Said) -> None:
    """A rank that makes an episode durable at each tick, and a checkpoint in the middle; what is there already (as the
    one before has left it) stays."""
    arc = root.open()
    with arc.writer(journal_s=NEVER_S) as w:
        there = set(arc.refresh().episodes.table["episode_id"].to_pylist())
        for i in range(TICKS):
            if f"tick-{i}" not in there:
                w.add_episode(steps(4, i), episode_id=f"tick-{i}")
                w.sync()
            said(f"tick-{i}")
            if i == SAVED_AT:
                w.checkpoint(i).result()
                said("saved")


def check_ticks(root: Backend, said: Said) -> None:
    """What was durable is there once it is recovered."""
    arc = root.open()
    assert_whole(arc)
    arc.recover()
    assert_whole(arc.refresh())
    found = {episode.id: episode.read() for episode in arc.episodes}
    assert list(found) == [f"tick-{i}" for i in range(len(found))]
    assert all(same(data, steps(4, i)) for i, data in enumerate(found.values()))
    assert {word for word in said.words if word != "saved"} <= set(found)
    assert "saved" not in said or SAVED_AT in {ck.step for ck in arc.checkpoints}


def crash(root: Backend) -> None:
    crashed_job(root.url, CRASHED, storage_options=root.storage_options)


def recover(root: Backend, said: Said) -> None:
    """A checkpoint of what the ranks that died had journaled."""
    found = root.open().recover()
    assert found is not None
    said("recovered")


def check_recovered(root: Backend, said: Said) -> None:
    """What they had saved is there; what they had journaled for all of them or none."""
    arc = root.open()
    assert_whole(arc)
    ids = {episode.id: episode.read() for episode in arc.episodes}
    assert set(ids) in (_of_all("saved"), _of_all("saved") | _of_all("journaled"))
    assert all(same(data, steps(4, int(name[0]))) for name, data in ids.items())
    assert "recovered" not in said or _of_all("journaled") <= set(ids)
    latest = arc.checkpoints.latest
    assert latest is not None
    assert {episode.id for episode in latest.episodes} == set(ids)


def _of_all(what: str) -> set[str]:
    return {f"{rank}-{what}" for rank in range(CRASHED)}
