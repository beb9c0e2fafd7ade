"""Asking a running job for a checkpoint: true on every rank at the same step; and saving when it crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base import shutdown
from archive.base.errors import StorageFullError, UsageError
from archive.base.layout import agreement_key
from archive.checkpoint import assembly, requests, rounds
from archive.store.storage import Storage
from tests.support.archives import fresh, reopened
from tests.support.backends import Backend
from tests.support.checkpoints import serials, steps
from tests.support.places import ROOT
from tests.support.processes import until
from tests.support.sampling import few_of
from tests.support.servers import free_ports


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has handlers and requests of its own."""
    handlers = {number: signal.getsignal(number) for number in requests.SIGNALS}
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    monkeypatch.setattr(shutdown, "process", shutdown.Shutdown())
    monkeypatch.setattr(requests, "POLL_S", 0.05)
    monkeypatch.setattr(rounds, "AGREE_POLL_S", 0.01)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", requests.SIGNALS)
def test_a_signal_is_a_request_once(number: signal.Signals) -> None:
    assert not requests.requested()
    os.kill(os.getpid(), number)
    assert requests.requested()
    assert not requests.requested()


def test_the_handler_that_was_there_is_called_too() -> None:
    got: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    requests.listen([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (got, requests.requested()) == ([signal.SIGUSR2], True)


def test_a_second_sigterm_does_what_it_did_before() -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests.listen()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == requests._on_signal, "asked by SIGUSR2 before: still the first SIGTERM"
    assert requests.requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert not got


_TERMINATED = """
import os, signal, time
from archive import checkpointing
assert not checkpointing.requested()
os.kill(os.getpid(), signal.SIGTERM)
assert checkpointing.requested()
print("saved", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


def test_a_second_sigterm_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TERMINATED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "saved\n", "")


def test_not_in_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=requests.requested)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_request_in_the_bucket_is_seen_once_by_whoever_writes_then() -> None:
    arc = fresh()
    requests.post(arc.storage)
    with arc.writer() as w:
        time.sleep(0.2)
        assert not requests.requested(), "one from before the writer was opened is not for it"
        requests.post(arc.storage)
        until(requests.requested, 60.0)
        w.checkpoint(1).result()
        time.sleep(0.2)
        assert not requests.requested()
    requests.post(arc.storage)
    time.sleep(0.2)
    assert not requests.requested(), "nobody writes any more"


def test_a_request_is_seen_by_ranks_of_which_the_first_has_died() -> None:
    arc = fresh()
    writers = [arc.writer(rank, 4, session="s") for rank in (3, 1)]
    time.sleep(0.2)
    assert not requests._asked.flag.is_set()
    requests.post(arc.storage)
    until(requests._asked.flag.is_set, 60.0)
    for w in writers:
        w._end()


def test_a_rank_that_sees_a_request_late_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that opened its writer before it, beside ranks that did so after it."""
    monkeypatch.setattr(requests._Watch, "_poll", lambda self: None)
    monkeypatch.setattr(requests, "POLL_S", 0.0)
    arc = fresh()
    w = arc.writer(0, 2, session="s")
    place = w._place
    early = requests._Watch(arc.storage, replace(place, rank=1))
    requests.post(arc.storage)
    first = requests._Watch(arc.storage, place)
    requests.post(arc.storage)
    for _ in range(requests.LEAD_STEPS):
        assert not first.agreed(True, False)
        assert not early.agreed(True, False)
    assert first.agreed(False, False)
    assert early.agreed(False, False)
    early._look_for_requests()
    assert not requests._asked.flag.is_set()
    requests.post(arc.storage)
    early._look_for_requests()
    assert requests._asked.flag.is_set()
    w._end()


def test_of_two_writers_of_a_process_only_rank_0_of_the_earlier_lists_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks do not hear which of them the rounds of the other have answered: each would ask for one more."""
    monkeypatch.setattr(requests._Watch, "_poll", lambda self: None)
    monkeypatch.setattr(requests, "POLL_S", 0.0)
    arc, other = fresh(), fresh()
    writers = [arc.writer(rank, 2, session="s") for rank in (0, 1)]
    first, second = requests._asked.watches
    later = other.writer(1, 2, session="s")
    requests.post(arc.storage)
    for watch, sees in ((second, False), (first, True)):
        monkeypatch.setattr(watch._asks, "take", lambda after_s: False)
        watch.look()
        assert requests._asked.flag.is_set() == sees
    for w in (later, *writers):
        w._end()


def test_an_earlier_writer_does_not_end_the_job_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the session before, which were not stopped, agree in haste: for good, as nobody acts on it here."""
    monkeypatch.setattr(requests, "ASKED_POLL_S", 0.0)
    monkeypatch.setattr(requests._Watch, "_poll", lambda self: None)
    arc = fresh()
    before = arc.writer(0, 2, session="s")
    (watch,) = requests._asked.watches
    later = fresh().writer(0, 2, session="t")
    shutdown.process.begin(shutdown.AGREE_PART)
    other = rounds.RequestRound(arc.storage, replace(before._place, rank=1), 0)
    assert other.await_agreement(other.answer(1, True, "n")).haste
    shutdown.process.began = float("-inf")
    for _ in range(3):
        watch.look()
    assert not shutdown.process.announced
    later._end()
    for _ in range(3):
        watch.look()
    assert shutdown.process.announced
    before._end()


def test_ranks_agree_by_the_writer_that_is_still_open_once_a_later_one_is_closed() -> None:
    w = fresh().writer(0, 2, session="s")
    watch = requests._asked.watch
    assert watch is not None
    with fresh().writer(0, 1):
        assert requests._asked.watch is not watch
        assert not requests.requested()
    assert requests._asked.watch is watch
    assert watch.calls == 1, "the other rank has called it, too"
    requests.request()
    assert not requests.requested(), "the other rank has to hear of it first"
    w._end()
    assert requests._asked.watch is None


def test_a_store_out_of_reach_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh().writer():

        def broken(self: Storage, prefix: str) -> list[str]:
            raise StorageFullError("away")

        with monkeypatch.context() as patch:
            patch.setattr(Storage, "list", broken)
            time.sleep(0.2)
            assert not requests.requested()


def test_a_place_that_is_taken_is_told_and_an_unclear_answer_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = fresh().storage
    key = agreement_key("s", 0, 1)
    mine = rounds.Answer(3, nonce="mine")
    assert rounds.put_once(storage, key, mine) == mine
    with pytest.raises(UsageError, match="two processes have this rank of the session"):
        rounds.put_once(storage, key, rounds.Answer(3, nonce="another's"))
    assert rounds.put_once(storage, key, rounds.Answer(9, nonce="mine")) == mine, "answered by a call that failed"
    real = Storage.create

    def unclear(self: Storage, name: str, data: Any) -> None:
        real(self, name, data)
        raise archive.AmbiguousWriteError("no answer")

    monkeypatch.setattr(Storage, "create", unclear)
    rounds.put_once(storage, agreement_key("s", 0, 2), rounds.Answer(5, nonce="n"))
    assert json.loads(storage.get(agreement_key("s", 0, 2)))["ready"] == 5


# -- several processes -----------------------------------------------------------------------------------------------


class Job:
    """Ranks that step until the job is told to end; what they say is in their logs."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], given: dict[str, Any]) -> None:
        text = json.dumps({**given, "folder": str(self.folder)})
        log = (self.folder / f"output-{len(self.processes)}").open("wb")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        with log:
            self.processes.append(
                subprocess.Popen(
                    [*command, "-m", "tests.support.checkpoint_requests", text], env=environment, stdout=log, stderr=log
                )
            )

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        log = self.folder / f"rank-{rank}.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def said(self, count: int) -> list[dict[str, Any]]:
        """The `count`-th line of each rank; a rank that has failed is told with its output."""

        def ready() -> list[dict[str, Any]] | None:
            for i, process in enumerate(self.processes):
                assert not process.poll(), (self.folder / f"output-{i}").read_text()
            lines = [self._lines(rank) for rank in range(self.world_size)]
            return [one[count] for one in lines] if min(map(len, lines)) > count else None

        found: list[dict[str, Any]] = until(ready, 60.0)
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def check(self, count: int) -> None:
        """Every rank acted `count` times, at the same steps and into the same commits, and left after the last."""
        assert [process.wait(60) for process in self.processes] == [0] * len(self.processes)
        acted = [
            [(line["step"], line["number"], line["ends"]) for line in self._lines(rank)[1:]]
            for rank in range(self.world_size)
        ]
        assert acted == [acted[0]] * self.world_size
        assert [ends for _, _, ends in acted[0]] == [False] * (count - 1) + [True]


def _holds(url: str, options: dict[str, Any], world_size: int) -> None:
    for ck in archive.open(url, storage_options=options).checkpoints:
        for rank in range(world_size):
            (data,) = ck.episodes.filter(rank=rank).read()
            assert data["serial"].tolist() == [rank * 1_000_000 + i for i in range(1, ck.step + 1)]


@pytest.mark.parametrize("told", ["all", "one"])
@pytest.mark.parametrize("backend", few_of(["seaweedfs", "local"], 1), indirect=True)
def test_ranks_without_a_process_group_act_and_leave_at_the_same_step(
    backend: Backend, tmp_path: Path, told: str
) -> None:
    job = Job(tmp_path, 3)
    given = {"url": backend.url, "options": backend.storage_options, "world_size": 3}
    try:
        for rank in range(3):
            job.start([sys.executable], {**given, "rank": rank})
        about = job.said(0)
        os.kill(about[1]["pid"], signal.SIGUSR2)
        job.said(1)
        requests.post(backend.connect())
        job.said(2)
        for one in about if told == "all" else about[1:2]:  # all at once, as a preemption does it: one checkpoint
            os.kill(one["pid"], signal.SIGTERM)
        job.check(3)
    finally:
        job.end()
    _holds(backend.url, backend.storage_options, 3)


def test_ranks_of_a_process_group_under_torchrun(tmp_path: Path) -> None:
    """gloo, two ranks: the session is broadcast, requests and the end are agreed on by one reduction a step."""
    pytest.importorskip("torch")
    job, url = Job(tmp_path, 2), str(tmp_path / "root")
    run = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    try:
        job.start([sys.executable, "-m", "torch.distributed.run", *run], {"url": url, "options": {}})
        about = job.said(0)
        assert len({one["session"] for one in about}) == 1
        os.kill(about[1]["pid"], signal.SIGUSR2)
        job.said(1)
        requests.post(Storage.connect(url))
        job.said(2)
        time.sleep(0.5)  # in which no rank takes the same request for another
        os.kill(about[0]["pid"], signal.SIGTERM)
        job.check(3)
    finally:
        job.end()
    _holds(url, {}, 2)


# -- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_saves_and_the_error_goes_on() -> None:
    arc = fresh()
    w = arc.writer(1, 2, session="s")
    w.append(steps([7]), env_ids=0)
    with (
        pytest.raises(ZeroDivisionError),
        requests.save_on_crash(lambda name: w.checkpoint(3, name, partial=True)),
    ):
        raise ZeroDivisionError("boom")
    w._end()
    (ck,) = reopened(arc).checkpoints
    assert ck.name.startswith("crash-ZeroDivisionError-")
    assert (ck.step, ck.missing_ranks, serials(ck)) == (3, [0], [7])
    assert reopened(arc).checkpoints.latest is None


def two_of_three(arc: archive.Archive, world_size: int = 3) -> list[archive.Writer]:
    writers = [arc.writer(rank, world_size, session="s") for rank in range(world_size)][:2]
    for w in writers:
        w.append(steps([7]), env_ids=0)
    return writers


def test_ranks_that_crash_in_one_second_at_different_steps_are_all_saved() -> None:
    arc = fresh()
    writers = two_of_three(arc)
    made = [w.checkpoint(103 + w.rank, "crash", partial=True).result() for w in writers]
    assert [(ck.step, ck.missing_ranks) for ck in made] == [(103, [1, 2]), (104, [0, 2])]
    for w in writers:
        w._end()


def test_a_rank_that_crashes_takes_what_another_makes_whole_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_of_three(fresh(), 2)
    commit = assembly.commit

    def after_another(*given: Any, partial: bool = False) -> Any:
        if partial:
            assert second.checkpoint(1, "c").result().whole
        return commit(*given, partial=partial)

    monkeypatch.setattr(assembly, "commit", after_another)
    assert first.checkpoint(1, "c", partial=True).result().whole
    for w in (first, second):
        w._end()


def test_nothing_is_saved_if_nothing_crashes_and_a_failed_save_hides_nothing() -> None:
    called: list[str] = []
    with requests.save_on_crash(lambda name: called.append(name)):
        pass
    assert not called

    def failing(name: str) -> None:
        raise StorageFullError("no space left")

    with pytest.raises(ZeroDivisionError) as caught, requests.save_on_crash(failing):
        raise ZeroDivisionError("boom")
    assert caught.value.__notes__ == ["the checkpoint on crash failed too: no space left"]


_HOOKED = """
import archive
from archive import checkpointing
w = archive.create({url!r}).writer()
w.append({{"serial": [1, 2]}}, env_ids=0)
checkpointing.install_excepthook(lambda name: w.checkpoint(9, name, partial=True))
raise LookupError("nobody catches this")
"""


def test_an_error_that_nobody_catches_saves_too(tmp_path: Path) -> None:
    url = str(tmp_path / "root")
    done = subprocess.run(
        [sys.executable, "-c", _HOOKED.format(url=url)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("LookupError: nobody catches this")
    ck = archive.open(url).checkpoints.latest
    assert ck is not None
    assert (ck.step, ck.name[:18]) == (9, "crash-LookupError-"), "a world of one is whole"
    assert [e.read()["serial"].tolist() for e in ck.episodes] == [[1, 2]]
