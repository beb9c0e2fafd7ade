"""A writer that lets go as it saves: in the background, by one rank, of its own run alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import archive
from archive import Keep
from archive.errors import SupersededError, UsageError
from archive.maintain import forgetting
from tests.support.checkpoints import fresh, serials, steps
from tests.support.letting_go import Ring


def _names(arc: archive.Archive, run: str = "main") -> list[str]:
    return [ck.name for ck in archive.open(arc.url).checkpoints.of(run)]


def test_a_writer_keeps_what_its_policy_wants() -> None:
    arc = fresh()
    with arc.writer(run="other") as other:
        other.add_episode(steps(range(900, 905)), episode_id="other")
        other.clear()
        for step in range(3):
            other.checkpoint(step).result()
    ring = Ring(arc, keep=Keep(last=2, every=4), forget="unreferenced")
    ring.turns(7)
    ring.w.close()
    assert _names(arc) == ["step-0", "step-4", "step-5", "step-6"]
    assert len(_names(arc, "other")) == 3
    left = archive.open(arc.url)
    held = {e.id for ck in left.checkpoints.of("main") for e in ck.episodes}
    assert {e.id for e in left.episodes} == held | {"other"}, "what another run wrote is not its to let go of"
    assert serials(left.checkpoints.of("main")["step-6"]) == list(range(40, 70))


def test_checkpoints_alone() -> None:
    arc = fresh()
    ring = Ring(arc, keep=Keep(last=1), forget="checkpoints")
    ring.turns(4)
    ring.w.close()
    assert _names(arc) == ["step-3"]
    assert len(archive.open(arc.url).episodes) == 4


def test_the_policy_that_the_run_has_already_is_enough() -> None:
    arc = fresh()
    Ring(arc, keep=Keep(last=1)).turns(2)
    ring = Ring(arc, begin=2, resume=arc.refresh().checkpoints.latest, forget="checkpoints")
    ring.turns(2)
    ring.w.close()
    assert _names(arc) == ["step-3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"forget": "checkpoints"}, "give keep="), ({"forget": "all", "keep": Keep(last=1)}, "give 'checkpoints'"),
        ({"forget": "unreferenced", "keep": Keep()}, "give keep="),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_the_session_opens(options: dict[str, Any], says: str) -> None:
    arc = fresh()
    with pytest.raises(UsageError, match=says):
        arc.writer(**options)
    assert arc.refresh().head.number == 0


def test_one_rank_alone_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    arc, asked = fresh(), []
    before = forgetting.after_checkpoint

    def counted(storage: Any, archive_id: str, place: Any, forget: str) -> Any:
        then = before(storage, archive_id, place, forget)
        return lambda made: (asked.append((place.rank, made.number)), then(made))

    monkeypatch.setattr(forgetting, "after_checkpoint", counted)
    writers = [arc.writer(rank=r, world_size=2, session="s", keep=Keep(last=1), forget="checkpoints") for r in (0, 1)]
    for step in range(3):
        for rank, w in enumerate(writers):
            w.append(steps(range(step * 20 + rank * 10, step * 20 + rank * 10 + 5)), env_ids=rank)
        for pending in [w.checkpoint(step) for w in writers]:
            pending.result()
    for w in writers:
        w.close()
    assert _names(arc) == ["step-2"]
    assert [rank for rank, _ in asked] == [0, 0, 0]


def test_nobody_waits_for_it_and_its_error_surfaces_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arc, may, done = fresh(), threading.Event(), threading.Event()

    def fails(*_: Any) -> Any:
        def then(made: Any) -> None:
            may.wait(60)
            done.set()
            raise SupersededError("somebody else forgot it")

        return then

    monkeypatch.setattr(forgetting, "after_checkpoint", fails)
    ring = Ring(arc, keep=Keep(last=1), forget="checkpoints")
    ring.turn()
    ring.w.append(steps(range(500, 505)), env_ids=0)
    assert not done.is_set(), "the checkpoint is there, and what comes after it goes on"
    may.set()
    ring.w._saver._thread.submit(int).result()  # what was under way is over
    with pytest.raises(SupersededError, match="somebody else"):
        ring.w.flush()
    may.clear()
    ring.turn()
    may.set()
    with pytest.raises(SupersededError, match="somebody else"):
        ring.w.close()


def test_a_session_that_was_replaced_lets_go_of_nothing() -> None:
    arc = fresh()
    ring = Ring(arc, keep=Keep(last=2))
    made = ring.turns(4)[-1]
    then = forgetting.after_checkpoint(arc.storage, arc.id, ring.w._place, "checkpoints")
    Ring(arc, resume=arc.refresh().checkpoints.latest, begin=4)
    with pytest.raises(SupersededError):
        then(made.commit)
    assert len(_names(arc)) == 4
