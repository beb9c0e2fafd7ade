"""`torchrl.checkpoint.Checkpoint` with a replay buffer that goes to an archive: model, optimizer and buffer of one
moment, on any number of ranks; what is damaged or foreign is refused before the buffer changes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.adapters import torchrl
from archive.base.errors import IntegrityError, NotFoundError, UsageError
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, steps

import torch  # isort: skip
from torchrl.checkpoint import Checkpoint, CheckpointAdapter, CheckpointError, CheckpointOptions  # isort: skip
from torchrl.data import PrioritizedSampler  # isort: skip

FILE = "archive.json"


@pytest.fixture
def adapters() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(url: Any, **options: Any) -> Any:
        made.append(torchrl.CheckpointAdapter(url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def url() -> str:
    return f"memory://components-{uuid.uuid4().hex}"


def test_it_is_an_adapter_of_torchrl(adapters: Any) -> None:
    made = adapters(url())
    assert isinstance(made, CheckpointAdapter)
    assert (made.adapter_id, made.format_version) == ("archive.replay_buffer", 1)


@pytest.mark.parametrize("form", ["directory", "archive"])
def test_model_optimizer_and_buffer_are_of_one_moment(form: Any, tmp_path: Path, adapters: Any) -> None:
    def job(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        policy = torch.nn.Linear(3, 1)
        rb = buffer(50, sampler=PrioritizedSampler(50, 0.7, 0.5), seed=seed)
        optimizer = torch.optim.Adam(policy.parameters())
        parts = Checkpoint(format=form, policy=policy, optimizer=optimizer)
        return policy, rb, parts.register("replay_buffer", rb, adapter=adapters(where))

    where = url()
    policy, rb, parts = job(0)
    rb.extend(steps(0, 30))
    first = parts.save(tmp_path / "1")
    rb.extend(steps(30, 30))
    parts.save(tmp_path / "2")
    other_policy, other, others = job(1)
    result = others.load(first)
    assert result.loaded == {"policy", "optimizer", "replay_buffer"}
    assert result.values["replay_buffer"].steps == 30
    assert contents(other) == [float(t) for t in range(30)]
    others.load(tmp_path / "2")
    assert torch.equal(other_policy.weight, policy.weight)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(steps(100 + i, 3)))
    found = archive.open(where)
    written = found.snapshot.columns(["length"])["length"].to_numpy().sum()
    assert written == 60  # each step once
    others.save(tmp_path / "3")  # a session of its own goes on from what was loaded
    assert len({ck.session for ck in archive.open(where).checkpoints}) == 2


def test_on_other_numbers_of_ranks(tmp_path: Path, adapters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", uuid.uuid4().hex)
    where, ranks = url(), [buffer(60) for _ in range(2)]

    def saved(rank: int) -> Path:
        ranks[rank].extend(steps(1000 * rank, 20 + rank))
        made, options = adapters(where, rank=rank, world_size=2), CheckpointOptions(save_kwargs={"step": 7})
        parts = Checkpoint().register("replay", ranks[rank], adapter=made, options=options)
        return Path(parts.save(tmp_path / f"rank-{rank}"))

    archive.open(where, create=True)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(saved, range(2)))
    names = {json.loads(next(path.rglob(FILE)).read_text())["commit"] for path in paths}
    assert len(names) == 1
    for world_size in (1, 2, 3):
        held: list[float] = []
        for rank in range(world_size):
            rb = buffer(60)
            made = Checkpoint().register("replay", rb, adapter=adapters(where, rank=rank, world_size=world_size))
            made.load(paths[0])
            held += contents(rb)
        assert held == [value for rb in ranks for value in contents(rb)]


def damage(path: Path, **changed: Any) -> None:
    file = next(path.rglob(FILE))
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no file": (lambda path: next(path.rglob(FILE)).unlink(), NotFoundError, "there is no"),
    "half a file": (lambda path: next(path.rglob(FILE)).write_text('{"archive": '), IntegrityError, "cannot be read"),
    "too deep": (lambda path: next(path.rglob(FILE)).write_text("[" * 60_000), IntegrityError, "cannot be read"),
    "no commit": (lambda path: damage(path, commit=None), IntegrityError, "does not name a commit"),
    "a list": (lambda path: next(path.rglob(FILE)).write_text("[]"), IntegrityError, "does not name a commit"),
    "another commit": (lambda path: damage(path, commit=77), NotFoundError, "names commit 77 of"),
    "another digest": (lambda path: damage(path, digest="0" * 64), IntegrityError, "by another digest"),
    "another archive": (
        lambda path: damage(path, archive="somebody's\x1b"),
        UsageError,
        "is of a checkpoint in archive",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_damaged_or_foreign_changes_nothing(what: str, tmp_path: Path, adapters: Any) -> None:
    rb, other, where = buffer(50), buffer(50, seed=3), url()
    rb.extend(steps(0, 30))
    other.extend(steps(500, 4))
    path = Checkpoint().register("replay", rb, adapter=adapters(where)).save(tmp_path / "1")
    do, error, text = DAMAGES[what]
    do(path)
    with pytest.raises(CheckpointError, match=text) as raised:
        Checkpoint().register("replay", other, adapter=adapters(where)).load(path)
    assert isinstance(raised.value.__cause__, error)
    assert "\x1b" not in str(raised.value)
    assert contents(other) == [float(t) for t in range(500, 504)]


def test_arguments_have_names(tmp_path: Path, adapters: Any) -> None:
    made = Checkpoint().register(
        "replay", buffer(5), adapter=adapters(url()), options=CheckpointOptions(save_args=(1,))
    )
    with pytest.raises(UsageError, match="options by name"):
        made.save(tmp_path / "1")
