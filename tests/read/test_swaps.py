"""Objects that change places: what one says of itself is compared with what leads to it,
so no read takes one for another."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import ArchiveError, CorruptCommitError, CorruptStateError
from archive.maintain import verify

RANKS, CHECKPOINTS = 2, 2


def make(root: Path, *, offset: int = 0, **how: Any) -> None:
    """Two ranks, two checkpoints with all that one can hold (the column "same" only in the first), commits between."""
    arc = archive.create(str(root), **how)
    writers = [arc.writer(r, RANKS, session="s") for r in range(RANKS)]
    for step in range(1, CHECKPOINTS + 1):
        pending = []
        for rank, w in enumerate(writers):
            number = offset + 100 * rank + 10 * step
            w.append({"x": np.arange(number, number + 4), "reward": np.ones(4)}, env_ids=0, first=step == 1)
            if step == 1:
                w.add_episode({"x": np.arange(number + 50, number + 53), "reward": np.ones(3)}, episode_id=f"e{rank}")
            w.commit()
            given: dict[str, Any] = {
                "columns": {"same": np.zeros(live(w)) + rank, "priority": np.arange(live(w)) + number},
                "attributes": {"mark": {f"e{rank}": rank}, "stale": {f"e{rank}": number}},
                "state": {"cursor": number, "ring": np.arange(3) + number},
                "progress": {"at": number},
                "unconsumed": [number],
            }
            if step == 2:
                given["columns"]["same"] = np.zeros(live(w)) + rank
            pending.append(w.checkpoint(step, **given))
        for one in pending:
            one.result(30)
    for w in writers:
        w.close()


def live(writer: archive.Writer) -> int:
    return int(sum(writer.live["length"].to_pylist()))


def everything(root: Path) -> Iterator[tuple[str, Any]]:
    """Each thing that can be read of such an archive, as (what, function)."""

    def arc() -> archive.Archive:
        return archive.open(str(root))

    yield "episodes", lambda: [data["x"].tolist() for data in arc().episodes.read()]
    yield "commits", lambda: [commit.to_json() for commit in arc().commits]
    yield "table", lambda: arc().checkpoints.table.to_pylist()
    for name in ("step-1", "step-2"):

        def ck(name: str = name) -> archive.Checkpoint:
            return arc().checkpoints[name]

        yield f"{name} live", lambda ck=ck: [data["x"].tolist() for data in ck().episodes.read()]
        yield f"{name} progress", lambda ck=ck: ck().progress
        yield f"{name} unconsumed", lambda ck=ck: ck().unconsumed
        yield f"{name} discarded", lambda ck=ck: (ck().discarded, ck().buffers)
        for rank in range(RANKS):
            yield f"{name} {rank} state", lambda ck=ck, r=rank: json.dumps(ck().state(r), default=lambda a: a.tolist())
            yield f"{name} {rank} same", lambda ck=ck, r=rank: ck().column("same", r).tolist()
            yield f"{name} {rank} priority", lambda ck=ck, r=rank: ck().column("priority", r).tolist()
            yield f"{name} {rank} attributes", lambda ck=ck, r=rank: ck().attributes(r)
            yield f"{name} {rank} resume", lambda ck=ck, r=rank: repr(ck().to_resume(r))

            def share(ck: Any = ck, rank: int = rank) -> Any:
                found = resharding.plan(ck(), world_size=3).share(rank)
                return [d["x"].tolist() for d in found.read()], found.columns["priority"].tolist()

            yield f"{name} {rank} share", share


def truth(root: Path) -> dict[str, Any]:
    return {what: read() for what, read in everything(root)}


def wrong(root: Path, true: dict[str, Any], names: set[str]) -> list[str]:
    """What is read wrongly, or refused without naming an object."""
    out = []
    for what, read in everything(root):
        try:
            if read() != true[what]:
                out.append(f"{what}: other values")
        except ArchiveError as error:
            if not any(name in str(error) for name in names):
                out.append(f"{what}: {error}")
    return out


def kinds(root: Path) -> dict[str, list[Path]]:
    """The objects by kind."""
    patterns = {
        "staged": "states/**/*.zip",
        "shards": "shards/*.zip",
        **{kind: f"manifest/*.{kind}.parquet" for kind in ("segments", "chunks", "live", "checkpoints")},
        "commits": "commits/*/*.json",
        "claims": "sessions/**/rank-*.json",
    }
    return {kind: sorted(root.glob(pattern)) for kind, pattern in patterns.items()}


KINDS = ("staged", "shards", "segments", "chunks", "live", "checkpoints", "commits", "claims")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("swaps") / "root"
    make(root)
    return root, truth(root)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_one_kind_that_change_places(whole: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    true = whole[1]
    objects = kinds(root)[kind]
    pairs = list(combinations(objects, 2) if kind == "staged" else pairwise(objects))
    assert pairs, "there is something to swap"
    lies = []
    for one, other in pairs:
        before = one.read_bytes(), other.read_bytes()
        for now in (before[::-1], (before[1], before[1]))[
            : 2 if kind == "staged" else 1
        ]:  # swapped; one in both places
            one.write_bytes(now[0])
            other.write_bytes(now[1])
            names = {one.relative_to(root).as_posix(), other.relative_to(root).as_posix()}
            lies += [f"{sorted(names)} {found}" for found in wrong(root, true, names)]
        one.write_bytes(before[0])
        other.write_bytes(before[1])
    assert lies == []


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same sessions, checkpoints and ranks, so that only what was written tells them apart."""
    root = tmp_path_factory.mktemp("another") / "root"
    make(root, offset=1000)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_another_archive(
    whole: tuple[Path, dict[str, Any]], another: Path, tmp_path: Path, kind: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    lies = []
    for mine, their in zip(kinds(root)[kind], kinds(another)[kind], strict=True):
        before = mine.read_bytes()
        mine.write_bytes(their.read_bytes())
        name = mine.relative_to(root).as_posix()
        lies += [f"{name} {found}" for found in wrong(root, whole[1], {name})]
        mine.write_bytes(before)
    assert lies == []


def test_an_error_says_which_rank_of_which_checkpoint_lies_there(tmp_path: Path) -> None:
    make(tmp_path / "root")
    first, second = kinds(tmp_path / "root")["staged"][:2]
    second.write_bytes(first.read_bytes())
    ck = archive.open(str(tmp_path / "root")).checkpoints["step-1"]
    with pytest.raises(
        CorruptStateError, match=r"(?s)rank-00001\.zip.*step-1/rank-00000\.zip.*put the right object back"
    ):
        ck.state(1)
    assert ck.state(0)["cursor"] == 10


@pytest.mark.parametrize("deep", [False, True])
def test_verify_finds_all_that_changed_places(tmp_path: Path, deep: bool) -> None:
    make(tmp_path / "root")
    arc = archive.open(str(tmp_path / "root"))
    assert verify(arc, deep=deep).sound
    for kind, objects in kinds(tmp_path / "root").items():
        if kind == "shards" and not deep:
            continue
        one, other = objects[0], objects[1]
        before = one.read_bytes(), other.read_bytes()
        one.write_bytes(before[1])
        other.write_bytes(before[0])
        found = " ".join(f"{f.object} {f.problem}" for f in verify(arc, deep=deep).findings)
        assert one.relative_to(tmp_path / "root").as_posix() in found, kind
        one.write_bytes(before[0])
        other.write_bytes(before[1])
    assert verify(arc, deep=deep).sound


def test_a_staged_object_of_another_rank_is_not_committed(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    for rank, w in enumerate(writers):
        w.append({"x": np.arange(3) + rank}, env_ids=0, first=True)
    pending = writers[1].checkpoint(1)
    states = tmp_path / "root" / "states" / "s"
    while not (found := list(states.glob("*/rank-00001.zip"))):
        pass
    (found[0].parent / "rank-00000.zip").write_bytes(found[0].read_bytes())
    with pytest.raises(CorruptStateError, match=r"(?s)rank-00000\.zip.*step-1/rank-00001\.zip"):
        pending.result(30)
    assert len(archive.open(str(tmp_path / "root")).checkpoints) == 0
    for w in writers:
        with pytest.raises(InterruptedError), w:
            raise InterruptedError


def test_a_commit_of_another_archive_below_the_newest(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", offset=1000)
    for number in range(1, 4):
        mine, theirs = (kinds(tmp_path / name)["commits"][number - 1] for name in "ab")
        mine.write_bytes(theirs.read_bytes())
    with pytest.raises(CorruptCommitError, match=re.escape("belongs to archive")):
        archive.open(str(tmp_path / "a")).commits[1]
