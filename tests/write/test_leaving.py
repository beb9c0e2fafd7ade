"""What a writer says that ends with steps that nobody commits."""

from __future__ import annotations

import re
from typing import Any

import pytest

import archive
from archive.testing import steps
from archive.write import Buffer, works

SAID = re.compile(r"<Writer rank 0 of 1, .*> closed with (\d+) uncommitted steps")


class OurError(Exception):
    """What the body of a `with` raises."""


def said(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [int(found[1]) for message in caplog.messages if (found := SAID.match(message))]


def leave(name: str, work: Any, **how: Any) -> None:
    """Leave a writer by an exception after this work."""

    def within() -> None:
        with archive.create(f"memory://leaving/{name}").writer(**how) as w:
            work(w)
            raise OurError

    with pytest.raises(OurError):
        within()


def add(w: archive.Writer, count: int) -> None:
    w.append(steps(count), env_ids=0)


def test_steps_of_all_buffers_are_counted_wherever_they_are(caplog: pytest.LogCaptureFixture) -> None:
    def work(w: archive.Writer) -> None:
        add(w, 3)
        w.commit()
        add(w, 20)
        w.flush()
        add(w, 100)
        w.buffer("other").append(steps(1000), env_ids=0)

    leave("counted", work)
    assert said(caplog) == [1120]


def test_what_a_checkpoint_has_that_is_under_way_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    def work(w: archive.Writer) -> None:
        add(w, 20)
        w.checkpoint(1)
        add(w, 3)

    leave("checkpoint", work)
    assert said(caplog) == [3]


def test_nothing_is_said_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    leave("nothing", lambda w: None)
    leave("committed", lambda w: (add(w, 3), w.commit()))
    leave("journaled", lambda w: add(w, 3), journal_s=60)
    with archive.create("memory://leaving/closed").writer() as w:
        add(w, 3)
    assert said(caplog) == []


def test_what_a_journal_could_not_take_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise archive.StorageError("the store is gone")

    def work(w: archive.Writer) -> None:
        add(w, 3)
        monkeypatch.setattr(works.Upload, "run", fails)

    leave("broken", work, journal_s=60)
    assert said(caplog) == [3]
    assert any("and not all of them in its journal" in message for message in caplog.messages)


def test_a_call_that_was_interrupted_counts_for_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(w: archive.Writer) -> None:
        add(w, 3)
        real = Buffer._keep

        def interrupted(*given: Any, **more: Any) -> None:
            real(*given, **more)
            raise KeyboardInterrupt

        monkeypatch.setattr(Buffer, "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(w, 20)

    leave("interrupted", work)
    assert said(caplog) == [3]
