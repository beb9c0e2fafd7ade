"""Metrics of a process: what they count, what they are called, and that a fork and a busy writer do no harm."""

from __future__ import annotations

import gc
import os
import re
import threading

import numpy as np
import pytest

import archive
import resharding
from archive.observe import FAMILIES, metrics
from archive.store import Storage
from resharding import ShareBuffer

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\["\\n])*",?)+\})? [0-9.e+-]+')


def number(text: str, name: str, **labels: str) -> float:
    """The value of one line; 0 if there is none."""
    wanted = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "} " if labels else " "
    found = [line for line in text.splitlines() if line.startswith(name + wanted)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def grown(before: str, name: str, **labels: str) -> float:
    return number(metrics(), name, **labels) - number(before, name, **labels)


def archive_of(url: str, episodes: int = 3) -> archive.Archive:
    arc = archive.create(url)
    with arc.writer(compression=None) as w:
        for _ in range(episodes):
            w.add_episode({"x": np.arange(100.0)})
        w.checkpoint(step=1, wait=True)
    return arc


def test_it_is_what_prometheus_reads() -> None:
    archive_of("memory://metrics/text")
    text = metrics()
    for line in text.splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line
    for family in FAMILIES:
        assert f"# TYPE {family.prometheus} {family.kind}\n" in text
    assert text.count("# TYPE") == len(FAMILIES)


def test_requests_are_those_that_the_archive_counts() -> None:
    gc.collect()  # writers that other tests have left behind look for requests
    before = metrics()
    stats = archive_of("memory://metrics/requests").io_stats()
    for verb in ("get", "put", "create", "list"):
        assert grown(before, "archive_requests_total", store="memory", verb=verb) == getattr(stats, verb)
    assert grown(before, "archive_sent_bytes_total", store="memory") == stats.bytes_out
    assert grown(before, "archive_answered_no_total", store="memory") == stats.answered_no > 0
    assert grown(before, "archive_errors_total", store="memory") == 0


def test_connections_that_are_gone_stay_counted() -> None:
    before = metrics()
    for _ in range(50):
        Storage.connect("memory://metrics/gone").put("x", b"12")
    gc.collect()
    assert grown(before, "archive_sent_bytes_total", store="memory") == 100
    assert grown(before, "archive_requests_total", store="memory", verb="put") == 50


def test_operations_are_timed_and_failures_counted() -> None:
    before = metrics()
    arc = archive_of("memory://metrics/operations")
    arc.episodes.read()
    for name in ("checkpoint", "checkpoint.stage", "checkpoint.join", "read"):
        assert grown(before, "archive_operation_seconds_count", operation=name) == 1
    assert grown(before, "archive_operation_seconds_sum", operation="checkpoint") > 0
    assert 3 * 800 < grown(before, "archive_written_bytes_total", operation="checkpoint") < 3 * 800 + 1000
    with pytest.raises(archive.UsageError):
        resharding.plan(arc.checkpoints[-1], world_size=2, tails="nonsense")
    assert grown(before, "archive_operation_failures_total", operation="plan") == 1


def test_a_resume_is_compared_with_its_plan() -> None:
    arc = archive_of("memory://metrics/resume", episodes=40)
    before = metrics()
    share = resharding.plan(arc.checkpoints[-1], world_size=2).share(0)
    cost, earlier = share.cost(), arc.io_stats()
    share.read()
    taken = arc.io_stats() - earlier
    for name, expected in [
        ("needed_bytes", cost["needed_bytes"]), ("received_bytes", taken.bytes_in),
        ("planned", cost["requests"]), ("requests", taken.requests),
    ]:  # fmt: skip
        assert grown(before, f"archive_resume_{name}_total", store="memory") == expected > 0, name


def test_comparing_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan says is in memory once the share was read."""

    def requests(url: str) -> int:
        arc = archive.open(url)
        share = resharding.plan(arc.checkpoints[-1], world_size=2).share(0)
        before = arc.io_stats()
        share.read()
        return (arc.io_stats() - before).requests

    url = archive_of("memory://metrics/compare", episodes=40).url
    compared = requests(url)
    monkeypatch.setattr(ShareBuffer, "cost", lambda buffer: {"needed_bytes": 0, "requests": 0})
    assert requests(url) == compared


def test_a_comparison_that_fails_is_no_failure_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise archive.CorruptManifestError("the chunk table is damaged")

    monkeypatch.setattr(ShareBuffer, "cost", broken)
    arc = archive_of("memory://metrics/broken")
    assert len(resharding.plan(arc.checkpoints[-1], world_size=1).share(0).read()) == 3


def test_the_loss_window_is_told_while_the_writer_is_busy() -> None:
    arc = archive.create("memory://metrics/behind")
    labels = {"rank": "0", "run": "busy"}
    with arc.writer(run="busy", journal_s=3600) as w:
        assert number(metrics(), "archive_journal_behind_seconds", **labels) == 0
        w.add_episode({"x": np.arange(3)})
        told: list[str] = []
        with w.together():
            thread = threading.Thread(target=lambda: told.append(metrics()))
            thread.start()
            thread.join(30)
        assert number(told[0], "archive_journal_behind_seconds", **labels) > 0
        w.sync()
        assert number(metrics(), "archive_journal_behind_seconds", **labels) == 0
    assert 'run="busy"' not in metrics()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_counts_its_own() -> None:
    arc = archive_of("memory://metrics/fork")
    into, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(out, repr(sum(float(x.rpartition(" ")[2]) for x in metrics().splitlines() if x[0] != "#")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(into, 100) == b"0.0"
    assert arc.io_stats().requests > 0
    for end in (into, out):
        os.close(end)
