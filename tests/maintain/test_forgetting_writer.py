"""A writer that lets go as it saves: in the background, by one rank, of its own run alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import archive
from archive import Keep
from archive.errors import ConflictError, SupersededError, UsageError
from archive.maintain import forget as forgetting
from archive.testing import assert_whole
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps
from tests.support.letting_go import Ring
from tests.support.transfers import others_within


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


def test_what_a_checkpoint_asks_for_stays_the_same_without_a_prune() -> None:
    arc = fresh()
    ring = Ring(arc, keep=Keep(last=2), forget="checkpoints")
    asked = []
    for _ in range(2):
        ring.turns(6)
        before = ring.arc.io_stats()
        ring.turns(1)
        after = ring.arc.io_stats()
        asked.append((after.list - before.list, after.head - before.head))
    assert asked[0] == asked[1]
    assert asked[0][0] == 0  # no folder is listed, which takes the longer, the more is in it
    ring.w.close()


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


# -- beside another run that commits -----------------------------------------------------------------------------------


def _other(arc: archive.Archive) -> tuple[Any, Any]:
    """A writer of another run, and a call that makes it commit rows and checkpoints in turn."""
    w, made = reopened(arc).writer(run="other"), []

    def act() -> None:
        made.append(w.add_episode(steps([len(made)]), episode_id=f"other-{len(made)}"))
        w.checkpoint(len(made)).result() if len(made) % 2 else w.commit()

    return w, act


@pytest.mark.parametrize("forget", ["unreferenced", "checkpoints"])
def test_tries_that_others_outrun_serve_the_next_one(monkeypatch: pytest.MonkeyPatch, forget: str) -> None:
    arc = fresh()
    other, act = _other(arc)
    ring = Ring(arc, keep=Keep(last=2), forget=forget)
    ring.turns(6)
    ring.w._saver._thread.submit(int).result()  # what came after them is over
    decided: list[int] = []
    decide = forgetting.decide
    monkeypatch.setattr(forgetting, "decide", lambda *a: (decided.append(a[1].number), decide(*a))[1])
    with others_within(monkeypatch, "/forget/", act, times=5) as tried:
        ring.turn()
        ring.w.close()
    assert (len(tried), len(decided)) == (6, 1)
    assert _names(arc) == ["step-5", "step-6"]
    assert _names(arc, "other") == ["step-1", "step-3", "step-5"]
    now = reopened(arc)
    held = {e.id for ck in now.checkpoints.of("main") for e in ck.episodes}
    ids = {e.id for e in now.episodes}
    assert {f"other-{k}" for k in range(5)} < ids
    assert held <= ids
    assert (forget == "checkpoints") or ids == held | {f"other-{k}" for k in range(5)}
    assert [serials(ck) for ck in now.checkpoints.of("main")] == [list(range(30, 60)), list(range(40, 70))]
    assert [serials(ck) for ck in now.checkpoints.of("other")] == [[0], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert_whole(now)
    other.close()
    assert len(reopened(arc).undo().checkpoints.of("main")) == 3
    assert len(reopened(arc).checkpoints.of("other")) == 3


def test_who_is_outrun_for_good_says_so_and_forgets_after_the_next_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.log.log._MOST_WAIT_S", 0.0)
    arc = fresh()
    other, act = _other(arc)
    ring = Ring(arc, keep=Keep(last=1), forget="unreferenced")
    ring.turns(3)
    ring.w._saver._thread.submit(int).result()
    with others_within(monkeypatch, "/forget/", act, times=99) as tried:
        assert ring.turn().name == "step-3", "the checkpoint is there whatever becomes of what comes after it"
        with pytest.raises(ConflictError, match=r"nothing was forgotten.*after its next checkpoint"):
            ring.w.close()
    assert len(tried) == forgetting.MOST_TRIES
    assert _names(arc) == ["step-2", "step-3"]
    ring = Ring(
        arc, keep=Keep(last=1), forget="unreferenced", begin=4, resume=arc.refresh().checkpoints.of("main").latest
    )
    ring.turn()
    ring.w.close()
    assert _names(arc) == ["step-4"]
    other.close()


def test_what_another_run_takes_over_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was forked from a checkpoint commits one of its own with the same steps while they are forgotten."""
    arc = fresh()
    ring = Ring(arc, keep=Keep(last=1))
    ring.turns(3)
    old = reopened(arc).checkpoints.of("main")["step-0"]
    fork = reopened(arc).writer(run="fork", fork_from=old)
    fork.add_episode(steps([1000]))
    fork.checkpoint(0).result()  # so nothing protects what it went on from but what it holds
    then = forgetting.after_checkpoint(arc.storage, arc.id, ring.w._place, "unreferenced")
    decided: list[int] = []
    decide = forgetting.decide
    monkeypatch.setattr(forgetting, "decide", lambda *a: (decided.append(a[1].number), decide(*a))[1])
    with others_within(monkeypatch, "/forget/", lambda: fork.checkpoint(1).result()):
        then(ring.turn().commit)
    assert len(decided) == 2
    assert 0 in serials(reopened(arc).checkpoints.of("fork").latest)
    fork.add_episode(steps([1001]))
    fork.checkpoint(2).result()
    assert_whole(reopened(arc))
    fork.close()
