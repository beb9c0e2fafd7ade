"""TorchRL's own calls: `rb.dumps(url)` and `rb.loads(url)` into an archive, and what they lose without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.base.errors import IntegrityError, NotFoundError, SupersededError, UsageError
from tests.support.backends import make_backend
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, steps
from tests.support.worlds import STORES

import torch  # isort: skip
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer  # isort: skip

SLICES: dict[str, Any] = {"slice_len": 2}


@pytest.fixture
def checkpointer(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(torchrl.ArchiveCheckpointer(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def extend(rb: Any, i: int) -> None:
    rb.extend(steps(1000 + 13 * i, 5))


@pytest.mark.parametrize("kind", STORES)
def test_one_line_changed(kind: str, request: pytest.FixtureRequest, tmp_path: Path, checkpointer: Any) -> None:
    backend = make_backend(request, kind, tmp_path)
    options = {"storage_options": backend.storage_options}
    rb = buffer(50, sampler=SliceSampler(**SLICES), checkpointer=checkpointer(**options))
    rb.extend(steps(0, 70))
    rb.dumps(backend.url)
    other = buffer(50, sampler=SliceSampler(**SLICES), seed=3, checkpointer=checkpointer(**options))
    other.loads(backend.url)
    assert_same_samples(rb, other, count=30, write=extend)


def appended(url: str) -> int:
    found = archive.open(url).checkpoints.latest
    assert found is not None
    table = found.snapshot.columns(["commit", "length"])
    return int(np.sum(table["length"].to_numpy()[table["commit"].to_numpy() == found.number]))


def test_dumping_again_uploads_what_is_new_also_after_loading(checkpointer: Any) -> None:
    """TorchRL can't dump a full ring that it has just loaded with some checkpointers,
    and writes it whole with the others."""
    url = "memory://dumps/again"
    rb = buffer(50, checkpointer=checkpointer())
    rb.extend(steps(0, 60))
    rb.save(url)
    rb.extend(steps(60, 5))
    rb.dump(url)
    assert appended(url) == 5
    other = buffer(50, seed=3, checkpointer=checkpointer())
    other.load(url)
    other.dumps(url)
    assert appended(url) == 0
    other.extend(steps(65, 7))
    other.dumps(url)
    assert appended(url) == 7
    assert [c.step for c in archive.open(url).checkpoints] == [0, 1, 2, 3]
    third = buffer(50, seed=4, checkpointer=checkpointer())
    third.loads(url)
    assert contents(third) == contents(other)


def test_any_capacity(checkpointer: Any) -> None:
    url = "memory://dumps/capacity"
    rb = buffer(50, checkpointer=checkpointer())
    rb.extend(steps(0, 60))
    rb.dumps(url)
    for capacity in (20, 80):
        other = buffer(capacity, checkpointer=checkpointer())
        other.loads(url)
        assert sorted(contents(other)) == sorted(contents(rb))[-len(other) :]
        assert 13 <= len(other) <= capacity


def test_a_buffer_that_there_is_and_others_keep_their_own(tmp_path: Path) -> None:
    rb = buffer(50)
    rb.extend(steps(0, 30))
    rb.dumps(tmp_path / "own")
    assert (tmp_path / "own" / "buffer_metadata.json").exists()
    held = torchrl.ArchiveCheckpointer(rb)
    rb.dumps(tmp_path / "deep" / "archived")
    assert (tmp_path / "deep" / "archived" / "archive.json").exists()
    other = buffer(50, seed=2)
    other.loads(tmp_path / "own")
    assert contents(other) == contents(rb)
    held.close()


def test_damage_is_noticed(tmp_path: Path, checkpointer: Any) -> None:
    """TorchRL reads a truncated file as zeros, and a flipped bit as another number."""
    rb = buffer(50, checkpointer=checkpointer())
    rb.extend(steps(0, 50))
    rb.dumps(tmp_path)
    (shard,) = (tmp_path / "shards").iterdir()
    data = shard.read_bytes()
    flipped = bytes(b ^ 1 if i % 100 == 50 else b for i, b in enumerate(data))
    for damaged in (data[: len(data) // 2], flipped, None):
        shard.unlink() if damaged is None else shard.write_bytes(damaged)
        other = buffer(50, seed=2, checkpointer=checkpointer())
        with pytest.raises((IntegrityError, archive.errors.StorageError), match=shard.name):
            other.loads(tmp_path)
        assert len(other) == 0


def test_nothing_there(checkpointer: Any) -> None:
    with pytest.raises(NotFoundError):
        buffer(50, checkpointer=checkpointer()).loads("memory://dumps/nothing")
    archive.create("memory://dumps/new")
    with pytest.raises(NotFoundError, match="no checkpoint yet"):
        buffer(50, checkpointer=checkpointer()).loads("memory://dumps/new")


def test_a_storage_alone_is_refused(checkpointer: Any) -> None:
    rb = buffer(50, checkpointer=checkpointer())
    for call in (rb._storage.dumps, rb._storage.loads):
        with pytest.raises(UsageError, match="of its replay buffer"):
            call("memory://dumps/storage")
    with pytest.raises(UsageError, match="hooks"):
        rb.register_save_hook(print)


def test_a_failed_dump_leaves_the_last_one(checkpointer: Any) -> None:
    url = "memory://dumps/failed"
    rb = buffer(50, checkpointer=checkpointer())
    rb.extend(steps(0, 20))
    rb.dumps(url)
    rb._sampler.state_dict = lambda: (_ for _ in ()).throw(NotImplementedError())
    rb.extend(steps(20, 20))
    with pytest.raises(UsageError, match="no state_dict"):
        rb.dumps(url)
    del rb._sampler.state_dict
    other = buffer(50, seed=2, checkpointer=checkpointer())
    other.loads(url)
    assert len(other) == 20
    del other
    mem = fsspec.filesystem("memory")
    assert mem.exists("/dumps/failed/archive.json")


def test_the_example_of_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line[4:] for line in torchrl.__doc__.splitlines() if line.startswith("    ")]
    assert 0 < len(lines) <= 15
    learned: list[Any] = []
    names = {"archive": archive, "resharding": resharding, "torchrl": torchrl, "learn": learned.append}
    exec("\n".join(lines), names)
    train: Any = names["train"]
    train("memory://dumps/example", buffer(100), [steps(lo, 10) for lo in range(0, 50, 10)])
    rb = buffer(100)
    train("memory://dumps/example", rb, [steps(50, 10)])
    assert "50 steps" in capsys.readouterr().out
    assert contents(rb) == [float(i) for i in range(60)]
    assert len(learned) == 6


def test_replay_and_demo_as_a_job_has_them() -> None:
    url = "memory://dumps/job"

    def run(batches: Any) -> Any:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
        demo = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
        arc = archive.open(url, create=True)
        ck, share = arc.checkpoints.latest, None
        buffers = {"replay": rb, "demo": demo}
        if ck:
            share = resharding.plan(ck, capacity=rb.storage.max_size).share()
            torchrl.restore(buffers, share)
        else:
            demo.extend(steps(500, 20))
        with arc.writer(resume=share) as w:
            for step, batch in enumerate(batches, start=ck.step + 1 if ck else 0):
                rb.extend(batch.reshape(-1)), rb.sample(), demo.sample()
                torchrl.save(buffers, w, step=step)
        return arc.checkpoints.latest, rb, demo

    first, rb, demo = run([steps(lo, 10) for lo in range(0, 50, 10)])
    second, again, demo_again = run([steps(lo, 10) for lo in range(50, 70, 10)])
    assert (first.step, second.step) == (4, 6)
    assert contents(again)[:50] == contents(rb)
    assert contents(demo_again) == contents(demo)
    assert appended(url) == 10


def test_the_adapter_is_imported_without_torchrl() -> None:
    code = (
        "import archive, sys; import archive.adapters.torchrl; "
        "print('torchrl' in sys.modules, 'tensordict' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_what_it_cannot_save_is_said() -> None:
    from torchrl.data import ReplayBufferEnsemble

    with archive.create("memory://dumps/refused").writer(0, 1, session="s") as w:
        with pytest.raises(UsageError, match="give its members by name"):
            torchrl.save(ReplayBufferEnsemble(buffer(5), buffer(5), batch_size=2), w, step=1)
        with pytest.raises(UsageError, match="give a ReplayBuffer of this process"):
            torchrl.save({"demo": torch.zeros(3)}, w, step=1)
        rb = buffer(5)
        with pytest.raises(UsageError, match="share one storage"):
            torchrl.save({"a": rb, "b": rb}, w, step=1)
        p = torchrl.save({"a": buffer(5), "b": buffer(5)}, w, step=1)
    with pytest.raises(UsageError, match="share one storage"):
        torchrl.restore({"a": rb, "b": rb}, p.result(60), rank=0, existing="replace")


def test_loading_goes_on_where_another_process_took_over(checkpointer: Any) -> None:
    url = "memory://dumps/taken over"
    rb, other = (buffer(50, seed=seed, checkpointer=checkpointer()) for seed in (1, 2))
    rb.extend(steps(0, 10))
    rb.dumps(url)
    other.loads(url)
    other.extend(steps(10, 5))
    other.dumps(url)
    rb.extend(steps(10, 3))
    with pytest.raises(SupersededError):
        rb.dumps(url)
    rb.loads(url)
    assert contents(rb) == contents(other)
    rb.dumps(url)
    assert appended(url) == 0
