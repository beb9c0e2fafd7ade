"""Functions and their versions, what is left to do, reads that fail, commits now and then, and where episodes come
from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.errors import CorruptChunkError, UsageError
from archive.jobs import folds, functions
from archive.maintain import verify
from tests.support.places import ROOT
from tests.support.tampering import inverted

STEPS = 4
FACTOR = 2
LATER = None


def filled(root: Path, count: int = 12, layout: str = "packed", shards: int = 1) -> archive.Archive:
    arc = archive.create(str(root), layout=layout)
    with arc.writer() as w:
        for i in range(count):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"e{i}")
            if (i + 1) % max(1, count // shards) == 0:
                w.flush()
    return arc.refresh()


def times(factor: float) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda steps: {"made": factor * steps["reward"]}


def made(arc: archive.Archive) -> dict[str, float]:
    return {
        ep.id: float(s["made"][1] / s["reward"][1])
        for ep, s in arc.refresh().episodes.stream(missing="skip")
        if "made" in s
    }


# -- digests -----------------------------------------------------------------------------------------------------------


def scaled(factor: float, steps: Any) -> Any:
    return factor * steps


def by_constant(steps: Any) -> Any:
    return FACTOR * steps


def by_helper(steps: Any) -> Any:
    return by_constant(steps)


def by_cache(steps: Any) -> Any:
    global LATER
    LATER = LATER or len(steps)
    return LATER


class Judge:
    def __init__(self, factor: float) -> None:
        self.factor, self.weights = factor, np.zeros(3)

    def __call__(self, steps: Any) -> Any:
        return self.factor * steps

    def judge(self, steps: Any) -> Any:
        return -self.factor * steps


class Strict(Judge):
    pass


def logged(fn: Any) -> Any:
    @wraps(fn)
    def inner(steps: Any) -> Any:
        return fn(steps)

    return inner


ONE, OTHER = (lambda s: 2 * s), (lambda s: 3 * s)


def enclosed(values: Any) -> Any:
    return lambda steps: values * steps


FUNCTIONS: dict[str, Any] = {
    "function": scaled, "constant": by_constant, "helper": by_helper, "cache": by_cache, "class": Judge,
    "subclass": Strict, "object": Judge(2), "other object": Judge(3), "method": Judge(2).judge,
    "other method": Judge(3).judge, "lambda": ONE, "other lambda on its line": OTHER, "partial": partial(scaled, 2),
    "other partial": partial(scaled, 3), "keywords": partial(scaled, factor=2), "nested": partial(partial(scaled), 2),
    "closure": enclosed(2), "other closure": enclosed(3), "texts": enclosed("a"), "tuples": enclosed((1, (2, "x"))),
    "decorated": logged(by_constant), "decorated otherwise": logged(scaled), "builtin": len, "ufunc": np.add,
    "other ufunc": np.multiply, "type": float,
}  # fmt: skip


def test_each_function_has_a_digest_of_its_own() -> None:
    digests = {name: functions.digest(fn) for name, fn in FUNCTIONS.items()}
    twice = [name for name, one in digests.items() if list(digests.values()).count(one) > 1]
    assert set(twice) <= {"partial", "nested"}
    assert all(len(one) == 16 for one in digests.values())


def test_digests_are_the_same_in_another_process() -> None:
    text = (
        "from tests.jobs import test_versions as t; print({n: t.functions.digest(f) for n, f in t.FUNCTIONS.items()})"
    )
    for seed in ("1", "2"):
        said = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", text], cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert said.stdout.strip() == str({name: functions.digest(fn) for name, fn in FUNCTIONS.items()})


def test_constants_and_helpers_of_a_module_count(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("constant", "helper", "decorated", "cache", "function")
    before = {name: functions.digest(FUNCTIONS[name]) for name in names}
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5)
    monkeypatch.setattr(sys.modules[__name__], "LATER", 5)
    after = {name: functions.digest(FUNCTIONS[name]) for name in names}
    assert [name for name in names if before[name] != after[name]] == ["constant", "helper", "decorated"]


def test_what_may_change_counts_by_its_type() -> None:
    kept: list[int] = []
    fn = enclosed(kept)
    before = functions.digest(fn)
    kept.append(1)
    assert functions.digest(fn) == before != functions.digest(enclosed({}))


# -- what is left ------------------------------------------------------------------------------------------------------


def test_stale_after_several_versions_and_dropped_fields(tmp_path: Path) -> None:
    arc, calls = filled(tmp_path / "arc"), list[float]()

    def version(factor: float) -> Any:
        def fn(steps: Mapping[str, Any]) -> dict[str, Any]:
            calls.append(factor)
            return {"made": factor * steps["reward"]}

        return fn

    def stale(factor: float, episodes: Any = None) -> int:
        calls.clear()
        chosen = arc.refresh().episodes if episodes is None else episodes
        chosen.map(version(factor), ["reward"], ["made"], job="made", only="stale")
        return len(calls)

    assert stale(1.0, arc.episodes[:5]) == 5
    assert stale(1.0) == 7
    assert stale(1.0) == 0
    assert stale(2.0, arc.episodes[:3]) == 3
    assert set(made(arc).values()) == {1.0, 2.0}
    assert stale(3.0) == 12
    assert stale(1.0) == 12, "an old version again is another one than the newest"
    arc.refresh().drop_fields(["made"])
    assert made(arc) == {}
    assert stale(1.0) == 12, "dropped rows are not there"
    arc.add_fields({"made": {"e3": np.zeros(STEPS)}})
    assert stale(1.0) == 1, "rows of another origin are of another version"
    assert set(made(arc).values()) == {1.0}
    assert [one["state"] for one in arc.jobs.abouts] == ["finished"]


def test_a_name_is_of_one_kind_of_work(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    verify(arc, job="nightly")
    with pytest.raises(UsageError, match="of kind 'verify', not 'map'"):
        arc.episodes.map(times(2), ["reward"], ["made"], job="nightly", only="stale")


def test_other_arguments_of_a_derivation_are_another_job(tmp_path: Path) -> None:
    from archive.fields.derived import discounted_return

    arc = filled(tmp_path / "arc")

    def fails(steps: Mapping[str, Any]) -> dict[str, Any]:
        raise ValueError("not yet")

    for gamma in (0.9, 0.9, 0.99):
        derived = discounted_return(gamma, as_name="returns")
        with pytest.raises(ValueError if gamma == 0.9 else UsageError, match=r"not yet|derive="):
            arc.episodes.map(fails, ["reward"], ["made"], job="made", derive=[derived])


# -- reads that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 2])
def test_a_damaged_chunk_fails_its_episodes_alone(tmp_path: Path, workers: int | None) -> None:
    arc = filled(tmp_path / "arc", shards=4)
    shard = arc.snapshot.columns(["shard"])["shard"].to_pylist()
    hurt = {f"e{i}" for i in range(12) if shard[i] == shard[4]}
    path = tmp_path / "arc" / shard[4]
    path.write_bytes(inverted(path.read_bytes()))
    with pytest.raises(CorruptChunkError):
        arc.episodes.map(times(2), ["reward"], ["made"], job="strict", workers=workers)
    arc.episodes.map(times(2), ["reward"], ["made"], job="made", workers=workers, on_error="skip")
    failed = arc.jobs["made"].failed
    assert failed.keys() == hurt
    assert all(text.startswith("CorruptChunkError") for text in failed.values())
    assert arc.jobs["made"].about["committed"] == STEPS * (12 - len(hurt))


# -- commits now and then ----------------------------------------------------------------------------------------------


def test_commits_come_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc, now, seen = filled(tmp_path / "arc"), [0.0], list[tuple[int, int]]()
    monkeypatch.setattr(folds, "monotonic", lambda: now[0])

    def fn(steps: Mapping[str, Any]) -> dict[str, Any]:
        now[0] += 120
        return times(2)(steps)

    arc.episodes.map(
        fn, ["reward"], ["made"], job="made", batch_size=1, commit_every="10min", progress=lambda *one: seen.append(one)
    )
    assert len(arc.jobs["made"].about["commits"]) == 3  # after 5 and 10 batches, and at the end
    assert seen == [(i, 12) for i in range(13)]
    assert set(made(arc).values()) == {2.0}


def test_a_callback_that_fails_ends_the_call_and_nothing_else(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")

    def tell(done: int, total: int) -> None:
        if done == 5:
            raise RuntimeError("the bar broke")

    fn = times(2)
    with pytest.raises(RuntimeError, match="the bar broke"):
        arc.episodes.map(fn, ["reward"], ["made"], job="made", batch_size=1, progress=tell)
    assert arc.jobs["made"].done == 5
    arc.episodes.map(fn, ["reward"], ["made"], job="made", batch_size=1)
    assert len(made(arc)) == 12


# -- where episodes come from ------------------------------------------------------------------------------------------


def fragile(flag: Path) -> Any:
    def fn(steps: Mapping[str, Any]) -> dict[str, Any]:
        if flag.exists() and steps["reward"][0] >= 6:
            raise ValueError("not yet")
        return {"made": 2 * steps["reward"]}

    return fn


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("width", [1, 60_000])
def test_shards_of_any_layout(tmp_path: Path, layout: str, width: int) -> None:
    arc = filled(tmp_path / "arc", layout=layout)
    fn = lambda steps: {"made": np.repeat(steps["reward"][:, None], width, 1)}  # noqa: E731
    arc.episodes.map(fn, ["reward"], ["made"], job="made", batch_size=3)
    for _, steps in arc.refresh().episodes.stream(["reward", "made"]):
        assert (steps["made"] == steps["reward"][:, None]).all()
    kinds = {path.suffix for path in (tmp_path / "arc" / "shards").iterdir()}
    assert kinds == {".zip" if layout == "packed" else ".zarr"}


def test_a_checkpoint_whose_steps_were_compacted_meanwhile(tmp_path: Path) -> None:
    arc, flag = archive.create(str(tmp_path / "arc")), tmp_path / "broken"
    with arc.writer() as w:
        for i in range(12):
            w.append({"reward": np.arange(STEPS, dtype="f8") + i}, env_ids=0, last=np.arange(STEPS) == STEPS - 1)
            w.flush()
        w.evict(env_id=0, before=3 * STEPS + 1)
        w.checkpoint(1).result()
        w.append({"reward": np.arange(STEPS, dtype="f8") + 100}, env_ids=0, last=np.arange(STEPS) == STEPS - 1)
    arc = arc.refresh()
    flag.touch()
    with pytest.raises(ValueError, match="not yet"):
        arc.checkpoints["step-1"].episodes.map(fragile(flag), ["reward"], ["made"], job="live", batch_size=2)
    resharding.compact(arc.refresh())
    arc.refresh().prune("0s", force=True, dry_run=False)
    flag.unlink()
    found = archive.open(arc.url).checkpoints["step-1"].episodes
    found.map(fragile(flag), ["reward"], ["made"], job="live", batch_size=2)
    for _, steps in archive.open(arc.url).checkpoints["step-1"].episodes.stream(["reward", "made"]):
        assert (steps["made"] == 2 * steps["reward"]).all()
    rows = archive.open(arc.url).late_fields
    assert sum(rows["length"].to_pylist()) == 9 * STEPS - 1, "live steps alone"


def test_an_archive_at_a_commit_is_read_only(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    with pytest.raises(UsageError, match="read only"):
        archive.open(arc.url, commit=arc.head.number).episodes.map(times(2), ["reward"], ["made"], job="made")
    assert not (tmp_path / "arc" / "jobs").exists()


def test_steps_in_other_archives(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    resharding.merge([filled(tmp_path / "one")], to=str(tmp_path / "all"), copy=False)
    arc = archive.open(str(tmp_path / "all"), allow_bases=True)
    for workers in (None, 2):
        with pytest.raises(ValueError, match="not yet"):
            arc.episodes.map(fragile(flag), ["reward"], ["made"], job="made", batch_size=2, workers=workers)
    flag.unlink()
    arc.episodes.map(fragile(flag), ["reward"], ["made"], job="made", batch_size=2, workers=2)
    assert set(made(arc).values()) == {2.0}


def test_metrics_of_a_job(tmp_path: Path) -> None:
    def read() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in archive.metrics().splitlines() if line.startswith("archive_job")]
        return {name: float(value) for name, _, value in lines}

    arc, before = filled(tmp_path / "arc"), read()
    arc.episodes.map(times(2), ["reward"], ["made"], job="made")
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["archive_job_rows_checkpointed_total"] == grown["archive_job_rows_committed_total"] == 12 * STEPS
    assert after["archive_job_rows_ready"] == 0
    assert after['archive_job_workers{state="active"}'] == 1
    assert {name for name in after if "time" in name} >= {
        f'archive_job_time_seconds_total{{part="{part}"}}' for part in ("read", "computed", "written")
    }
