"""TransferQueue really, on Ray: what two storage units held, in three and in one; what stays when a save dies."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import torch
from tensordict import NonTensorStack, TensorDict

import archive
import resharding
from archive.adapters import transferqueue
from archive.adapters.transferqueue import adapter, live
from archive.base.errors import (
    ArchiveError,
    CapacityError,
    CorruptChunkError,
    FieldError,
    NothingThereError,
    StateError,
    UsageError,
)
from archive.store.storage import Storage
from tests.support import ray_cluster
from tests.support.backends import make_backend
from tests.support.documents import DOCS, run_page
from tests.support.tampering import inverted
from tests.support.ticks import NEVER_S, abandoned
from tests.support.transferqueue_systems import (
    contents,
    controller,
    drawn,
    empty,
    known,
    put,
    spread,
    system,
    tq,
    with_units,
)

KEYS = [f"k{i}" for i in range(8)]


@dataclass(frozen=True)
class Before:
    """What a system of two units was when it was saved, and what it handed out after that."""

    url: str
    contents: Any
    known: Any
    next: list[list[int]]


def hand_out() -> list[list[int]]:
    """Of "step-1": another consumer of the rank that had batch 0 already, then what is next, until there is no more."""
    return [drawn("step-1", count, batch) for count, batch in ((3, 0), (3, 1), (3, 2), (1, 3), (1, 4))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster.cluster(4):
        yield


@pytest.fixture(scope="module")
def before(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Before:
    url = str(tmp_path_factory.mktemp("two") / "queue")
    with system(2):
        put("step-1", KEYS)
        put("step-2", ["a", "b"], first=20)
        tq().kv_clear("k2", "step-1")  # its index is to be given out again
        tq().kv_put("late", "step-2", tag={"promised": True})  # a key whose fields are yet to come
        first = drawn("step-1", 3, 0)
        assert sorted(spread()) == [4, 5]
        ck = transferqueue.save_checkpoint(url, metadata={"step": 7, "loss": 0.5})
        assert (ck.step, ck.progress, len(ck.episodes)) == (7, {"step": 7, "loss": 0.5}, 10)
        out = Before(url, contents(), known(), hand_out())
        assert out.next[0] == first
        assert [len(batch) for batch in out.next] == [3, 3, 0, 1, 0]
        assert len({index for batch in out.next for index in batch}) == 7
    return out


@pytest.fixture(scope="module")
def running(before: Before) -> Iterator[Any]:
    with system(3) as three:
        yield three


@pytest.fixture
def fresh(running: Any) -> Iterator[Any]:
    """The system of three units, empty."""
    empty()
    yield running
    empty()


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def holds(before: Before) -> bool:
    return bool(contents() == before.contents and known() == before.known)


def test_three_units_hold_what_two_held_and_hand_out_the_same(before: Before, fresh: Any) -> None:
    ck = transferqueue.load_checkpoint(before.url)
    assert ck.step == 7
    assert holds(before)
    assert sum(spread()) == 9
    assert all(spread())
    assert hand_out() == before.next


def test_one_unit_does_too(before: Before, fresh: Any) -> None:
    with with_units(1):
        transferqueue.load_checkpoint(archive.open(before.url))
        assert holds(before)
        assert spread() == [9]
        assert hand_out() == before.next


def test_what_is_there_is_replaced(before: Before, fresh: Any) -> None:
    put("other", ["x", "y", "z"], first=50)
    put("step-1", ["k0"], first=60)
    drawn("other", 2, 0)
    controller("clear_partition", "other")  # as the controller alone clears it, what is in the units stays
    transferqueue.load_checkpoint(archive.open(before.url).checkpoints.latest)
    assert holds(before)
    assert sum(spread()) == 9


def test_indexes_that_were_given_out_are_not_given_out_again(before: Before, fresh: Any) -> None:
    transferqueue.load_checkpoint(before.url)
    put("step-3", [f"new{i}" for i in range(4)], first=70)
    known_before = {index for part in before.contents.values() for index in part}
    assert not known_before & set(contents()["step-3"])
    tq().kv_put("late", "step-2", fields={"tokens": torch.arange(3)})
    assert tq().kv_list("step-2")["step-2"]["late"] == {"promised": True}


def test_a_second_save_uploads_what_is_new_or_changed(fresh: Any, url: str) -> None:
    put("p", KEYS)
    big = TensorDict({"pixels": torch.randint(0, 255, (8, 200_000), dtype=torch.uint8)}, 8)
    tq().kv_batch_put(keys=KEYS, partition_id="p", fields=big)
    arc = archive.create(url)
    first = transferqueue.save_checkpoint(arc)
    sent = arc.io_stats().bytes_out
    assert sent > 1_600_000
    again = transferqueue.save_checkpoint(arc)
    assert (first.step, again.step) == (0, 1)
    assert arc.io_stats().bytes_out - sent < 65_536
    sent = arc.io_stats().bytes_out
    tq().kv_put("k3", "p", fields={"pixels": torch.zeros(200_000, dtype=torch.uint8)}, tag={"step": 99})
    tq().kv_clear("k5", "p")
    put("p", ["k9"], first=9)
    third = transferqueue.save_checkpoint(arc)
    assert arc.io_stats().bytes_out - sent < 65_536 + 20_000  # zeros are small
    ids = [{episode.id for episode in ck.episodes} for ck in (first, again, third)]
    assert ids[0] == ids[1]
    assert (len(ids[0] - ids[2]), len(ids[2] - ids[0])) == (2, 2)
    was = contents()
    assert [tag["step"] for key, tag, _ in was["p"].values() if key == "k3"] == [99]
    transferqueue.load_checkpoint(url)
    assert contents() == was


def test_what_is_archived_can_be_looked_at(before: Before) -> None:
    ck = archive.open(before.url).checkpoints.latest
    assert ck is not None
    found = {episode.attributes.get("key"): episode for episode in ck.episodes}
    one = found["k0"]
    assert one.attributes["consumed"] == ["train"]
    assert found["k7"].attributes["consumed"] == []
    assert one.attributes["tag"] == {"step": 0, "score": 0.0}
    assert one.read()["text"].tolist() == ["prompt 0: \u00e9"]
    assert found["late"].attributes["partition"] == "step-2"


@pytest.mark.parametrize("store", ["moto", "seaweedfs"])
def test_on_s3(request: pytest.FixtureRequest, tmp_path: Path, before: Before, fresh: Any, store: str) -> None:
    root = make_backend(request, store, tmp_path)
    transferqueue.load_checkpoint(before.url)
    transferqueue.save_checkpoint(root.url, storage_options=root.storage_options, step=3)
    empty()
    transferqueue.load_checkpoint(root.url, storage_options=root.storage_options)
    assert holds(before)


def test_through_ones_own_writer(fresh: Any, url: str) -> None:
    arc = archive.create(url)
    put("p", KEYS)
    with arc.writer(rank=0, world_size=1, run="job") as w:
        w.buffer("queue")
        one = transferqueue.save_checkpoint(w, step=5, buffer="queue", name="five")
        put("p", ["more"], first=30)
        two = transferqueue.save_checkpoint(w, metadata={"step": 6}, buffer="queue")
    was = contents()
    assert (one.name, two.name, two.run) == ("five", "step-6", "job")
    with pytest.raises(UsageError, match="which was"):
        transferqueue.load_checkpoint(arc, run="job")
    transferqueue.load_checkpoint(resharding.plan(two, world_size=1).share(0), buffer="queue")
    assert contents() == was
    transferqueue.load_checkpoint(arc, run="job", buffer="queue")
    assert contents() == was
    assert len(transferqueue.load_checkpoint(one, buffer="queue").episodes) == 8
    assert len(contents()["p"]) == 8


def test_a_checkpoint_of_a_step_as_verl_names_them(fresh: Any, url: str) -> None:
    wanted = {}
    for step in (10, 20, 30):
        put("p", [f"k{step}"], first=step)
        ck = transferqueue.save_checkpoint(url, metadata={"global_steps": step})
        assert (ck.name, ck.progress) == (f"step-{step}", {"global_steps": step})
        wanted[step] = contents()
    for step in (20, 10):
        assert transferqueue.load_checkpoint(url, step=step).step == step
        assert contents() == wanted[step]
    with pytest.raises(NothingThereError, match=r"no whole checkpoint of step 15 .*the newest steps are: 10, 20, 30"):
        transferqueue.load_checkpoint(url, step=15)
    with pytest.raises(UsageError, match=r"step=20: a checkpoint.* is of its own step"):
        transferqueue.load_checkpoint(ck, step=20)
    assert contents() == wanted[10]
    put("p", ["other"], first=70)
    assert transferqueue.save_checkpoint(url, metadata={"step": True, "global_steps": 20}).step == 20
    wanted[20] = contents()
    transferqueue.load_checkpoint(url, step=20)  # the newest of them
    assert contents() == wanted[20]
    assert transferqueue.load_checkpoint(url).step == 20


def test_samples_that_were_promised_and_have_no_values_yet(fresh: Any, url: str) -> None:
    """Neither in the system that is saved, nor in the one that is loaded into, are they in the way."""

    def promise(count: int) -> Any:
        return tq().get_client().get_meta(data_fields=["tokens"], batch_size=count, partition_id="p", mode="insert")

    put("p", KEYS)
    promise(3)
    transferqueue.save_checkpoint(url, step=1)
    was, all_known = contents(), known()
    assert len(was["p"]) == 11
    promise(40)
    controller("create_partition", "empty")
    transferqueue.load_checkpoint(url)
    assert (contents(), known()) == (was, all_known)
    meta = promise(2)
    tq().get_client().put(TensorDict({"tokens": torch.ones(2, 3)}, 2), metadata=meta)
    assert len(contents()["p"]) == 13


class Killed(BaseException):
    """As if the process had ended there."""


def go_on(arc: archive.Archive, ck: Any) -> archive.Writer:
    share = resharding.plan(ck, world_size=1).share(0)
    return arc.writer(resume=share, session=f"s{uuid.uuid4().hex[:8]}", journal_s=NEVER_S)


def test_a_save_that_dies_with_a_journal_is_loaded_whole_once_it_is_recovered(
    fresh: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*given: Any, **more: Any) -> None:
        w.sync()
        raise Killed

    arc = archive.create(url)
    put("p", KEYS)
    w = arc.writer(rank=0, world_size=1, journal_s=NEVER_S)
    transferqueue.save_checkpoint(w, step=0)
    was = contents()
    tq().kv_clear("k1", "p")
    put("p", ["more"], first=30)
    now, all_known = contents(), known()
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "checkpoint", dies)
        with pytest.raises(Killed):
            transferqueue.save_checkpoint(w, step=1)
    again = abandoned(w)
    transferqueue.load_checkpoint(again)
    assert contents() == was
    again.recover("main")
    transferqueue.load_checkpoint(again)
    assert (contents(), known()) == (now, all_known)
    put("p", ["late"], first=40)
    was = contents()
    transferqueue.save_checkpoint(again)
    transferqueue.load_checkpoint(url)
    assert contents() == was


def test_a_journal_without_the_controllers_state_is_not_loaded(fresh: Any, url: str) -> None:
    arc = archive.create(url)
    put("p", KEYS)
    w = arc.writer(rank=0, world_size=1, journal_s=NEVER_S)
    transferqueue.save_checkpoint(w)
    was = contents()
    w.remove(next(iter(w.live["episode_id"].to_pylist())))
    w.sync()
    again = abandoned(w)
    ck = again.recover()
    transferqueue.load_checkpoint(again)
    assert contents() == was
    with pytest.raises(UsageError, match="knows nothing of what came after checkpoint 'step-0'"):
        transferqueue.load_checkpoint(ck)
    assert contents() == was


def test_a_followed_queue_comes_back_as_it_was_at_its_last_tick(fresh: Any, url: str) -> None:
    """And again, from the writer that goes on."""
    arc = archive.create(url)
    put("p", KEYS)
    w = arc.writer(rank=0, world_size=1, journal_s=NEVER_S)
    transferqueue.save_checkpoint(w, metadata={"step": 3})
    transferqueue.follow(w)
    taken: set[int] = set()
    for turn, name in enumerate(("one", "two")):
        put("p", [name], first=20 + turn)
        tq().kv_clear(f"k{turn}", "p")
        tq().kv_put("k5", "p", fields={"image": torch.full((2, 3), turn, dtype=torch.uint8)}, tag={"turn": turn})
        taken.update(drawn("p", 2, turn))
        was, all_known = contents(), known()
        w.sync()
        put("p", ["lost"], first=50)
        again = abandoned(w)
        ck = again.recover()
        assert transferqueue.load_checkpoint(again).number == ck.number
        assert (contents(), known(), ck.progress) == (was, all_known, {"step": 3})
        assert len(taken) == 2 * (turn + 1)
        consumed = {episode.attributes["index"] for episode in ck.episodes if episode.attributes["consumed"]}
        assert consumed == taken & set(was["p"])
        w = go_on(again, ck)
        transferqueue.follow(w)
    with w:
        last = transferqueue.save_checkpoint(w, step=9)
    transferqueue.load_checkpoint(last)
    assert (contents(), known()) == (was, all_known)


def test_the_process_that_follows_is_killed(fresh: Any, tmp_path: Path) -> None:
    import ray

    class Follower:  # in here, so that Ray sends its code
        def __init__(self, url: str) -> None:
            import transfer_queue

            transfer_queue.init()
            self.writer = archive.open(url, create=True).writer(rank=0, world_size=1, journal_s=0.05)
            transferqueue.follow(self.writer)

        def sync(self) -> None:
            self.writer.sync()

        def die(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    put("p", KEYS)
    one = ray.remote(num_cpus=0)(Follower).remote(str(tmp_path))
    tq().kv_clear("k1", "p")
    put("p", ["more"], first=30)
    drawn("p", 3, 0)
    was, all_known = contents(), known()
    ray.get(one.sync.remote())
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(one.die.remote())
    put("p", ["lost"], first=50)
    transferqueue.load_checkpoint(archive.open(tmp_path).recover())
    assert (contents(), known()) == (was, all_known)


def test_a_queue_that_nobody_saved_and_one_that_was_emptied(fresh: Any, url: str) -> None:
    w = archive.create(url).writer(rank=0, world_size=1, journal_s=NEVER_S)
    transferqueue.follow(w)
    put("p", KEYS[:3])
    was, all_known = contents(), known()
    w.sync()
    empty()
    again = abandoned(w)
    ck = again.recover()
    transferqueue.load_checkpoint(ck)
    assert (contents(), known()) == (was, all_known)
    w = go_on(again, ck)
    transferqueue.follow(w)
    empty()
    all_known = known()
    w.sync()
    w.sync()
    again = abandoned(w)
    put("p", ["other"])
    transferqueue.load_checkpoint(again.recover())
    assert (contents(), known()) == ({}, all_known)


def test_a_tick_reads_what_is_new_and_one_that_fails_leaves_nothing(
    fresh: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = archive.create(url).writer(rank=0, world_size=1, journal_s=NEVER_S)
    put("p", KEYS)
    transferqueue.follow(w)
    real, asked = live.Live.read, []
    monkeypatch.setattr(live.Live, "read", lambda self, some, cut: asked.extend(some) or real(self, some, cut))
    drawn("p", 3, 0)
    w.sync()
    assert asked == []
    put("p", ["more"], first=30)
    was = contents()
    asked.clear()
    w.sync()
    assert [sample.key for sample in asked] == ["more"]
    put("p", ["fine"], first=40)
    tq().kv_batch_put(keys=["a"], partition_id="p", fields=TensorDict({"odd": NonTensorStack(Fraction(1, 2))}, 1))
    with pytest.raises(StateError, match="field 'odd' of sample 'a'"):
        w.sync()
    again = abandoned(w)
    transferqueue.load_checkpoint(again.recover())
    assert contents() == was


def test_following_needs_a_journal(fresh: Any, url: str) -> None:
    with archive.create(url).writer() as w, pytest.raises(UsageError, match="journal_s"):
        transferqueue.follow(w)


def test_a_save_that_dies_leaves_the_one_before(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every storage operation."""
    real, lock, left = Storage.request, threading.Lock(), [0]

    def request(*args: Any, **more: Any) -> Any:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        return real(*args, **more)

    outcomes = []
    for k in range(100):
        url = f"memory://{uuid.uuid4().hex}"
        empty()
        put("p", ["old"])
        transferqueue.save_checkpoint(url)
        old = contents()
        put("p", ["new"], first=1)
        new, left[0] = contents(), k
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "request", request)
            try:
                transferqueue.save_checkpoint(url)
                ended = True
            except BaseException:
                ended = False
        transferqueue.load_checkpoint(url)
        found = contents()
        assert found in ([new] if ended else [old, new]), k
        outcomes.append("new" if found == new else "old")
        if ended:
            break
    assert outcomes[0] == "old"
    assert outcomes[-1] == "new"
    assert 5 < len(outcomes) < 100


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_field_that_would_take_pickle(fresh: Any, url: str) -> None:
    tq().kv_batch_put(keys=["a"], partition_id="p", fields=TensorDict({"odd": NonTensorStack(Fraction(1, 2))}, 1))
    with pytest.raises(StateError, match="field 'odd' of sample 'a' of partition 'p'"):
        transferqueue.save_checkpoint(url)
    assert archive.open(url).checkpoints.latest is None


def test_a_tag_that_is_no_json(fresh: Any, url: str) -> None:
    put("p", ["a"])
    controller("set_custom_meta", {"p": {min(contents()["p"]): {"model": object()}}})
    with pytest.raises(StateError, match="tag of sample 'a' of partition 'p'"):
        transferqueue.save_checkpoint(url)


def test_more_than_the_units_hold_touches_nothing(fresh: Any, url: str) -> None:
    put("p", [f"k{i}" for i in range(90)])
    transferqueue.save_checkpoint(url)
    empty()
    with with_units(1):
        put("kept", ["a"])
        was = contents()
        with pytest.raises(CapacityError, match="90 of 90 samples"):
            transferqueue.load_checkpoint(url)
        assert contents() == was


def test_damage_touches_nothing(fresh: Any, tmp_path: Path) -> None:
    put("p", KEYS)
    arc = archive.open(tmp_path, create=True)
    transferqueue.save_checkpoint(arc)
    empty()
    for key in arc.refresh().shards:
        (tmp_path / key).write_bytes(inverted((tmp_path / key).read_bytes()))
    with pytest.raises(ArchiveError) as told:
        transferqueue.load_checkpoint(arc)
    assert isinstance(told.value, CorruptChunkError)
    assert controller("list_partitions") == []
    put("kept", ["a"])
    was = contents()
    with pytest.raises(CorruptChunkError):
        transferqueue.load_checkpoint(arc)
    assert contents() == was


def test_a_put_that_fails_leaves_it_empty(before: Before, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put("other", ["x"])

    def failing(self: Any, rows: Any) -> None:
        real(self, rows)
        raise RuntimeError("the unit died")

    real = live.Live.put
    monkeypatch.setattr(live.Live, "put", failing)
    with pytest.raises(RuntimeError, match="the unit died"):
        transferqueue.load_checkpoint(before.url)
    assert controller("list_partitions") == []
    assert spread() == [0, 0, 0]


def test_another_sampler(before: Before, fresh: Any) -> None:
    from transfer_queue.sampler import RankAwareSampler, SeqlenBalancedSampler

    controller("register_sampler", SeqlenBalancedSampler(dp_size=2, n_samples_per_prompt=2))
    with pytest.raises(UsageError, match=r"RankAwareSampler .*the running sampler is a SeqlenBalancedSampler"):
        transferqueue.load_checkpoint(before.url)
    controller("register_sampler", RankAwareSampler)


def test_samples_that_are_cleared_meanwhile(fresh: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put("p", KEYS)
    real = live.Live.read

    def read(self: Any, samples: Any, cut: Any) -> Any:
        if cleared:
            tq().kv_clear(cleared.pop(), "p")
            put("p", [f"again{len(cleared)}"], first=40)
        return real(self, samples, cut)

    monkeypatch.setattr(live.Live, "read", read)
    cleared = ["k0", "k1"]
    transferqueue.save_checkpoint(url)
    was = contents()
    empty()
    transferqueue.load_checkpoint(url)
    assert contents() == was
    cleared = KEYS[2:]
    with pytest.raises(UsageError, match="cleared at each of 3 attempts"):
        transferqueue.save_checkpoint(url)


def test_the_archive_of_something_else(fresh: Any, url: str) -> None:
    with pytest.raises(NothingThereError):
        transferqueue.load_checkpoint(url)
    arc = archive.create(url)
    with pytest.raises(NothingThereError, match="no whole checkpoint"):
        transferqueue.load_checkpoint(arc)
    with arc.writer() as w:
        w.add_episode({"obs": torch.ones(3)})
        w.checkpoint(1).result()
        with pytest.raises(UsageError, match="a Writer is what is saved to"):
            transferqueue.load_checkpoint(w)
    for act in (transferqueue.load_checkpoint, transferqueue.save_checkpoint):
        with pytest.raises(UsageError, match=r"archive\.adapters\.transferqueue"):
            act(arc)
    put("p", ["a"])
    transferqueue.save_checkpoint(arc, run="queue")
    assert len(arc.refresh().checkpoints) == 2


def test_a_process_that_has_joined_no_system(fresh: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.interface._TQ_CLIENT", None)
    for act in (transferqueue.save_checkpoint, transferqueue.load_checkpoint):
        with pytest.raises(UsageError, match=r"transfer_queue\.init"):
            act(url)


def test_include_storage_is_passed_over(fresh: Any, url: str, caplog: pytest.LogCaptureFixture) -> None:
    put("p", ["a"])
    was = contents()
    transferqueue.save_checkpoint(url, include_storage=False)
    assert "no effect" in caplog.text
    transferqueue.load_checkpoint(url)
    assert contents() == was


def test_a_reserved_name(fresh: Any, url: str) -> None:
    tq().kv_batch_put(keys=["a"], partition_id="p", fields=TensorDict({"transferqueue": torch.ones(1, 2)}, 1))
    with pytest.raises(FieldError, match="rename it"):
        transferqueue.save_checkpoint(url)


def test_the_page(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "adapters" / "transferqueue.md", {})
