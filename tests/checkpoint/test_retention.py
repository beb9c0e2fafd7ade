"""Which checkpoints a run's policy retains, and what policy leaves out of them, as data."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest

import archive
import resharding
from archive.base.errors import CorruptCommitError, UsageError
from archive.checkpoint.retention import Candidate, Clock, Keep, keep_of, read_clock
from archive.log.records import KeepRule
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps, value_of

NAN = float("nan")
NOW = datetime(2020, 5, 17, tzinfo=UTC)


def _kept(keep: Keep, metrics: list[dict[str, float]]) -> list[int]:
    """Checkpoints that were made an hour apart, the newest a moment ago."""
    count = len(metrics)
    made = [Candidate(100 + i, i, m, NOW - timedelta(hours=count - 1 - i)) for i, m in enumerate(metrics)]
    return keep.kept(made, NOW)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(), [0, 1, 2, 3, 4, 5]),
        (Keep(last=2), [4, 5]),
        (Keep(last=99), [0, 1, 2, 3, 4, 5]),
        (Keep(every=3), [0, 3, 5]),
        (Keep(best=("return", "max")), [3, 5]),
        (Keep(best=("return", "min")), [1, 5]),
        (Keep(best=("absent", "max")), [5]),
        (Keep(last=1, every=4, best=("return", "min")), [0, 1, 4, 5]),
        (Keep(best=("return", 3)), [0, 2, 3, 5]),
        (Keep(best=("return", "min", 2)), [0, 1, 5]),
        (Keep(best=("return", 1)), [3, 5]),
        (Keep(within="3h"), [2, 3, 4, 5]),
        (Keep(within="30m"), [5]),
        (Keep(within="1s"), [5]),
    ],
)
def test_a_checkpoint_is_kept_if_one_rule_wants_it(keep: Keep, expected: list[int]) -> None:
    metrics: list[dict[str, float]] = [{"return": v} for v in (2.0, -1.0, 9.0, 9.0, NAN)]
    assert _kept(keep, [*metrics, {}]) == [100 + i for i in expected]
    assert Keep.of(KeepRule.from_json(keep.rule.to_json(), what="a rule", error=CorruptCommitError)) == keep


def test_no_checkpoints_no_problem() -> None:
    assert _kept(Keep(last=1, best=("x", "max")), []) == []
    assert Keep.of(None) == Keep()


@pytest.mark.parametrize(
    "wrong", [{"last": 0}, {"every": -1}, {"last": 1.5}, {"last": True}, {"best": ("a",)}, {"best": ("a", "up")},
     {"best": ("a", 0)}, {"best": ("a", 2.5)}, {"best": ("a", "min", "max")}, {"best": "ab"},
     {"best": ("a", "max", 2, 3)},
     {"within": "7"}, {"within": 7}, {"within": "0d"}, {"within": "1y"}, {"within": "-1d"}],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"keep\.{next(iter(wrong))}="):
        Keep(**wrong)


def test_a_rule_as_earlier_libraries_read_it() -> None:
    assert Keep(best=("a", 1)).rule.to_json() == {"last": None, "every": None, "best": ["a", "max"]}
    rule = Keep(best=("a", 3), within="2w").rule.to_json()
    assert rule == {"last": None, "every": None, "best": ["a", "max"], "best_count": 3, "within_s": 1_209_600}
    huge = KeepRule(within_s=(1 << 63) - 1)
    assert Keep.of(huge).kept([Candidate(1, 1, {}, NOW)], NOW) == [1]


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss", ("loss", "max")), ("loss:min", ("loss", "min")), ("loss:3", ("loss", "max", 3)),
        ("loss:min:3", ("loss", "min", 3)), ("eval:loss", ("eval:loss", "max")), ("a:7:min:3", ("a:7", "min", 3)),
        ("min", ("min", "max")), ("7", ("7", "max")),
    ],
)  # fmt: skip
def test_a_rule_as_it_is_typed(text: str, best: Any) -> None:
    assert keep_of(None, None, None, text) == Keep(best=best)


@pytest.mark.parametrize("text", ["loss:0", "loss:3:min", ":max:min"])
def test_a_rule_that_is_typed_and_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"keep\.best="):
        keep_of(None, None, None, text)


def test_the_store_is_asked_for_its_clock_where_age_counts_alone() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(1).result()
    before = arc.io_stats()
    assert read_clock(arc.storage, Keep(last=1, every=2)) == Clock()
    assert (arc.io_stats() - before).requests == 0
    clock = read_clock(arc.storage, Keep(within="1h"))
    assert clock.now is not None
    assert [*clock.made] == list(range(1, arc.refresh().head.number + 1))
    assert max(clock.made.values()) <= clock.now


def test_a_clock_that_is_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with arc.writer(keep=Keep(within="1h")) as w:
        for step in range(2):
            w.checkpoint(step).result()
    later = SimpleNamespace(now=lambda zone=None: datetime.now(zone) + timedelta(days=1))
    monkeypatch.setattr("archive.checkpoint.joint.datetime", later)
    with reopened(arc).writer() as w:
        w.checkpoint(2).result()
    assert [c.name for c in reopened(arc).checkpoints.kept()] == ["step-0", "step-1", "step-2"]
    plan = reopened(arc).forget(Keep(within="1h"))
    assert [one.reasons[0] for one in plan.checkpoints] == ["within 1h"] * 3


def test_the_policy_is_in_the_archive_and_goes_on_over_sessions() -> None:
    arc = fresh()
    with arc.writer(keep=Keep(last=1, best=("loss", "min"))) as w:
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0]):
            w.checkpoint(step, metrics={"loss": loss}).result()
    assert [c.name for c in reopened(arc).checkpoints.kept()] == ["step-1", "step-3"]
    with reopened(arc).writer() as w:
        w.checkpoint(9, metrics={"loss": 0.5}).result()
    assert [c.name for c in reopened(arc).checkpoints.kept()] == ["step-9"]
    assert len(reopened(arc).checkpoints) == 5, "nothing is deleted by it"
    with reopened(arc).writer(keep=Keep(last=2)):
        pass
    assert [c.name for c in reopened(arc).checkpoints.kept()] == ["step-3", "step-9"]


def test_each_run_has_its_own() -> None:
    arc = fresh()
    for run, keep in (("a", Keep(last=1)), ("b", None)):
        with arc.writer(run=run, keep=keep) as w:
            w.checkpoint(1).result()
            w.checkpoint(2).result()
    kept = reopened(arc).checkpoints
    assert [(c.run, c.step) for c in kept.kept()] == [("a", 2), ("b", 1), ("b", 2)]
    assert [(c.run, c.step) for c in kept.of("a").kept()] == [("a", 2)]


def _lacking(whole: dict[str, list[int]], live: dict[str, list[int]], ended: set[str]) -> dict[str, dict[str, int]]:
    """What of each of these episodes is not there, counted."""
    out: dict[str, dict[str, int]] = {}
    for name, found in live.items():
        if found != whole[name] or name not in ended:
            counts = out.setdefault("open" if found[:1] == whole[name][:1] else "headless", {"episodes": 0, "steps": 0})
            counts["episodes"] += 1
            counts["steps"] += len(found)
    return out


def _serials(episodes: Any) -> dict[str, list[int]]:
    return {ep.id: ep.read(["serial"])["serial"].tolist() for ep in episodes}


def _check_dropped(arc: archive.Archive, writers: list[Any], step: int) -> None:
    """What is dropped is each episode of which not all is live, as a plan drops it."""
    (kept, *_) = [p.result() for p in [w.checkpoint(step) for w in writers]]
    (dropped, *_) = [p.result() for p in [w.checkpoint(step + 1, incomplete="drop") for w in writers]]
    arc = reopened(arc)
    ended = {ep.id for ep in arc.episodes if ep.complete}
    expected = _lacking(_serials(arc.episodes), _serials(kept.episodes), ended)
    plan = resharding.plan(kept, 1, incomplete="drop")
    assert len(expected) == 2
    assert dropped.discarded == expected
    expected["headless"]["episodes"] += 1  # a plan tells of the parts before and behind a hole as such
    assert {why: of["episodes"] for why, of in plan.dropped_of("replay").items()} == {
        why: of["episodes"] for why, of in expected.items()
    }
    assert [*_serials(dropped.episodes)] == [ep.id for ep in plan.share(0)]
    assert dropped.episodes.to_pandas()["complete"].all()


def test_dropped_is_each_episode_of_which_not_all_is_live_whoever_took_it_over() -> None:
    arc, numbers = fresh(), count()
    with arc.writer() as w:
        for env in range(10):
            if env >= 4:  # some begin without steps, which takes a place of its own
                w.add_episode(steps([]), env_id=env, last=False, episode_id=f"bare-{env}")
            if env < 8:
                w.append(steps(islice(numbers, 4)), env_ids=env, last=[False] * 3 + [True])
        w.close_episodes(9)
        for env, gone in {0: [3], 1: [1], 2: [0], 4: [0], 5: [1], 6: [1, 2, 3, 4], 7: [4]}.items():
            w.evict(env, positions=gone)
        _check_dropped(arc, [w], 1)
    for step, ranks in ((3, 1), (5, 2), (7, 1)):
        ck = reopened(arc).checkpoints[f"step-{step - 2}"]
        plan, name = resharding.plan(ck, ranks), f"session-{step}"
        writers = [reopened(arc).writer(resume=plan.share(rank), session=name) for rank in range(ranks)]
        _check_dropped(arc, writers, step)
        for one in writers:
            one.close()


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "left out" in (text := record.getMessage())]


def test_what_policy_leaves_out_is_counted_logged_and_in_the_commit(caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    with arc.writer() as w, caplog.at_level(logging.INFO, logger="archive"):
        w.append(steps(range(4)), env_ids=0, last=True)  # whole
        w.append(steps(range(4, 10)), env_ids=0, last=True)  # loses its beginning, below
        w.append(steps(range(10, 13)), env_ids=1)  # open
        w.append(steps(range(13, 18)), env_ids=2, first=True)  # loses its beginning and is open: headless
        w.evict(0, positions=[4, 5])
        w.evict(2, before=1)
        live = [*range(4), *range(6, 13), *range(14, 18)]
        kept = w.checkpoint(1, columns={"p": value_of(live)}).result()
        assert not left_out(caplog)
        dropped = w.checkpoint(2, columns={"p": value_of(live)}, incomplete="drop").result()
        with pytest.raises(UsageError, match="give 'keep' or 'drop'"):
            w.checkpoint(3, incomplete="some")
    assert serials(kept) == live
    assert kept.discarded == {}
    assert serials(dropped) == [0, 1, 2, 3]
    assert (dropped.column("p", 0) == value_of([0, 1, 2, 3])).all()
    expected = {"headless": {"episodes": 2, "steps": 8}, "open": {"episodes": 1, "steps": 3}}
    assert reopened(arc).checkpoints["step-2"].discarded == expected
    assert left_out(caplog) == [
        "checkpoint 'step-2' left out 2 headless episodes with 8 steps",
        "checkpoint 'step-2' left out 1 open episodes with 3 steps",
    ]
    assert sorted(e.length for e in reopened(arc).episodes) == [3, 4, 5, 6], "the archive has all of them"
