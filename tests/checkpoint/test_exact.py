"""A checkpoint holds exactly what was live, with its columns, attributes and state, and uploads only what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import CheckpointError, ColumnError, NotFoundError, StateError, UsageError
from tests.support.archives import fresh, reopened
from tests.support.backends import Backend
from tests.support.checkpoints import serials, steps, value_of

KB = 1024


def _bulk(start: int, count: int, width: int) -> dict[str, Any]:
    """Steps that do not compress, so that bytes uploaded are bytes given."""
    rng = np.random.default_rng(start)
    return {"obs": rng.random((count, width)), "serial": np.arange(start, start + count)}


def _nbytes(data: dict[str, Any]) -> int:
    return sum(a.nbytes for a in data.values())


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
def test_a_second_checkpoint_uploads_only_what_is_new(backend: Backend) -> None:
    arc = archive.create(backend.url, storage_options=backend.storage_options)
    with arc.writer() as w:
        w.append(_bulk(0, 20_000, 64), env_ids=0)
        columns = {"priority": np.random.default_rng(1).random(21_000), "slot": np.arange(21_000)}
        w.checkpoint(1, columns={n: c[:20_000] for n, c in columns.items()}).result()
        before = arc.io_stats()
        new = _bulk(20_000, 1_000, 64)
        w.append(new, env_ids=0)
        state = {"rng": np.random.default_rng(2).random(5_000)}
        ck = w.checkpoint(2, columns=columns, state=state).result()
        used = arc.io_stats() - before
    given = _nbytes(new) + sum(c.nbytes for c in columns.values()) + state["rng"].nbytes
    assert used.bytes_out <= 1.05 * given + 64 * KB
    assert used.put + used.create <= 2 + 6, "a shard, a state; segments, chunks, live, checkpoints, commit"
    assert len(ck.episodes.read(["serial"])[0]["serial"]) == 21_000
    assert (ck.column("priority", 0) == columns["priority"]).all()


def test_every_64_mb_cost_at_most_two_puts() -> None:
    arc = fresh()
    with arc.writer(compression=None) as w:
        w.checkpoint(1).result()
        before = arc.io_stats()
        block = np.zeros((1024, 16 * KB), np.uint8)
        for _ in range(12):  # 192 MB
            w.append({"frame": block}, env_ids=0)
        w.checkpoint(2).result()
        used = arc.io_stats() - before
    assert used.put + used.create <= 2 * 3 + 6


def test_unchanged_columns_and_attributes_refer_to_the_earlier_object() -> None:
    arc = fresh()
    with arc.writer() as w:
        one, _ = w.add_episode(steps(range(10))), w.add_episode(steps(range(10, 20)))
        same, tags = np.arange(20.0), {"tag": {one: ["a", 1]}}
        first = w.checkpoint(1, columns={"same": same, "other": same}, attributes=tags).result()
        second = w.checkpoint(2, columns={"same": same.copy(), "other": same + 1}, attributes=tags).result()
        third = w.checkpoint(3, columns={"same": same, "other": same + 1}, attributes={"tag": {one: ["a", 2]}}).result()
    entries = [ck.staged(0).index.columns["replay"] for ck in (first, second, third)]
    assert entries[0]["same"] == entries[1]["same"] == entries[2]["same"]
    assert entries[0]["other"].object != entries[1]["other"].object == entries[2]["other"].object
    texts = [ck.staged(0).index.attributes["replay"]["tag"].object for ck in (first, second, third)]
    assert texts[0] == texts[1] != texts[2]
    for ck, other, tag in ((first, 0, 1), (second, 1, 1), (third, 1, 2)):
        again = reopened(arc).checkpoints[ck.name]
        assert (again.column("same", 0) == same).all()
        assert (again.column("other", 0) == same + other).all()
        assert again.episodes[one].attributes == {"tag": ["a", tag]}


def test_a_large_buffer_overwritten_out_of_order_ten_times_over() -> None:
    """100,000 slots; each round a random tenth of them is overwritten, ten rounds a checkpoint, ten checkpoints."""
    slots, per_round = 100_000, 10_000
    rng = np.random.default_rng(7)
    arc = fresh()
    position = np.arange(slots)  # of the step in each slot
    with arc.writer() as w:
        w.append({"serial": np.arange(slots)}, env_ids=0, last=True)
        for number in range(1, 11):
            for _ in range(10):
                chosen = rng.choice(slots, per_round, replace=False)
                w.evict(0, positions=position[chosen])
                begin = int(position.max()) + 1
                got = w.append({"serial": np.arange(begin, begin + per_round)}, env_ids=0, last=True)
                position[chosen] = got
            live = np.sort(position)
            w.checkpoint(number, columns={"priority": value_of(live), "slot": np.argsort(position)}).result()
            if number in (1, 10):
                _check_slots(arc, f"step-{number}", position)
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-10"]) as w:
        assert w.live["length"].to_numpy().sum() == slots
        w.evict(0, positions=position[:1000])
        w.append({"serial": np.arange(2_000_000, 2_001_000)}, env_ids=0)
        ck = w.checkpoint(11).result()
    kept = np.r_[np.sort(position[1000:]), np.arange(2_000_000, 2_001_000)]
    assert (np.concatenate([d["serial"] for d in ck.episodes.read()]) == kept).all()


def _check_slots(arc: archive.Archive, name: str, position: np.ndarray[Any, Any]) -> None:
    ck = reopened(arc).checkpoints[name]
    serial = np.concatenate([d["serial"] for d in ck.episodes.read()])
    assert (serial == np.sort(position)).all()
    assert (ck.column("priority", 0) == value_of(serial)).all()
    assert (position[ck.column("slot", 0)] == serial).all()
    assert ck.buffers["replay"]["steps"] == len(position)


def test_holes_inside_a_segment_keep_each_columns_step() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(100)), env_ids=0)
        w.append(steps(range(100, 150)), env_ids=5)
        w.evict(0, positions=[0, 3, 4, 50, 99])
        w.evict(5, before=10)
        w.evict(5, positions=[49, 11])
        live = [i for i in range(100) if i not in (0, 3, 4, 50, 99)] + [
            100 + i for i in range(10, 50) if i not in (11, 49)
        ]
        assert w.live["length"].to_numpy().sum() == len(live)
        w.checkpoint(1, columns={"priority": value_of(live)}).result()
    ck = reopened(arc).checkpoints.latest
    assert ck is not None
    assert serials(ck) == live
    assert (ck.column("priority", 0) == value_of(live)).all()
    assert serials(ck) == live
    with reopened(arc).writer(resume=ck) as w:
        assert serials(w.checkpoint(2).result()) == live


def test_a_column_of_the_wrong_length_is_refused_with_both_counts() -> None:
    arc = fresh()
    with arc.writer() as w:
        one = w.add_episode(steps(range(7)))
        two = w.add_episode(steps(range(7, 10)))
        with pytest.raises(ColumnError, match="'priority' has 9 values, the buffer has 10 live steps"):
            w.checkpoint(1, columns={"priority": np.zeros(9)})
        with pytest.raises(ColumnError, match=f"no values for live episode '{two}'"):
            w.checkpoint(1, columns={"priority": {one: np.zeros(7)}})
        with pytest.raises(ColumnError, match=f"has 2 values for episode '{two}', of which 3 steps are live"):
            w.checkpoint(1, columns={"priority": {one: np.zeros(7), two: np.zeros(2)}})
        with pytest.raises(ColumnError, match="has a value for 'nobody', which is not among the 2 live"):
            w.checkpoint(1, attributes={"tag": {"nobody": 1}})
        with pytest.raises(StateError, match=r"state\.env"):
            w.checkpoint(1, state={"env": object()})
        with pytest.raises(UsageError, match="no buffer 'demo'"):
            w.checkpoint(1, buffers={"demo": {}})
        ck = w.checkpoint(1, columns={"priority": np.zeros(10)}).result()
    assert serials(ck) == list(range(10)), "what was refused had written nothing under that name"
    assert len(reopened(arc).checkpoints) == 1


def test_a_column_as_a_dict_of_episodes() -> None:
    arc = fresh()
    with arc.writer() as w:
        one = w.add_episode(steps(range(5)))
        two = w.add_episode(steps(range(5, 8)))
        w.evict(positions=[1, 2])
        ck = w.checkpoint(1, columns={"p": {two: value_of([5, 6, 7]), one: value_of([0, 3, 4])}}).result()
    assert serials(ck) == [0, 3, 4, 5, 6, 7]
    assert (ck.column("p", 0) == value_of(serials(ck))).all()


@pytest.mark.parametrize(
    "values",
    [np.arange(12).reshape(4, 3), np.array([True, False, True, True]), np.array(["a", "", "é", "x" * 999], object),
     np.array([1 + 2j, 0, 3, 4j]), np.array([np.nan, np.inf, -0.0, 1e-300])],
    ids=["matrix", "bool", "text", "complex", "floats"],
)  # fmt: skip
def test_columns_of_every_kind_come_back_to_the_bit(values: np.ndarray[Any, Any]) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(range(4)))
        w.checkpoint(1, columns={"c/with slash": values}).result()
    latest = reopened(arc).checkpoints.latest
    assert latest is not None
    got = latest.column("c/with slash", 0)
    assert got.dtype == values.dtype or got.dtype.kind in "OUT"
    assert got.tolist() == values.tolist() if values.dtype == object else got.tobytes() == values.tobytes()


def test_several_buffers_have_their_own_everything() -> None:
    arc = fresh()
    with arc.writer() as w:
        demo = w.buffer("demo")
        w.append(steps(range(10)), env_ids=0)
        demo.append(steps(range(100, 130)), env_ids=0)
        more = {"columns": {"priority": value_of(range(100, 130))}, "state": {"cursor": 30}}
        w.checkpoint(
            1, columns={"priority": value_of(range(10))}, state={"cursor": 10}, buffers={"demo": more}
        ).result()
        assert demo.live["length"].to_pylist() == [30]
    arc = reopened(arc)
    ck = arc.checkpoints["step-1"]
    for buffer, begin, stop in (("replay", 0, 10), ("demo", 100, 130)):
        assert serials(ck, buffer) == list(range(begin, stop))
        assert (ck.column("priority", 0, buffer) == value_of(range(begin, stop))).all()
        assert ck.state(0, buffer) == {"cursor": stop - begin}
        assert ck.buffers[buffer] == {"steps": stop - begin, "episodes": 1, "columns": ["priority"]}
    with arc.writer(resume=ck) as w:
        demo = w.buffer("demo")
        demo.append(steps(range(130, 140)), env_ids=0, last=True)
        w.evict(0, before=4)
        ck = w.checkpoint(2).result()
    assert serials(ck) == list(range(4, 10))
    assert serials(ck, "demo") == list(range(100, 140))
    assert [e.complete for e in ck.episodes.filter(buffer="demo")] == [True]
    with pytest.raises(NotFoundError, match="no column 'priority' in buffer 'demo'"):
        ck.column("priority", 0, "demo")


def test_state_trees_come_back_as_they_were() -> None:
    state = {
        "cursors": np.arange(5), 7: (1, [2.5, None, True], b"\x00\xff"),
        ("a", 1): {"big": 2**200, "inf": float("-inf")}, "scalar": np.float32(3.5), "text": "é", "none": None,
        "empty": {}, "generator": np.random.default_rng(3).bit_generator.state,
    }  # fmt: skip
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(1, state=state).result()
        w.checkpoint(2).result()
    got = reopened(arc).checkpoints["step-1"].state(0)
    assert got.pop("cursors").tolist() == [0, 1, 2, 3, 4]
    assert got == {k: v for k, v in state.items() if k != "cursors"}
    assert [type(k) for k in got] == [type(k) for k in state if k != "cursors"]
    assert reopened(arc).checkpoints["step-2"].state(0) is None


def test_columns_and_states_without_values() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(
            1, columns={"p": np.zeros((0, 3), np.float32)}, state={"none": np.zeros((0, 2), np.int16), "a": 1}
        ).result()
    ck = reopened(arc).checkpoints["step-1"]
    assert (ck.column("p", 0).shape, ck.column("p", 0).dtype) == ((0, 3), np.float32)
    got = ck.state(0)
    assert (got["none"].shape, got["none"].dtype, got["a"]) == ((0, 2), np.int16, 1)


def test_removed_and_cleared_steps_stay_in_the_archive() -> None:
    arc = fresh()
    with arc.writer() as w:
        one, two = w.add_episode(steps([0, 1])), w.add_episode(steps([2]))
        w.checkpoint(1).result()
        assert w.remove(one) == 2
        assert serials(w.checkpoint(2).result()) == [2]
        w.clear()
        third = w.checkpoint(3).result()
        w.add_episode(steps([3]))
        assert serials(w.checkpoint(4).result()) == [3]
    assert serials(third) == []
    assert [e.id for e in reopened(arc).episodes][:2] == [one, two]
    assert serials(reopened(arc).checkpoints["step-1"]) == [0, 1, 2]


def test_a_name_is_staged_once_a_session_and_the_newest_wins_over_sessions() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([0]), env_ids=0)
        w.checkpoint(1, "mine").result()
        pending = w.checkpoint(2, "mine")
        with pytest.raises(CheckpointError, match="another name"):
            pending.result()
        w.append(steps([1]), env_ids=0)
        assert serials(w.checkpoint(2, "other").result()) == [0, 1], "the failed one has taken nothing with it"
    arc = reopened(arc)
    with arc.writer(resume=arc.checkpoints["mine"]) as w:
        w.append(steps([7]), env_ids=0)
        w.checkpoint(9, "mine").result()
    assert [c.name for c in reopened(arc).checkpoints] == ["mine", "other", "mine"]
    assert serials(reopened(arc).checkpoints["mine"]) == [0, 7]
    assert serials(reopened(arc).checkpoints[0]) == [0]


def test_lineage_metrics_and_progress_are_in_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with arc.writer(run="lab") as w:
        w.checkpoint(
            5, metrics={"return": 2}, config={"lr": 1e-3, "layers": [1, 2]}, progress={"frames": 2**70}
        ).result()
    ck = reopened(arc).checkpoints.of("lab")[0]
    assert (ck.run, ck.step, ck.metrics, ck.progress) == ("lab", 5, {"return": 2.0}, {"frames": 2**70})
    lineage = ck.lineage
    assert lineage["parent"] == reopened(arc).commits[-2].digest
    assert (lineage["run"], lineage["session"], lineage["library"]) == ("lab", ck.session, archive.__version__)
    assert lineage["config"] == {"lr": 1e-3, "layers": [1, 2]}
    assert lineage["git"] is None or len(lineage["git"]) == 40
    monkeypatch.chdir(tmp_path)
    with fresh().writer() as w:
        assert w.checkpoint(1).result().lineage["git"] is None


def test_a_checkpoint_can_be_read_long_after_and_by_commit_number() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([0, 1]), env_ids=0)
        first = w.checkpoint(1).result()
        w.evict(0, before=2)
        w.append(steps([2]), env_ids=0)
        w.checkpoint(2).result()
    then = archive.open(arc.url, commit=first.number)
    assert then.checkpoints.latest is not None
    assert serials(then.checkpoints.latest) == [0, 1]
    with pytest.raises(UsageError, match="read only"):
        then.writer()
