"""A job whose shards are thinly live, and all that anybody reads of an archive, by value."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import archive
import resharding

SCHEMA = archive.Schema(
    axes={"state": "offset", "tokens": "ragged", "goal": "free", "one": "free"}, next_of={"next/obs": "obs"},
    json=["info"],
)  # fmt: skip


def plain(start: int, count: int) -> dict[str, Any]:
    """Steps that may be cut anywhere, of many dtypes."""
    at = np.arange(start, start + count)
    rng = np.random.default_rng(start)
    return {
        "k": at, "obs": rng.random((count, 3)).astype(np.float32), "reward": at * 0.5,
        "small": at.astype(ml_dtypes.bfloat16), "text": [f"{i} ü" for i in at], "wide": np.array([f"{i}" for i in at]),
        "flag": at % 2 == 0, "nan": at * np.float64("nan"),
        "none": None, "empty": {}, "void": np.zeros((count, 0)), "when": at.astype("M8[s]"), "z": at + 1j,
    }  # fmt: skip


def whole(number: int, length: int) -> dict[str, Any]:
    """An episode with a field of each other kind of axis; its segments are never cut."""
    rng = np.random.default_rng(number)
    obs = rng.random((length + 1, 2))
    return {
        "k": np.full(length, number), "state": rng.random((length + 1, 2)),
        "tokens": [np.arange(j % 3) + number for j in range(length)],
        "goal": rng.random((2, 2)), "one": np.float32(number), "obs": obs[:-1], "next": {"obs": obs[1:]},
        "info": [{"n": number, "j": [j, None]} for j in range(length)],
    }  # fmt: skip


def everything(arc: archive.Archive) -> dict[str, Any]:
    """All episodes by id: what is known of them, and their steps."""
    rows = zip(as_stored(arc.episodes), arc.episodes.read(), strict=True)
    return {row["episode_id"]: (row, data) for row, data in rows}


def as_stored(episodes: archive.Episodes) -> list[dict[str, Any]]:
    """A row for each episode, without what is derived from all there are, such as columns of metadata."""
    table = episodes.table
    derived = [name for name in table.column_names if name.startswith("metadata.")]  # of the texts in `metadata`
    rows: list[dict[str, Any]] = table.drop_columns(["created_at", "commit", *derived]).to_pylist()
    return rows


def of_checkpoint(ck: Any) -> dict[str, Any]:
    """All that a checkpoint says: episodes, columns, attributes, state."""
    return {
        "ids": [e.id for e in ck.episodes], "steps": ck.episodes.read(), "lengths": [e.length for e in ck.episodes],
        "complete": [e.complete for e in ck.episodes], "live": ck.live.to_pylist(),
        "columns": [ck.column("priority", rank) for rank in ck.ranks], "attributes": ck.values,
        "state": [ck.state(rank) for rank in ck.ranks], "about": (ck.name, ck.step, ck.run, ck.session, ck.progress),
    }  # fmt: skip


def of_plan(ck: Any, ranks: int) -> list[Any]:
    """What each of so many ranks gets."""
    plan = resharding.plan(ck, world_size=ranks)
    shares = [plan.share(rank) for rank in range(ranks)]
    return [([e.id for e in s], s.read(), s.columns["priority"], s.attributes, s.next_positions) for s in shares]


def fetched(ck: Any) -> int:
    """Bytes that resuming from a checkpoint reads."""
    return sum(cost["bytes"] for cost in resharding.plan(ck, 1).cost())


def priorities(w: Any) -> np.ndarray[Any, Any]:
    return np.arange(int(w.live["length"].to_numpy().sum())) * 1.5


class Job:
    """A writer whose buffer lost most of its steps, in runs and in whole episodes, and its checkpoint."""

    def __init__(self, url: Any, seed: int = 0, **options: Any) -> None:
        self.url = url
        self.arc = archive.create(url, **options)
        self.w = self.arc.writer(schema=SCHEMA)
        for i in range(20):
            ends = [j == 49 for j in range(50)] if i % 3 else None
            self.w.append(plain(i * 50, 50), env_ids=0, last=ends)
        ids = [self.w.add_episode(whole(i, 5 + i % 4), episode_id=f"whole-{i}") for i in range(24)]
        self.first = self.save(1)
        rng = np.random.default_rng(seed)
        self.w.evict(0, positions=np.sort(rng.choice(990, 850, replace=False)))
        self.w.remove([i for i in ids if rng.random() < 0.8])
        self.second = self.save(2)

    def save(self, step: int) -> Any:
        ids = self.w.live["episode_id"].to_pylist()
        return self.w.checkpoint(
            step, columns={"priority": priorities(self.w)}, attributes={"age": dict.fromkeys(ids, step)},
            state={"cursor": step}, progress={"epoch": step},
        ).result()  # fmt: skip

    def opened(self) -> archive.Archive:
        return archive.open(self.url)
