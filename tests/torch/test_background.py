"""What the sampler does behind: no failure there is swallowed or costs a batch, and use after close is an error."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import ArchiveError, ClosedError, MissingObjectError, UsageError
from tests.support import servers
from tests.support.backends import Proxied
from tests.support.gathering import made

torch = pytest.importorskip("torch", reason="the sampler needs torch")
from archive.torch import Sampler  # noqa: E402
from archive.torch.strategies import WithoutReplacement  # noqa: E402

LENGTHS = [30, 30, 30]


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    return made(tmp_path / "a", LENGTHS)


def hide(tmp_path: Path, hidden: bool) -> None:
    """Take the shards away, or put them back."""
    here, away = tmp_path / "a" / "shards", tmp_path / "a" / "gone"
    (here if hidden else away).rename(away if hidden else here)


def settle(sampler: Sampler) -> None:
    """Wait for what is fetched ahead."""
    for future in sampler._gather._ahead:
        future.exception(30)


def drawn(sampler: Sampler, batches: int) -> list[list[int]]:
    return [sampler.sample()["t"].tolist() for _ in range(batches)]


def seeded() -> Any:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_failure_ahead_surfaces_at_the_next_batch_and_costs_none(
    arc: archive.Archive, tmp_path: Path, prefetch: int
) -> None:
    options: Any = {"batch_size": 10, "strategy": "without_replacement", "cache_bytes": 0}
    wanted = drawn(Sampler(arc, ["t"], generator=seeded(), **options), 18)
    sampler = Sampler(archive.open(tmp_path / "a"), ["t"], generator=seeded(), prefetch=prefetch, **options)
    found = drawn(sampler, 2)
    settle(sampler)
    for _ in range(2):
        hide(tmp_path, True)
        sampler._gather.prefetch([0, 1, 2], [0, 0, 0])
        settle(sampler)
        hide(tmp_path, False)
        with pytest.raises(MissingObjectError, match="archive verify"):  # though all is there again
            sampler.sample()
        found += drawn(sampler, 8)
        settle(sampler)
    assert found == wanted
    sampler.close()


def test_a_failure_of_filling_surfaces_once_and_can_be_tried_again(arc: archive.Archive, tmp_path: Path) -> None:
    with Sampler(arc, ["t"], fill=True, batch_size=2) as sampler:
        assert sampler.fill(60)
    with Sampler(archive.open(tmp_path / "a"), ["t"], batch_size=2) as again:
        hide(tmp_path, True)
        with pytest.raises(MissingObjectError, match="archive verify"):
            again.fill(60)
        hide(tmp_path, False)
        again.sample()
        assert again.fill(60)
        assert again.ready == 1.0


def test_a_batch_that_failed_is_the_next_one(arc: archive.Archive, tmp_path: Path) -> None:
    options: Any = {"batch_size": 10, "strategy": "without_replacement", "cache_bytes": 0}
    wanted = drawn(Sampler(arc, ["t"], generator=seeded(), **options), 9)
    broken = Sampler(archive.open(tmp_path / "a"), ["t"], generator=seeded(), **options)
    found = drawn(broken, 3)
    hide(tmp_path, True)
    for _ in range(2):
        with pytest.raises(MissingObjectError):
            broken.sample()
    hide(tmp_path, False)
    assert found + drawn(broken, 6) == wanted


def test_a_failure_while_drawing_ahead_costs_no_batch(
    arc: archive.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"batch_size": 10, "strategy": "without_replacement"}
    wanted = drawn(Sampler(arc, ["t"], generator=seeded(), **options), 9)
    sampler = Sampler(archive.open(tmp_path / "a"), ["t"], generator=seeded(), prefetch=2, **options)
    whole, calls = sampler._gather.prefetch, iter(range(100))

    def broken(*args: Any) -> None:
        if next(calls) % 2:
            raise MissingObjectError("gone")
        whole(*args)

    monkeypatch.setattr(sampler._gather, "prefetch", broken)
    found, failures = [], 0
    while len(found) < 9:
        try:
            found += drawn(sampler, 1)
        except MissingObjectError:
            failures += 1
    assert found == wanted
    assert failures > 2
    sampler.close()


def test_a_failure_ahead_that_nobody_was_told_of_surfaces_at_the_end(arc: archive.Archive, tmp_path: Path) -> None:
    sampler = Sampler(arc, ["t"], batch_size=2, cache_bytes=0)
    sampler.sample()
    hide(tmp_path, True)
    sampler._gather.prefetch([0, 1, 2], [0, 0, 0])
    settle(sampler)
    with pytest.raises(MissingObjectError):
        sampler.close()
    sampler.close()


def test_what_the_store_refused_ahead_is_told_though_it_answers_again(proxied: Proxied) -> None:
    made(proxied.url, [300], storage_options=servers.s3fs_options(proxied.endpoint), compression=None)
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    options: Any = {"batch_size": 4, "strategy": "without_replacement"}
    plain = Sampler(arc, ["image"], generator=seeded(), **options)
    with Sampler(arc, ["image"], generator=seeded(), prefetch=1, **options) as sampler:
        found = [sampler.sample()["image"]]
        settle(sampler)
        proxied.proxy.add("status", path="/shards/", times=-1, status=403)
        found.append(sampler.sample()["image"])  # was fetched before, and the next one fails behind
        settle(sampler)
        proxied.proxy.reset()
        with pytest.raises(ArchiveError):
            sampler.sample()
        found.append(sampler.sample()["image"])
    assert all(torch.equal(image, plain.sample()["image"]) for image in found)


def test_what_follows_another_field_is_local_when_that_is(tmp_path: Path) -> None:
    arc = made(tmp_path / "b", [400, 400], compression=None, chunk_bytes=2_000)
    with Sampler(arc, ["next"], batch_size=1) as sampler:
        assert sampler.ready == 0.0
        sampler.sample()
        assert 0.0 < sampler.ready < 0.5
        assert sampler.fill(60)
        assert sampler.ready == 1.0


def test_threads_share_what_is_drawn(arc: archive.Archive) -> None:
    class Slow(WithoutReplacement):
        def _next(self, size: int) -> Any:
            at = self.position
            time.sleep(0.01)
            places = super()._next(size)
            self.position = at + len(places)
            return places

    sampler = Sampler(arc, ["t"], batch_size=10, strategy=Slow, prefetch=2)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: sampler.sample()["t"].tolist(), range(9)))
    assert sorted(t for batch in found for t in batch) == list(range(90))
    sampler.close()


def test_after_close_nothing_begins_anew(arc: archive.Archive) -> None:
    sampler = Sampler(arc, ["t"], batch_size=4)
    sampler.fill(60)
    sampler.close()
    for use in (sampler.sample, sampler.fill):
        with pytest.raises(ClosedError):
            use()
    assert sampler.ready == 0.0
    assert "0% local" in repr(sampler)
    assert sampler._gather._source is None


def test_a_state_of_another_strategy_is_refused(arc: archive.Archive) -> None:
    uniform, other = Sampler(arc, ["t"]), Sampler(arc, ["t"], strategy="without_replacement")
    for one, state in ((uniform, other.state_dict()), (other, uniform.state_dict())):
        before = one.generator.get_state()
        with pytest.raises(UsageError, match="strategy"):
            one.load_state_dict(state)
        assert torch.equal(one.generator.get_state(), before)


def test_priorities_may_be_tensors_of_a_graph(arc: archive.Archive) -> None:
    errors = torch.ones(sum(LENGTHS), requires_grad=True)
    sampler = Sampler(arc, ["t"], batch_size=4, strategy="prioritized", priorities=errors)
    batch = sampler.sample()
    sampler.update_priorities(batch["_index"], errors[:4] * 2)
    assert set(np.unique(sampler.strategy.priorities)) == {1.0, 2.0}  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_reads_by_connections_of_its_own(arc: archive.Archive) -> None:
    gather = Sampler(arc, ["t"], batch_size=4)._gather
    gather.rows([0], [0])
    with gather._here().store._changed:  # as another thread may at the time of the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if gather.held_bytes == 0 and gather.rows([1], [2])["t"].tolist() == [32] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gather.held_bytes > 0
