"""Columns are journaled by what has changed: a recovery finds what a plain model of addresses and values has."""

from __future__ import annotations

import hashlib
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import archive
import resharding
from archive.base import ColumnError, CorruptStateError, StorageError, UpgradeError, layout
from archive.saved import TickColumn, TickIndex, columns, pack
from archive.shard import encode, indexed
from tests.support.archives import fresh, reopened
from tests.support.journals import BUFFERS, Job, check, copy_of, cut, die, expected, job
from tests.support.sampling import examples
from tests.support.ticks import NEVER_S, abandoned, journal

LIVE = 200_000


class Faulty:
    """A storage's create_once that fails as often as it is told to, of objects whose keys begin so."""

    def __init__(self, arc: archive.Archive) -> None:
        self.begin, self.times = "", 0
        self._create = arc.storage.create_once
        arc.storage.create_once = self  # type: ignore[method-assign, assignment]

    def __call__(self, key: str, data: Any, **more: Any) -> Any:
        if self.times and key.startswith(self.begin):
            self.times -= 1
            raise StorageError(f"no room for {key}")
        return self._create(key, data, **more)


def tick(one: Job, faulty: Faulty) -> None:
    """A tick, which may fail first."""
    faulty.begin, faulty.times = "journal/", int(one.rng.integers(0, 4))
    while True:
        try:
            return one.tick()
        except StorageError:
            pass


def checkpoint(one: Job, step: int, faulty: Faulty) -> None:
    """A checkpoint, which may fail, after which all is as before; or one without buffers."""
    faulty.times = 0
    before, progress = {name: held.copy() for name, held in one.held.items()}, one.progress
    if not one.rng.integers(0, 4):
        one.progress = {"light": step}
        one.w.checkpoint(step, save_replay=False, progress=one.progress, wait=True)
        return
    faulty.begin, faulty.times = "states/", 9 * int(one.rng.integers(0, 2))
    try:
        one.checkpoint(step).result(30)
    except StorageError:
        one.held, one.progress = before, progress
    faulty.times = 0


@pytest.mark.parametrize("seed", range(examples(36)))
def test_a_recovery_finds_the_values_that_were_said_last(seed: int) -> None:
    arc = fresh()
    one = job(arc, seed)
    faulty, rng = Faulty(arc), np.random.default_rng(seed + 1000)
    verbs: list[Callable[[str], None]] = [one.append, one.append, one.add, one.evict, one.remove]
    verbs += [one.say_all, one.say_all, one.change, one.change, one.say]
    first = 0
    for step in range(1, 40):
        verbs[int(rng.integers(0, len(verbs)))](BUFFERS[int(rng.integers(0, 4)) // 3])
        match int(rng.integers(0, 9)):
            case 0 | 1 | 2:
                tick(one, faulty)
            case 3:
                checkpoint(one, step, faulty)
                tick(one, faulty)
            case 4:
                tick(one, faulty)
                archive.open(arc.url).recover()
            case 5 if step > 20 and not first:  # the job dies, and goes on
                tick(one, faulty)
                die(one.w)
                first, held = step, one.held
                made = arc.refresh().recover()
                check(made, 0, held, one.progress)
                progress, one = one.progress, job(archive.open(arc.url), seed + step, held, resume=made)
                verbs = [one.append, one.evict, one.say_all, one.change, one.say]
                one.progress, faulty = progress, Faulty(arc)
    tick(one, faulty)
    die(one.w)
    entry = arc.refresh().head.runs["main"]
    for number in {entry.journal[0], int(rng.integers(entry.journal[0], one.w._pipeline.number + 1))}:
        if number in one.seen and number > entry.journal[0]:
            left = copy_of(arc)
            cut(left, one.w.session, 0, number)
            check(left.recover(), 0, expected(one, number)[0], None)
    check(arc.recover(), 0, one.held, one.progress)


# -- what it takes -----------------------------------------------------------------------------------------------------


def large(dtype: Any = np.float64, **options: Any) -> tuple[archive.Archive, Any, Any]:
    """An archive, a writer of many live steps, and a value of each that was journaled."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S, **options)
    w.append({"x": np.zeros(LIVE, np.uint8)}, env_ids=0, last=np.arange(LIVE) % 500 == 499)
    values = np.random.default_rng(0).random(LIVE).astype(dtype)
    w.journal(columns={"priority": values})
    w.sync()
    return arc, w, values


def written(arc: archive.Archive, w: Any) -> int:
    """Bytes of the newest object of the journal, once all is in it."""
    number = w.sync().number - 1
    return len(arc.storage.get(layout.journal_key(w.session, 0, number)))


@pytest.mark.parametrize("count", [0, 1, 100, 1000, 20_000])
@pytest.mark.parametrize("way", ["whole", "changes", "episode"])
def test_what_has_changed_is_written_and_nothing_else(count: int, way: str) -> None:
    arc, w, values = large()
    rng = np.random.default_rng(1)
    at = np.sort(rng.choice(LIVE, count, replace=False))
    values[at] = rng.random(count)
    if way == "whole":
        w.journal(columns={"priority": values})
    elif way == "changes":
        w.journal(changes={"priority": (0, at, values[at])}, progress=1)
    else:
        w.journal(
            columns={"priority": dict(zip(w.live["episode_id"].to_pylist(), [*values.reshape(-1, 500)], strict=True))},
            progress=1,
        )
    number = w.durable_until.number
    if count:
        assert written(arc, w) <= 1.2 * count * 8 + 4096
    assert w.sync().number == number + bool(count or way != "whole"), "there is no object where nothing has changed"
    w.append({"x": np.zeros(10, np.uint8)}, env_ids=0, last=np.arange(10) == 9)
    w.evict(0, before=7)
    values = np.append(values[7:], np.arange(10.0))
    w.journal(columns={"priority": values})
    assert written(arc, w) <= 10_000  # with the row of a segment
    die(w)
    np.testing.assert_array_equal(arc.refresh().recover().column("priority", 0), values)


def test_what_a_checkpoint_has_is_not_written_again_and_what_it_lacks_is() -> None:
    arc, w, values = large()
    w.checkpoint(1, columns={"priority": values}, wait=True)
    values[5] = 2.0
    w.journal(columns={"priority": values})
    assert written(arc, w) <= 4096
    w.checkpoint(2, wait=True)
    w.journal(columns={"priority": values})
    assert written(arc, w) > LIVE * 7
    die(w)
    np.testing.assert_array_equal(arc.refresh().recover().column("priority", 0), values)


def test_a_checkpoint_that_failed_is_no_base_and_one_that_may_come_is() -> None:
    for fails in (True, False):
        arc = fresh()
        faulty = Faulty(arc)
        w = arc.writer(journal_s=NEVER_S)
        w.append({"x": np.zeros(4)}, env_ids=0)
        w.journal(columns={"p": np.array([1.0, 1.0, 1.0, 1.0])})
        faulty.begin, faulty.times = "states/", 99 * fails
        pending = w.checkpoint(1, columns={"p": np.array([2.0, 2.0, 1.0, 1.0])})
        if fails:
            with pytest.raises(StorageError):
                pending.result()
        else:
            pending.result()
        w.journal(columns={"p": np.array([2.0, 1.0, 2.0, 1.0])})
        w.sync()
        die(w)
        faulty.times = 0
        assert arc.refresh().recover().column("p", 0).tolist() == [2.0, 1.0, 2.0, 1.0]


def calls_of(do: Callable[[], object]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


def test_the_caller_works_in_proportion_to_what_has_changed() -> None:
    rng = np.random.default_rng(2)
    calls, peaks = [], []
    for live in (2000, LIVE):
        with fresh().writer(journal_s=NEVER_S) as w:
            w.append({"x": np.zeros(live, np.uint8)}, env_ids=0, last=np.arange(live) % 10 == 9)
            w.journal(columns={"priority": np.zeros(live)})
            w.sync()
            for _ in range(3):
                at = rng.choice(live, 100, replace=False)
                given = {"priority": (0, at, rng.random(100))}
                w.evict(0, before=3)
                tracemalloc.start()
                count = calls_of(lambda given=given: w.journal(changes=given))  # type: ignore[misc]
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                count += calls_of(lambda: w._journal.tick())  # what is done under the lock
            calls.append(count)
            peaks.append(peak)
    assert calls[1] <= calls[0] + 5
    assert max(peaks) < 64 * 1024


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_changes_that_fit_no_step_or_no_column_are_refused_and_change_nothing() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(4)}, env_ids=[0, 0, 1, 1])
    w.add_episode({"x": np.zeros(2)})
    w.journal(columns={"p": np.arange(6.0)})
    w.journal(changes={"p": (None, [1], [70.0])})
    for wrong, error, why in [
        ((0, [2], [1.0]), archive.UsageError, "env 0 has positions 0 to 2, and no step at 2"),
        ((0, [-1], [1.0]), archive.UsageError, "no step at -1"),
        ((7, [0], [1.0]), archive.UsageError, "env 7 has positions 0 to 0"),
        (([0, 1], [0, 1, 0], [1.0] * 3), archive.UsageError, "2 env ids do not fit 3 positions"),
        ((0, [0.5], [1.0]), archive.UsageError, "must be integers"),
        ((0, [0, 1], [1.0]), ColumnError, "1 values for 2 positions"),
        ((0, [0], [1]), ColumnError, "same dtype and shape, or the whole column"),
        ((0, [0], np.ones(1, np.float32)), ColumnError, "same dtype and shape, or the whole column"),
        ([0, [0], [1.0]], archive.UsageError, "no tuple"),
    ]:
        with pytest.raises(error, match=why):
            w.journal(progress=5, changes={"q": (0, [0], ["no"]), "p": wrong})
    w.sync()
    w.journal(changes={"p": ([1, 0], [0, 1], [50.0, 60.0])})
    w.journal(columns={"q": np.arange(6, dtype=np.int8)})
    w.journal(columns={"q": np.arange(6, dtype=np.int16)})  # a whole column may have another dtype
    w.sync()
    die(w)
    made = arc.refresh().recover()
    assert made.column("p", 0).tolist() == [0.0, 70.0, 2.0, 60.0, 50.0, 5.0]
    assert made.progress is None
    assert made.column("q", 0).dtype == np.int16


def test_a_change_of_dtype_is_written_whole() -> None:
    arc, w, values = large(np.float32)
    w.journal(columns={"priority": values.astype(np.float64)})
    w.sync()
    values[3] = 9
    w.journal(columns={"priority": values.astype(np.float64)})
    assert written(arc, w) <= 4096
    die(w)
    found = arc.refresh().recover().column("priority", 0)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("first", [np.uint64, np.int64])
def test_values_that_one_dtype_does_not_hold_are_refused(first: Any) -> None:
    second = np.int64 if first is np.uint64 else np.uint64
    with fresh().writer(journal_s=NEVER_S) as w:
        for name in ("a", "b"):
            w.add_episode({"x": np.zeros(2)}, episode_id=name)
        lossy = {"a": np.array([2**60 + 1, 1], first), "b": np.array([1, 2], second)}
        with pytest.raises(ColumnError, match="several dtypes"):
            w.journal(columns={"p": lossy})
        with pytest.raises(ColumnError, match="several dtypes"):
            w.checkpoint(1, columns={"p": lossy})
        with pytest.raises(ColumnError, match="several dtypes"):
            w.checkpoint(1, columns={"p": {"a": np.zeros((2, 3)), "b": np.zeros(2)}})
        ck = w.checkpoint(1, columns={"p": {"a": [1, 2], "b": [0.5, 1.5]}}).result()
        assert ck.column("p", 0).tolist() == [1.0, 2.0, 0.5, 1.5]


def saved_in_a_checkpoint(arc: archive.Archive) -> Any:
    """A writer that goes on from a checkpoint with a column of floats."""
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode({"x": np.zeros(2)}, env_id=0, episode_id="a")
    w.add_episode({"x": np.zeros(3)}, env_id=0, episode_id="b")
    made = w.checkpoint(1, columns={"p": np.arange(5.0)}).result()
    w.close()
    return reopened(arc).writer(resume=resharding.plan(made, world_size=1).share(0), journal_s=NEVER_S)


def found_by_a_recovery(arc: archive.Archive) -> Any:
    w = saved_in_a_checkpoint(arc)
    w.journal(changes={"p": (0, [1], [1.0])}, progress=1)
    w.sync()
    made = abandoned(w).recover()
    return reopened(arc).writer(resume=resharding.plan(made, world_size=1).share(0), journal_s=NEVER_S)


def resumed_by_name(arc: archive.Archive) -> Any:
    saved_in_a_checkpoint(arc).close()
    return reopened(arc).writer(resume=arc.refresh().checkpoints.latest, journal_s=NEVER_S)


def saved_in_the_session(arc: archive.Archive) -> Any:
    w = saved_in_a_checkpoint(arc)
    w.checkpoint(2, columns={"p": np.arange(5.0)}, wait=True)
    return w


def journaled_in_the_session(arc: archive.Archive) -> Any:
    w = saved_in_a_checkpoint(arc)
    w.journal(columns={"p": np.arange(5)})
    w.journal(columns={"p": np.arange(5.0)})
    w.sync()
    return w


def saved_otherwise_in_vain(arc: archive.Archive) -> Any:
    """A writer whose checkpoint with a column of another dtype failed."""
    w = saved_in_a_checkpoint(arc)
    faulty = Faulty(arc)
    w._log.storage.create_once = faulty
    faulty.begin, faulty.times = "states/", 99
    pending = w.checkpoint(2, columns={"p": np.zeros(5, np.float32)})
    with pytest.raises(StorageError):
        pending.result()
    faulty.times = 0
    return w


BEGINNINGS = [
    saved_in_a_checkpoint,
    found_by_a_recovery,
    resumed_by_name,
    saved_in_the_session,
    journaled_in_the_session,
    saved_otherwise_in_vain,
]


@pytest.mark.parametrize("begun", BEGINNINGS)
def test_values_of_some_steps_in_another_dtype_leave_all_others_as_they_are(begun: Callable[..., Any]) -> None:
    arc = fresh()
    w = begun(arc)
    for wrong in (
        {"changes": {"p": (0, [2], np.array([9], np.float32))}},
        {"columns": {"p": {"a": np.array([1, 2])}}},
        {"columns": {"p": {"a": np.zeros((2, 1))}}},
    ):
        with pytest.raises(ColumnError, match=r"column 'p' of buffer 'replay' .* same dtype and shape, or the whole"):
            w.journal(**wrong)
    if begun is not saved_otherwise_in_vain:  # of which nobody knows yet that it was in vain
        w.journal(columns={"p": {"a": np.array([7.0, 8.0])}})
        w.journal(changes={"p": (0, [2], [9.0])})
    w.sync()
    made = abandoned(w).recover() or arc.refresh().checkpoints.latest
    want = [0.0, 1.0, 2.0, 3.0, 4.0] if begun is saved_otherwise_in_vain else [7.0, 8.0, 9.0, 3.0, 4.0]
    assert made.column("p", 0).tolist() == want


@pytest.mark.parametrize("begun", BEGINNINGS)
def test_the_dtype_of_some_values_is_that_of_the_whole_column_that_was_said_last(begun: Callable[..., Any]) -> None:
    w = begun(fresh())
    w.journal(columns={"p": np.arange(5)})
    w.journal(changes={"p": (0, [2], [20])})
    w.sync()
    w.journal(columns={"p": {"a": np.array([7, 8])}})
    with pytest.raises(ColumnError, match="same dtype"):
        w.journal(changes={"p": (0, [2], [9.0])})
    w.sync()
    assert abandoned(w).recover().column("p", 0).tolist() == [7, 8, 20, 3, 4]


KINDS = [
    (np.float64, np.int64),
    (np.int64, np.float64),
    (np.float32, np.float64),
    (ml_dtypes.bfloat16, np.float32),
    (np.bool_, np.int16, np.uint8),
    (np.int8, np.float32, np.complex64),
    ("<U9", "<U7"),
    ("S9", "S7"),
    (">f8", "<f8"),
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_recovery_has_the_values_of_ranks_of_several_dtypes_as_their_share_had_them(kinds: Any, world: int) -> None:
    arc = fresh()
    writers = [arc.writer(rank, len(kinds), session="first", journal_s=NEVER_S) for rank in range(len(kinds))]
    for w in writers:
        w.append({"x": np.arange(6.0)}, env_ids=[0, 0, 0, 1, 1, 1])
    saved = [np.linspace(0, 1, 6) * (rank + 3) for rank in range(len(kinds))]
    pending = [w.checkpoint(1, columns={"p": v.astype(k)}) for w, v, k in zip(writers, saved, kinds, strict=True)]
    made, *_ = [one.result() for one in pending]
    for w in writers:
        w.close()
    plan = resharding.plan(made, world_size=world)
    shares = [plan.share(rank) for rank in range(world)]
    wanted = [share.columns["p"].copy() for share in shares]
    arc = reopened(arc)
    writers = [arc.writer(resume=share, session="second", journal_s=NEVER_S) for share in shares]
    for w, values in zip(writers, wanted, strict=True):
        w.append({"x": np.zeros(1)}, env_ids=[99])
        if len(values) > 1:
            first = w.live.to_pylist()[0]
            w.journal(changes={"p": (first["env_id"], [first["position"]], values[1:2])})
            values[0] = values[1]
        w.sync()
    again = resharding.plan(abandoned(*writers).recover(), world_size=world)
    for rank, values in enumerate(wanted):
        found = again.share(rank).columns["p"]
        assert (found.dtype, len(found)) == (values.dtype, len(values) + 1)
        np.testing.assert_array_equal(found[:-1], values)
        assert np.isnan(found[-1]) if values.dtype.kind in "fcV" else not found[-1]


@pytest.mark.parametrize(
    "values",
    [
        (np.zeros(3), np.zeros((3, 2))),
        (np.zeros((3, 2)), np.zeros((3, 1))),
        (np.zeros(3), np.array(["a", "b", "c"])),
        (np.zeros(3, ml_dtypes.bfloat16), np.zeros(3, np.float16)),
        (np.zeros(3, "M8[s]"), np.zeros(3)),
    ],
)
def test_values_of_ranks_that_no_dtype_holds_are_refused_and_the_steps_are_recovered(values: Any) -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="first", journal_s=NEVER_S) for rank in range(2)]
    for w in writers:
        w.append({"x": np.arange(3.0)}, env_ids=[0, 0, 0])
    pending = [w.checkpoint(1, columns={"p": of}) for w, of in zip(writers, values, strict=True)]
    made, *_ = [one.result() for one in pending]
    for w in writers:
        w.close()
    share = resharding.plan(made, world_size=1).share(0)
    with pytest.raises(ColumnError, match=r"column 'p' of buffer 'replay' .*none holds all values .*read those of one"):
        share.columns  # noqa: B018
    assert [len(made.column("p", rank)) for rank in range(2)] == [3, 3]
    w = reopened(arc).writer(resume=share, journal_s=NEVER_S)
    for of in values:
        with pytest.raises(ColumnError, match="or the whole column"):
            w.journal(changes={"p": (0, [0], of[:1])})
    w.journal(columns={"p": np.arange(6)})
    w.journal(changes={"p": (0, [0], [7])})
    w.sync()
    assert abandoned(w).recover().column("p", 0).tolist() == [7, 1, 2, 3, 4, 5]


# -- in the store ------------------------------------------------------------------------------------------------------


def scattered() -> tuple[archive.Archive, Any, str]:
    """An archive with a tick of values of scattered steps, and its key."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(200)}, env_ids=np.repeat([0, 1], 100))
    w.journal(columns={"p": np.zeros(200)})
    w.sync()
    w.journal(changes={"p": (np.repeat([0, 1], 25), np.tile(np.arange(0, 100, 4), 2), np.arange(50.0))})
    w.sync()
    die(w)
    return arc.refresh(), w, layout.journal_key(w.session, 0, 1)


def test_a_reader_that_does_not_know_scattered_columns_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arc, w, _ = scattered()
    first, second = journal(arc, w.session)
    assert first.index.format["features"] == []
    assert second.index.format["features"] == ["scattered columns"]
    monkeypatch.setattr(layout, "FEATURES", layout.FEATURES - {"scattered columns"})
    for read in (arc.tails, arc.recover):
        with pytest.raises(UpgradeError, match="features scattered columns"):
            read()


HOSTILE: dict[str, tuple[str, Any]] = {
    "more stretches than there are": ("streams", [["s", 0, 0, 0, 26], ["s", 0, 1, 0, 25]]),
    "very many": ("streams", [["s", 0, 0, 0, 2**62], ["s", 0, 1, 0, 2**62]]),
    "none of a stream": ("streams", [["s", 0, 0, 0, 50], ["s", 0, 1, 0, 0]]),
    "a beginning beyond all": ("streams", [["s", 0, 0, 2**63 - 1, 25], ["s", 0, 1, 0, 25]]),
    "one before all": ("streams", [["s", 0, 0, -1, 25], ["s", 0, 1, 0, 25]]),
    "no such array": ("ranges", "%ranges/replay/q"),
    "the values themselves": ("ranges", "%columns/replay/p"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_steps_that_there_cannot_be_end_the_tail(kind: str) -> None:
    arc, _, key = scattered()
    data = arc.storage.get(key)
    start, stop = indexed.index_span(data, key)
    body = json.loads(data[start:stop].partition(b"\n")[0])
    name, value = HOSTILE[kind]
    body["columns"]["replay"]["p"][name] = value
    line = json.dumps(body, separators=(",", ":")).encode()
    text = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
    head = data[:22] + len(text).to_bytes(4, "little") + data[26:start]
    arc.storage.put(key, head + text + data[stop:])
    (tail,) = arc.tails().ranks
    assert (tail.ended, tail.next) == ("damaged", 1)
    assert arc.recover().column("p", 0).tolist() == [0.0] * 200


def test_ranges_of_any_numbers_are_damage_or_steps() -> None:
    for ranges in (
        np.array([0, -1, 1, 1]),
        np.array([0, 1, 1, 0]),
        np.array([0, 2**62, 1, 1]),
        np.array([0, 1, 2**63, 1], np.uint64),
        np.array([0.0, 1.0, 1.0, 1.0]),
        np.zeros((4, 1), int),
        np.array(["a"] * 4, object),
    ):
        with pytest.raises(CorruptStateError, match="cannot be"):
            columns.stretches_of(TickColumn("p", "<f8", (), (("s", 0, 0, 5, 2),), "r"), ranges, "here")
    for most in (2**40 + 1, 2**63 - 1):
        with pytest.raises(CorruptStateError, match="cannot be"):
            columns.stretches_of(TickColumn("p", "<f8", (("s", 0, 0, 0, most),) * 2), None, "here")
    steps, streams = columns.stretches_of(
        TickColumn("p", "<f8", (), (("s", 0, 0, 5, 2), ("t", 1, 2, 0, 1)), "r"), np.array([0, 3, 2, 1, 2, 1]), "here"
    )
    assert list(zip(steps.stream, steps.lo, steps.hi, steps["at"], strict=True)) == [
        (0, 5, 6, 0),
        (0, 9, 11, 1),
        (1, 2, 3, 3),
    ]
    assert streams == [("s", 0, 0), ("t", 1, 2)]


def forged(arc: archive.Archive, w: Any, number: int, dtype: str, values: Any, count: int) -> tuple[Any, list[Any]]:
    """The index of an object with values of a column of so many steps, and its members."""
    column = TickColumn("%columns/replay/p", dtype, ((w.session, 0, -1, 0, count),))
    index = TickIndex("main", w.session, 0, number, "0" * 16, 1, columns={"replay": {"p": column}})
    return index, list(encode({column.array: values}, attributes={}))


def one_episode() -> tuple[archive.Archive, Any]:
    """An archive with an episode of four steps in the journal of a writer that died."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode({"x": np.arange(4.0)})
    w.sync()
    die(w)
    return arc, w


FORGED: dict[str, tuple[str, Any]] = {
    "an unknown dtype": ("nonsense", np.zeros(4)),
    "a dtype of other bytes": ("bfloat16", np.zeros(4, np.float32)),
    "a dtype of fewer bytes": ("<f4", np.zeros(4)),
    "bytes of another width": ("|S3", np.zeros((4, 6), np.uint8)),
    "numbers that are texts": ("str", np.zeros(4)),
    "texts that are numbers": ("<f8", np.full(4, "1", object)),
    "times that are no whole numbers": ("<M8[s]", np.zeros(4)),
    "Python objects": ("|O", np.full(4, "1", object)),
    "bytes of no width": ("|S0", np.zeros((4, 0), np.uint8)),
    "several in one": ("2i4", np.zeros((4, 8), np.uint8)),
    "texts of 2 GiB": ("<U536870911", np.zeros(4)),
    "a chunk that is missing": ("<f8", np.zeros(4)),
    "a shape beyond all": ("<f8", np.zeros((4, 0, 2**47))),
}


@pytest.mark.parametrize("kind", FORGED)
def test_columns_that_somebody_made_up_end_the_tail(kind: str) -> None:
    arc, w = one_episode()
    index, members = forged(arc, w, 1, *FORGED[kind], 4)
    if kind == "a chunk that is missing":
        members = [one for one in members if not one.array]
    arc.storage.create_once(layout.journal_key(w.session, 0, 1), pack(index, {}, members)[0])
    (tail,) = arc.refresh().tails().ranks
    assert (tail.ended, tail.next) == ("damaged", 1)
    assert f"rank-00000/{1:09d}.zip" in str(tail.why)
    again = arc.recover()
    assert again is not None
    assert again.episodes[0].read()["x"].tolist() == [0, 1, 2, 3]


def test_steps_whose_values_have_no_bytes_take_no_memory() -> None:
    arc, w = one_episode()
    for number in range(1, 4):
        index, members = forged(arc, w, number, "<f4", np.zeros((2**40, 0), np.float32), 2**40)
        arc.storage.create_once(layout.journal_key(w.session, 0, number), pack(index, {}, members)[0])
    again = arc.refresh().recover()
    assert again is not None
    assert again.column("p", 0).shape == (4, 0)
