"""Train a policy on any number of ranks; start it again on any other number and it goes on from the last checkpoint.

    torchrun --standalone --nproc-per-node 4 train_resume.py s3://bucket/run --steps 1000 --every 100

What a rank's ring `[envs, LENGTH, ...]` has gained since the last checkpoint is all that the next one uploads.
`kill -USR2` on any rank asks for a checkpoint at once, SIGTERM for one before the job ends.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import archive
import resharding
from archive import checkpointing
from archive.torch import ring

ENVS, LENGTH, OBS, ACTIONS, EPISODE = 12, 1024, 4, 2, 16


class Replay:
    """A rank's ring: step p of an env row lies in slot p % LENGTH."""

    def __init__(self, envs: int, share: Any) -> None:
        self.pos = self.size = torch.zeros(envs, dtype=torch.int64)
        self.steps = {name: torch.zeros(envs, LENGTH, dtype=torch.int64) for name in ("action", "serial", "checksum")}
        self.steps |= {"obs": torch.zeros(envs, LENGTH, OBS), "reward": torch.zeros(envs, LENGTH)}
        self.steps["done"] = torch.zeros(envs, LENGTH, dtype=torch.bool)
        self.priority = torch.zeros(envs, LENGTH)
        if share is not None:
            filled = ring.fill(share, num_envs=envs, max_length=LENGTH)
            self.pos, self.size = filled.pos, filled.size
            self.steps |= filled.buffers  # a share may be empty
            self.priority = filled.columns.get("priority", self.priority)
            self.steps["done"] |= filled.cut  # episodes that were open where the job ended do not go on

    def add(self, priority: torch.Tensor, **step: torch.Tensor) -> None:
        row, slot = torch.arange(len(self.pos)), self.pos % LENGTH
        for name, value in step.items():
            self.steps[name][row, slot] = value
        self.priority[row, slot] = priority
        self.pos, self.size = self.pos + 1, (self.size + 1).clamp(max=LENGTH)

    def sample(self, count: int) -> dict[str, torch.Tensor]:
        row = torch.randint(len(self.pos), (count,))
        slot = (self.pos[row] - 1 - (torch.rand(count) * self.size[row]).long()) % LENGTH
        return {name: value[row, slot] for name, value in self.steps.items()}


def checksum(obs: torch.Tensor, action: torch.Tensor, serial: torch.Tensor) -> torch.Tensor:
    return (obs.view(torch.int32).long().sum(-1) * 31 + action) * 31 + serial


def train(url: str, steps: int, every: int) -> None:
    rank, envs = dist.get_rank(), ENVS // dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(OBS, ACTIONS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    arc = archive.open(url, create=True)
    latest = arc.checkpoints.of("main").latest
    share = resharding.plan(latest, num_envs=envs, max_length=LENGTH).share() if latest else None
    if share is not None:
        state = share.state or share.source_states[0]  # of this rank in a world of the same size, else of all ranks
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    torch.manual_seed(rank if share is None else share.seed)
    replay, begin = Replay(envs, share), latest.progress["step"] if latest else 0
    with arc.writer(resume=share) as w:
        for step in range(begin, steps):
            obs = torch.randn(envs, OBS)
            action = model(obs).softmax(-1).multinomial(1)[:, 0].detach()
            reward = torch.where(action == 1, obs.sum(-1), -obs.sum(-1))
            made = {"obs": obs, "action": action, "serial": step * ENVS + rank * envs + torch.arange(envs)}
            done = torch.full((envs,), step % EPISODE == EPISODE - 1)
            replay.add(reward.abs(), reward=reward, done=done, checksum=checksum(**made), **made)

            batch = replay.sample(32)
            optimizer.zero_grad()
            (cross_entropy(model(batch["obs"]), batch["action"], reduction="none") * batch["reward"]).mean().backward()
            optimizer.step()

            if checkpointing.requested() or (step + 1) % every == 0:  # the first on every rank at every step
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                at = {"pos": replay.pos, "size": replay.size, "last": replay.steps["done"]}
                columns = ring.append(w, replay.steps, **at, columns={"priority": replay.priority})
                w.checkpoint(step + 1, columns=columns, state=state, progress={"step": step + 1})
            if checkpointing.terminating():  # on all ranks, if any got SIGTERM
                break


if __name__ == "__main__":
    (parser := argparse.ArgumentParser()).add_argument("url")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    dist.init_process_group("gloo")
    train(**vars(parser.parse_args()))
    dist.destroy_process_group()
