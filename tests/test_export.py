"""Bulk export: plain files hold what the archive holds, in order, without our code to read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
import resharding
from archive.errors import FieldError, UsageError

LENGTHS = (4, 0, 7, 1, 5)


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    made = archive.create(tmp_path / "a")
    with made.writer() as w:
        for i, n in enumerate(LENGTHS):
            steps = {
                "obs": {"x": np.arange(n * 3, dtype=np.float32).reshape(n, 3) + i},
                "reward": np.full(n, i / 2),
                "note": [f"{i}-{t} ü" for t in range(n)] if n else np.array([], object),
                "tokens": [np.arange(t) for t in range(n)] if n else archive.Ragged(np.arange(0), np.arange(0)),
            }
            w.add_episode(steps, episode_id=f"e{i}", metadata={"i": i})
    return archive.open(tmp_path / "a")


def test_npz_files_hold_the_episodes(arc: archive.Archive, tmp_path: Path) -> None:
    names = resharding.export(arc, tmp_path / "out", episodes_per_file=2)
    assert names == ["part-000000.npz", "part-000001.npz", "part-000002.npz"]
    wanted = [ep.id for ep in arc.episodes]
    for name in names:
        with np.load(tmp_path / "out" / name, allow_pickle=False) as file:
            about = json.loads(str(file["episodes"]))
            for i, row in enumerate(about):
                data = arc.episodes[row["episode_id"]].read()
                assert row["episode_id"] == wanted.pop(0)
                assert file[f"{i}/obs/x"].tobytes() == data["obs"]["x"].tobytes()
                assert file[f"{i}/note"].tolist() == data["note"].tolist()
                assert file[f"{i}/tokens.lengths"].tolist() == list(map(len, data["tokens"]))
    assert not wanted


def test_parquet_files_have_a_row_a_step(arc: archive.Archive, tmp_path: Path) -> None:
    found = arc.episodes.filter(where="length > 1")
    (name,) = resharding.export(found, tmp_path / "out", format="parquet", fields=["obs", "reward", "note"])
    rows = pq.read_table(tmp_path / "out" / name).to_pylist()
    wanted = [
        {
            "episode_id": ep.id,
            "step": t,
            "obs/x": data["obs"]["x"][t].tolist(),
            "reward": data["reward"][t],
            "note": data["note"][t],
        }
        for ep, data in zip(found, found.read(), strict=True)
        for t in range(ep.length)
    ]
    assert [{k: r[k] for k in w} for r, w in zip(rows, wanted, strict=True)] == wanted


def test_what_does_not_fit_is_refused(arc: archive.Archive, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="tokens"):
        resharding.export(arc, tmp_path / "out", format="parquet")
    with pytest.raises(UsageError, match="csv"):
        resharding.export(arc, tmp_path / "out", format="csv")
    with pytest.raises(UsageError, match="engine"):
        resharding.export(arc, tmp_path / "out", engine="slurm")
