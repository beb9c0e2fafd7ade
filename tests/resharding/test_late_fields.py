"""Late fields go along: to other numbers of ranks, into rings, other archives and files."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
import resharding
from archive.maintain import verify
from archive.torch import ring
from tests.support.archives import identical, reopened
from tests.support.checkpoints import steps
from tests.support.worlds import save_world, shares

ENVS, STEPS = 3, 6


def saved(url: str) -> archive.Archive:
    """Two ranks with three env rows of six steps each, of which the first two left the buffer."""

    def save(rank: int, w: archive.Writer, step: int) -> Any:
        for env in range(ENVS):
            first = (rank * ENVS + env) * STEPS
            w.append(steps(range(first, first + STEPS)), env_ids=env, first=True, episode_ids=f"r{rank}e{env}")
            w.evict(env_id=env, before=2)
        return w.checkpoint(step, progress={})

    save_world(url, [0, 1], save)
    return archive.open(url)


def advantage_of(serials: Any) -> Any:
    return np.asarray(serials, np.float32) * 3 + 1


def fill(arc: archive.Archive, *names: str) -> archive.Archive:
    eps = arc.episodes
    given = {ep.id: advantage_of(ep.read(["serial"])["serial"]) for ep in eps if not names or ep.id in names}
    return arc.add_fields({"advantage": given}, provenance={"from": "serial"})


def fits(data: dict[str, Any]) -> bool:
    return identical(data["advantage"], advantage_of(data["serial"]))


def test_a_checkpoint_made_before_it_has_it_on_any_number_of_ranks() -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"))
    found = arc.checkpoints.latest
    assert found is not None
    assert [len(data["advantage"]) for data in found.episodes.read(["advantage"])] == [4] * 6
    for world_size in (1, 2, 3):
        for share in shares(found, world_size):
            assert all(fits(data) for data in share.read())
            assert all(fits(data) for _, data in share.stream())
            filled = ring.fill(share, num_envs=2 * ENVS, max_length=8)
            assert (filled.buffers["advantage"] == filled.buffers["serial"] * 3 + 1)[filled.live].all()


def test_a_ring_is_filled_where_only_some_steps_have_it() -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"), "r0e1")
    (share,) = shares(arc.checkpoints.latest, 1)
    filled = ring.fill(share, num_envs=2 * ENVS, max_length=8)
    assert filled.buffers.keys() == {"obs", "serial", "reward"}
    assert [sorted(data) for data in share.read()].count(["advantage", "obs", "reward", "serial"]) == 1


def test_a_live_buffer_comes_back_without_what_was_added() -> None:
    """It goes on with steps that have no such field: those would get whatever lies in its memory."""
    data, torchrl_adapter = pytest.importorskip("torchrl.data"), pytest.importorskip("archive.adapters.torchrl")
    tensordict = pytest.importorskip("tensordict")

    def buffer() -> Any:
        return data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(20), batch_size=4)

    arc, live = archive.create(f"memory://{uuid.uuid4().hex}"), buffer()
    live.extend(tensordict.TensorDict({"reward": np.arange(10.0)}, [10]))
    with arc.writer() as w:
        torchrl_adapter.save(live, w, step=1)
    arc.refresh().add_fields({"advantage": {ep.id: np.ones(ep.length) for ep in arc.episodes}})
    found = arc.checkpoints.latest
    assert found is not None
    assert all("advantage" in data for data in found.episodes.read())
    for share in (resharding.plan(found, world_size=1).share(0), resharding.plan(found, world_size=2).share(1)):
        again = buffer()
        torchrl_adapter.restore(again, share)
        assert set(again[:].keys()) - {"index"} == {"reward"}


def test_a_share_as_saved_stays_so_when_it_is_pickled() -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"))
    for share in shares(arc.checkpoints.latest, 2):
        assert all("advantage" in data for data in pickle.loads(pickle.dumps(share)).read())
        for part in (share.as_saved(), share.as_saved().buffer("replay")):
            again = pickle.loads(pickle.dumps(part)).read()
            assert again
            assert all("advantage" not in data for data in again)


def test_who_resumes_goes_on_with_what_was_added_as_it_was() -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"))
    for share in shares(arc.checkpoints.latest, 1):
        with arc.writer(resume=share, session="second") as w:
            w.append(steps(range(100, 103)), env_ids=0)
            again = w.checkpoint(2).result()
    lacking = [data["serial"].tolist() for data in again.episodes.read() if "advantage" not in data]
    assert lacking == [[100, 101, 102]]
    assert [fits(data) for data in again.episodes.read() if "advantage" in data] == [True] * 6
    (new,) = again.episodes.filter(where="length = 3").read(["advantage"], missing=-1)
    assert new["advantage"].tolist() == [-1] * 3


def test_a_branch_that_was_left_behind_keeps_its_own() -> None:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    with arc.writer(session="one") as w:
        w.append(steps(range(3)), env_ids=0, first=True, episode_ids="e")
        checkpoint = w.checkpoint(1).result()
        w.append(steps(range(3, 6)), env_ids=0, last=True)
    fill(arc.refresh())
    assert len(arc.episodes["e"].read()["advantage"]) == 6
    with arc.writer(session="two", resume=checkpoint) as w:
        w.append(steps(range(50, 52)), env_ids=0, last=True)
    ep = arc.refresh().episodes["e"]
    assert ep.read(["serial"])["serial"].tolist() == [0, 1, 2, 50, 51]
    assert ep.read(["advantage"], missing=0)["advantage"].tolist() == [1, 4, 7, 0, 0]


def test_another_revision_does_not_have_it() -> None:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    with arc.writer() as w:
        w.add_episode(steps(range(3)), episode_id="e")
        w.commit()
        fill(arc.refresh())
        w.add_episode(steps(range(3)), episode_id="e", replace=True)
    assert sorted(arc.refresh().episodes["e"].read()) == ["obs", "reward", "serial"]
    assert fits(archive.open(arc.url, commit=arc.head.number - 1).episodes["e"].read())


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("transfer", ["merge", "filter", "split"])
def test_other_archives_get_it(tmp_path: Path, transfer: str, copy: bool) -> None:
    arc = fill(saved(str(tmp_path / "from")))
    arc.drop_fields(["advantage"])
    fill(arc, "r0e0", "r1e2")
    to = str(tmp_path / "to")
    run: dict[str, Callable[[], Any]] = {
        "merge": lambda: resharding.merge([arc.url], to=to, copy=copy),
        "filter": lambda: resharding.filter(arc.url, to=to, episode_id=["r0e0", "r0e1"], copy=copy),
        "split": lambda: resharding.split(arc.url, to=to, count=1, copy=copy),
    }
    run[transfer]()
    url = next(str(path.parent) for path in sorted((tmp_path / "to").rglob("archive.json")))
    found = archive.open(url, allow_bases=True)
    have = {ep.id: ep.read() for ep in found.episodes}
    assert {name for name, data in have.items() if "advantage" in data} == {"r0e0", "r1e2"} & have.keys()
    assert all(fits(data) for data in have.values() if "advantage" in data)
    number = found.head.number
    assert not verify(found, deep=True).findings
    if transfer == "merge":
        assert resharding.merge([arc.url], to=to, copy=copy).head.number == number
        arc.add_fields({"advantage": {"r0e0": np.zeros(6, np.float32)}})
        again = resharding.merge([arc.url], to=to, copy=copy)
        assert archive.open(again.url, allow_bases=True).episodes["r0e0"].read()["advantage"].tolist() == [0] * 6


@pytest.mark.parametrize("min_alive", [0.9])
def test_compaction_leaves_it_where_it_is(min_alive: float) -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"))
    arc.add_fields({"reward": {"r0e0": np.full(6, 7.0)}})
    before = {ep.id: ep.read() for ep in arc.episodes}
    resharding.compact(arc, min_alive=min_alive)
    arc = reopened(arc)
    assert "compact" in [commit.kind for commit in arc.commits]
    after = {ep.id: ep.read() for ep in arc.episodes}
    assert after.keys() == before.keys()
    assert all(identical(after[name], before[name]) for name in before)
    arc.drop_fields(["reward"])
    assert arc.episodes["r0e0"].read(["reward"])["reward"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]


def test_files_have_it(tmp_path: Path) -> None:
    arc = fill(saved(f"memory://{uuid.uuid4().hex}"))
    (name,) = resharding.export(arc, str(tmp_path), format="npz")
    with np.load(tmp_path / name) as found:
        assert (found["0/advantage"] == advantage_of(found["0/serial"])).all()
    (name,) = resharding.export(arc, str(tmp_path), format="parquet")
    table = pq.read_table(tmp_path / name)
    assert np.array_equal(table["advantage"].to_numpy(), advantage_of(table["serial"].to_numpy()))
