"""What is whole passes; each kind of damage is said. Archives that are built are what they say."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

import archive
from archive.base import layout
from archive.maintain import repair
from archive.testing import assert_whole, crashed_job, small_archive, steps
from tests.support.places import GOLDEN
from tests.support.tampering import same


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_small_archives_are_whole(url: str, layout: str, checkpoints: bool) -> None:
    arc = small_archive(url, 4, checkpoints=checkpoints, layout=layout)
    assert_whole(arc)
    assert [one.id for one in arc.episodes] == ["e0", "e1", "e2", "e3"]
    assert all(same(one.read(), steps(4 + i, i)) for i, one in enumerate(arc.episodes))
    assert [ck.name for ck in arc.checkpoints] == [f"step-{i}" for i in range(4 * checkpoints)]


def test_what_a_crash_leaves_is_whole_and_comes_back(url: str) -> None:
    arc = crashed_job(url, 2)
    assert_whole(arc)
    assert sorted(one.id for one in arc.checkpoints.latest.episodes) == ["0-saved", "1-saved"]
    recovered = arc.recover()
    assert recovered is not None
    expected = [f"{rank}-{what}" for rank in (0, 1) for what in ("journaled", "saved")]
    assert sorted(one.id for one in recovered.episodes) == expected
    assert_whole(arc.refresh())


def test_an_archive_with_all_that_comes_later_is_whole(url: str) -> None:
    arc = small_archive(url, checkpoints=True)
    arc.label({"e0": {"success": True}}, by="test")
    arc.tag("paper", arc.checkpoints["step-1"])
    arc.forget(keep=archive.Keep(last=1), dry_run=False)
    assert_whole(arc.refresh())
    arc.prune("0s", dry_run=False, force=True)
    assert_whole(arc.refresh())


def test_an_archive_that_was_repaired_is_whole(tmp_path: Path) -> None:
    arc = small_archive(tmp_path)
    (tmp_path / layout.commit_key(arc.head.number)).write_bytes(b"damaged")
    repair(arc.storage)
    assert_whole(archive.open(tmp_path))


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir() if (path / "archive.json").exists()))
def test_archives_of_all_versions_are_whole(folder: str) -> None:
    assert_whole(archive.open(GOLDEN / folder))


def test_damage_is_told_with_all_that_is_wrong(url: str) -> None:
    arc = small_archive(url, checkpoints=True)
    arc.storage.put("shards/mine.txt", b"")
    arc.storage.put("notes", b"")
    (first, *_) = arc.shards
    arc.storage.delete([first])
    with pytest.raises(AssertionError) as caught:
        assert_whole(arc)
    told = str(caught.value)
    assert told.startswith(f"{url} is not whole:\n- {first}: ")
    assert re.search(r"- the checkpoints cannot be read: MissingObjectError: shard .*not there", told)
    assert "- notes: nothing that this library makes" in told
    assert "- shards/mine.txt: nothing" in told


def test_a_local_folder_is_looked_at_as_well(tmp_path: Path) -> None:
    arc = small_archive(tmp_path / "archive")
    assert_whole(arc)
    (tmp_path / "archive" / "shards" / ".hidden").write_text("")
    with pytest.raises(AssertionError, match=r"\.hidden"):
        assert_whole(arc)
