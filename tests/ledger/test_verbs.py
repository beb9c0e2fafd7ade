"""What a ledger's verbs say and refuse; and what is to be done again after a resume."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import layout
from archive.ledger import Group, Rollout
from archive.ledger.prompts import Cursors
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import steps


def sealed(w: archive.Writer, ledger: Any, key: Any, sibling: int = 0, **more: Any) -> str:
    """One more episode, as that rollout."""
    name = w.add_episode(steps([1, 2]), **more)
    ledger.seal(key, sibling, name)
    return name


def test_a_prompt_goes_from_drawn_to_trained_and_may_come_again() -> None:
    with fresh().writer() as w:
        ledger = w.ledger("prompts")
        assert w.ledger("prompts") is ledger
        ledger.draw(["a", 7], siblings=2)
        assert [ledger.state(key) for key in ("a", 7, "b")] == ["drawn", "drawn", None]
        ledger.start("a")
        assert ledger.state("a") == "started"
        names = [sealed(w, ledger, "a", sibling) for sibling in (0, 1)]
        assert ledger.sealed("a") == dict(enumerate(names))
        assert ledger.to_train() == [Group("a", names)]
        assert ledger.counts == {"drawn": 1, "started": 0, "sealed": 1, "trained": 0, "dropped": 0}
        ledger.train("a", update_count=3)
        ledger.drop([7], "too long")
        assert [ledger.state(key) for key in ("a", 7)] == ["trained", "dropped"]
        assert not ledger.to_train()
        ledger.draw(["a"])
        assert ledger.state("a") == "drawn"
        assert ledger.to_reissue() == [], "what this session drew itself"


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    with fresh().writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b"], siblings=2)
        name = sealed(w, ledger, "a")
        other = w.add_episode(steps([3]))
        ledger.seal("a", 0, name)  # the same again
        for refused, error, words in (
            (lambda: ledger.seal("c", 0, other), archive.NotFoundError, "never drawn"),
            (lambda: ledger.seal("a", 0, other), archive.UsageError, "sealed with episode"),
            (lambda: ledger.seal("a", 2, other), archive.UsageError, "no sibling 2"),
            (lambda: ledger.seal("a", 1, "unknown"), archive.UsageError, "add it first"),
            (lambda: ledger.seal(["a", "b"], 1, [other]), archive.UsageError, "2 keys and 1 episodes"),
            (lambda: ledger.train(["a"]), archive.UsageError, "siblings 1 of 2 are not sealed"),
            (lambda: ledger.train(["c"]), archive.NotFoundError, "never drawn"),
            (lambda: ledger.draw(["c", "a"]), archive.UsageError, "still in flight"),
            (lambda: ledger.draw(["c", "c"]), archive.UsageError, "twice"),
            (lambda: ledger.draw([True]), archive.UsageError, "a string or an integer"),
            (lambda: ledger.draw([1.5]), archive.UsageError, "a string or an integer"),  # type: ignore[list-item]
            (lambda: ledger.draw(["c"], siblings=0), archive.UsageError, "at least"),
            (lambda: ledger.start(["b", "a"]), archive.UsageError, "sealed already"),
            (lambda: ledger.drop(["b", "c"], "no"), archive.NotFoundError, "never drawn"),
            (lambda: ledger.to_reissue("prompt"), archive.UsageError, "granularity"),  # type: ignore[arg-type]
        ):
            before = ledger.table
            with pytest.raises(error, match=words):
                refused()
            assert ledger.table == before
            assert ledger.state("c") is None
        ledger.seal("a", 1, other)
        ledger.train("a")
        with pytest.raises(archive.UsageError, match="trained already"):
            ledger.train("a")
        with pytest.raises(archive.UsageError, match="trained already"):
            ledger.seal("a", 1, other)


def test_what_an_earlier_session_left_is_done_again_and_no_more() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b", 7], siblings=2, cursor={"at": 3})
        ledger.start(["a", "b"])
        kept = sealed(w, ledger, "a")
        w.checkpoint(1, wait=True)
        late = sealed(w, ledger, "a", 1)
        ledger.train("a")
        ledger.draw("late", cursor={"at": 4})
    found = reopened(arc)
    assert found.ledgers == ["prompts"]
    assert found.ledger("prompts").state("a") == "trained"
    left = [Rollout("a", 1), *(Rollout(key, sibling) for key in ("b", 7) for sibling in (0, 1))]
    view = found.checkpoints["step-1"].ledger("prompts")
    assert view.to_reissue() == left
    assert view.cursor == {"at": 3}
    assert view.state("late") is None
    with found.writer(resume=found.checkpoints["step-1"]) as w:
        ledger = w.ledger("prompts")
        assert ledger.to_reissue() == left
        assert ledger.to_reissue("group") == ["a", "b", 7]
        assert ledger.cursor == {"at": 3}
        assert ledger.cursors == {0: {"at": 3}}
        assert ledger.sealed("a") == {0: kept}
        assert late not in ledger.table["episode_id"].to_pylist()
        for rollout in left[:2]:
            ledger.start(*rollout)
        assert ledger.to_reissue() == left[2:]
        again = sealed(w, ledger, "a", 1)
        assert ledger.to_train() == [Group("a", [kept, again])]
        ledger.train("a")
        ledger.drop("b", "slow", sibling=1)
        one = sealed(w, ledger, "b")
        assert ledger.to_train() == [Group("b", [one])], "the others don't wait for it"
    assert reopened(arc).ledger("prompts").counts == {"drawn": 1, "started": 0, "sealed": 1, "trained": 1, "dropped": 0}


def test_a_checkpoint_without_buffers_keeps_the_ledger_and_the_episodes_that_it_speaks_of() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b"])
        kept = sealed(w, ledger, "a")
        w.checkpoint(1, save_replay=False, wait=True)
        ledger.draw("late")
        w.add_episode(steps([5]), episode_id="later")
        w.commit()
    found = reopened(arc)
    assert {ep.id for ep in found.episodes} == {kept, "later"}, "each is there once"
    with found.writer(resume=found.checkpoints["step-1"]) as w:
        ledger = w.ledger("prompts")
        assert ledger.to_train() == [Group("a", [kept])]
        assert ledger.to_reissue() == [Rollout("b", 0)]
        assert ledger.state("late") is None
        assert w.live.num_rows == 0


def test_rows_say_with_which_weights_and_of_a_tick_only_the_last() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b", "c"], siblings=1)
        ledger.start(["a", "b"])
        mixed = w.add_episode(steps([1, 2, 3]), model_weights_uuid=["w1", "w0", "w1"], update_count=[6, 4, 5])
        ledger.seal("a", episode_id=mixed)  # by those of its last step
        name = w.add_episode(steps([4]), model_weights_uuid="w1", update_count=5)
        ledger.seal("b", episode_id=name, model_weights_uuid="w2", update_count=6)
        ledger.train("a", update_count=9)
        w.commit()
    rows = reopened(arc).ledger("prompts").rows.to_pylist()
    told = [(r["key"], r["sibling"], r["state"], r["model_weights_uuid"], r["update_count"]) for r in rows]
    drawn = [(f'"{key}"', -1, "drawn", None, None) for key in "abc"]
    assert told == [
        *drawn, ('"a"', 0, "sealed", "w1", 5), ('"b"', 0, "sealed", "w2", 6), ('"a"', -1, "trained", None, 9),
    ]  # fmt: skip
    assert len({(r["session"], r["rank"], r["sequence"]) for r in rows}) == 1


def test_a_sealed_rollout_may_be_made_again() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b", "c"])
        for key in ("a", "b"):
            sealed(w, ledger, key)
        w.commit()
        ledger.reopen(["a", "b", "c"])
        assert [ledger.state(key) for key in "abc"] == ["started", "started", "drawn"]
        assert ledger.sealed("a") == {}
        again = sealed(w, ledger, "a")
        sealed(w, ledger, "c")
        ledger.reopen("c")  # in the same commit as it was sealed
        ledger.train("a")
        with pytest.raises(archive.UsageError, match="trained already"):
            ledger.reopen("a")
        w.checkpoint(1, wait=True)
    found = reopened(arc)
    rows = [(r["key"], r["state"], r["episode_id"]) for r in found.ledger("prompts").rows.to_pylist()]
    assert ('"a"', "started", None) not in rows, "of a commit only the last counts"
    assert ('"a"', "sealed", again) in rows
    with found.writer(resume=found.checkpoints["step-1"]) as w:
        assert w.ledger("prompts").to_reissue() == [Rollout("b", 0), Rollout("c", 0)]


def test_nothing_but_a_ledger_is_committed_once() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.ledger("prompts").draw(np.arange(3))
        w.ledger("others").draw("x")
        w.commit()
        head = w.commit()
    found = reopened(arc)
    assert found.ledgers == ["others", "prompts"]
    assert found.head.number == head.number
    assert found.head.added == {"segments": 0, "ledger": 4}
    assert found.ledger("prompts").state(2) == "drawn"
    assert len(found.ledger("others").rows) == 1


def test_a_session_that_goes_on_from_none_is_told_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        found = [one.getMessage() for one in caplog.records if "in flight, which this one" in one.getMessage()]
        caplog.clear()
        return found

    arc = fresh()
    with arc.writer() as w:
        w.ledger("prompts").draw(["a", "b", "c"])
        w.ledger("prompts").drop("b", "bad")
        w.checkpoint(1, wait=True)
        assert told() == []
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-1"]) as w:
        assert w.ledger("prompts").to_reissue()
        assert told() == [], "it knows of them"
    with reopened(arc).writer(run="other") as w:
        assert w.ledger("prompts").to_reissue() == []
        assert told() == [], "another run's"
    with reopened(arc).writer() as w:
        assert w.ledger("prompts") is w.ledger("prompts")
        (words,) = told()
        assert "2 keys" in words
        assert "resume=arc.recover()" in words
        w.ledger("more")
        assert told() == []
        w.ledger("prompts").draw("d")
        w.ledger("prompts").drop("d", "bad")
    with reopened(arc).writer() as w:
        w.ledger("prompts")
        assert told() == [], "of the newest that knew of any"


ODD = ["", "\x00\x1b[31m", "line\nline", "null", '"', "\\", "\u2028", "\U0001f600", "1", 1, -1, 0, 2**64, -(2**1000)]


def test_odd_keys_come_back_as_they_are() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(iter(ODD))
        ledger.draw([])
        ledger.seal([], episode_id=[])
        ledger.train([])
        ledger.draw(np.array(7))
        ledger.draw(np.str_("eight"))
        ledger.draw(np.array(["nine", "ten"]))
        ledger.draw(key for key in (np.int64(11), np.uint8(12)))
        ledger.start(np.int64(7), sibling=np.int64(0))  # type: ignore[arg-type]
        w.checkpoint(1, wait=True)
    left = [*ODD, 7, "eight", "nine", "ten", 11, 12]
    assert [one.key for one in reopened(arc).checkpoints["step-1"].ledger("prompts").to_reissue()] == left
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-1"]) as w:
        found = w.ledger("prompts").to_reissue("group")
        assert found == left
        assert [type(key) for key in found] == [type(key) for key in left]
        w.ledger("prompts").drop(left, "all")
    view = reopened(arc).ledger("prompts")
    assert [view.state(key) for key in left] == ["dropped"] * len(left)


@pytest.mark.parametrize(
    "key", [True, np.True_, 1.0, None, b"bytes", object(), 10**5000, "\ud800", ["a", "\udfff"], [["a"]], [b"a"],
            [np.float64(1)], np.zeros((2, 2), int), ["a", "a"], [1, np.int64(1)], [0, False]],
    ids=lambda key: type(key).__name__,
)  # fmt: skip
def test_what_is_no_key_is_refused_and_changes_nothing(key: Any) -> None:
    with fresh().writer() as w:
        ledger = w.ledger("prompts")
        for verb in (ledger.draw, ledger.start, ledger.train, lambda key: ledger.seal(key, episode_id="e")):
            with pytest.raises(archive.ArchiveError):
                verb(key)
        assert ledger.table.num_rows == 0


def test_threads_that_draw_the_same_keys_each_get_some() -> None:
    def take(_: int) -> list[int]:
        got = []
        for key in range(50):
            try:
                ledger.draw(key)
                got.append(key)
            except archive.UsageError:
                continue
        return got

    arc = fresh()
    with arc.writer() as w, ThreadPoolExecutor(4) as pool:
        ledger = w.ledger("prompts")
        taken = [key for got in pool.map(take, range(4)) for key in got]
    assert sorted(taken) == list(range(50))
    assert sorted(reopened(arc).ledger("prompts").rows["key"].to_pylist()) == sorted(map(str, range(50)))


def test_an_interrupted_call_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a"])
        with monkeypatch.context() as patched:
            patched.setattr(Cursors, "saying", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ledger.draw(["b"], cursor=1)
        assert ledger.state("b") is None
    assert reopened(arc).ledger("prompts").rows["key"].to_pylist() == ['"a"']


def test_a_library_that_knows_no_ledger_refuses_the_archive_once_there_is_one() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps([1, 2]))
        w.checkpoint(1).result()
        assert layout.JOURNAL not in arc.refresh().head.format["features"]
        w.ledger("prompts").draw(["a"])
        w.checkpoint(2).result()
        assert layout.JOURNAL in arc.refresh().head.format["features"]
