"""The objects of a job are as archive/FORMAT.md says: this reads them with other people's tools alone."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
from tests.support.places import ROOT

STEPS, EPISODES = 5, 40
SECTION = (ROOT / "archive" / "FORMAT.md").read_text("utf-8").partition("\n## Jobs\n")[2].partition("\n## ")[0]


def fails_at_seven(steps: Mapping[str, Any]) -> dict[str, Any]:
    if steps["reward"][0] == 7:
        raise ValueError("no seven")
    return {"twice": 2 * steps["reward"], "note": ["a", "é"] * 2 + [""]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The objects of a finished job."""
    arc = archive.create(tmp_path_factory.mktemp("jobs") / "arc")
    with arc.writer() as w:
        for i in range(EPISODES):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"e{i}")
    arc.refresh().episodes.map(fails_at_seven, ["reward"], ["twice", "note"], job="a job", on_error="skip")
    return Path(arc.url.removeprefix("file://")) / "jobs" / "a%20job"


def document(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    assert b"\n" not in data
    assert len(data) <= 65_536
    found: dict[str, Any] = json.loads(data)
    return found


def test_all_keys_and_names_are_in_the_document(folder: Path) -> None:
    for path in folder.glob("*.json"):
        assert re.search(rf"^- `{path.name.partition('-')[0]}-<n>.json` \(create-only", SECTION, re.MULTILINE), (
            path.name
        )
        for key in document(path):
            assert f"`{key}`" in SECTION or f'"{key}"' in SECTION, (path.name, key)
    names = {re.sub(r"[0-9a-f]{6,}", "N", path.name) for path in folder.iterdir()}
    kinds = {f"{kind}-N.json" for kind in ("round", "kind", "fold", "made", "end")}
    assert names == {*kinds, "plan-N.parquet", "failed-N.parquet", "N.zip"}


def test_the_plan_has_all_episodes_once(folder: Path) -> None:
    round = document(folder / "round-000000.json")
    root = folder.parent.parent
    plan = pq.read_table(root / round["plan"]["path"]).to_pydict()
    assert (round["job"], round["number"], round["first"], round["kind"]) == ("a job", 0, 0, "map")
    assert sorted(plan["number"]) == list(range(EPISODES)) == list(range(round["items"]))
    assert plan["batch"] == sorted(plan["batch"])
    assert {*plan["batch"]} == set(range(round["batches"]))


def test_results_hold_the_columns_of_their_batches(folder: Path) -> None:
    round, found = document(folder / "round-000000.json"), dict[int, tuple[Any, Any]]()
    plan = pq.read_table(folder.parent.parent / round["plan"]["path"]).to_pydict()
    items: dict[int, list[int]] = {}
    for batch, number in zip(plan["batch"], plan["number"], strict=True):
        items.setdefault(batch, []).append(number)
    for batch in range(round["first"], round["first"] + round["batches"]):
        data = (folder / f"{batch:09}.zip").read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as group:
            line, digest = group.read("index.json").split(b"\n")[:2]
            assert data[40:].startswith(line)
            assert hashlib.sha256(line).hexdigest().encode() == digest
            index = json.loads(line)
            assert (index["job"], index["batch"], index["items"]) == ("a job", batch, len(items[batch]))
            assert all(f"`{key}`" in SECTION for key in index)
            for i in range(len(index["said"])):
                (count,) = index["arrays"][str(i)]["shape"]
                places = np.frombuffer(group.read(str(i)), "<i8")
                twice = np.frombuffer(group.read(f"{i}/twice"), index["arrays"][f"{i}/twice"]["dtype"])
                assert index["arrays"][f"{i}/note"]["dtype"] == "O"
                notes = json.loads(group.read(f"{i}/note"))
                assert len(places) == count == index["items"] - index["failed"]
                for at, place in enumerate(places):
                    part = slice(at * STEPS, (at + 1) * STEPS)
                    found[items[batch][place]] = twice[part].tolist(), notes[part]
    assert found == {
        i: ([2.0 * (i + step) for step in range(STEPS)], ["a", "é", "a", "é", ""]) for i in range(EPISODES) if i != 7
    }


def test_folds_their_commits_and_failures(folder: Path) -> None:
    round, fold = document(folder / "round-000000.json"), document(folder / "fold-000000.json")
    made, end = document(folder / "made-000000.json"), document(folder / "end-000000.json")
    assert fold == {"round": 0, "batches": [[0, round["batches"]]]}
    assert (made["rows"], made["forgotten"], made["failed"]) == (STEPS * (EPISODES - 1), 0, 1)
    assert end == {"outcome": "finished", "done": round["batches"]}
    commit = folder.parent.parent / "commits" / "000000" / f"{made['commit']:09}.json"
    assert json.loads(commit.read_bytes().split(b"\n")[0])["transaction"] == f"job/{round['session']}/0"
    failed = pq.read_table(folder / "failed-000000.parquet").to_pylist()
    assert [(row["episode_id"], row["error"]) for row in failed] == [("e7", "ValueError: no seven")]
