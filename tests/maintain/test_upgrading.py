"""Archives of version 1: read and written on as they were, refusing what they cannot hold, until they are upgraded."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.base import layout
from archive.errors import UpgradeError, UsageError
from archive.shard import indexed
from tests.support.commands import call, printed
from tests.support.golden import FIRST, GOLDEN, differences, stream
from tests.support.tampering import body, commit_files

NEW_KINDS = {"forget", "undo", "restore", "prune", "tag", "label", "late", "upgrade"}
NEW_KEYS = {"forgotten", "labels", "late", "tags", "let_go", "removed", "pruned", "undoes"}


@pytest.fixture(params=FIRST)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an archive as version 1 made it."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / "old")


def everything(root: Path) -> dict[str, Any]:
    """All that is read of an archive."""
    arc = archive.open(root)
    return {
        "episodes": {episode.id: episode.read() for episode in arc.episodes},
        "summaries": arc.episodes.table.to_pylist(),
        "checkpoints": {ck.name: checkpoint(ck) for ck in arc.checkpoints},
    }


def checkpoint(ck: archive.Checkpoint) -> dict[str, Any]:
    return {
        "live": ck.live.to_pylist(), "steps": ck.episodes.read(), "progress": ck.progress, "state": ck.state(0),
        "columns": {name: ck.column(name, 0) for name in ck.staged(0).index.columns["replay"]},
    }  # fmt: skip


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# -- what a library of version 1 would say -----------------------------------------------------------------------------


def formats(root: Path) -> Iterator[tuple[str, Any]]:
    """(object, what it says of its format) of every object that says so."""
    yield "archive.json", json.loads((root / "archive.json").read_bytes())["format"]
    for path in commit_files(root):
        yield path.name, body(path)["format"]
    for path in root.glob("states/*/*/*.zip"):
        data = path.read_bytes()
        start, stop = indexed.index_span(data, "")
        yield path.name, json.loads(data[start:stop].split(b"\n")[0])["format"]


def shard_formats(root: Path) -> Iterator[int]:
    for path in root.glob("shards/*.zip"):
        with zipfile.ZipFile(path) as members:
            yield json.loads(members.read("zarr.json"))["attributes"]["trajectory-archive"]["format"]
    for path in root.glob("shards/*.zarr/zarr.json"):
        yield json.loads(path.read_bytes())["attributes"]["trajectory-archive"]["format"]


def found_new(root: Path) -> list[Any]:
    """What a library of version 1 would refuse, or what it must not come across."""
    out: list[Any] = [(key, block) for key, block in formats(root) if block["read"] > 1 or block["features"]]
    out += [found for found in shard_formats(root) if found != 1]
    for path in commit_files(root):
        commit = body(path)
        marks = [run[name] for run in commit["runs"].values() for name in ("latest", "latest_replay") if name in run]
        out += [commit["kind"]] if commit["kind"] in NEW_KINDS else []
        out += [*(commit.keys() & NEW_KEYS), *(mark for mark in marks if "manifest" in mark)]
    return out


def written_on(root: Path) -> None:
    """What writers and redistribution do, on an archive: sessions, checkpoints, revisions, a resume, a run that forks,
    merges and a compaction."""
    arc = archive.open(root)
    with arc.writer(session="third", resume=arc.checkpoints.latest, keep=Keep(last=2)) as w:
        w.append(stream(1, 7, 9), env_ids=1)
        w.buffer("demo").add_episode(stream(3, 0, 4), episode_id="more")
        w.checkpoint(30, state={"n": 1}, wait=True)
        w.add_episode(stream(3, 0, 2), episode_id="one step", replace=True)
    arc.writer(run="other", fork_from=arc.refresh().checkpoints["step-30"]).close()
    other = archive.create(root.parent / "other")
    with other.writer() as w:
        w.add_episode(stream(0, 0, 3), episode_id="of another")
        w.add_episode(stream(0, 0, 3), episode_id="of another, too")
    resharding.merge([other.url], to=arc.url, copy=True)
    resharding.compact(archive.open(root), min_alive=1.0)


def test_it_goes_on_in_version_1(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_new(old) == []
    written_on(old)
    assert {body(path)["kind"] for path in commit_files(old)} >= {"session", "checkpoint", "merge", "compact"}
    assert found_new(old) == []
    assert archive.open(old).head.format == {"read": 1, "write": 1, "features": []}
    now = everything(old)
    assert now["episodes"].keys() >= {"more", "of another", "kinds"}
    monkeypatch.setattr(layout, "READ_VERSION", 1)
    assert list(differences(everything(old), now)) == []


# -- what it cannot hold -----------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[archive.Archive], Any]] = {
    "forget": lambda arc: arc.forget(episodes="superseded"),
    "forget now": lambda arc: arc.forget(ids=["kinds"], dry_run=False),
    "undo": lambda arc: arc.undo(),
    "restore": lambda arc: arc.restore(commit=1),
    "prune": lambda arc: arc.prune(),
    "prune now": lambda arc: arc.prune(older_than="0s", force=True, dry_run=False),
    "tag": lambda arc: arc.tag("paper"),
    "tag a checkpoint": lambda arc: arc.tag("paper", arc.checkpoints["step-10"]),
    "label": lambda arc: arc.label({"kinds": {"good": True}}),
    "label some": lambda arc: arc.episodes.label(good=True),
    "add fields": lambda arc: arc.add_fields({"n": {arc.episodes[0].id: range(arc.episodes[0].length)}}),
    "map": lambda arc: arc.episodes.map(lambda data: {"n": data["reward"]}),
    "drop fields": lambda arc: arc.drop_fields(["n"]),
    "redact": lambda arc: arc.forget(ids=["kinds"], redact=True, dry_run=False),
    "late fields": lambda arc: arc.add_fields({"score": {"one step": np.zeros(1)}}),
    "drop late fields": lambda arc: arc.drop_fields(["score"]),
    "a writer that forgets": lambda arc: arc.writer(keep=Keep(last=1), forget="checkpoints"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_version_2_brought_is_refused_and_nothing_is_written(old: Path, verb: str) -> None:
    before = contents(old)
    with pytest.raises(UsageError, match=r"of format 1, .*arc\.upgrade\(\) or `archive upgrade URL`.*format 1 alone"):
        VERBS[verb](archive.open(old))
    assert contents(old) == before


COMMANDS = (
    ("forget", "--episodes", "superseded"), ("undo",), ("restore", "--commit", 1, "--yes"), ("prune",),
    ("tag", "paper"), ("label", "--id", "kinds", "good=true"),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=[str(command[0]) for command in COMMANDS])
def test_commands_say_how_to_go_on(old: Path, command: tuple[Any, ...]) -> None:
    before = contents(old)
    done = call(command[0], old, *command[1:])
    assert done.exit_code == 2
    assert "archive upgrade URL" in done.output
    assert contents(old) == before


# -- upgrading ---------------------------------------------------------------------------------------------------------


def test_an_upgrade_changes_nothing_but_the_version(old: Path) -> None:
    told, before = everything(old), contents(old)
    assert "is of format 2" in printed("upgrade", old)
    after = contents(old)
    assert after.keys() - before.keys() == {commit_files(old)[-1]}
    assert {path: after[path] for path in before} == before
    assert list(differences(everything(old), told)) == []
    assert archive.open(old).upgrade().head.number == len(commit_files(old)) == 7


def test_then_all_of_version_2_works(old: Path) -> None:
    arc = archive.open(old).upgrade()
    told = everything(old)
    arc.label({"kinds": {"good": True}})
    arc.add_fields({"score": {"kinds": np.arange(4)}})
    arc.tag("paper", arc.checkpoints["step-20"])
    arc.forget(Keep(last=1), episodes="superseded", dry_run=False)
    arc.undo()
    assert list(differences(everything(old)["checkpoints"], told["checkpoints"])) == []
    arc.refresh().forget(ids=["one step"], dry_run=False)
    arc.prune(older_than="0s", force=True, dry_run=False)
    now = everything(old)
    assert list(differences(now["checkpoints"], told["checkpoints"])) == []
    assert now["episodes"].keys() == told["episodes"].keys() - {"one step"}
    assert dict(archive.open(old).episodes["kinds"].labels) == {"good": True}
    assert now["episodes"]["kinds"]["score"].tolist() == [0, 1, 2, 3]
    assert archive.open(old, commit="paper").checkpoints.latest.name == "step-20"
    assert list(shard_formats(old)) == [1] * len(list(shard_formats(old)))


def test_a_library_of_version_1_refuses_it_then(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.open(old).upgrade()
    with archive.open(old).writer() as w:
        w.add_episode(stream(3, 0, 4), episode_id="more")
    assert [body(path)["format"]["read"] for path in commit_files(old)] == [1] * 6 + [2] * 3
    monkeypatch.setattr(layout, "READ_VERSION", 1)
    with pytest.raises(UpgradeError, match=r"commit 9 at .* is written in format 2, this library reads format 1"):
        archive.open(old)
    assert "kinds" in archive.open(old, commit=6).episodes


def test_a_writer_that_is_at_work_goes_on_in_version_2(old: Path) -> None:
    arc = archive.open(old)
    with arc.writer(session="third", resume=arc.checkpoints.latest) as w:
        w.append(stream(1, 7, 9), env_ids=1)
        w.checkpoint(30, wait=True)
        assert archive.open(old).head.version == 1
        archive.open(old).upgrade().tag("paper")
        w.append(stream(1, 9, 11), env_ids=1)
        made = w.checkpoint(40, state={"n": np.arange(3)}).result()
    head = archive.open(old).head
    assert (head.version, len(head.files("tags"))) == (2, 1)
    assert archive.open(old, commit=made.number).head.version == 2
    assert {block["read"] for key, block in formats(old) if key.startswith("rank-")} == {1}
    assert len(archive.open(old).episodes["env 1"].read()["reward"]) == 11


def test_a_reader_that_is_at_work_sees_what_comes_then(old: Path) -> None:
    reader = archive.open(old)
    archive.open(old).upgrade().label({"kinds": {"good": True}})
    assert dict(reader.refresh().episodes["kinds"].labels) == {"good": True}
    reader.tag("paper")


def test_two_upgrades_at_once_are_one(old: Path) -> None:
    one, other = archive.open(old), archive.open(old)
    one.upgrade(), other.upgrade()
    assert one.head.number == other.head.number == 7
