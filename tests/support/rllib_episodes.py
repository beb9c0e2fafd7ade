"""Episodes and replay buffers of RLlib's for tests, and their equality: of values, of types and of bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.rllib", reason="Ray has no wheel for every Python and platform")
pytest.importorskip("gymnasium", reason="RLlib needs it")

import gymnasium
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.execution.segment_tree import SegmentTree
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.replay_buffers import (
    EpisodeReplayBuffer,
    MultiAgentEpisodeReplayBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer,
    PrioritizedEpisodeReplayBuffer,
)

KINDS = (
    EpisodeReplayBuffer,
    PrioritizedEpisodeReplayBuffer,
    MultiAgentEpisodeReplayBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer,
)
AGENTS = ("cat", "dog", 7)
MODULES = {"cat": "felis", "dog": "canis", 7: "canis"}
_SEEN = gymnasium.spaces.Dict(
    {
        "image": gymnasium.spaces.Box(0, 255, (2, 3), np.uint8),
        "at": gymnasium.spaces.Tuple((gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.Discrete(5))),
    }
)
_DONE = gymnasium.spaces.MultiDiscrete([3, 4])


def is_multi(buffer: Any) -> bool:
    return isinstance(buffer, MultiAgentEpisodeReplayBuffer)


def is_prioritized(buffer: Any) -> bool:
    return isinstance(buffer, PrioritizedEpisodeReplayBuffer)


def module_of(agent: Any, *_: Any) -> str:
    return MODULES[agent]


class Envs:
    """Environments that go on: each call gives pieces of episodes, as RLlib's runners do."""

    def __init__(self, seed: int, *, multi: bool, count: int = 2, odd: bool = True) -> None:
        """odd: episodes differ in the types of their values, and some are numpy."""
        self.rng = np.random.default_rng(seed)
        self.multi = multi
        self.odd = odd
        self._seed = seed
        self._number = 0
        self._running: list[Any] = [None] * count

    def pieces(self, steps: int) -> list[Any]:
        """So many steps of each environment."""
        out = []
        for i, _ in enumerate(self._running):
            for _ in range(steps):
                episode = self._running[i] = self._running[i] or self.begun()
                (self._step_of_agents if self.multi else self._step)(episode)
                if episode.is_done:
                    out.append(self._given(episode))
                    self._running[i] = None
            if (episode := self._running[i]) is not None and len(episode):
                self._running[i] = episode.cut(len_lookback_buffer=int(self.rng.integers(3)))
                out.append(self._given(episode))
        return out

    def _given(self, episode: Any) -> Any:
        return episode.to_numpy() if self.odd and not self._number % 3 and episode.is_done else episode

    def begun(self) -> Any:
        """An episode without a step."""
        self._number += 1
        name = f"{self._seed}-{self._number}"
        if not self.multi:
            episode = SingleAgentEpisode(id_=name, observation_space=_SEEN, action_space=_DONE)
            episode.add_env_reset(self._seen(), {"episode": self._number})
            return episode
        episode = MultiAgentEpisode(
            id_=name,
            observation_space=dict.fromkeys(AGENTS, _SEEN),
            action_space=dict.fromkeys(AGENTS, _DONE),
            agent_to_module_mapping_fn=module_of,
        )
        agents = self._some(AGENTS) or AGENTS[:1]
        episode.add_env_reset(
            observations={agent: self._seen() for agent in agents}, infos={agents[0]: {"first": True}}
        )
        return episode

    def _seen(self) -> Any:
        at = (self.rng.uniform(-1, 1, 2).astype(np.float32), np.int64(self.rng.integers(5)))
        return {"image": self.rng.integers(0, 255, (2, 3), np.uint8), "at": at}

    def _acted(self) -> Any:
        return np.array([self.rng.integers(3), self.rng.integers(4)])

    def _reward(self) -> Any:
        value = float(self.rng.normal())
        return np.float32(value) if self.odd and self._number % 2 else value

    def _some(self, agents: Any) -> Any:
        return [agent for agent in agents if self.rng.random() < 0.7]

    def _step(self, episode: Any) -> None:
        ends = self.rng.random() < 0.15
        logits = self.rng.normal(size=3).astype(np.float16)
        episode.add_env_step(
            self._seen(), self._acted(), self._reward(), {"n": np.int32(episode.t), "who": ["a", None]},
            terminated=ends and episode.t % 2 == 0, truncated=ends and episode.t % 2 == 1,
            extra_model_outputs={"logits": logits, "logp": float(self.rng.normal())},
        )  # fmt: skip

    def _step_of_agents(self, episode: Any) -> None:
        act = [agent for agent in episode.get_agents_to_act() if not episode.agent_episodes[agent].is_done]
        act = sorted(act, key=str)
        ends = self.rng.random() < 0.12
        seen = AGENTS if ends else self._some([*AGENTS])
        hanging = set(episode._hanging_actions_end)
        new = set(AGENTS) - set(episode.agent_episodes) - set(episode.env_t_to_agent_t)
        seen = [agent for agent in seen if agent in act or agent in hanging or (agent in new and not ends)]
        episode.add_env_step(
            observations={agent: self._seen() for agent in seen},
            actions={agent: self._acted() for agent in act},
            rewards={agent: self._reward() for agent in {*act, *seen}},
            infos={agent: {"t": episode.env_t} for agent in seen},
            truncateds={"__all__": ends},
            extra_model_outputs={agent: {"logp": float(self.rng.normal())} for agent in act},
        )


def play(buffer: Any, envs: Envs, rng: np.random.Generator, moves: int) -> None:
    """Random adding, which evicts, drawing and new priorities."""
    for _ in range(moves):
        buffer.add(envs.pieces(int(rng.integers(1, 6))))
        if rng.random() < 0.7:
            draw(buffer, 4)
            if rng.random() < 0.8:
                prioritize(buffer, rng)


def draw(buffer: Any, count: int) -> Any:
    """What the buffer draws, from its own random generator."""
    given: dict[str, Any] = {"n_step": 1, "include_infos": True, "include_extra_model_outputs": True}
    if is_multi(buffer):
        given["modules_to_sample"] = sorted(module for module, some in buffer._module_to_indices.items() if some)
    else:
        given["sample_episodes"] = True
    drawn = buffer.sample(count, **given, **({"beta": 0.5} if is_prioritized(buffer) else {}))
    for one in drawn:
        one.id_ = "drawn" if one.multi_agent_episode_id is None else one.id_  # RLlib invents one
    return drawn


def prioritize(buffer: Any, rng: np.random.Generator) -> None:
    """New priorities for what was drawn last, as a learner's losses are."""
    if not is_prioritized(buffer):
        return
    if not is_multi(buffer):
        buffer.update_priorities(rng.exponential(size=len(buffer._last_sampled_indices)).astype(np.float32))
        return
    for module, last in sorted(buffer._module_to_last_sampled_indices.items()):
        buffer.update_priorities(rng.exponential(size=len(last)), module)


def priorities(buffer: Any) -> dict[tuple[Any, ...], Any]:
    """(episode, agent, its step) -> priority; agent None: the episode's own step."""
    names = {number: name for name, number in buffer.episode_id_to_index.items()}
    out = {(names[n], None, t): buffer._sum_segment[node] for n, t, node in buffer._indices}
    for module, indices in getattr(buffer, "_module_to_indices", {}).items():
        for n, agent, t, node in indices:
            assert buffer._module_to_min_segment[module][node] == buffer._module_to_sum_segment[module][node]
            out[names[n], agent, t] = buffer._module_to_sum_segment[module][node]
    return out


def contents(buffer: Any) -> dict[str, Any]:
    """All that a buffer is made of."""
    names = {*vars(buffer)} - (set() if is_prioritized(buffer) else {"_last_sampled_indices"})
    names |= {"capacity", "episodes", "episode_id_to_index", "_indices", "_num_timesteps", "rng",
             "_num_timesteps_added", "sampled_timesteps"}  # fmt: skip
    out = {name: getattr(buffer, name) for name in sorted(names)}
    if "_sample_idx_to_tree_idx" in out:  # RLlib leaves entries of a longer list behind
        out["_sample_idx_to_tree_idx"] = {i: out["_sample_idx_to_tree_idx"][i] for i in range(len(buffer._indices))}
    return out


def check_same(a: Any, b: Any, at: str = "") -> None:
    """Assert that two values are the same: types, dtypes, bits."""
    if isinstance(a, deque) and isinstance(b, deque):
        a, b = list(a), list(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        assert {*a} == {*b}, f"{at}: {a.keys() ^ b.keys()}"
        for key in a:
            check_same(a[key], b[key], f"{at}[{key!r}]")
        return
    assert type(a) is type(b), f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, list | tuple):
        assert len(a) == len(b), f"{at}: {len(a)} and {len(b)}"
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            check_same(one, other, f"{at}[{i}]")
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), f"{at}: {a} and {b}"
    elif isinstance(a, SingleAgentEpisode | MultiAgentEpisode | InfiniteLookbackBuffer | SegmentTree):
        slots = [name for kind in type(a).__mro__ for name in getattr(kind, "__slots__", ())]
        skip = {"_last_added_observation", "_last_added_infos", "agent_to_module_mapping_fn"}
        for name in {*slots, *getattr(a, "__dict__", {})} - skip:
            check_same(getattr(a, name), getattr(b, name), f"{at}.{name}")
    elif isinstance(a, np.random.Generator):
        check_same(a.bit_generator.state, b.bit_generator.state, f"{at}.rng")
    elif isinstance(a, MetricsLogger):
        check_same(a.stats, b.stats, f"{at}.metrics")
    elif hasattr(a, "stats_cls_identifier"):
        check_same(a.get_state(), b.get_state(), at)
    elif isinstance(a, float):
        assert np.float64(a).tobytes() == np.float64(b).tobytes(), f"{at}: {a} and {b}"
    elif not callable(a):
        assert a == b, f"{at}: {a!r} and {b!r}"
