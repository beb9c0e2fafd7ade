"""A function over episodes as a job: each batch has one result, whoever runs it; commits make results visible."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.errors import ExpiredError, FieldError, JobError, NotFoundError, UsageError
from archive.jobs import functions

STEPS = 5


def filled(url: Any, count: int = 40, first: int = 0) -> archive.Archive:
    arc = archive.open(str(url), create=True)
    with arc.writer() as w:
        for i in range(first, first + count):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i, "obs": np.ones((STEPS, 3))}, episode_id=f"e{i}")
    with arc.writer():  # a session of its own: what an earlier one wrote may be forgotten
        pass
    return arc.refresh()


def doubled(steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * steps["reward"]}


def seventh_fails(steps: Mapping[str, Any]) -> dict[str, Any]:
    if steps["reward"][0] == 7:
        raise ValueError("no seven")
    return doubled(steps)


def noted(folder: Path, steps: Mapping[str, Any]) -> dict[str, Any]:
    """The double, and a line in a file for each call."""
    with (folder / "calls").open("a") as file:
        file.write(f"{int(steps['reward'][0])}\n")
    return doubled(steps)


def calls(folder: Path) -> list[int]:
    path = folder / "calls"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check(arc: archive.Archive, name: str = "twice", times: int = 2) -> None:
    episodes = archive.open(arc.url).episodes
    for ep, steps in episodes.stream([name, "reward"]):
        assert (steps[name] == times * steps["reward"]).all(), ep.id
    rows = archive.open(arc.url).late_fields
    assert sum(rows["length"].to_pylist()) == STEPS * len(episodes)  # no step twice


@pytest.mark.parametrize("workers", [None, 2])
def test_each_episode_is_computed_once(tmp_path: Path, workers: int | None) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(partial(noted, tmp_path), ["reward"], ["twice"], job="score", workers=workers)
    check(arc)
    assert sorted(calls(tmp_path)) == list(range(40))
    job = arc.jobs["score"]
    assert (job.done, job.state, job.finished, job.failed) == (job.total, "finished", True, {})
    assert list(arc.jobs) == ["score"]
    arc.refresh().episodes.map(partial(noted, tmp_path), ["reward"], ["twice"], job="score", workers=workers)
    assert len(calls(tmp_path)) == 40  # it is finished


def test_it_tells_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arc, told = filled(tmp_path / "arc"), list[tuple[int, int]]()
    arc.episodes.map(doubled, ["reward"], ["twice"], job="score", progress=lambda *at: told.append(at))
    assert told == [(done, 20) for done in range(21)]
    arc.episodes.map(doubled, ["reward"], ["twice"], job="bar", progress=True)
    assert "job bar: 20 of 20 batches" in capsys.readouterr().err
    assert "score  map   20       20  200" in str(arc.jobs)
    assert "<td>score</td>" in arc.jobs._repr_html_()
    assert ("bar" in arc.jobs, "else" in arc.jobs, arc.jobs.get("else")) == (True, False, None)
    assert repr(arc.jobs["bar"]) == "<job 'bar', finished: 20 of 20 batches>"


def test_after_an_error_the_same_call_goes_on(tmp_path: Path) -> None:
    arc, done = filled(tmp_path / "arc"), []
    flag = tmp_path / "broken"
    flag.touch()

    def fragile(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 30 and flag.exists():
            raise ValueError("not yet")
        done.append(int(steps["reward"][0]))
        return doubled(steps)

    call = partial(arc.episodes.map, fragile, ["reward"], ["twice"], job="score")
    with pytest.raises(ValueError, match="not yet") as caught:
        call()
    assert "e30" in caught.value.__notes__[0]
    before = arc.jobs["score"].done
    assert 0 < before < arc.jobs["score"].total
    flag.unlink()
    call()
    check(arc)
    assert len(done) <= 40 + 2  # but for what was under way


def test_failing_episodes_are_left_out_and_listed(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(seventh_fails, ["reward"], ["twice"], job="score", on_error="skip")
    assert arc.jobs["score"].failed == {"e7": "ValueError: no seven"}
    assert "twice" not in arc.episodes["e7"].read(missing="skip")
    assert (arc.episodes["e8"].read(["twice"])["twice"] == 2 * (np.arange(STEPS) + 8)).all()


def test_what_is_missing_or_of_another_version_is_made(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    first = partial(noted, tmp_path)
    arc.episodes.map(first, ["reward"], ["twice"], job="score", only="missing")
    arc = filled(tmp_path / "arc", 5, 100)
    arc.episodes.map(first, ["reward"], ["twice"], job="score", only="missing")
    assert sorted(calls(tmp_path)) == [*range(40), *range(100, 105)]
    check(arc)
    arc.episodes.map(first, ["reward"], ["twice"], job="score", only="stale")
    assert len(calls(tmp_path)) == 45

    def thrice(steps: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice": 3 * steps["reward"]}

    with pytest.raises(UsageError, match=r"digest is [0-9a-f]{16}.*only='stale'"):
        arc.episodes.map(thrice, ["reward"], ["twice"], job="score")
    arc.episodes.map(thrice, ["reward"], ["twice"], job="score", only="stale")
    assert (arc.episodes["e8"].read(["twice"])["twice"] == 3 * (np.arange(STEPS) + 8)).all()


class Judge:
    """A class is made once a worker."""

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice": self.factor * steps["reward"], "by": np.full(STEPS, os.getpid())}


def test_a_class_runs_in_other_processes(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(Judge, ["reward"], ["twice", "by"], workers=2)
    made = {int(pid) for _, steps in arc.episodes.stream(["by"]) for pid in steps["by"]}
    assert os.getpid() not in made
    assert 1 <= len(made) <= 2
    check(arc)


def test_large_columns_have_shards_of_their_own(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    wide = np.random.default_rng(0).standard_normal((STEPS, 50_000))
    arc.episodes.map(lambda steps: {"wide": wide + steps["reward"][0]}, ["reward"], ["wide"], job="wide")
    for i in (0, 7, 39):
        assert (arc.episodes[f"e{i}"].read(["wide"])["wide"] == wide + i).all()


def test_live_steps_of_a_checkpoint(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "arc"))
    with arc.writer() as w:
        for i in range(0, 30, 10):
            w.append({"reward": np.arange(i, i + 10.0)}, env_ids=[0] * 10, first=np.arange(10) == 0)
        w.evict(env_id=0, before=5)
        w.checkpoint(step=1).result()
    found = arc.refresh().checkpoints.latest
    assert found is not None
    flag = tmp_path / "broken"
    flag.touch()

    def fragile(steps: Mapping[str, Any]) -> dict[str, Any]:
        if flag.exists() and steps["reward"][0] == 20:
            raise ValueError("not yet")
        return doubled(steps)

    with pytest.raises(ValueError, match="not yet"):
        found.episodes.map(fragile, ["reward"], ["twice"], job="live", batch_size=1)
    flag.unlink()
    again = archive.open(arc.url).checkpoints.latest
    assert again is not None
    again.episodes.map(fragile, ["reward"], ["twice"], job="live", batch_size=1)
    assert [steps["twice"][0] for _, steps in again.episodes.stream(["twice"])] == [10, 20, 40]


@pytest.mark.parametrize(
    "text",
    [
        "def fn(s): return {FACTOR} * s",
        "class fn:\n  def __call__(self, s): return {FACTOR} * s",
        "class fn:\n  factor = {FACTOR}\n  def __call__(self, s): return self.factor * s",
    ],
)
def test_what_is_typed_at_a_prompt_is_told_apart_by_what_it_does(text: str) -> None:
    found = []
    for factor in (2, 2, 3):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text.replace("{FACTOR}", str(factor)), "<stdin>", "exec"), names)
        found.append(functions.digest(names["fn"]))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("workers", [None, 2])
def test_many_runs_of_a_batch_are_read_right(tmp_path: Path, workers: int | None) -> None:
    """Batches that are read in several runs, while the next one is read."""
    arc = archive.create(str(tmp_path / "arc"))
    rng = np.random.default_rng(0)
    with arc.writer() as w:
        for i in range(600):
            w.add_episode({"obs": rng.standard_normal((40, 32)), "reward": np.full(40, float(i))}, episode_id=f"e{i}")
    arc.refresh().episodes.map(
        lambda steps: {"sum": steps["obs"].sum(axis=1) + steps["reward"]},
        ["obs", "reward"], ["sum"], workers=workers, max_bytes=400_000, batch_size=100,
    )  # fmt: skip
    for ep, steps in arc.episodes.stream(["obs", "reward", "sum"]):
        assert (steps["sum"] == steps["obs"].sum(axis=1) + steps["reward"]).all(), ep.id


def test_a_function_may_give_the_same_memory_again(tmp_path: Path) -> None:
    arc, buffer = filled(tmp_path / "arc"), np.zeros(STEPS)

    def same(steps: Mapping[str, Any]) -> dict[str, Any]:
        np.multiply(2, steps["reward"], out=buffer)
        return {"twice": buffer}

    arc.episodes.map(same, ["reward"], ["twice"])
    check(arc)


def test_a_function_and_what_it_starts_read_no_standard_input(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc", 4)

    def reads(steps: Mapping[str, Any]) -> dict[str, Any]:
        import subprocess
        import sys

        found = subprocess.run(["cat"], stdout=subprocess.PIPE, check=True).stdout + sys.stdin.read().encode()
        return {"twice": 2 * steps["reward"] + len(found)}

    arc.episodes.map(reads, ["reward"], ["twice"], workers=2, batch_size=1)
    check(arc)


def test_other_episodes_than_those_of_the_job(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    few = arc.episodes.filter(where="length > 0")[:10]
    few.map(doubled, ["reward"], ["twice"], job="score")
    few.map(doubled, ["reward"], ["twice"], job="score")
    with pytest.raises(UsageError, match=r"begun with 10 episodes, and leaves out 30 of those given here"):
        arc.episodes.map(doubled, ["reward"], ["twice"], job="score")


def test_missing_goes_on_and_then_does_what_came_since(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    flag = tmp_path / "broken"
    flag.touch()

    def fragile(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 30 and flag.exists():
            raise ValueError("not yet")
        return doubled(steps)

    with pytest.raises(ValueError, match="not yet"):
        arc.episodes.map(fragile, ["reward"], ["twice"], job="score", only="missing")
    flag.unlink()
    arc = filled(tmp_path / "arc", 5, 100)
    arc.episodes.map(fragile, ["reward"], ["twice"], job="score", only="missing")
    check(arc)


def test_fields_that_were_written_with_the_steps_are_not_missing(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "arc"))
    with arc.writer() as w:
        w.add_episode({"reward": np.ones(3), "value": np.full(3, 7.0)}, episode_id="old")
        w.add_episode({"reward": np.ones(3)}, episode_id="new")
    arc.refresh().episodes.map(lambda s: {"value": s["reward"]}, ["reward"], ["value"], job="v", only="missing")
    assert arc.episodes["old"].read(["value"])["value"].tolist() == [7, 7, 7]
    assert arc.episodes["new"].read(["value"])["value"].tolist() == [1, 1, 1]


def test_what_others_add_meanwhile_is_not_missing(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")

    def beside(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 20:
            archive.open(arc.url).add_fields({"twice": {"e5": np.full(STEPS, -1.0)}})
        return doubled(steps)

    arc.episodes.map(beside, ["reward"], ["twice"], job="score", only="missing")
    again = archive.open(arc.url).episodes
    assert again["e5"].read(["twice"])["twice"].tolist() == [-1] * STEPS
    assert again["e6"].read(["twice"])["twice"].tolist() == [2 * (6 + i) for i in range(STEPS)]


def test_episodes_of_no_steps_and_episodes_given_twice(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "arc"))
    with arc.writer() as w:
        for i, count in enumerate((3, 0, 2)):
            w.add_episode({"reward": np.full(count, float(i))}, episode_id=f"e{i}")
    said = lambda steps: {"text": [str(value) for value in steps["reward"]]}  # noqa: E731
    arc.refresh().episodes[np.array([2, 0, 1, 0])].map(said, ["reward"], ["text"], job="text")
    assert [list(arc.episodes[f"e{i}"].read(["text"])["text"]) for i in (0, 2)] == [["0.0"] * 3, ["2.0"] * 2]


def test_another_dtype_than_the_rest_of_the_column_has(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(doubled, ["reward"], ["twice"])
    arc = filled(tmp_path / "arc", 5, 100)
    narrow = lambda steps: {"twice": (2 * steps["reward"]).astype("f4")}  # noqa: E731
    with pytest.raises(FieldError, match="'twice' is <f8"):
        arc.episodes.map(narrow, ["reward"], ["twice"], only="missing")
    arc.drop_fields(["twice"])
    arc.episodes.map(narrow, ["reward"], ["twice"], only="missing")


def test_failures_of_a_call_without_a_name_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(seventh_fails, ["reward"], ["twice"], on_error="skip")
    assert "failed at 1 episodes, which are left out, such as 'e7': ValueError: no seven" in caplog.text


def test_a_function_that_no_worker_can_load(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc", 4)
    with pytest.raises(JobError, match="cannot be loaded in a worker"):
        arc.episodes.map(Unloadable(), ["reward"], ["twice"], workers=2)


def _refuse() -> None:
    raise RuntimeError("not here")


class Unloadable:
    """It pickles, and cannot be unpickled."""

    def __call__(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        return doubled(steps)

    def __reduce__(self) -> Any:
        return _refuse, ()


# -- beside others -----------------------------------------------------------------------------------------------------


def interrupted(arc: archive.Archive, folder: Path) -> Callable[[], Any]:
    """A job of which some batches are done; the call that goes on with it."""
    flag = folder / "broken"
    flag.touch()

    def fragile(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 30 and flag.exists():
            raise ValueError("not yet")
        return doubled(steps)

    call = partial(arc.episodes.map, fragile, ["reward"], ["twice"], job="score")
    with pytest.raises(ValueError, match="not yet"):
        call()
    flag.unlink()
    return call


def test_results_of_forgotten_episodes_are_left_out_and_counted(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    call = interrupted(arc, tmp_path)
    other = archive.open(arc.url)
    other.forget(ids=["e3", "e35"], dry_run=False)
    other.prune("0s", force=True, dry_run=False)  # it spares what the job reads
    call()
    assert arc.jobs["score"].about["forgotten"] == 2 * STEPS
    check(arc)
    assert len(archive.open(arc.url).episodes) == 38


def test_a_prune_knows_unfinished_jobs_and_deletes_what_ended_ones_left(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    call = interrupted(arc, tmp_path)
    there = {one.key for one in arc.storage.scan("jobs")}
    arc.prune("0s", force=True, dry_run=False)
    assert {one.key for one in arc.storage.scan("jobs")} == there
    call()
    check(arc)
    archive.open(arc.url).prune("0s", force=True, dry_run=False)
    left = {one.key.rpartition("/")[2] for one in arc.storage.scan("jobs")}
    assert left == {"round-000000.json", "end-000000.json", "fold-000000.json", "made-000000.json"}
    check(arc)
    assert arc.jobs["score"].finished


def test_a_job_that_was_cancelled_leaves_nothing_that_a_prune_does_not_find(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    shards = {one.key for one in arc.storage.scan("shards")}
    wide = np.zeros((STEPS, 50_000))

    def fragile(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 30:
            raise ValueError("never")
        return {"wide": wide}

    with pytest.raises(ValueError, match="never"):
        arc.episodes.map(fragile, ["reward"], ["wide"], job="wide")
    arc.jobs["wide"].cancel()
    assert arc.jobs["wide"].state == "cancelled"
    with pytest.raises(UsageError, match="cancelled already"):
        arc.jobs["wide"].cancel()
    archive.open(arc.url).prune("0s", force=True, dry_run=False)
    assert {one.key for one in arc.storage.scan("shards")} == shards
    assert len(list(arc.storage.scan("jobs"))) == 2  # that it was, and how it ended


def test_a_driver_stops_where_its_job_was_cancelled(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")

    def cancels(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 30:
            archive.open(arc.url).jobs["score"].cancel()
        return doubled(steps)

    with pytest.raises(JobError, match="cancelled by another process"):
        arc.episodes.map(cancels, ["reward"], ["twice"], job="score")


def test_a_prune_before_the_job_was_there_is_noticed(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    stale = archive.open(arc.url)
    assert stale.episodes.nbytes  # its tables are read
    arc.forget(ids=[f"e{i}" for i in range(40)], dry_run=False)
    arc.prune("0s", force=True, dry_run=False)
    with pytest.raises(ExpiredError, match="was pruned by commit"):
        stale.episodes.map(doubled, ["reward"], ["twice"], job="score")


def test_a_round_that_another_took_the_place_of_commits_nothing_any_more(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")

    def thrice(steps: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice": 3 * steps["reward"]}

    def stalls(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 39:  # all the others are done
            again = archive.open(arc.url).episodes
            again.map(thrice, ["reward"], ["twice"], job="score", only="stale")
        return doubled(steps)

    with pytest.raises(JobError, match="replaced by another process"):
        arc.episodes.map(stalls, ["reward"], ["twice"], job="score")
    check(arc, times=3)


def test_another_round_after_a_prune_of_the_first_one(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    arc.episodes.map(doubled, ["reward"], ["twice"], job="score", only="missing")
    arc.prune("0s", force=True, dry_run=False)
    arc = filled(tmp_path / "arc", 5, 100)
    arc.episodes.map(doubled, ["reward"], ["twice"], job="score", only="missing")
    assert {one.key.rpartition("/")[2] for one in arc.storage.scan("jobs/score")} > {"fold-000001.json"}
    assert arc.jobs["score"].about["committed"] == 5 * STEPS
    check(arc)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"engine": "spark"}, "engine='spark': give one of 'local', 'ray'"),
        ({"only": "some"}, "only='some': give one of"),
        ({"on_error": "warn"}, "on_error='warn': give one of"),
        ({"workers": 0}, "workers=0"),
        ({"num_gpus": 1}, "go with engine='ray'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"commit_every": "soon"}, "commit_every='soon'"),
        ({"only": "missing", "adds": None}, "say which fn makes"),
        ({"job": ""}, "must have a name"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    arc = filled(tmp_path / "arc", 3)
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        arc.episodes.map(doubled, ["reward"], **{"adds": ["twice"], "job": "score", **given})
    assert arc.jobs.unfinished() == []
    assert arc.refresh().late_fields.num_rows == 0


def test_a_store_in_memory_has_no_other_processes() -> None:
    arc = filled("memory://jobs/alone")
    with pytest.raises(UsageError, match="in the memory of this process"):
        arc.episodes.map(doubled, ["reward"], ["twice"], job="score", workers=2)
    assert len(arc.jobs) == 0
    arc.episodes.map(doubled, ["reward"], ["twice"], job="score")
    check(arc)


def test_a_function_that_cannot_be_pickled(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    with (tmp_path / "open").open("w") as file:
        held = file

        def writes(steps: Mapping[str, Any]) -> dict[str, Any]:
            held.write("x")
            return doubled(steps)

        with pytest.raises(UsageError, match="cannot be sent to other processes"):
            arc.episodes.map(writes, ["reward"], ["twice"], job="score", workers=2)


@pytest.mark.parametrize("job", [None, "score"])
def test_results_of_another_kind_than_the_first(tmp_path: Path, job: str | None) -> None:
    arc = filled(tmp_path / "arc")

    def other(steps: Mapping[str, Any]) -> dict[str, Any]:
        made = 2 * steps["reward"]
        return {"twice": made.astype("f4") if steps["reward"][0] == 20 else made}

    with pytest.raises(FieldError, match=r"twice: <f4.*twice: <f8"):
        arc.episodes.map(other, ["reward"], ["twice"], job=job)
    assert arc.refresh().late_fields.num_rows == 0


def test_a_job_of_other_arguments(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")
    interrupted(arc, tmp_path)
    (job,) = arc.jobs.values()
    assert not job.finished
    with pytest.raises(UsageError, match="of another function"):
        arc.episodes.map(doubled, ["reward"], ["twice"], job="score")
    with pytest.raises(NotFoundError, match="no job 'else'"):
        arc.jobs["else"]
