"""Tables that somebody made up, with checksums that are right: a prune deletes nothing but shards, staged objects and
manifest files, and not the lists of earlier prunes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import archive
from archive import Keep
from archive.errors import CorruptManifestError, IntegrityError, UnsafePathError
from archive.maintain import prune
from tests.support.letting_go import Ring, forgotten
from tests.support.pruning import NOW, aged, keys_of, left_behind, sound, why
from tests.support.tampering import body, change_table, commit_files, set_column

STRANGE = (
    "../x", "../root2/shards/00000000-a-00000.zip", "/etc/hosts", "archive.json", "commits", "commits/000000",
    "commits/000000/000000001.json", "sessions/first/rank-00000.json", "pins/x.json", "shards", "shards/", "manifest",
    "shards/../archive.json", "shards/../commits.zarr", "commits.zarr", "shards/x.zarr", "shards/x.zip",
    "states/../sessions/rank-00000.zip", "states/first", "", "\x00",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of which some was forgotten."""
    root = tmp_path_factory.mktemp("forged") / "root"
    ring = Ring(archive.create(root, layout="directory"), session="first")
    ring.turns(4)
    ring.w.close()
    archive.open(root).forget(Keep(last=2), episodes="unreferenced", dry_run=False)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy, in a folder in which other things lie."""
    (tmp_path / "x").write_bytes(b"x")
    return shutil.copytree(written, tmp_path / "root")


def files(root: Path) -> set[Path]:
    """All that lies in the archive and beside it."""
    return {path for path in root.parent.rglob("*") if path.is_file()}


def forge_first(root: Path, kind: str, column: str, key: str | None) -> None:
    """The first row of a table's newest file has this in one column."""

    def change(table: pa.Table) -> pa.Table:
        return set_column(table, column, pa.array([key, *table[column].to_pylist()[1:]], pa.string()))

    change_table(root, kind, change)


def named_forgotten(root: Path, key: str | None) -> None:
    """The table of what was forgotten names this."""
    forge_first(root, "forgotten", "key", key)


@pytest.mark.parametrize("key", [*STRANGE, None])
def test_what_no_prune_may_delete(root: Path, key: str | None) -> None:
    named_forgotten(root, key)
    before = files(root)
    with pytest.raises(IntegrityError, match=r"no manifest file|without key"):
        archive.open(root).prune(dry_run=False, **NOW)
    assert files(root) == before
    assert len(archive.open(root).episodes.read()) > 0


def parts_of_shards(root: Path) -> Iterator[str]:
    """Objects within the shards that are needed."""
    for key in archive.open(root).shards:
        yield from (path.relative_to(root).as_posix() for path in (root / key).rglob("*") if path.is_file())


def test_a_part_of_a_shard_that_is_needed(root: Path) -> None:
    before = archive.open(root).episodes.read()
    for key in list(parts_of_shards(root))[:5]:
        named_forgotten(root, key)
        with pytest.raises(CorruptManifestError, match="no manifest file"):
            archive.open(root).prune(dry_run=False, **NOW)
    assert len(archive.open(root).episodes.read()) == len(before)


def test_what_is_needed_stays_though_the_table_has_it(root: Path) -> None:
    for key in archive.open(root).shards:
        named_forgotten(root, key)
        archive.open(root).prune(dry_run=False, **NOW)
        assert (root / key).exists()
        archive.open(root).episodes.read()


@pytest.mark.parametrize("column", ["shard", "chunks"])
@pytest.mark.parametrize("key", STRANGE)
def test_a_segment_in_a_strange_place_is_not_forgotten(root: Path, key: str, column: str) -> None:
    forge_first(root, "segments", column, key)
    before = files(root)
    with pytest.raises((IntegrityError, UnsafePathError)):
        archive.open(root).forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    assert files(root) == before


def test_lists_of_prunes_stay(root: Path) -> None:
    """Even where the forgetting comes right after the prune, so that the list is what its parent leads to."""
    archive.open(root).prune(dry_run=False, **NOW)
    made = archive.open(root).head
    assert made.pruned is not None
    plan = archive.open(root).prune(**NOW)
    assert plan.empty
    arc = archive.open(root)
    arc.forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    assert made.pruned.path not in forgotten(arc)
    named_forgotten(root, made.pruned.path)
    arc = archive.open(root)
    assert why(arc.prune(dry_run=False, **NOW))[prune.LIST] == 1
    assert made.pruned.path in keys_of(arc)
    old = left_behind(arc)
    aged(root, 25)
    assert {one.key for one in archive.open(root).prune(dry_run=False).going} == {*old}
    assert sound(arc)
    assert body(commit_files(root)[-1])["kind"] == "prune"
