"""Files of Minari, D4RL and LeRobot, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LENGTHS = (3, 1, 5)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    else:
        assert a == b


def flat(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """As D4RL has them: the first episode terminates, the second times out, the rest is unfinished."""
    rng, n = np.random.default_rng(1), sum(lengths)
    ends = np.cumsum(lengths) - 1
    return {
        "observations": rng.normal(size=(n, 4)), "actions": rng.normal(size=(n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32), "terminals": np.arange(n) == ends[0],
        "timeouts": np.arange(n) == ends[1], "infos/qpos": rng.normal(size=(n, 3)), "metadata": np.arange(2),
    }  # fmt: skip


def write_flat(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        h5py = pytest.importorskip("h5py", reason="h5py is not installed")
        with h5py.File(path, "w") as file:
            for name, value in arrays.items():
                file[name] = value
    return path


def write_lerobot(root: Path, **changes: Any) -> Path:
    """Two episodes in two files, by hand."""
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "grid": {"dtype": "int64", "shape": [2, 2], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    } | {
        n: {"dtype": "int64", "shape": [1], "names": None}
        for n in ("frame_index", "episode_index", "index", "task_index")
    }
    files, tasks = {}, ["push", "pull"]
    for i, n in enumerate((4, 3)):
        start, task = 4 * i, np.full(n, i) if i else np.array([0, 0, 1, 1])
        data = {
            "observation.state": [[float(start + t), 0.5] for t in range(n)], "action": [float(t) for t in range(n)],
            "next.done": [t == n - 1 for t in range(n)], "grid": [[[t, 1], [2, 3]] for t in range(n)],
            "timestamp": pa.array(np.arange(n, dtype=np.float32) / 10), "frame_index": list(range(n)),
            "episode_index": [i] * n, "index": list(range(start, start + n)), "task_index": task.tolist(),
        }  # fmt: skip
        table = pa.table(data)
        for name in ("observation.state", "action"):
            kind = pa.list_(pa.float32(), 2) if name != "action" else pa.float32()
            table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
        files[f"data/chunk-000/file-{i:03d}.parquet"] = table
    files["meta/tasks.parquet"] = pa.table({"task_index": [0, 1], "__index_level_0__": tasks})
    files["meta/episodes/chunk-000/file-000.parquet"] = pa.table({
        "episode_index": [0, 1], "tasks": [["push", "pull"], ["pull"]], "length": [4, 3], "data/chunk_index": [0, 0],
        "data/file_index": [0, 1], "dataset_from_index": [0, 4], "dataset_to_index": [4, 7],
    })  # fmt: skip
    for name, table in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / name)
    info = {
        "codebase_version": "v3.0", "robot_type": "arm", "fps": 10, "total_episodes": 2,
        "splits": {"train": "0:2"}, "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }  # fmt: skip
    (root / "meta/info.json").write_text(json.dumps(info | changes))
    return root
