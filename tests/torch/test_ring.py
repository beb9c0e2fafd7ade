"""Rings into the archive and back: what is new is appended once, what comes back is the ring, bit for bit."""

from __future__ import annotations

import threading
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archive
from archive.base.errors import FieldError, UsageError
from archive.fields.nests import flatten
from archive.torch import ring, rings
from archive.torch.rings import RingSteps
from archive.write import intake, pipeline, slabs
from tests.support.places import DATA
from tests.support.rings import RankShare, Ring
from tests.support.sampling import examples

ALF = DATA / "alf"
FIRST, LAST = 0, 2


def new_archive() -> archive.Archive:
    return archive.create(f"memory://{uuid.uuid4().hex}")


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, dtype included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor


def assert_same_ring(filled: ring.Filled, source: Ring) -> None:
    live = source.live
    assert torch.equal(filled.pos[source.size > 0], source.pos[source.size > 0])
    assert torch.equal(filled.size, source.size)
    assert torch.equal(filled.live, live)
    got, expected = dict(flatten(filled.buffers)), dict(flatten(source.buffers))
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        assert same(got[path][live], leaf[live]), path
        assert not bits(got[path][~live]).any(), path
    assert same(filled.columns["priority"][live], source.priority[live])
    assert not filled.columns["priority"][~live].any()


def refill(ck: Any, source: Ring, rank: int = 0, **how: Any) -> ring.Filled:
    return ring.fill(RankShare(ck, rank), num_envs=len(source.pos), max_length=source.max_length, **how)


def save(w: archive.Writer, source: Ring, step: int) -> Any:
    columns = ring.append(w, source.buffers, **source.how())
    return w.checkpoint(step=step, columns=columns).result()


def written_steps(arc: archive.Archive) -> int:
    """Steps in shards, live or not."""
    return int(arc.refresh().snapshot.columns(["length"])["length"].to_numpy().sum())


# -- the checkpoints of a real job ------------------------------------------------------------------------------------


def load(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(fields, the rest) of a rank's checkpoint."""
    raw = torch.load(ALF / f"rank_{rank}.pt", weights_only=True)
    named = {key.removeprefix("_replay_buffer."): value for key, value in raw.items()}
    rest = {key: named.pop(key) for key in list(named) if key.startswith("_")}
    return named, rest


def leaf_of(index: torch.Tensor) -> torch.Tensor:
    """Where the tree of a ring of 3 x 16 has its leaves: 48 is no power of two, so they begin in the deepest row."""
    return 48 + (index + 16) % 48


def append_rank(w: archive.Writer, rank: int) -> dict[str, Any]:
    fields, rest = load(rank)
    leaves = rest["_sum_tree._values"][leaf_of(torch.arange(48))].reshape(3, 16)
    return ring.append(
        w, fields, pos=rest["_current_pos"], size=rest["_current_size"], first=fields["step_type"] == FIRST,
        last=fields["step_type"] == LAST, columns={"priority": leaves},
    )  # fmt: skip


@pytest.fixture(scope="module")
def alf() -> Any:
    """A checkpoint of the four ranks."""
    arc = new_archive()
    writers = [arc.writer(rank=rank, world_size=4, session="s") for rank in range(4)]
    pending = [w.checkpoint(step=1, columns=append_rank(w, rank)) for rank, w in enumerate(writers)]
    yield pending[0].result()
    for p, w in zip(pending, writers, strict=True):
        p.result()
        w.close()


@pytest.mark.parametrize("rank", range(4))
def test_alf_steps_are_those_expected(alf: Any, rank: int) -> None:
    expected = np.load(ALF / f"rank_{rank}_expected.npz")
    share = RankShare(alf, rank)
    nests, env = share.read(), share.layout.env_id
    for row in range(3):
        for name in set(expected) - {"priority"}:
            got = np.concatenate([nest[name] for nest, e in zip(nests, env, strict=True) if e == row])
            assert got.dtype == expected[name].dtype
            assert got.tobytes() == expected[name][row].tobytes(), (name, row)
    assert share.columns["priority"].tobytes() == expected["priority"].tobytes()  # live order is env by env


@pytest.mark.parametrize("rank", range(4))
def test_alf_rings_come_back_bit_for_bit(alf: Any, rank: int) -> None:
    fields, rest = load(rank)
    filled = ring.fill(RankShare(alf, rank), num_envs=3, max_length=16)
    assert torch.equal(filled.pos, rest["_current_pos"])
    assert torch.equal(filled.size, rest["_current_size"])
    assert set(filled.buffers) == set(fields)
    for name, value in fields.items():
        assert same(filled.buffers[name][filled.live], value[filled.live]), name
    oldest = (filled.pos - filled.size) % 16
    rows = torch.arange(3)
    assert filled.report["headless"] == int((fields["step_type"][rows, oldest] != FIRST).sum())
    newest = (filled.pos - 1) % 16
    unended = fields["step_type"][rows, newest] != LAST
    assert filled.report["open"] == filled.report["cut"] == int(unended.sum())
    assert torch.equal(filled.cut.nonzero(), torch.stack([rows, newest], 1)[unended])


@pytest.mark.parametrize("rank", range(4))
def test_alf_trees_are_rebuilt_with_their_counters(alf: Any, rank: int) -> None:
    _, rest = load(rank)
    filled = ring.fill(RankShare(alf, rank), num_envs=3, max_length=16)
    sums, maxima = Tree(torch.add), Tree(torch.maximum)
    leaves = ring.rebuild(sums, filled, "priority")
    assert ring.rebuild(maxima.set, filled, "priority") == leaves
    assert leaves == (int((sums.values[48:] != 0).sum()), float(rest["_sum_tree._values"][48:].max()))
    assert torch.equal(sums.values[leaf_of(torch.arange(48))].reshape(3, 16), filled.columns["priority"])
    assert leaves.nnz == int(filled.size.sum()) == sums.nnz
    assert torch.equal(sums.values[48:], rest["_sum_tree._values"][48:])
    assert torch.equal(maxima.values[1:], rest["_max_tree._values"][1:])
    torch.testing.assert_close(sums.values[1:], rest["_sum_tree._values"][1:])


class Tree:
    """A binary tree over 48 leaves, root at 1, with a vectorised set."""

    def __init__(self, combine: Any) -> None:
        self.values, self.combine, self.nnz = torch.zeros(96), combine, 0

    def __setitem__(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self.nnz += int(torch.count_nonzero(values)) - int(torch.count_nonzero(self.values[leaf_of(index)]))
        self.values[leaf_of(index)] = values
        for node in range(47, 0, -1):
            self.values[node] = self.combine(self.values[2 * node], self.values[2 * node + 1])

    def set(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self[index] = values


# -- rings that go on --------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_appended() -> None:
    arc, source = new_archive(), Ring(3, 16).run([20, 5, 0])
    w = arc.writer()
    assert_same_ring(refill(save(w, source, 1), source), source)
    assert written_steps(arc) == 16 + 5
    ring.append(w, source.buffers, **source.how())
    assert [w.next_position(e) for e in range(3)] == [20, 5, 0]
    source.run([3, 3, 1])
    assert_same_ring(refill(save(w, source, 2), source), source)
    assert written_steps(arc) == 16 + 5 + 3 + 3 + 1
    w.close()


def test_a_ring_overwritten_between_saves_closes_the_open_episode() -> None:
    arc, source = new_archive(), Ring(2, 8)
    source.left[:] = 100  # neither env's episode ends
    source.run(4)
    w = arc.writer()
    before = save(w, source, 1)
    assert [e.complete for e in before.episodes] == [False, False]
    source.run([20, 4])
    after = save(w, source, 2)
    assert_same_ring(refill(after, source), source)
    ended = {e.env_id: e.reason for e in arc.refresh().episodes if e.id in {x.id for x in before.episodes}}
    assert ended == {0: "gap", 1: None}
    gap, going_on = (RankShare(after).layout, RankShare(after).read())
    assert gap.headless.tolist() == [True, True]  # one lost its first steps to the gap, one never had a first
    assert [steps["t"].tolist() for steps in going_on] == [list(range(16, 24)), list(range(8))]
    w.close()


def test_training_goes_on_from_a_filled_ring() -> None:
    arc, source = new_archive(), Ring(3, 16).run([30, 12, 17])
    with arc.writer() as w:
        ck = save(w, source, 1)
    filled = refill(ck, source, unfinished="continue")
    assert not filled.cut.any()
    source.buffers, source.pos, source.size = filled.buffers, filled.pos, filled.size
    source.priority = filled.columns["priority"]
    source.run([2, 9, 0])
    before = written_steps(arc)
    with arc.writer(resume=ck) as w:
        again = save(w, source, 2)
    assert_same_ring(refill(again, source), source)
    assert written_steps(arc) == before + 11


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_comes_back(data: st.DataObject) -> None:
    num_envs, max_length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    source = Ring(num_envs, max_length, seed=data.draw(st.integers(0, 99)), offset=data.draw(st.integers(0, 30)))
    w = new_archive().writer()
    for save_number in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 3))):
            source.run(data.draw(st.lists(st.integers(0, 20), min_size=num_envs, max_size=num_envs)))
            columns = ring.append(w, source.buffers, **source.how())
        ck = w.checkpoint(step=save_number, columns=columns).result()
        if ck.buffers["replay"]["steps"]:
            assert_same_ring(refill(ck, source), source)
        else:
            assert not source.size.any()
    w.close()


def test_rows_may_have_any_env_ids_and_columns_follow_them() -> None:
    arc, source = new_archive(), Ring(3, 8).run([9, 3, 5])
    w = arc.writer()
    columns = ring.append(w, source.buffers, env_ids=torch.tensor([7, 2, 5]), **source.how())
    order = [1, 2, 0]  # of rows by env id
    spans = [np.arange(int(source.pos[e] - source.size[e]), int(source.pos[e])) % 8 for e in order]
    expected = np.concatenate([source.priority[e].numpy()[span] for e, span in zip(order, spans, strict=True)])
    assert columns["priority"].tolist() == expected.tolist()
    assert w.live["env_id"].unique().to_pylist() == [2, 5, 7]
    ck = w.checkpoint(step=1, columns=columns).result()
    assert np.concatenate([e["t"] for e in ck.episodes.read()]).tolist() == [0, 1, 2, *range(5), *range(1, 9)]
    w.close()


def test_options_may_be_given_for_each_slot() -> None:
    arc, source = new_archive(), Ring(2, 8).run([6, 11])
    updates = torch.arange(16).reshape(2, 8)
    uuids = np.array([["a"] * 8, ["b"] * 8], object)
    w = arc.writer()
    ring.append(
        w, source.buffers, **source.how(), terminated=source.last, update_count=updates, model_weights_uuid=uuids,
        metadata={"task": "push"},
    )  # fmt: skip
    ck = w.checkpoint(step=1).result()
    env = ck.episodes.table["env_id"].to_pylist()
    for e, steps, row in zip(env, ck.episodes.read(), ck.episodes, strict=True):
        slots = [int(t) % 8 for t in steps["t"]]
        counts = [int(updates[e, s]) for s in slots]
        assert row.update_counts == (min(counts), max(counts) + 1)
        assert row.model_weights_uuids == ["ab"[e]]
        assert row.metadata == {"task": "push"}
        assert bool(row.terminated) == bool(source.last[e, slots[-1]])
    w.close()


def test_several_buffers_of_one_writer() -> None:
    arc, source, demo = new_archive(), Ring(2, 8).run(5), Ring(1, 4, seed=1).run(9)
    w = arc.writer()
    columns = ring.append(w, source.buffers, **source.how())
    others = ring.append(w.buffer("demo"), demo.buffers, **demo.how())
    ck = w.checkpoint(step=1, columns=columns, buffers={"demo": {"columns": others}}).result()
    assert_same_ring(refill(ck, source), source)
    assert_same_ring(ring.fill(RankShare(ck, 0, "demo"), num_envs=1, max_length=4), demo)
    w.close()


def leaves_of_all_kinds(shape: tuple[int, int]) -> dict[str, Any]:
    count = shape[0] * shape[1]
    raw = torch.arange(count * 2, dtype=torch.int64).reshape(*shape, 2)
    words = np.array([f"step {i}" for i in range(count)], object).reshape(shape)
    return {
        "float8": (raw % 100).to(torch.uint8).view(torch.float8_e5m2),
        "half": raw.to(torch.float16),
        "complex": torch.complex(raw.float(), -raw.float()),
        "bool": raw % 3 == 0,
        "uint16": raw.to(torch.uint16),
        "grad": raw.float().requires_grad_(),
        "strided": torch.arange(count * 2).reshape(2, *reversed(shape)).permute(2, 1, 0),
        "numpy": np.asfortranarray(raw.numpy().astype(">f4")),
        "words": words,
        "empty": torch.zeros(*shape, 0),
    }


@pytest.mark.parametrize("pos", [(9, 9, 9), (9, 4, 20)], ids=["same pace", "own pace"])
def test_leaves_of_all_kinds_and_strides(pos: tuple[int, ...]) -> None:
    leaves = leaves_of_all_kinds((3, 6))
    w = new_archive().writer()
    ends = torch.tensor(pos)
    ring.append(w, leaves, pos=ends, size=ends.clamp(max=6))
    ck = w.checkpoint(step=1).result()
    filled = ring.fill(RankShare(ck), num_envs=3, max_length=6)
    live = filled.live
    for name, leaf in leaves.items():
        got = filled.buffers[name]
        if name == "words":
            assert got[live.numpy()].tolist() == leaf[live.numpy()].tolist()
        elif name == "numpy":
            assert got[live].tolist() == leaf[live.numpy()].tolist()
        else:
            assert same(got[live], leaf.detach()[live]), name
    w.close()


# -- what the caller gets and does not pay -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [8, [8, 5, 2]], ids=["same pace", "own pace"])
def test_the_caller_may_go_on_at_once(steps: Any) -> None:
    arc, source = new_archive(), Ring(3, 8).run(steps)
    kept = {path: leaf.clone() for path, leaf in flatten(source.buffers)}
    priority, live = source.priority.clone(), source.live
    w = arc.writer()
    columns = ring.append(w, source.buffers, **source.how())
    pending = w.checkpoint(step=1, columns=columns)
    for _, leaf in flatten(source.buffers):
        leaf.zero_()
    source.priority.zero_()
    filled = refill(pending.result(), source)
    for path, leaf in flatten(filled.buffers):
        assert same(leaf[live], kept[path][live])
    assert same(filled.columns["priority"][live], priority[live])
    w.close()


def test_appended_arrays_are_copied_once() -> None:
    """What a slab gathers is what the pipeline gets: neither is it the caller's, nor copied again."""
    source, taken = Ring(2, 8).run(8), []
    w = new_archive().writer()
    original = RingSteps.take

    def watching(self: RingSteps, leaf: Any, *empty: Any) -> Any:
        out = original(self, leaf, *empty)
        taken.append(out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RingSteps, "take", watching)
        ring.append(w, source.buffers, **source.how())
    (block,) = next(iter(w.slabs._open.values())).blocks
    addresses = {t.data_ptr() if isinstance(t, torch.Tensor) else t.ctypes.data for t in taken}
    mine = {leaf.data_ptr() for _, leaf in flatten(source.buffers)}
    kept = {array.ctypes.data for array in block.data.values()}
    assert kept <= addresses
    assert not kept & mine
    w.close()


def test_fields_of_slabs_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = intake.normalise

    def counting(nest: Any, schema: Any) -> Any:
        looked.append(1)
        return original(nest, schema)

    monkeypatch.setattr(intake, "normalise", counting)
    monkeypatch.setattr(rings, "MAX_CALL_BYTES", 400)
    source, arc = Ring(3, 16).run(16), new_archive()
    plain = {"obs": torch.arange(3 * 16 * 5).reshape(3, 16, 5), "reward": np.ones((3, 16), np.float32)}
    with arc.writer() as w:
        ring.append(w, plain, **source.how())
    assert len(looked) == 1
    read = np.concatenate([ep.read()["obs"] for ep in arc.episodes])
    assert sorted(read[:, 0].tolist()) == plain["obs"][..., 0].flatten().tolist()


def test_what_comes_next_waits_while_what_was_saved_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next checkpoint's caller takes note of the last one, and the background does not begin beside him for it."""
    monkeypatch.setattr(pipeline, "_MOMENT_S", 60.0)
    source = Ring(3, 16).run(4)
    w = new_archive().writer()
    save(w, source, 1)
    source.run(4)
    ring.append(w, source.buffers, **source.how())
    with w._changes(wait=False):
        w._submit()
    w._settle()
    assert [work.begun for work in w._pipeline.uncommitted()] == [False]
    w.close()


def test_the_caller_does_not_wait_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_UNDER_WAY_BYTES", 1)
    monkeypatch.setattr(slabs, "SHARD_BYTES", 1024)
    monkeypatch.setattr(rings, "MAX_CALL_BYTES", 1000)
    arc, source, uploading = new_archive(), Ring(4, 32), threading.Event()
    w = arc.writer()
    source.left[:] = 100  # episodes that lie in many shards
    source.run(32)
    for _ in range(8):
        w._pipeline._uploads.submit(uploading.wait)  # nothing is uploaded until the event is set
    try:
        columns = ring.append(w, source.buffers, **source.how())
        pending = w.checkpoint(step=1, columns=columns)
        assert not pending.done()
        source.run(32)
        waiting = threading.Thread(
            target=ring.append, args=(w.buffer("other"), source.buffers), kwargs={**source.how(), "bounded": True}
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    finally:
        uploading.set()
    waiting.join()
    assert pending.result().buffers["replay"]["steps"] == 4 * 32
    read = (
        arc.refresh().episodes.filter(buffer="replay").read(["t"])
    )  # in the order in which segments follow each other
    assert [steps["t"].tolist() for steps in read] == [list(range(32))] * 4
    w.close()


@settings(max_examples=examples(100), deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=12),
    most=st.integers(1, 200),
)
def test_slabs_are_slabs_of_time(ends: list[tuple[int, int]], most: int) -> None:
    stop = np.array([p for p, _ in ends])
    start = np.array([p - min(n, p) for p, n in ends])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings, "MAX_CALL_BYTES", most)
        some = np.flatnonzero(stop > start)
        unseen = RingSteps(some, start[some], stop[some], 40)
        slabs = list(rings._slabs(unseen, int((stop - start).sum()), 1)) if len(some) else []
    steps = [[(int(r), int(p)) for r, p in zip(np.repeat(s.rows, s.counts), s.positions, strict=True)] for s in slabs]
    together = [step for slab in steps for step in slab]
    assert sorted(together) == [(e, p) for e in range(len(ends)) for p in range(start[e], stop[e])]
    assert all(0 < len(slab) <= most for slab in steps)
    assert all(slab == sorted(slab) for slab in steps)  # row by row, so that nobody has to sort them
    ages = [{int(stop[e]) - p for e, p in slab} for slab in steps]
    for older, newer in pairwise(ages):
        assert min(older) > max(newer) or older & newer  # a slab that is too large for one call is cut by rows
    if sum(len(slab) for slab in steps) > most >= len(ends):
        assert all(min(older) > max(newer) for older, newer in pairwise(ages))


def test_eviction_leaves_whole_shards_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Ring(4, 64).run(64)
    monkeypatch.setattr(rings, "MAX_CALL_BYTES", 4 * 16 * 80)
    monkeypatch.setattr(slabs, "SHARD_BYTES", 4 * 16 * 80)
    arc = new_archive()
    w = arc.writer()
    save(w, source, 1)
    rows = arc.refresh().snapshot.columns(["shard", "position", "length"]).to_pylist()
    shards = {r["shard"] for r in rows}
    source.run(34)
    save(w, source, 2)
    dead = {s for s in shards if all(r["position"] + r["length"] <= 34 for r in rows if r["shard"] == s)}
    assert len(shards) >= 4
    assert len(dead) >= len(shards) // 2
    w.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(kind: type[Exception], match: str, change: Any) -> None:
    arc, source = new_archive(), Ring(2, 8).run(5)
    how = {"buffers": source.buffers, **source.how()}
    change(how)
    w = arc.writer()
    with pytest.raises(kind, match=match):
        ring.append(w, how.pop("buffers"), **how)
    assert w.live.num_rows == 0
    assert w.commit().number == w._log.head.number
    assert written_steps(arc) == 0
    w.close()


@pytest.mark.parametrize(
    ("kind", "match", "change"),
    [
        (UsageError, "no option 'positions'", lambda how: how.update(positions=[1])),
        (UsageError, "size 9 with pos 5", lambda how: how.update(size=torch.tensor([5, 9]))),
        (UsageError, "pos of a ring is", lambda how: how.update(pos=torch.tensor([5.0, 5.0]))),
        (UsageError, "size of a ring is", lambda how: how.update(size=torch.tensor([5]))),
        (UsageError, "distinct and not negative", lambda how: how.update(env_ids=[3, 3])),
        (UsageError, "distinct and not negative", lambda how: how.update(env_ids=[-1, 3])),
        (FieldError, "'first' has shape", lambda how: how.update(first=torch.zeros(8, 2))),
        (FieldError, "'priority' has shape", lambda how: how["columns"].update(priority=torch.zeros(2, 7))),
        (FieldError, "'priority' is a list", lambda how: how["columns"].update(priority=[1.0])),
        (FieldError, "'reward' has shape", lambda how: how["buffers"].update(reward=torch.zeros(2, 9))),
        (FieldError, "'reward' is a list", lambda how: how["buffers"].update(reward=[[1.0] * 8] * 2)),
        (FieldError, "no fields", lambda how: how.update(buffers={})),
    ],
)
def test_what_is_no_ring_is_refused(kind: type[Exception], match: str, change: Any) -> None:
    refused(kind, match, change)


def test_a_ring_that_is_behind_its_writer_is_refused() -> None:
    w = new_archive().writer()
    ring.append(w, (source := Ring(2, 8).run(5)).buffers, **source.how())
    with pytest.raises(UsageError, match=r"env 1 of the ring is at position 3, but the writer has its steps up to 5"):
        ring.append(w, (other := Ring(2, 8).run([6, 3])).buffers, **other.how())
    assert w.next_position(0) == 5  # nothing was appended
    w.close()


# -- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.bench
@pytest.mark.parametrize(("shape", "length"), [((64,), 64), ((3, 32, 32), 24)], ids=["states", "frames"])
@pytest.mark.parametrize("pace", ["same pace", "own pace"])
def test_many_envs_cost_about_a_copy(shape: tuple[int, ...], length: int, pace: str, tmp_path: Path) -> None:
    import time

    envs = 4096
    buffers = {"obs": torch.ones(envs, length, *shape, dtype=torch.float32 if len(shape) == 1 else torch.uint8)}
    buffers["reward"] = torch.ones(envs, length)
    pos = torch.full((envs,), 3 * length + 7)
    pos = pos if pace == "same pace" else pos + torch.randint(0, length, (envs,))
    first = torch.rand(envs, length) < 0.01
    copies, appends = [], []
    for attempt in range(3):
        w = archive.create(str(tmp_path / str(attempt))).writer()
        started = time.perf_counter()
        kept = [leaf.clone() for leaf in buffers.values()]
        copies.append(time.perf_counter() - started)
        del kept
        started = time.perf_counter()
        ring.append(w, buffers, pos=pos, size=torch.full((envs,), length), first=first, last=first.roll(-1, 1))
        appends.append(time.perf_counter() - started)
        w.checkpoint(step=1).result()
        w.close()
    megabytes = sum(leaf.nbytes for leaf in buffers.values()) / 1e6
    print(
        f"\n{envs} envs x {length}, {pace}: {megabytes:.0f} MB, copy {min(copies):.3f} s, append {min(appends):.3f} s"
    )
    assert min(appends) < 3 * min(copies) + 0.3
