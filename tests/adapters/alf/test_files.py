"""ALF's own checkpoint files into an archive and out of it; and ALF itself, where it can be imported."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import resharding
from archive.adapters import alf
from archive.base.errors import IntegrityError, NotFoundError, UsageError
from tests.support.alf_buffer import ReplayBuffer, returns_of, run, saved
from tests.support.archives import fresh
from tests.support.places import DATA
from tests.support.worlds import shares

FILES = [DATA / "alf" / f"rank_{rank}.pt" for rank in range(4)]
PREFIX = "_replay_buffer."


def contents(path: Path, module: str | None = None) -> dict[str, torch.Tensor]:
    loaded = torch.load(path, weights_only=True)
    part = loaded if module is None else loaded[module]
    return {key.removeprefix(PREFIX): value for key, value in part.items()}


@pytest.fixture(scope="module")
def imported() -> Any:
    return alf.import_checkpoint(FILES, fresh(), step=7)


@pytest.mark.parametrize("rank", range(4))
def test_files_come_back_bit_for_bit(imported: Any, rank: int, tmp_path: Path) -> None:
    path = alf.export_checkpoint(
        imported, tmp_path / "ckpt-7-replay_buffer", rank=rank, unfinished="continue", module="agent"
    )
    got, expected = contents(path, "agent"), contents(FILES[rank])
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == got[name].dtype, name
        if name == "_sum_tree._values":  # inner nodes of a sum depend on the order of additions
            torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=0)
            assert torch.equal(got[name][48:], tensor[48:])
        else:
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("rank", range(4))
def test_imported_steps_are_those_expected(imported: Any, rank: int) -> None:
    expected = np.load(FILES[rank].with_name(f"rank_{rank}_expected.npz"))
    share = shares(imported, 4)[rank]
    nests, env = share.read(), share.layout.env_id
    for row in range(3):
        for name in set(expected) - {"priority"}:
            got = np.concatenate([nest[name] for nest, e in zip(nests, env, strict=True) if e == row])
            assert got.tobytes() == expected[name][row].tobytes(), (name, row)
    assert share.columns["priority"].tobytes() == expected["priority"].tobytes()
    assert (imported.step, imported.world_size) == (7, 4)


def test_four_ranks_of_files_to_three_and_to_one(imported: Any, tmp_path: Path) -> None:
    steps = sum(int(contents(path)["_current_size"].sum()) for path in FILES)
    for world in (3, 1):
        total = 0
        for share in shares(imported, world, num_envs=2, max_length=160):
            path = alf.export_checkpoint(share, tmp_path / "x", num_envs=2, max_length=160)
            got = contents(path, "algorithm")
            total += int(got["_current_size"].sum())
            assert got["reward"].shape == (2, 160)
            for env in range(2):
                assert set(got["env_id"][env, : int(got["_current_size"][env])].tolist()) <= {env}
        assert total == steps


def test_all_nestings_of_a_state_dict_are_known(tmp_path: Path) -> None:
    rb = run(ReplayBuffer(2, 8), 5)
    bare = rb.state_dict()
    algorithm = {PREFIX + key: value for key, value in bare.items()} | {"_network.weight": torch.zeros(2)}
    torch.save({"algorithm": algorithm, "metrics": {}, "trainer_progress": {}}, tmp_path / "ckpt-300-replay_buffer")
    for source in (bare, algorithm, {"algorithm": algorithm, "metrics": {}}, tmp_path / "ckpt-300-replay_buffer"):
        ck = alf.import_checkpoint(source, fresh())
        assert ck.step == (300 if isinstance(source, Path) else 0)
        other = ReplayBuffer(2, 8)
        alf.restore(other, ck, rank=0, unfinished="continue")
        assert returns_of([other]) == returns_of([rb])


def test_files_may_be_anywhere_and_are_of_the_size_that_was_planned() -> None:
    rb, root = run(ReplayBuffer(2, 8), 5), f"memory://{uuid.uuid4().hex}"
    ck = alf.import_checkpoint({PREFIX + key: value for key, value in rb.state_dict().items()}, fresh())
    found = alf.export_checkpoint(ck, f"{root}/ckpt-7-replay_buffer", rank=0, unfinished="continue")
    again = alf.import_checkpoint(found, fresh())
    assert again.step == 7
    other = ReplayBuffer(2, 8)
    alf.restore(other, again, rank=0, unfinished="continue")
    assert returns_of([other]) == returns_of([rb])
    share = resharding.plan(ck, world_size=1, num_envs=1, max_length=20).share(0)
    alf.export_checkpoint(share, f"{root}/ckpt-8-replay_buffer")
    larger = ReplayBuffer(1, 20)
    alf.restore(larger, alf.import_checkpoint(f"{root}/ckpt-8-replay_buffer", fresh()), rank=0)
    assert sorted(returns_of([larger])) == sorted(returns_of([rb]))
    with pytest.raises(NotFoundError, match="ckpt-9"):
        alf.import_checkpoint(f"{root}/ckpt-9-replay_buffer", fresh())


def test_what_is_not_a_buffer_of_alf_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    arc, rb = fresh(), run(ReplayBuffer(2, 8), 5)
    part = {PREFIX + key: value for key, value in rb.state_dict().items()}
    (tmp_path / "noise").write_bytes(b"no file of torch")
    torch.save(Path("/"), tmp_path / "pickle")
    for error, match, source in [
        (NotFoundError, "no file", tmp_path / "ckpt-1-replay_buffer"),
        (IntegrityError, "weights_only=True", tmp_path / "noise"),
        (IntegrityError, "weights_only=True", tmp_path / "pickle"),
        (UsageError, "several buffers: a, b; give module=", {"a": part, "b": part}),
        (UsageError, "no replay buffer: a", {"a": {"x": torch.zeros(2)}}),
        (UsageError, "no tensors", {"x": 3}),
        (UsageError, "nothing to import", []),
    ]:
        with pytest.raises(error, match=match):
            alf.import_checkpoint([part, source] if source else [], arc)
    assert not arc.refresh().checkpoints
    assert not arc.episodes


def test_a_checkpoint_of_another_system_has_no_ring_to_export(tmp_path: Path) -> None:
    arc = fresh()
    with arc.writer(0, 1) as w:
        w.append({"step_type": torch.zeros(3)}, env_ids=0)
        ck = w.checkpoint(1).result(60)
    with pytest.raises(UsageError, match="ALF did not save this checkpoint"):
        alf.export_checkpoint(ck, tmp_path / "x", rank=0)
    assert not list(tmp_path.iterdir())


# -- ALF itself --------------------------------------------------------------------------------------------------------


def real(num_envs: int = 3, max_length: int = 16, **options: Any) -> Any:
    pytest.importorskip("alf.experience_replayers.replay_buffer", reason="ALF is not installed (it is not on PyPI)")
    from alf.data_structures import Experience, TimeStep
    from alf.experience_replayers.replay_buffer import ReplayBuffer as Real
    from alf.tensor_specs import TensorSpec

    number = TensorSpec((), torch.int64)
    step = TimeStep(
        step_type=TensorSpec((), torch.int32), reward=TensorSpec(()), discount=TensorSpec(()), env_id=number,
        observation={"number": number, "image": TensorSpec((2, 2), torch.uint8)},
    )  # fmt: skip
    options = {"prioritized_sampling": True, "keep_episodic_info": True, "record_episodic_return": True} | options
    return Real(Experience(time_step=step, action=TensorSpec((2,), torch.bfloat16)), num_envs, max_length, **options)


def feed(rb: Any, source: ReplayBuffer) -> Any:
    """The live steps of a full or unwrapped buffer, by ALF's own add_batch; priorities by its update_priority."""
    from alf.data_structures import Experience, TimeStep

    for slot in source.live(0):
        at = (slice(None), slot)
        names = ("step_type", "reward", "discount", "env_id")
        image, number = source.field("observation|image")[at], source.field("observation|number")[at]
        step = TimeStep(
            **{n: source.field(n)[at] for n in names}, observation={"number": number, "image": image}, prev_action=()
        )
        rb.add_batch(Experience(time_step=step, action=source.field("action")[at]))
    rb.get_batch(6, 2)
    env = torch.arange(rb.num_environments).repeat(3)
    position = (rb._current_pos[env] - torch.arange(2, 2 + len(env)) % 5 - 2).clamp(min=0)
    rb.update_priority(env, position, torch.rand(len(env)) + 0.1)
    return rb


@pytest.mark.parametrize("counts", [[9], [16, 16], [16, 7], [16, 16, 16, 3]])
def test_alf_itself_bit_for_bit_and_its_next_samples(counts: list[int]) -> None:
    rb, other = real(), real()
    for seed, count in enumerate(counts):
        feed(rb, run(ReplayBuffer(3, 16), count, seed=seed))
    alf.restore(feed(other, run(ReplayBuffer(3, 16), 5)), saved(rb), rank=0, existing="replace", unfinished="continue")
    for name, tensor in rb.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    more = run(ReplayBuffer(3, 16), 8, seed=50)
    drawn = []
    for one in (rb, other):
        torch.manual_seed(3)
        batches = [one.get_batch(8, 2) for _ in range(50)]
        feed(one, more)
        drawn.append([*batches, *(one.get_batch(8, 2) for _ in range(50))])
    for (a, info), (b, other_info) in zip(*drawn, strict=True):
        assert torch.equal(a.time_step.observation["number"], b.time_step.observation["number"])
        assert torch.equal(info.importance_weights, other_info.importance_weights)
        assert torch.equal(info.discounted_return, other_info.discounted_return)
        assert bool((info.importance_weights > 0).all())


@pytest.mark.parametrize("size", [(2, 40), (5, 24)])
def test_alf_goes_on_after_a_redistribution(size: tuple[int, int]) -> None:
    sources = [feed(real(), run(ReplayBuffer(3, 16), 16, seed=rank)) for rank in range(2)]
    from tests.support.alf_buffer import world

    (share,) = shares(world(sources), 1, num_envs=size[0], max_length=size[1])
    rb = real(*size)
    alf.restore(rb, share)
    for seed in range(60, 66):
        feed(rb, run(ReplayBuffer(size[0], 16), 9, seed=seed))
        for env in range(size[0]):
            pos = torch.arange(int(rb._current_pos[env] - rb._current_size[env]), int(rb._current_pos[env]))
            ids = torch.full_like(pos, env)
            kinds = rb._buffer.step_type[env, pos % size[1]]
            assert set(rb._buffer.time_step.env_id[env, pos % size[1]].tolist()) == {env}
            ahead = rb.steps_to_episode_end(pos, ids)
            for i in range(len(pos) - 1):
                if kinds[i + 1] != 0:  # of the same episode, unless that is closed
                    assert kinds[i] == 2 or ahead[i] == ahead[i + 1] + 1
        assert rb._sum_tree.nnz == int((rb._sum_tree._values[rb._sum_tree._capacity :] != 0).sum())


def test_alfs_checkpointer_loads_what_is_exported(tmp_path: Path) -> None:
    rb, other = feed(real(), run(ReplayBuffer(3, 16), 16)), real()
    from alf.utils.checkpoint_utils import Checkpointer

    def algorithm(buffer: Any) -> Any:
        module = torch.nn.Module()
        module._network, module._replay_buffer = torch.nn.Linear(2, 2), buffer
        return module

    Checkpointer(tmp_path, algorithm=algorithm(rb)).save(5)
    path = tmp_path / "ckpt-5-replay_buffer"
    ck = alf.import_checkpoint(path, fresh())
    path.unlink()
    assert alf.export_checkpoint(ck, path, rank=0) == path
    assert Checkpointer(tmp_path, algorithm=algorithm(other)).load() == 5
    rb.load_state_dict(rb.state_dict())  # closes what is unfinished
    for name, tensor in rb.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
