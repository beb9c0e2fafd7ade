"""The sampler: what batches hold, what may be drawn, and that a state goes on exactly where it was taken."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import ClosedError, ColumnError, FieldError, UsageError
from tests.support.gathering import check, made

torch = pytest.importorskip("torch", reason="the sampler needs torch")
from archive.torch import Sampler  # noqa: E402
from archive.torch.strategies import Uniform  # noqa: E402

LENGTHS = np.array([7, 1, 30, 12, 2, 25, 40, 3, 19, 60])
ENDS = np.cumsum(LENGTHS) - 1
FIRST = ENDS - LENGTHS + 1
STEPS = int(LENGTHS.sum())
FAST = ["t", "x", "next", "image", "reward"]


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    return made(tmp_path_factory.mktemp("sampler") / "a", LENGTHS)


def seeded(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def drawn(sampler: Sampler, batches: int) -> list[list[int]]:
    return [sampler.sample()["t"].reshape(-1).tolist() for _ in range(batches)]


def test_a_batch_of_steps_is_tensors_of_the_drawn_steps(arc: archive.Archive) -> None:
    sampler = Sampler(arc, batch_size=32, generator=seeded(), index=True)
    assert len(sampler) == STEPS
    batch = sampler.sample()
    check({k: batch[k] for k in ("t", "x", "next", "image", "reward")}, batch["t"].numpy(), ENDS)
    assert torch.equal(batch["_index"], batch["t"])
    assert isinstance(batch["next"]["x"], torch.Tensor)
    assert batch["tokens"].lengths.tolist() == (batch["t"] % 5).tolist()
    assert batch["info"][3] == {"a": int(batch["t"][3])}
    assert len(sampler.sample(5)["t"]) == 5


def test_windows_stay_within_an_episode(arc: archive.Archive) -> None:
    sampler = Sampler(arc.episodes, FAST, batch_size=40, unit="window", length=6, generator=seeded(), index=True)
    assert len(sampler) == int(np.maximum(LENGTHS - 5, 0).sum())
    for _ in range(5):
        batch = sampler.sample()
        t = batch["t"].numpy()
        check(batch, t, ENDS)
        assert (np.diff(t, axis=1) == 1).all()
        assert (np.searchsorted(ENDS, t[:, 0]) == np.searchsorted(ENDS, t[:, -1])).all()
        assert batch["_index"].tolist() == t[:, 0].tolist()


def test_whole_episodes_are_ragged(arc: archive.Archive) -> None:
    sampler = Sampler(arc, ["t", "x"], batch_size=4, unit="episode", generator=seeded(), index=True)
    batch = sampler.sample()
    numbers = batch["_index"].tolist()
    assert batch["t"].lengths.tolist() == LENGTHS[numbers].tolist()
    assert batch["t"].values.tolist() == [t for n in numbers for t in range(FIRST[n], ENDS[n] + 1)]


def test_a_tensordict_has_the_batch_as_its_size(arc: archive.Archive) -> None:
    pytest.importorskip("tensordict")
    batch = Sampler(arc, FAST, batch_size=8, collate="tensordict", index=True).sample()
    assert batch.batch_size == torch.Size([8])
    check(batch, batch["t"].numpy(), ENDS)
    assert Sampler(arc, ["t"], batch_size=4, device="meta").sample()["t"].device.type == "meta"


def test_the_same_generator_draws_the_same(arc: archive.Archive) -> None:
    for strategy in ("uniform", "without_replacement", "prioritized"):
        options: Any = {"priorities": np.arange(STEPS)} if strategy == "prioritized" else {}
        first, second, other = (
            Sampler(arc, ["t"], batch_size=16, strategy=strategy, generator=seeded(seed), **options)
            for seed in (3, 3, 4)
        )
        assert drawn(first, 20) == drawn(second, 20) != drawn(other, 20)


def test_more_than_there_is_needs_replacement(arc: archive.Archive) -> None:
    few = arc.episodes[:2]
    with pytest.raises(UsageError, match="replace=True"):
        Sampler(few, ["t"], batch_size=9).sample()
    with pytest.raises(UsageError, match="replace=True"):
        Sampler(few, ["t"], batch_size=9, strategy="without_replacement").sample()
    assert set(Sampler(few, ["t"], batch_size=100, replace=True).sample()["t"].tolist()) <= set(range(8))
    with pytest.raises(UsageError, match="at least one of both"):
        Sampler(arc.episodes[:0], ["t"]).sample()
    with pytest.raises(UsageError, match="at least one of both"):
        Sampler(few, ["t"], unit="window", length=50).sample()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unit": "page"}, "unit="),
        ({"unit": "window"}, "length"),
        ({"length": 3}, "length"),
        ({"strategy": "newest"}, "strategy="),
        ({"strategy": "prioritized"}, "priorities="),
        ({"priorities": [1.0]}, "strategy='prioritized'"),
        ({"strategy": "prioritized", "priorities": [1.0]}, "1 priorities were given"),
        ({"strategy": "prioritized", "priorities": np.full(STEPS, -1.0)}, "not below 0"),
        ({"strategy": "prioritized", "priorities": np.full(STEPS, np.nan)}, "finite"),
        ({"strategy": "prioritized", "priorities": np.ones(STEPS), "beta": 2}, "beta"),
        ({"recency": 0}, "recency"),
        ({"staleness": 1, "update_count": 3}, "not both"),
        ({"batch_size": 0}, "batch_size"),
        ({"collate": "tuple"}, "collate"),
        ({"cache_bytes": -1}, "cache_bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused(arc: archive.Archive, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Sampler(arc, **options)


def test_columns_are_a_checkpoints(arc: archive.Archive) -> None:
    with pytest.raises(ColumnError, match="checkpoint"):
        Sampler(arc, strategy="prioritized", priorities="priority")
    with pytest.raises(UsageError, match="cannot be drawn from a int"):
        Sampler(5)
    with pytest.raises(FieldError, match="nope"):
        Sampler(arc, ["nope"], batch_size=4).sample()


def test_only_recent_steps(arc: archive.Archive) -> None:
    sampler = Sampler(arc, ["t"], batch_size=50, recency=70, generator=seeded())
    assert len(sampler) == 70
    assert {t for batch in drawn(sampler, 20) for t in batch} == set(range(STEPS - 70, STEPS))
    windows = Sampler(arc, ["t"], batch_size=20, unit="window", length=10, recency=70, generator=seeded())
    assert min(t for batch in drawn(windows, 30) for t in batch) == STEPS - 70
    whole = Sampler(arc, ["t"], batch_size=2, unit="episode", recency=2)
    assert sorted(whole.sample()["t"].lengths.tolist()) == [19, 60]


def test_update_counts_staleness_and_weights(arc: archive.Archive) -> None:
    def episodes_of(**options: Any) -> set[int]:
        sampler = Sampler(arc, ["t"], batch_size=200, replace=True, generator=seeded(), **options)
        return set(np.searchsorted(ENDS, sampler.sample()["t"].numpy()).tolist())

    assert episodes_of(update_count=(2, 4)) == {2, 3}
    assert episodes_of(update_count=9) == {9}
    assert episodes_of(staleness=1) == {8, 9}
    assert episodes_of(model_weights_uuid="w2") == {2, 5, 8}
    assert episodes_of(model_weights_uuid="w2", staleness=2) == {8}
    with pytest.raises(UsageError, match="at least one of both"):
        Sampler(arc, ["t"], update_count=(50, 60)).sample()


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("strategy", ["uniform", "without_replacement", "prioritized"])
def test_a_state_goes_on_exactly(arc: archive.Archive, strategy: str, prefetch: int) -> None:
    options: Any = {"priorities": np.arange(STEPS) % 13} if strategy == "prioritized" else {}
    first = Sampler(arc, ["t"], batch_size=60, strategy=strategy, prefetch=prefetch, generator=seeded(), **options)
    drawn(first, 5)
    if strategy == "prioritized":
        first.update_priorities([3, 4], [100.0, 50.0])
    state = first.state_dict()
    wanted = drawn(first, 9)
    second = Sampler(arc, ["t"], batch_size=60, strategy=strategy, prefetch=prefetch, generator=seeded(9), **options)
    drawn(second, 2)
    second.load_state_dict(state)
    assert drawn(second, 9) == wanted
    for sampler in (first, second):
        sampler.close()


def test_a_state_lives_in_a_checkpoint(arc: archive.Archive, tmp_path: Path) -> None:
    sampler = Sampler(arc, ["t"], batch_size=60, strategy="without_replacement", prefetch=2, generator=seeded())
    drawn(sampler, 4)
    own = archive.create(tmp_path / "own")
    with own.writer() as w:
        w.checkpoint(1, state={"sampler": sampler.state_dict()}).result(60)
    wanted = drawn(sampler, 6)
    found = archive.open(tmp_path / "own").checkpoints.latest
    assert found is not None
    again = Sampler(arc, ["t"], batch_size=60, strategy="without_replacement", prefetch=2)
    again.load_state_dict(found.state(0)["sampler"])
    assert drawn(again, 6) == wanted
    sampler.close()
    again.close()


def test_a_state_of_other_episodes_is_refused(arc: archive.Archive) -> None:
    state = Sampler(arc, ["t"]).state_dict()
    with pytest.raises(UsageError, match="same episodes"):
        Sampler(arc.episodes[:3], ["t"]).load_state_dict(state)
    with pytest.raises(UsageError, match="no state of a sampler"):
        Sampler(arc, ["t"]).load_state_dict({})


def test_priorities_are_updated_by_index(arc: archive.Archive) -> None:
    sampler = Sampler(
        arc, ["t"], batch_size=50, strategy="prioritized", priorities=np.ones(STEPS), alpha=1.0, generator=seeded()
    )
    batch = sampler.sample()
    assert batch["_index"].tolist() == batch["t"].tolist()
    assert torch.equal(batch["_weight"], torch.ones(50))
    sampler.update_priorities(np.arange(STEPS), np.zeros(STEPS))
    sampler.update_priorities([17, 99], torch.tensor([3.0, 1.0]))
    found = torch.cat([sampler.sample()["t"] for _ in range(40)])
    assert set(found.tolist()) == {17, 99}
    assert abs((found == 17).float().mean() - 0.75) < 0.05
    with pytest.raises(UsageError, match="no step of this sampler"):
        sampler.update_priorities([STEPS], [1.0])
    with pytest.raises(UsageError, match="strategy='prioritized'"):
        Sampler(arc, ["t"]).update_priorities([0], [1.0])


@pytest.mark.parametrize("options", [{"unit": "window", "length": 4}, {"unit": "episode"}])
def test_what_is_drawn_ahead_is_what_would_have_been_drawn(arc: archive.Archive, options: dict[str, Any]) -> None:
    plain, ahead = (
        Sampler(arc, FAST, batch_size=3, generator=seeded(), prefetch=n, index=True, **options) for n in (0, 2)
    )
    for _ in range(10):
        first, second = plain.sample(), ahead.sample()
        assert torch.equal(first["_index"], second["_index"])
        assert str(first["x"]) == str(second["x"])
    ahead.close()


def test_a_strategy_of_ones_own(arc: archive.Archive) -> None:
    class Newest(Uniform):
        def draw(self, size: int, generator: Any) -> Any:
            return super().draw(size, generator)._replace(places=torch.arange(self.count - size, self.count))

    sampler = Sampler(arc, ["t"], batch_size=4, strategy=Newest)
    assert sampler.sample()["t"].tolist() == list(range(STEPS - 4, STEPS))


def test_filling_makes_everything_local(arc: archive.Archive) -> None:
    with Sampler(arc, FAST, batch_size=8) as sampler:
        assert sampler.ready == 0.0
        sampler.sample()
        assert 0 < sampler.ready <= 1.0
        assert sampler.fill(60)
        assert sampler.ready == 1.0
        before = sampler.io_stats.total.requests
        drawn(sampler, 20)
        assert sampler.io_stats.total.requests == before
    with pytest.raises(ClosedError):
        sampler.sample()


def test_filling_stops_where_memory_ends_unless_there_is_a_disk(
    arc: archive.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archive.torch.sampler._BYTES_AT_ONCE", 20_000)
    with Sampler(arc, FAST, cache_bytes=250_000) as small:
        assert small.fill(60)
        assert 0.1 < small.ready < 0.9
        held = sum(np.count_nonzero(pool.present) for pool in small._gather._here().store._pools.values())
        assert small.io_stats.total.chunks - small.io_stats.total.hits <= held + 10  # nothing was pushed out again
    with Sampler(arc, FAST, batch_size=64, cache_bytes=150_000, disk_cache=tmp_path / "c") as disk:
        assert disk.fill(60)
        assert disk.ready == 1.0
        before = disk.io_stats.total.requests
        drawn(disk, 20)
        assert disk.io_stats.total.requests == before


def test_close_does_not_wait_for_the_rest(arc: archive.Archive) -> None:
    sampler = Sampler(arc, FAST, fill=True)
    started = time.perf_counter()
    sampler.close()
    sampler.close()
    assert time.perf_counter() - started < 5
