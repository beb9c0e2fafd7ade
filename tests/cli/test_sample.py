"""`archive sample`: what it draws from, and what it says of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli
from archive.buffers import TrajectoryReplayBuffer
from tests.support.trajectories import make


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two ranks, two checkpoints; of the second, rank 0 has two trajectories more."""
    root = tmp_path_factory.mktemp("archive")
    buffers = [TrajectoryReplayBuffer(world_size=2, rank=r, session="s", sample_window_size=0) for r in range(2)]
    for more in (3, 2):
        buffers[0].add_trajectories([make(i) for i in range(more)])
        buffers[1].add_trajectories([make(7, steps=10)])
        for rank, buffer in enumerate(buffers):
            buffer.save_checkpoint(f"{root}/rank_{rank}")
    for buffer in buffers:
        buffer.close()
    return str(root)


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(cli.main, ["sample", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_it_draws_from_the_newest_checkpoint(url: str) -> None:
    told = run(url, "--num-chunks", "64", "--cache-size", "3")
    assert told["source"] == "checkpoint step-1"
    assert (told["num_trajectories"], told["total_samples"], told["cache_size"]) == (7, 5 * 8 + 2 * 20, 3)
    fields = {f["field"]: (f["shape"], f["dtype"]) for f in told["fields"]}
    assert fields["curr_obs/half"] == ([64, 1], "bfloat16")
    assert fields["curr_obs/image"] == ([64, 2, 2], "int32")
    assert fields["dones"] == ([64, 1], "bool")
    for part in ("load", "sample"):
        assert told[part]["requests"] > 0
        assert told[part]["bytes"] > 0
        assert told[part]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "source", "trajectories"),
    [
        (["--checkpoint", "step-0"], "checkpoint step-0", 4),
        (["--where", "length > 5"], "checkpoint step-1", 2),
        (["--sample-window-size", "1"], "checkpoint step-1", 7),
    ],
)
def test_it_draws_from_what_is_asked_for(url: str, arguments: list[str], source: str, trajectories: int) -> None:
    told = run(url, *arguments)
    assert (told["source"], told["num_trajectories"]) == (source, trajectories)


@pytest.mark.parametrize(("rank", "trajectories"), [(0, 5), (1, 2)])
def test_a_url_that_ends_in_a_rank_means_that_rank(url: str, rank: int, trajectories: int) -> None:
    told = run(f"{url}/rank_{rank}")
    assert (told["source"], told["num_trajectories"]) == (f"checkpoint step-1, rank {rank}", trajectories)


def test_without_a_checkpoint_it_draws_from_all_episodes(tmp_path: Path) -> None:
    with archive.create(tmp_path).writer() as w:
        w.add_episode({"obs": np.zeros((6, 3)), "reward": np.ones(6)})
    told = run(str(tmp_path), "--num-chunks", "6")
    assert (told["source"], told["total_samples"]) == ("all episodes", 6)
    assert [f["shape"] for f in told["fields"]] == [[6, 3], [6]]


def test_it_prints_a_table(url: str) -> None:
    done = CliRunner().invoke(cli.main, ["sample", url, "--num-chunks", "8"])
    assert done.exit_code == 0
    for word in ("checkpoint step-1", "requests", "curr_obs/image", "[8, 2, 2]", "bfloat16"):
        assert word in done.stdout


def test_more_than_there_is_gives_what_there_is(url: str) -> None:
    assert run(url, "--num-chunks", "9999")["num_chunks"] == 80
    assert run(url, "--num-chunks", "9999", "--replace")["num_chunks"] == 9999
