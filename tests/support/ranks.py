"""Ranks of a training job in threads: every step has a number, which its fields,
its checksum and its priority follow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import archive
from archive import Schema
from archive.checkpoint.checkpoints import Checkpoint

Array = np.ndarray[Any, Any]
SCHEMA = Schema(env_id=["env", "ids/env"], episode_id=["traj", "ids/traj"], next_of={"next/x": "x"})


def checksum(t: Array) -> Array:
    return (t * 2654435761 + 12345) % 1000003


def priority(t: Array) -> Array:
    return (t % 1013).astype(np.float32) / np.float32(7)


def image(t: Array) -> Array:
    return np.stack([t, t // 2, -t], 1).astype(np.float32)


def ends(t: Array) -> Array:
    """Whether a step is the last of its episode."""
    return np.asarray(checksum(t) % 6 == 0)


def fields_of(t: Array, env: Any = 0, traj: Any = 0, stride: Any = 1) -> dict[str, Any]:
    """The steps numbered t; of the same env row, the next one is numbered t + stride."""
    envs, trajectories = np.broadcast_to(env, len(t)), np.broadcast_to(traj, len(t))
    return {
        "t": t, "sum": checksum(t), "x": image(t), "stride": np.broadcast_to(stride, len(t)),
        "env": envs.astype(np.int32), "traj": trajectories.astype(np.int64), "reward": (t % 3).astype(np.float32),
        "ids": {"env": envs.astype(np.uint8), "traj": trajectories.astype(np.float64)},
        "next": {"x": image(t + stride)},
    }  # fmt: skip


def assert_sound(data: dict[str, Any]) -> None:
    """All fields of these steps belong to their numbers."""
    t = data["t"]
    want = fields_of(t, stride=data["stride"])
    for name in ("sum", "x", "reward"):
        np.testing.assert_array_equal(data[name], want[name], err_msg=name)
    np.testing.assert_array_equal(data["next"]["x"], want["next"]["x"])


@dataclass
class Rank:
    """One rank and its ring: env row -> numbers of the steps that are in it, oldest first."""

    arc: archive.Archive
    writer: Any
    rows: dict[int, list[int]]
    clock: itertools.count[int]
    trajectory: dict[int, int] = field(default_factory=dict)

    def run(self, steps: int) -> None:
        """Steps of all env rows, each a vector step."""
        envs = np.array(sorted(self.rows))
        for _ in range(steps if len(envs) else 0):
            t = np.array([next(self.clock) for _ in envs])
            traj = np.array([self.trajectory.get(int(e), 0) for e in envs])
            last = ends(t)
            self.writer.append(fields_of(t, envs, traj, len(envs)), env_ids=envs, last=last)
            for env, number, done in zip(envs.tolist(), t.tolist(), last.tolist(), strict=True):
                self.rows[env].append(number)
                self.trajectory[env] = self.trajectory.get(env, 0) + done

    def evict(self, share: float) -> None:
        """The oldest part of each row leaves."""
        places = self.writer.live.to_pydict()
        end = {e: p + n for e, p, n in zip(places["env_id"], places["position"], places["length"], strict=True)}
        for env, row in self.rows.items():
            gone = int(len(row) * share)
            self.writer.evict(env, before=end[env] - len(row) + gone)
            del row[:gone]

    @property
    def live(self) -> Array:
        """Numbers of the live steps, in live order."""
        return np.array([t for env in sorted(self.rows) for t in self.rows[env]], np.int64)


def job(
    url: str, world_size: int, session: str, *, envs: int = 3, clock: itertools.count[int] | None = None,
    schema: Schema = SCHEMA, storage_options: Any = None,
) -> list[Rank]:  # fmt: skip
    """The ranks of a job that starts anew."""
    clock = clock or itertools.count()
    archives = [archive.open(url, storage_options=storage_options) for _ in range(world_size)]
    writers = [a.writer(rank, world_size, session=session, schema=schema) for rank, a in enumerate(archives)]
    return [Rank(a, w, {e: [] for e in range(envs)}, clock) for a, w in zip(archives, writers, strict=True)]


def resumed(url: str, plan: Any, session: str, clock: itertools.count[int], storage_options: Any = None) -> list[Rank]:
    """The ranks of a job that goes on from a plan."""
    out = []
    for rank in range(plan.world_size):
        share = plan.share(rank)
        arc = archive.open(url, storage_options=storage_options)
        writer = arc.writer(resume=share, session=session, schema=SCHEMA)
        rows: dict[int, list[int]] = {}
        for env, data in zip(share.layout.env_id.tolist(), share.read(["t"]), strict=True):
            rows.setdefault(env, []).extend(data["t"].tolist())
        out.append(Rank(arc, writer, rows, clock))
    return out


def checkpoint(ranks: Sequence[Rank], step: int, **options: Any) -> Checkpoint:
    """A checkpoint of all ranks, as a reader sees it who opens the archive afterwards."""

    def save(rank: Rank) -> int:
        pending = rank.writer.checkpoint(
            step, columns={"priority": priority(rank.live)}, state={"rank": rank.writer.rank, "step": step},
            attributes={"staleness": {e: len(e) + step for e in set(rank.writer.live["episode_id"].to_pylist())}},
            progress={"step": step}, **options,
        )  # fmt: skip
        return int(pending.result(60).number)

    with ThreadPoolExecutor(len(ranks)) as pool:
        (number,) = set(pool.map(save, ranks))
    found = ranks[0].arc.refresh().checkpoints[options.get("name") or f"step-{step}"]
    assert found.number == number
    return found


def close(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.writer.close()


def numbers(share: Any) -> Array:
    """Numbers of a share's steps, in order; every field and every priority is looked at on the way."""
    parts = share.read()
    for data in parts:
        assert_sound(data)
    t = np.concatenate([np.zeros(0, np.int64), *(data["t"] for data in parts)])
    column = share.columns["priority"]
    assert column.dtype == np.float32
    np.testing.assert_array_equal(column, priority(t))
    return t


_names = itertools.count()


def world(ranks: int = 4) -> tuple[archive.Archive, archive.Checkpoint]:
    """A job of some ranks with rings that were evicted from, and its checkpoint."""
    url = f"memory://resaving-{next(_names)}"
    arc = archive.create(url)
    made = job(url, ranks, "first")
    for rank in made:
        rank.run(14)
        rank.evict(0.3)
    ck = checkpoint(made, 7, metrics={"loss": 0.5})
    close(made)
    return arc.refresh(), ck
