"""What a save of RLlib's replay buffers writes, what a journal keeps of them, and what is refused."""

from __future__ import annotations

import uuid
from typing import Any

import gymnasium
import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import ArchiveError, CorruptStateError, FieldError, UsageError
from tests.support.rllib_episodes import (
    KINDS,
    Envs,
    EpisodeReplayBuffer,
    MultiAgentEpisode,
    MultiAgentEpisodeReplayBuffer,
    PrioritizedEpisodeReplayBuffer,
    SingleAgentEpisode,
    check_same,
    contents,
    draw,
    is_multi,
    module_of,
    play,
    prioritize,
)
from tests.support.ticks import NEVER_S, abandoned

from archive.adapters import rllib  # isort: skip (Ray is there)
from archive.adapters.rllib.values import arrays_of, items_of, space_of, space_tree  # isort: skip


def created() -> Any:
    return archive.create(f"memory://rllib-{uuid.uuid4().hex}")


def episode(count: int, name: str | None = None, **given: Any) -> Any:
    values = {"observations": [float(i) for i in range(count + 1)], "actions": list(range(count))}
    return SingleAgentEpisode(id_=name, rewards=[1.0] * count, len_lookback_buffer=0, **{**values, **given})


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_new_is_written_again(kind: Any) -> None:
    envs, rng, buffer = Envs(1, multi=is_multi(kind())), np.random.default_rng(0), kind(capacity=60)
    arc = created()
    with arc.writer() as w:
        for step in range(4):
            play(buffer, envs, rng, 4)
            before = set(w.live["episode_id"].to_pylist()), {e.id_: len(e) for e in buffer.episodes}
            shards = set(arc.shards)
            ck = rllib.save(buffer, w, step=step).result()
            assert {one.metadata["rllib"]["id"] for one in ck.episodes} == before[1].keys()
            rllib.save(buffer, w, step=step + 100, wait=True)
            assert set(archive.open(arc.url).shards) >= shards
        count = len(archive.open(arc.url).shards)
        rllib.save(buffer, w, step=1000, wait=True)
        assert len(archive.open(arc.url).shards) == count
    again = kind(capacity=60)
    share = resharding.plan(archive.open(arc.url).checkpoints.latest, world_size=1).share(0)
    rllib.restore(again, share)
    with arc.writer(resume=share) as w:
        rllib.save(again, w, step=2000, wait=True)
        assert len(archive.open(arc.url).shards) == count
        new = envs.pieces(2)
        again.add(new)
        ck = rllib.save(again, w, step=2001).result()
    third = kind(capacity=60)
    rllib.restore(third, ck, 0)
    check_same(contents(again), contents(third))


def test_an_archived_episode_is_one_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = EpisodeReplayBuffer(capacity=100)
    buffer.add(episode(3, "a", terminated=True, infos=[{"n": i} for i in range(4)]))
    seen, outputs = [{"x": np.ones(2, np.float32), "y": 1}] * 3, {0: [0, 1], "state": [{"h": np.ones(2)}] * 2}
    buffer.add(episode(2, "b", observations=seen, extra_model_outputs=outputs))
    arc = created()
    with arc.writer() as w:
        ck = rllib.save(buffer, w, step=1).result()
    a, b = (ck.episodes.filter(where=f"metadata.rllib.id = '{name}'")[0] for name in "ab")
    found = a.read()
    assert (found["obs"].tolist(), found["actions"].tolist()) == ([0, 1, 2, 3], [0, 1, 2])
    assert found["infos"] == [{"n": i} for i in range(4)]
    assert (a.complete, b.complete, a.length) == (True, False, 3)
    assert [one.id for one in arc.episodes.filter(where="return > 2 and terminated")] == [a.id]
    assert b.read(["obs/x"])["obs"]["x"].dtype == np.float32
    assert b.read()["extra_model_outputs"]["0"].tolist() == [0, 1]
    again = EpisodeReplayBuffer(capacity=100)
    rllib.restore(again, ck, 0)
    check_same(contents(buffer), contents(again))


def test_pieces_of_an_episode_whose_beginning_left_are_kept() -> None:
    buffer = EpisodeReplayBuffer(capacity=4)
    first = episode(3, "long")
    following = first.cut(len_lookback_buffer=2)
    for i in range(3):
        following.add_env_step(10.0 + i, i, 0.5)
    arc = created()
    with arc.writer() as w:
        buffer.add(first)
        rllib.save(buffer, w, step=1, wait=True)
        buffer.add(episode(4, "other"))
        buffer.add(following)
        ck = rllib.save(buffer, w, step=2).result()
    again = EpisodeReplayBuffer(capacity=4)
    rllib.restore(again, ck, 0)
    check_same(contents(buffer), contents(again))
    assert [one.length for one in arc.episodes if one.metadata["rllib"]["id"] == "long"] == [3, 3]


def test_an_agent_that_came_later_has_its_module() -> None:
    buffer = KINDS[3](capacity=50)
    first = MultiAgentEpisode(id_="late", agent_to_module_mapping_fn=module_of)
    first.add_env_reset(observations={"cat": 0.0})
    first.add_env_step(observations={"cat": 1.0}, actions={"cat": 0}, rewards={"cat": 1.0})
    later = first.cut()
    later.add_env_step(observations={"cat": 2.0, "dog": 0.0}, actions={"cat": 0}, rewards={"cat": 1.0})
    acts = {"cat": 0, "dog": 1}
    later.add_env_step(observations={"cat": 3.0, "dog": 1.0}, actions=acts, rewards={"cat": 1.0, "dog": 0.5})
    buffer.add(first)
    buffer.add(later)
    ck = saved(buffer)
    again = KINDS[3](capacity=50)
    rllib.restore(again, ck, 0)
    check_same(contents(buffer), contents(again))
    moved = KINDS[3](capacity=60)
    rllib.restore(moved, ck, 0)
    assert {name: moved.get_num_timesteps(name) for name in ("felis", "canis")} == {"felis": 3, "canis": 1}


def test_several_buffers_are_of_one_moment() -> None:
    rng = np.random.default_rng(0)
    buffers = {
        "replay": PrioritizedEpisodeReplayBuffer(capacity=50),
        "demo": MultiAgentEpisodeReplayBuffer(capacity=50),
    }
    for i, buffer in enumerate(buffers.values()):
        play(buffer, Envs(i, multi=is_multi(buffer)), rng, 5)
    with created().writer() as w:
        ck = rllib.save(buffers, w, step=1).result()
    again = {"replay": PrioritizedEpisodeReplayBuffer(capacity=50), "demo": MultiAgentEpisodeReplayBuffer(capacity=50)}
    assert {*rllib.restore(again, ck, 0)} == {*again}
    for name, buffer in buffers.items():
        check_same(contents(buffer), contents(again[name]))


# -- followed by a journal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_recovered_buffer_draws_the_same(kind: Any) -> None:
    arc, rng, buffer = created(), np.random.default_rng(2), kind(capacity=60)
    envs = Envs(5, multi=is_multi(buffer))
    w = arc.writer(journal_s=NEVER_S)
    rllib.follow(buffer, w)
    for step in range(3):
        play(buffer, envs, rng, 3)
        if step == 1:
            rllib.save(buffer, w, step=step, wait=True)
        w.sync()
    before = contents(buffer)
    abandoned(w)
    ck = archive.open(arc.url).recover()
    again = kind(capacity=60)
    rllib.restore(again, ck, 0)
    after = contents(again)
    for name in ("add", "sample", "update_priorities", "set_state"):  # that take turns
        before.pop(name, None)
    check_same(before, after)
    check_same(draw(buffer, 5), draw(again, 5))
    prioritize(again, rng)


# -- values and spaces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3],
        [1.5, np.float32(2.5), np.float64(0.1)],
        [True, np.bool_(False)],
        ["a", "\U0001f600", ""],
        [np.array(1, np.int8), np.array(2, np.int8)],
        [np.zeros((2, 0)), np.zeros((2, 0))],
        [{"a": (1, [2.0]), "b": {"c": np.arange(3)}}, {"a": (np.int16(1), [3.0]), "b": {"c": np.arange(3)}}],
        np.arange(6).reshape(3, 2),
        {"a": (np.zeros(3, np.float16), np.ones((3, 2), bool))},
    ],
)
def test_values_come_back_as_they_were(data: Any) -> None:
    arrays, form = arrays_of(data, "here")
    check_same(data, items_of(arrays, form))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([object()], "is a builtins.object, which cannot be stored"),
        ([np.zeros(2), np.zeros(3)], "differ in dtype or shape"),
        ([{"a": 1}, {"b": 1}], "nests of different keys"),
        ([1, "a"], "types int, str do not fit one array"),
        ([2**60 + 1, 1.5], "do not fit one array"),
        ([{1: 2}], "no str"),
        ([{}, {}], "nests without a value"),
    ],
)
def test_values_that_cannot_be_kept_are_named(data: Any, match: str) -> None:
    with pytest.raises(FieldError, match=match):
        arrays_of(data, "here")


def test_spaces_come_back_as_they_were() -> None:
    some = gymnasium.spaces
    inner = {
        "box": some.Box(np.array([0, -np.inf], np.float32), np.array([1, np.inf], np.float32)),
        "image": some.Box(0, 255, (4, 4, 3), np.uint8),
        "many": some.MultiDiscrete([[2, 3], [4, 5]]),
        "bits": some.MultiBinary((2, 3)),
        "text": some.Text(5, charset="abc"),
        "pair": some.Tuple((some.Discrete(3, start=-1), some.Box(-1, 1, ()))),
    }
    space = some.Dict(inner)
    assert space_of(space_tree(space)) == space
    assert space_of(space_tree(None)) is None
    with pytest.raises(CorruptStateError, match="more than any"):
        space_of(("Box", [("all", 0.0, (2**20, 2**20)), 1.0, (2,), np.dtype(np.float32)]))
    with pytest.raises(FieldError, match="Graph"):
        space_tree(some.Graph(some.Discrete(2), None))


# -- refused -----------------------------------------------------------------------------------------------------------


def saved(buffer: Any) -> Any:
    with created().writer() as w:
        return rllib.save(buffer, w, step=1).result()


def refused(buffer: Any, source: Any, error: type[ArchiveError], match: str | None, **given: Any) -> None:
    before = contents(buffer)
    with pytest.raises(error, match=match):
        rllib.restore(buffer, source, **given)
    check_same(before, contents(buffer))


def test_what_cannot_be_restored_is_refused() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(capacity=100)
    buffer.add([episode(4, "a"), episode(5, "b")])
    ck = saved(buffer)
    refused(PrioritizedEpisodeReplayBuffer(capacity=100), ck, UsageError, "give rank=")
    refused(EpisodeReplayBuffer(capacity=100), ck, UsageError, "saved of a PrioritizedEpisodeReplayBuffer.*", rank=0)
    refused(PrioritizedEpisodeReplayBuffer(capacity=100, alpha=0.5), ck, UsageError, "alpha=1.0.*alpha=0.5", rank=0)
    refused(buffer, ck, UsageError, "already holds 2 episodes", rank=0)
    assert rllib.restore(buffer, ck, 0, existing="replace").episodes == 2
    cut = resharding.plan(ck, world_size=1, max_length=6).share(0)
    refused(PrioritizedEpisodeReplayBuffer(capacity=100), cut, UsageError, "stay whole: plan with capacity=")
    with created().writer() as w:
        w.add_episode({"x": np.zeros(2)})
        other = w.checkpoint(step=1).result()
    refused(EpisodeReplayBuffer(capacity=100), other, UsageError, "not saved by archive.adapters.rllib", rank=0)
    with pytest.raises(
        UsageError, match="an EpisodeReplayBuffer of RLlib's, or one of its kinds, is expected, not list"
    ):
        rllib.restore([], ck, 0)


def test_another_capacity_lists_the_steps_anew() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(capacity=100)
    buffer.add([episode(4, "a"), episode(5, "b")])
    report = rllib.restore(again := PrioritizedEpisodeReplayBuffer(capacity=10), saved(buffer), 0)
    assert "dealt out anew" in str(report)
    assert [node for _, _, node in again._indices] == list(range(9))
    assert again._sum_segment.sum() == buffer._sum_segment.sum()


def test_what_cannot_be_saved_is_named() -> None:
    for given, error, match in (
        ({"infos": [{"f": print}] * 3}, ArchiveError, "infos.*stored"),
        ({"actions": [object()] * 2}, FieldError, "episode 'bad', 'actions' is a builtins.object"),
        ({"extra_model_outputs": {0: [1, 2], "0": [1, 2]}}, FieldError, "two fields 'extra_model_outputs/0'"),
    ):
        buffer = EpisodeReplayBuffer(capacity=100)
        buffer.add([episode(2, "good"), episode(2, "bad", **given)])
        with created().writer() as w:
            with pytest.raises(error, match=match):
                rllib.save(buffer, w, step=1)
            buffer.episodes.pop()
            del buffer._indices[2:], buffer.episode_id_to_index["bad"]
            ck = rllib.save(buffer, w, step=1).result()
        assert [one.metadata["rllib"]["id"] for one in ck.episodes] == ["good"]


def test_damaged_states_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = PrioritizedEpisodeReplayBuffer(capacity=16)
    buffer.add([episode(4, "a"), episode(5, "b")])
    real = rllib.buffer.RLlibBuffer._state

    def damaged(change: Any) -> Any:
        def state(self: Any) -> Any:
            found = real(self)
            change(found)
            return found

        monkeypatch.setattr(rllib.buffer.RLlibBuffer, "_state", state)
        return saved(buffer)

    new = PrioritizedEpisodeReplayBuffer(capacity=16)
    for change, error in (
        (lambda s: s.update(evicted=3), CorruptStateError),
        (
            lambda s: s["trees"][0][1].update(free=s["trees"][0][1]["free"] | {"first": np.array([0])}),
            CorruptStateError,
        ),
        (lambda s: s["trees"][0][1]["free"].update(counts=np.array([2**62])), CorruptStateError),
        (lambda s: s.pop("numbers"), ArchiveError),
        (lambda s: s.update(format=2), ArchiveError),
    ):
        refused(new, damaged(change), error, None, rank=0)
