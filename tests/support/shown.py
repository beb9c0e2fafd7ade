"""Archives to look at, and questions to the viewer's answers without a browser."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa

import archive
from archive.view.shown import Shown
from archive.view.wire import Query, Reply

SIDE = 16


def film(steps: int, seed: int) -> np.ndarray[Any, Any]:
    """Pictures of which no two are alike."""
    return np.random.default_rng(seed).integers(0, 256, (steps, SIDE, SIDE + 4, 3), np.uint8)


def looked_at(url: str, episodes: int = 6, steps: int = 30) -> archive.Archive:
    """An archive of episodes with two cameras, numbers, texts and metadata, of two runs and three weights."""
    arc = archive.create(url)
    for run, names in (("first", range(episodes // 2)), ("second", range(episodes // 2, episodes))):
        with arc.writer(run=run) as w:
            for n in names:
                w.add_episode(_steps(steps, n), **_about(n))
            w.checkpoint(n, metrics={"loss": 1.0 / (n + 1)}).result()
    return arc


def _steps(steps: int, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    first = film(steps, 2 * n + 1).transpose(0, 3, 1, 2).copy()  # channels first
    return {
        "obs": {"front": film(steps, 2 * n), "wrist": first, "state": rng.normal(size=(steps, 3)).astype(np.float32)},
        "reward": np.full(steps, float(n % 4), np.float32),
        "task": [f"push <b>{n}</b>"] * steps,
    }


def _about(n: int) -> dict[str, Any]:
    return {
        "episode_id": f"e{n}", "model_weights_uuid": f"weights-{n // 2}", "update_count": 10 * n, "terminated": True,
        "metadata": {"task": "push", "seed": n},
    }  # fmt: skip


def ask(answer: Any, shown: Shown, body: Any = None, **given: Any) -> Any:
    """What it answers: JSON as it is, a table as its columns, bytes as (bytes, facts)."""
    texts = {key: json.dumps(value) if isinstance(value, list) else str(value) for key, value in given.items()}
    reply: Reply = answer(shown, Query(texts, json.dumps(body).encode() if body is not None else b""))
    if "json" in reply.kind:
        return json.loads(reply.body)
    if "arrow" in reply.kind:
        return pa.ipc.open_stream(io.BytesIO(reply.body)).read_all().to_pydict()
    return reply.body, {key: json.loads(value) for key, value in reply.facts.items()}
