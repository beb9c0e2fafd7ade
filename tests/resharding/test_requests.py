"""What resuming costs, counted at the server: each byte once, few requests, whatever M, N and the age of the ring."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Schema
from archive.checkpoint.checkpoints import Checkpoint
from tests.support import servers
from tests.support.backends import Proxied
from tests.support.reading_bounds import Bound, bound
from tests.support.sampling import few_of

ROW_BYTES = 1000 + 8 * 8 + 2 * 4 + 4
TARGETS = (1, 2, 3, 5, 8)


def steps(rng: np.random.Generator, count: int, width: int = 1000) -> dict[str, Any]:
    return {
        "image": rng.integers(0, 256, (count, width), np.uint8), "state": rng.normal(size=(count, 8)),
        "action": rng.normal(size=(count, 2)).astype(np.float32), "reward": np.ones(count, np.float32),
    }  # fmt: skip


def save(
    proxied: Proxied, world_size: int, *, envs: int, length: int, slabs: int, evicted: float = 0.0, width: int = 1000
) -> Checkpoint:
    """Ranks that fill their rings, a shard each time the background has enough, and save them."""
    rng = np.random.default_rng(world_size)
    direct = servers.s3fs_options(proxied.endpoint)  # only reading is counted
    archive.create(proxied.url, storage_options=direct)
    archives = [archive.open(proxied.url, storage_options=direct) for _ in range(world_size)]
    writers = [a.writer(r, world_size, session="s", schema=Schema(), compression=None) for r, a in enumerate(archives)]
    for w in writers:
        for t in range(length):
            w.append(steps(rng, envs, width), env_ids=np.arange(envs), last=(t + np.arange(envs)) % 20 == 19)
            if (t + 1) % -(-length // slabs) == 0:
                w.flush()
        for env in range(envs):
            w.evict(env, before=int(length * evicted))
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(lambda w: w.checkpoint(1).result(120), writers))
    return opened(proxied)


def opened(proxied: Proxied) -> Checkpoint:
    """As a process that has just started sees it."""
    return archive.open(proxied.url, storage_options=proxied.storage_options).checkpoints["step-1"]


def read(proxied: Proxied, plan: resharding.Plan, rank: int) -> tuple[int, int]:
    """Requests and bytes of shards that the server sees while one rank reads its share."""
    share = resharding.Plan.from_json(plan.to_json(), opened(proxied)).share(rank)
    proxied.proxy.log.clear()
    got = sum(len(data["reward"]) for data in share.read())
    assert got == plan.steps[rank]
    seen = [s for s in proxied.proxy.log if "/shards/" in s.path]
    assert {s.method for s in seen} <= {"GET"}
    return len(seen), sum(s.bytes_out for s in seen)


def check(proxied: Proxied, ck: Checkpoint, targets: Sequence[int], row_bytes: int = ROW_BYTES) -> None:
    for n in targets:
        plan = resharding.plan(ck, world_size=n)
        total = Bound()
        requests = fetched = 0
        for rank in range(n):
            cost = plan.share(rank).cost()
            limit = bound(plan.share(rank), row_bytes)
            counted = read(proxied, plan, rank)
            assert counted == (cost["requests"], cost["bytes"]), "the dry run says what the server sees"
            assert counted[1] <= limit.bytes, (n, rank, counted, limit)
            assert counted[0] <= limit.requests, (n, rank, counted, limit)
            requests, fetched = requests + counted[0], fetched + counted[1]
            total.needed, total.edges, total.partial = (
                total.needed + limit.needed, total.edges + limit.edges, total.partial + limit.partial,
            )  # fmt: skip
            total.shards += limit.shards
        print(
            f"{ck.world_size} -> {n}: {fetched / 1e6:.2f} MB of {total.needed / 1e6:.2f} needed, {requests} requests "
            f"of {total.requests:.0f}, {total.shards} shards crossed"
        )


@pytest.mark.parametrize("m", few_of([2, 8, 1, 3], 2))
def test_any_ranks_read_each_byte_once(proxied: Proxied, m: int) -> None:
    ck = save(proxied, m, envs=4, length=1600 // m, slabs=2)
    check(proxied, ck, TARGETS)


@pytest.mark.parametrize("proxied", ["seaweedfs"], indirect=True)
@pytest.mark.parametrize("evicted", few_of([0.5, 0.2, 0.8], 1))
def test_rings_read_what_is_left_of_them(proxied: Proxied, evicted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the env rows appended as it comes; the writer cuts slabs of time."""
    monkeypatch.setattr("archive.write.slabs.LEAST_SLAB_BYTES", 2**18)  # 32 of them, as larger rings have
    ck = save(proxied, 2, envs=16, length=500, slabs=1, evicted=evicted)
    assert len(archive.open(proxied.url, storage_options=proxied.storage_options).shards) > 40
    check(proxied, ck, (1, 2, 3))


def test_thousands_of_env_rows(proxied: Proxied) -> None:
    """A few steps of each, in shards of a few steps of each; see test_rings.py for cuts within them."""
    ck = save(proxied, 2, envs=4096, length=12, slabs=3, evicted=2 / 3, width=100)
    row_bytes = ROW_BYTES - 900
    check(proxied, ck, (3,), row_bytes)


def test_opening_planning_and_resuming_take_few_requests(proxied: Proxied) -> None:
    """Nothing but the manifest is read before the data, and of each object no more than a GET."""
    save(proxied, 3, envs=2, length=40, slabs=2)
    proxied.proxy.log.clear()
    ck = opened(proxied)
    assert len(proxied.proxy.log) <= 8
    proxied.proxy.log.clear()
    share = resharding.plan(ck, world_size=2).share(1)
    share.to_resume()
    verbs = proxied.proxy.verbs()
    assert set(verbs) == {"GET"}
    assert len(verbs) <= 2 + ck.world_size  # segments, live set, and what each rank staged
    assert not [s for s in proxied.proxy.log if "/shards/" in s.path]


def test_streaming_in_small_batches_fetches_no_chunk_twice(proxied: Proxied) -> None:
    """A chunk in which one batch ends and the next begins is fetched once."""
    ck = save(proxied, 2, envs=16, length=160, slabs=4)
    plan = resharding.plan(ck, world_size=3)
    at_once = plan.share(1).cost()
    limit = bound(plan.share(1), ROW_BYTES)
    share = resharding.Plan.from_json(plan.to_json(), opened(proxied)).share(1)
    proxied.proxy.log.clear()
    steps_read = sum(len(data["reward"]) for _, data in share.stream(max_bytes=2**19))
    seen = [s for s in proxied.proxy.log if "/shards/" in s.path]
    assert steps_read == plan.steps[1]
    assert len(seen) > at_once["requests"], "there were several batches"
    assert sum(s.bytes_out for s in seen) <= min(limit.bytes, 1.02 * at_once["bytes"])


def test_planning_and_reading_a_share_import_no_pandas(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    writers = [arc.writer(rank, 2, session="s") for rank in range(2)]
    saved = []
    for w in writers:
        for first in (np.tile(np.arange(5) == 0, 2), None):  # an episode is a chain of segments
            w.append({"x": np.arange(10.0)}, env_ids=np.repeat([0, 1], 5), first=first)
            w.commit()
        attributes = {"age": dict.fromkeys(w.live["episode_id"].to_pylist(), 1)}
        saved.append(w.checkpoint(1, state={"a": 1}, columns={"p": np.arange(20.0)}, attributes=attributes))
    for pending in saved:
        pending.result(60)
    code = """
import sys, archive, resharding
ck = archive.open(sys.argv[1]).checkpoints["step-1"]
for given in ({"world_size": 2}, {"world_size": 3, "weights": "p"}, {"world_size": 1, "capacity": 30}):
    plan = resharding.plan(ck, **given)
    str(plan), plan.to_json(), plan.dropped_episodes()
    share = plan.share(0)
    assert len(share.read()) == len(list(share)) > 0
    share.columns, share.attributes, share.source_states, share.layout
print([name for name in ("pandas", "zarr", "torch") if name in sys.modules])
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "root")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"
