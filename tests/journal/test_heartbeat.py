"""A process that was stopped, or is a minute old, asks for a newer session before it says anything."""

from __future__ import annotations

import pytest

import archive
from archive.journal import ticker


def test_who_was_stopped_asks_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()
    monkeypatch.setattr(ticker, "uptime", lambda: now[0])
    heartbeat = ticker.Heartbeat(2.0, lambda: looks.append(now[0]))
    for now[0] in (1.0, 3.0, 5.0):
        heartbeat.beat()
        heartbeat.check()
    assert looks == []
    now[0] = 8.0
    heartbeat.check()
    assert looks == [8.0]
    heartbeat.check()
    assert looks == [8.0]
    while now[0] < 8.0 + ticker.LOOK_S:
        assert looks == [8.0]
        now[0] += 1.0
        heartbeat.beat()
    assert looks == [8.0, now[0]]


def test_who_was_replaced_is_told_each_time_and_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()
    monkeypatch.setattr(ticker, "uptime", lambda: now[0])

    def replaced() -> None:
        looks.append(now[0])
        raise archive.SupersededError("replaced")

    heartbeat = ticker.Heartbeat(2.0, replaced)
    for now[0] in (5.0, 10.0, 15.0):
        with pytest.raises(archive.SupersededError):
            heartbeat.check()
    assert looks == [5.0]
