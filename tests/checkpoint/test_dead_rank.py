"""A rank that is gone: the others say so after seconds, and what they have is saved when they are told to end."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import shutdown, waits
from archive.checkpoint import assembly, pending, requests, rounds
from archive.saved import stage
from tests.support.processes import until

TOO_LONG_S = 90.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "process", shutdown.Shutdown())
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    monkeypatch.setattr(assembly, "PARTIAL_STEP_IN_S", 0.05)


def one_of_two(name: str) -> archive.Writer:
    w = archive.create(f"memory://dead-{name}").writer(0, 2, session="s")
    w.append({"x": np.arange(2)}, env_ids=0)
    return w


def test_two_of_three_ranks_save_what_they_have_when_they_are_told_to_end(tmp_path: Path) -> None:
    url = str(tmp_path / "root")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.dead_rank",
             json.dumps({"url": url, "folder": str(tmp_path), "rank": r})],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for r in range(3)
    ]  # fmt: skip
    try:

        def said(rank: int) -> list[dict[str, Any]]:
            log = tmp_path / f"rank-{rank}.log"
            return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

        until(lambda: all(said(r) for r in range(3)), TOO_LONG_S)
        ranks[1].kill()
        ranks[1].wait(30)
        (tmp_path / "go").touch()
        until(lambda: all(len(said(r)) == 2 for r in (0, 2)), TOO_LONG_S)
        for r in (0, 2):
            assert said(r)[1]["waiting_for"] == [1]
            assert said(r)[1]["told"][0] == [1]
            assert "waits for rank 1" in said(r)[1]["shown"]
        began = time.monotonic()
        for r in (0, 2):
            ranks[r].send_signal(signal.SIGTERM)
        errors = {r: ranks[r].communicate(timeout=90)[1] for r in (0, 2)}
        took = time.monotonic() - began
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
            if process.stderr is not None:
                process.stderr.close()
    assert [ranks[r].returncode for r in (0, 2)] == [0, 0], errors
    assert took < 60, "the six seconds of the shutdown, and what a busy machine takes to save"
    arc = archive.open(url)
    assert [c.name for c in arc.checkpoints if c.whole] == ["step-1"]
    latest = arc.checkpoints.latest
    assert latest is not None
    assert latest.name == "step-1"
    for r in (0, 2):
        assert (said(r)[2]["last"], said(r)[2]["missing"], said(r)[2]["earlier"]) == ("last", [1], [1])
        assert ("has waited" in errors[r]) == (r == 0), "rank 0 says it for all"
    assert "for rank 1 of this job" in errors[0]
    last = arc.checkpoints["last"]
    assert last.missing_ranks == [1]
    share = resharding.plan(last, world_size=1, allow_missing=True).share(0)
    found = sorted(int(one) for data in share.read() for one in data["serial"])
    assert found == sorted(r * 1000 + s for r in (0, 2) for s in range(said(r)[2]["serial"]))


def test_a_log_line_names_the_missing_rank_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "archive")
    w = one_of_two("logs")
    pending = w.checkpoint(1)
    assert pending.waiting_for == ()
    until(lambda: len(caplog.messages) >= 2, TOO_LONG_S)
    assert "checkpoint 'step-1' has waited" in caplog.messages[0]
    assert "rank 1 of this job" in caplog.messages[0]
    assert pending.waiting_for == (1,)
    with pytest.raises(archive.DeadlineError, match="waits for rank 1"):
        pending.result(0.01)
    pending._saver.give_up()  # type: ignore[attr-defined]
    with pytest.raises(archive.RanksMissingError, match="rank 1 of 2"):
        pending.result()
    w._end()


def test_the_process_ends_within_its_time_and_nothing_is_lost() -> None:
    shutdown.set_within(2.0)
    w = one_of_two("ends")
    earlier = w.checkpoint(1, timeout_s=600)
    time.sleep(0.1)
    began = time.monotonic()
    shutdown.process.begin()
    w.append({"x": np.arange(3)}, env_ids=0)
    last = w.checkpoint(2, timeout_s=600).result()
    assert time.monotonic() - began < 10
    assert (earlier.result().missing_ranks, last.missing_ranks, last.whole) == ([1], [1], False)
    assert [ep.length for ep in last.episodes] == [5]
    w.close()


def test_a_late_rank_makes_it_whole_and_one_that_is_in_a_partial_one_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown.set_within(2.0)
    monkeypatch.setattr(assembly, "PARTIAL_STEP_IN_S", 3.0)
    arc = archive.create("memory://dead-three")
    writers = [arc.writer(rank, 3, session="s") for rank in range(3)]
    for w in writers:
        w.append({"x": np.arange(2)}, env_ids=0)
    pending = [w.checkpoint(1) for w in writers[:2]]
    shutdown.process.begin()
    made = [p.result() for p in pending]
    assert [ck.missing_ranks for ck in made] == [[2], [2]]
    assert made[0].number == made[1].number
    assert writers[2].checkpoint(1).result().whole  # late, but all have staged now
    for w in writers:
        w._end()


def test_a_rank_that_does_not_answer_a_request_is_named_and_a_shutdown_does_not_wait_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "archive")
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    monkeypatch.setattr(rounds, "AGREE_POLL_S", 0.01)
    before = {n: signal.getsignal(n) for n in requests.SIGNALS}
    w = one_of_two("agree")
    try:
        requests.listen(shutdown_s=5.0)
        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        requests.request()
        began = time.monotonic()
        while not requests.requested():
            assert time.monotonic() - began < 60
        assert time.monotonic() - began > 1.0  # a fifth of the five seconds
        assert requests.terminating()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "waiting for rank 1 of this job" in caplog.messages[0]
    w._end()


def of_three(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, archive.Writer]:
    """Ranks 0 and 2 of three; rank 1 never comes."""
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    monkeypatch.setattr(requests, "ASKED_POLL_S", 0.1)
    monkeypatch.setattr(rounds, "AGREE_POLL_S", 0.01)
    shutdown.set_within(2.0)
    arc = archive.create(f"memory://dead-{name}")
    writers = {rank: arc.writer(rank, 3, session="s") for rank in (2, 0)}
    for w in writers.values():
        w.append({"x": np.arange(2)}, env_ids=0)
    return writers


def act(w: archive.Writer, *, told: bool) -> rounds.Agreed | None:
    """Call `requested()` as this rank until it acts."""
    watch = requests._Watch(w._storage, w._place)
    until(lambda: watch.agreed(True, told), TOO_LONG_S)
    watch.stop()
    return rounds.RequestRound(w._storage, w._place, 0).agreed


def act_in_haste(w: archive.Writer) -> None:
    """The process of this rank was told to end, and does not wait for the answers of the others; theirs were not."""
    shutdown.process.begin(shutdown.AGREE_PART)
    said = act(w, told=True)
    assert said is not None
    assert said.haste
    shutdown.process.began = float("-inf")


def test_a_rank_that_was_not_told_to_end_takes_an_agreement_in_haste_as_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers = of_three("haste", monkeypatch)
    act_in_haste(writers[2])
    act(writers[0], told=False)
    assert requests._asked.ending
    assert shutdown.process.passed(shutdown.AGREE_PART), "as long as those wait that agreed"
    pending = {rank: w.checkpoint(1, timeout_s=600) for rank, w in writers.items()}
    until(lambda: all(one.done() for one in pending.values()), TOO_LONG_S)
    made = {rank: one.result() for rank, one in pending.items()}
    assert [(ck.ranks, ck.missing_ranks, ck.whole) for ck in made.values()] == [([0, 2], [1], False)] * 2
    for w in writers.values():
        w._end()


def test_a_rank_that_waits_for_a_dead_one_hears_of_an_agreement_in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not get to its next step before, so nobody hears its answer."""
    writers = of_three("blocked", monkeypatch)
    pending = writers[0].checkpoint(1, timeout_s=600)
    act_in_haste(writers[2])
    until(pending.done, TOO_LONG_S)
    assert pending.result().missing_ranks == [1, 2]
    assert requests._asked.flag.is_set(), "it answers at its next step"
    for w in writers.values():
        w._end()


def test_a_rank_that_dies_after_the_agreement_is_waited_for_as_long_as_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is told to end, all answer, and it never saves."""
    writers = of_three("after", monkeypatch)
    place = replace(writers[0]._place, rank=1)
    rounds.RequestRound(writers[0]._storage, place, 0).answer(1, True, "n")
    rounds.RequestRound(writers[0]._storage, replace(place, rank=2), 0).answer(1, False, "n")
    said = act(writers[0], told=False)
    assert said is not None
    assert (said.told, said.haste) == (True, False)
    began = time.monotonic()
    pending = [w.checkpoint(1, timeout_s=600) for w in writers.values()]
    until(lambda: all(one.done() for one in pending), TOO_LONG_S)
    assert time.monotonic() - began >= 0.9 * shutdown.process.within_s
    assert [one.result().missing_ranks for one in pending] == [[1], [1]]
    for w in writers.values():
        w._end()


def test_a_rank_that_an_error_made_late_does_not_take_itself_for_one_that_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would agree on the next request in haste, and end the whole job, though nobody was told to end."""
    writers = of_three("error", monkeypatch)
    place = writers[0]._place
    for rank in (1, 2):
        rounds.RequestRound(writers[0]._storage, replace(place, rank=rank), 0).answer(1, False, "n")
    watch, wait = requests._Watch(writers[0]._storage, place), rounds.RequestRound.await_agreement

    def fails(self: rounds.RequestRound, own: rounds.Answer) -> rounds.Agreed:
        assert not wait(self, own).told
        raise archive.StorageError("away")

    assert [watch.agreed(True, False) for _ in range(requests.LEAD_STEPS)] == [False, False]
    with monkeypatch.context() as patch:
        patch.setattr(rounds.RequestRound, "await_agreement", fails)
        with pytest.raises(archive.StorageError):
            watch.agreed(False, False)
    assert watch.agreed(False, False)
    assert "an earlier call ended with an error" in caplog.messages[-1]
    assert not shutdown.process.announced
    assert not requests._asked.ending
    watch.stop()
    for w in writers.values():
        w._end()


def forgotten() -> float:
    """The beginning of an end that is forgotten by now; the process had longer steps, or a longer upload."""
    return time.monotonic() - (shutdown.FORGOTTEN_AFTER + 1) * shutdown.process.within_s


def test_an_upload_that_takes_longer_than_an_end_is_known_is_not_followed_by_a_long_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdown.set_within(2.0)
    w = one_of_two("upload")

    def slow(*given: Any, **more: Any) -> Any:
        shutdown.process.began = forgotten()
        assert w._saver._pending is not None
        w._saver._pending.began = shutdown.process.began - 0.1
        return stage(*given, **more)

    monkeypatch.setattr("archive.checkpoint.saver.stage", slow)
    assert w.checkpoint(1, timeout_s=5).result().missing_ranks == [1]
    w._end()


def test_a_rank_with_long_steps_that_was_told_to_end_does_not_wait_long_for_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers = of_three("long-steps", monkeypatch)
    shutdown.process.began = forgotten()
    monkeypatch.setattr(rounds, "AGREE_TIMEOUT_S", 5.0)
    said = act(writers[2], told=True)
    assert said is not None
    assert said.haste
    for w in writers.values():
        w._end()


def test_time_for_a_shutdown_is_a_positive_number() -> None:
    with pytest.raises(archive.UsageError, match="above 0"):
        shutdown.set_within(0)


def test_a_process_that_lives_on_was_not_told_to_end() -> None:
    one = shutdown.Shutdown()
    assert not one.passed(0.0)
    one.begin()
    assert one.announced
    assert one.passed(0.0)
    assert not one.passed(1.0)
    one.began = time.monotonic() - 1000
    assert not one.announced
    assert not one.passed(0.5)
    one.begin()
    assert one.announced


def test_ranks_are_named_for_people() -> None:
    assert waits.ranks([1]) == "rank 1"
    assert waits.ranks([2, 0]) == "ranks 0, 2"
    assert waits.ranks(range(30)).endswith("19 and 10 more")


def test_the_bar_names_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = pending.Bar()
    for phase in ("uploading", "staging"):
        bar({"phase": phase, "name": "a", "step": 1})
    bar({"phase": "joining", "name": "a", "step": 1, "waiting_for": [1, 2]})
    assert bar._drawn.tasks[0].fields["phase"] == "waiting for ranks 1, 2"
    bar({"phase": "failed", "name": "a", "step": 1})
