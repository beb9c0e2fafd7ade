"""Bulk export: plain files hold what the archive holds, in order, without our code to read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
import resharding
from archive.base.errors import FieldError, UsageError

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


def test_parquet_has_every_kind_of_field(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    axes = {"obs": "offset", "goal": "free", "level": "free"}
    wanted = []
    with arc.writer(schema=archive.Schema(axes=axes, json=["info"])) as w:
        for i, n in enumerate((3, 1, 2)):
            steps = {
                "obs": np.arange(2.0 * (n + 1)).reshape(n + 1, 2) + i,
                "tokens": [list(range(t)) for t in range(n)],
                "pairs": [np.full((t + 1, 2), i, np.float32) for t in range(n)],
                "words": [["a"] * t for t in range(n)],
                "goal": np.arange(i * 2.0).reshape(i, 2),
                "level": np.int64(i),
                "info": [{"t": t} for t in range(n)],
                "phase": np.full(n, 1 + 2j),
                "none": None,
            }
            w.add_episode(steps, episode_id=f"e{i}")
            for t in range(n):
                wanted.append({
                    "episode_id": f"e{i}", "step": t, "obs": steps["obs"][t].tolist(),
                    "obs.after": [steps["obs"][n].tolist()] if t == n - 1 else None,
                    "tokens": list(range(t)), "pairs": steps["pairs"][t].tolist(), "words": ["a"] * t,
                    "goal": steps["goal"].tolist() if t == 0 else None, "level": i if t == 0 else None,
                    "info": json.dumps({"t": t}), "phase": [1.0, 2.0],
                })  # fmt: skip
    (name,) = resharding.export(arc, tmp_path / "out", format="parquet")
    assert pq.read_table(tmp_path / "out" / name).to_pylist() == [{k: row[k] for k in row} for row in wanted]


def test_parts_of_episodes_and_absent_fields_go_into_parquet(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=archive.Schema(axes={"obs": "offset"})) as w:
        w.add_episode({"obs": np.arange(3), "reward": np.ones(2)}, episode_id="whole", env_id=0)
        w.append({"obs": np.arange(4, 6), "reward": np.ones(2)}, env_ids=0, first=True)
        w.add_episode({"reward": np.ones(1), "tokens": [[1, 2]]}, episode_id="other", env_id=1)
        w.evict(env_id=0, before=1)
        ck = w.checkpoint(1, wait=True).result()
    (name,) = resharding.export(ck.episodes, tmp_path / "out", format="parquet")
    rows = pq.read_table(tmp_path / "out" / name).to_pylist()
    assert [(r["obs"], r["obs.after"], r["tokens"]) for r in rows] == [
        (1, [2], None), (4, None, None), (5, None, None), (None, None, [1, 2]),
    ]  # fmt: skip


def test_what_does_not_fit_is_refused(arc: archive.Archive, tmp_path: Path) -> None:
    with arc.writer() as w:
        w.add_episode({"odd": np.zeros(1, [("a", "f4"), ("b", "i4")])}, episode_id="odd")
        for n in (2, 3):
            w.add_episode({"obs": {"x": np.zeros((1, n), np.float32)}}, episode_id=f"wide{n}")
    odd = arc.refresh().episodes.filter(episode_id="odd")
    with pytest.raises(FieldError, match=r"'odd'.*--field.*npz"):
        resharding.export(odd, tmp_path / "out", format="parquet")
    with pytest.raises(FieldError, match=r"differs between episodes.*--field.*npz"):
        resharding.export(
            arc.episodes.filter(where="length = 1"), tmp_path / "out", format="parquet", fields=["obs"], missing="skip"
        )
    with pytest.raises(UsageError, match="csv"):
        resharding.export(arc, tmp_path / "out", format="csv")
