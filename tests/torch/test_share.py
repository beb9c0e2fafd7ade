"""Sampling from checkpoints and shares: columns and new ids are the steps' own, and a share is drawn from at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.checkpoint.checkpoints import Checkpoint
from tests.support import servers
from tests.support.backends import Proxied
from tests.support.ranks import assert_sound, checkpoint, close, job, priority

torch = pytest.importorskip("torch", reason="the sampler needs torch")
from archive.torch import Sampler  # noqa: E402


@pytest.fixture(scope="module")
def ck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    url = str(tmp_path_factory.mktemp("share") / "a")
    archive.create(url)
    ranks = job(url, 3, "first", envs=4)
    for rank in ranks:
        rank.run(60)
        rank.evict(0.3)
    yield checkpoint(ranks, 1)
    close(ranks)


def arrays(nest: Any) -> Any:
    return {k: arrays(v) for k, v in nest.items()} if isinstance(nest, dict) else nest.numpy()


def test_a_checkpoints_steps_have_their_column(ck: Checkpoint) -> None:
    sampler = Sampler(ck, batch_size=128, strategy="prioritized", priorities="priority", index=True)
    assert len(sampler) == ck.episodes.lengths().sum()
    every = sampler._gather.rows(*sampler._gather.place(np.arange(len(sampler))))
    np.testing.assert_array_equal(sampler.strategy.priorities, priority(every["t"]))  # type: ignore[attr-defined]
    batch = arrays(sampler.sample())
    assert_sound({k: v for k, v in batch.items() if not k.startswith("_")})
    np.testing.assert_array_equal(every["t"][batch["_index"]], batch["t"])


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_shares_have_columns_and_new_ids(ck: Checkpoint, world_size: int) -> None:
    plan = resharding.plan(ck, world_size=world_size)
    seen: list[int] = []
    for rank in range(world_size):
        share = plan.share(rank)
        with Sampler(share, batch_size=share.steps, strategy="without_replacement", index=True) as sampler:
            batch = arrays(sampler.sample())
        order = np.argsort(batch.pop("_index"))
        read = share.read()
        for name in ("t", "env", "traj", "sum"):
            whole = np.concatenate([data[name] for data in read])
            np.testing.assert_array_equal(batch[name][order], whole, err_msg=name)
            assert batch[name].dtype == whole.dtype
        for name in ("env", "traj"):
            np.testing.assert_array_equal(batch["ids"][name][order], np.concatenate([d["ids"][name] for d in read]))
        np.testing.assert_array_equal(priority(batch["t"][order]), share.columns["priority"])
        seen += batch["t"].tolist()
    assert len(seen) == len(set(seen)) == ck.episodes.lengths().sum()


def test_whole_episodes_of_a_share_have_new_ids(ck: Checkpoint) -> None:
    share = resharding.plan(ck, world_size=2).share(1)
    with Sampler(share, batch_size=6, unit="episode", index=True) as sampler:
        batch = sampler.sample()
    ends = np.cumsum(batch["env"].lengths.numpy())
    for number, env, traj in zip(
        batch["_index"].tolist(),
        np.split(batch["env"].values, ends),
        np.split(batch["traj"].values, ends),
        strict=False,
    ):
        assert set(env.tolist()) == {int(share.layout.env_id[number])}
        assert set(traj.tolist()) == {number}


def test_a_share_is_seeded_by_its_plan(ck: Checkpoint) -> None:
    plan = resharding.plan(ck, world_size=2)
    draws = []
    for rank in (0, 0, 1):
        with Sampler(plan.share(rank), ["t"], batch_size=20, fill=False, index=True) as sampler:
            draws.append(sampler.sample()["_index"].tolist())
    assert draws[0] == draws[1] != draws[2]


def large(proxied: Proxied, *, episodes: int, steps: int, width: int) -> None:
    """An archive with a checkpoint, written past the proxy."""
    arc = archive.create(proxied.url, storage_options=servers.s3fs_options(proxied.endpoint))
    with arc.writer(compression=None) as w:
        for i in range(episodes):
            t = np.arange(i * steps, (i + 1) * steps)
            w.add_episode({"t": t, "x": np.repeat(t[:, None], width, 1), "action": t.astype(np.float32)})
        w.checkpoint(1, columns={"priority": np.ones(episodes * steps)}).result(60)


def shard_requests(proxied: Proxied) -> int:
    return sum("/shards/" in seen.path for seen in proxied.proxy.log)


@pytest.mark.parametrize("proxied", ["seaweedfs"], indirect=True)
def test_the_first_batch_does_not_wait_for_the_rest(proxied: Proxied) -> None:
    large(proxied, episodes=40, steps=250, width=512)
    latest = archive.open(proxied.url, storage_options=proxied.storage_options).checkpoints.latest
    assert latest is not None
    share = resharding.plan(latest, world_size=1).share(0)
    proxied.proxy.add("delay", path="/shards/", times=-1, seconds=0.02)
    started = time.perf_counter()
    sampler = Sampler(share, batch_size=32, max_ahead_bytes=2**20)
    batch = sampler.sample()
    first_s, ready = time.perf_counter() - started, sampler.ready
    assert torch.equal(batch["x"][:, 0], batch["t"])
    assert first_s < 4
    assert ready < 0.9
    assert sampler.fill(60)
    assert sampler.ready == 1.0
    proxied.proxy.log.clear()
    for _ in range(5):
        batch = sampler.sample()
        assert torch.equal(batch["x"][:, 511], batch["t"])
    assert shard_requests(proxied) == 0
    sampler.close()


def test_requests_at_the_server_are_few(proxied: Proxied) -> None:
    large(proxied, episodes=30, steps=100, width=256)
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    sampler = Sampler(arc, ["x", "action"], batch_size=64, generator=torch.Generator().manual_seed(0))
    proxied.proxy.log.clear()
    chunks = 0
    for _ in range(6):
        sampler.sample()
        chunks += sampler.io_stats.batch.chunks - sampler.io_stats.batch.hits
    assert sampler.io_stats.total.requests == shard_requests(proxied) <= 1.2 * chunks
    small = Sampler(arc, ["action"], batch_size=64)
    proxied.proxy.log.clear()
    small.sample()
    assert shard_requests(proxied) <= 2
    assert sum(seen.bytes_out for seen in proxied.proxy.log) < 40_000


def test_a_batch_that_was_drawn_ahead_is_not_fetched_again(proxied: Proxied) -> None:
    large(proxied, episodes=20, steps=100, width=256)
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    sampler = Sampler(arc, batch_size=16, prefetch=2, generator=torch.Generator().manual_seed(0))
    plain = Sampler(arc, batch_size=16, generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        assert torch.equal(sampler.sample()["t"], plain.sample()["t"])
    sampler.close()
    proxied.proxy.log.clear()
    again = Sampler(arc, batch_size=16, prefetch=2, generator=torch.Generator().manual_seed(0))
    ranges: list[tuple[str, str | None]] = []
    for _ in range(8):
        again.sample()
    again.close()
    ranges = [(seen.path, seen.range) for seen in proxied.proxy.log if "/shards/" in seen.path]
    assert len(ranges) == len(set(ranges)) > 0


def test_memory_of_a_filling_sampler_is_bounded(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer(compression=None) as w:
        for i in range(20):
            w.add_episode({"t": np.full(200, i), "x": np.zeros((200, 1000), np.uint8)})
    with Sampler(archive.open(tmp_path / "a"), cache_bytes=2**20, fill=True, batch_size=16) as sampler:
        for _ in range(30):
            sampler.sample()
            assert sampler._gather.held_bytes <= 2**20
        assert sampler.fill(60)
        assert 0.1 < sampler.ready < 0.5
