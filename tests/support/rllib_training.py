"""Offline training of RLlib's for tests: episodes, as an archive and as RLlib's own Parquet, and the losses."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer

import archive

SPACES = {
    "bc": (gymnasium.spaces.Box(-5, 5, (4,), np.float32), gymnasium.spaces.Discrete(2)),
    "cql": (gymnasium.spaces.Box(-8, 8, (3,), np.float32), gymnasium.spaces.Box(-2, 2, (1,), np.float32)),
}


class Seeded(EpisodeReplayBuffer):  # type: ignore[misc]
    """The buffer from which a prelearner draws, whose draws depend on the episodes alone. RLlib's own has no seed, and
    gets the episodes of a batch as a set."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rng = np.random.default_rng(5)

    def add(self, episodes: Any) -> None:
        super().add(sorted(episodes, key=lambda one: one.id_))


def made(algorithm: str, count: int = 12) -> list[dict[str, Any]]:
    """Episodes for an algorithm."""
    rng, (seen, _) = np.random.default_rng(0), SPACES[algorithm]
    out = []
    for i in range(count):
        steps = int(rng.integers(5, 20))
        actions = rng.integers(0, 2, steps) if algorithm == "bc" else rng.uniform(-2, 2, (steps, 1)).astype(np.float32)
        obs = rng.normal(size=(steps + 1, *seen.shape)).astype(np.float32)
        rewards = rng.normal(size=steps).astype(np.float32)
        out.append({"id": f"e{i:02}", "obs": obs, "actions": actions, "rewards": rewards, "terminated": i % 3 > 0})
    return out


def archived(episodes: list[dict[str, Any]], url: str, **options: Any) -> None:
    """Write them as anybody may: with other names than RLlib's."""
    schema = archive.Schema(axes={"observation": "offset"})
    with archive.create(url, **options).writer(schema=schema) as w:
        for one in episodes:
            fields = {"observation": one["obs"], "action": one["actions"], "reward": one["rewards"]}
            ends = {"terminated": one["terminated"], "truncated": not one["terminated"]}
            w.add_episode(fields, episode_id=one["id"], **ends)


def as_parquet(episodes: list[dict[str, Any]], folder: Path) -> None:
    """Write them as RLlib's batches of samples, an episode a row."""
    rows = []
    for one in episodes:
        steps, last = len(one["rewards"]), one["terminated"]
        values = {"obs": one["obs"][:-1], "new_obs": one["obs"][1:], "actions": one["actions"]}
        ends = {"terminateds": [False] * (steps - 1) + [last], "truncateds": [False] * (steps - 1) + [not last]}
        rows.append(
            {"eps_id": [one["id"]] * steps, "rewards": one["rewards"].tolist(), **ends}
            | {name: value.tolist() for name, value in values.items()}
        )
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "episodes.parquet")


def config_of(algorithm: str, **data: Any) -> Any:
    """A small configuration without randomness that is not seeded, and without a clock."""
    seen, done = SPACES[algorithm]
    config = BCConfig() if algorithm == "bc" else CQLConfig()
    config.environment("Pendulum-v1" if algorithm == "cql" else None, observation_space=seen, action_space=done)
    config.env_runners(num_env_runners=0).learners(num_learners=0).debugging(seed=3)
    config.reporting(
        min_time_s_per_iteration=0, min_train_timesteps_per_iteration=0, min_sample_timesteps_per_iteration=0
    )
    config.offline_data(
        prelearner_buffer_class=Seeded, map_batches_kwargs={"concurrency": 1}, input_read_batch_size=4,
        dataset_num_iters_per_learner=1 if algorithm == "bc" else 2, **data,
    )  # fmt: skip
    if algorithm == "bc":
        return config.training(train_batch_size_per_learner=16, lr=1e-3)
    return config.training(train_batch_size_per_learner=16, bc_iters=1, lr=None)


def losses(config: Any, iterations: int = 2) -> list[dict[str, float]]:
    """All losses of some iterations."""
    algorithm = config.build_algo()
    try:
        found = [algorithm.train()["learners"]["default_policy"] for _ in range(iterations)]
    finally:
        algorithm.stop()
        del algorithm
        gc.collect()  # its datasets' iterators end while Ray is there
    return [{name: float(value) for name, value in one.items() if name.endswith("loss")} for one in found]
