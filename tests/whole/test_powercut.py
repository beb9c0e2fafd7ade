"""Whenever the power goes, on a disk that loses what was not synced: the archive is whole, what was acknowledged is
there, and what was interrupted can be done again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import archive
from archive.testing import assert_whole, small_archive
from tests.support.backends import Backend
from tests.support.operations import OF_BATCHES, OPERATIONS, Operation
from tests.support.powercut import Chance, Disk, Everything, Tree, replant
from tests.support.said import Said
from tests.support.sampling import one_in, sampled

COMMIT = re.compile(r"/([0-9]{9})\.json$")
MAY_RETURN = "pruned"  # deletes need not outlast a power cut


class Heard(Said):
    """Words with the operation of a disk after which each was said."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self._disk = disk
        self.told: list[tuple[int, str]] = []

    def __call__(self, word: str) -> None:
        super().__call__(word)
        self.told.append((self._disk.now, word))

    def by(self, cut: int, path: Path) -> Said:
        """The words that were said before a cut."""
        said = Said(path)
        for then, word in self.told:
            if then <= cut and word != MAY_RETURN:
                said(word)
        return said


class PowerCuts:
    """An operation, done once on a disk that is recorded, and what is left of that at any cut."""

    def __init__(self, operation: Operation, folder: Path) -> None:
        self._operation, self._folder = operation, folder
        self._root = Backend(str(folder / "disk" / "root"), name="local")
        (folder / "disk").mkdir()
        self.disk = Disk(folder / "disk")
        self.heard = Heard(folder / "said", self.disk)
        with self.disk.recorded():
            operation.prepare(self._root)
            self.disk.settle()
            self.begun = self.disk.now
            operation.act(self._root, self.heard)
        assert self.disk.left(self.disk.now, Everything()) == self.disk.seen()

    def meet(self, cut: int, left: Tree) -> None:
        """Look at what is left, and do it again."""
        replant(self.disk, left)
        (self._folder / "again").unlink(missing_ok=True)
        said = self.heard.by(cut, self._folder / "again")
        with Disk(self.disk.base).recorded():
            self._operation.check(self._root, said)
            self._operation.act(self._root, said)
            assert self._operation.done <= set(said.words)
            self._operation.check(self._root, said)


@pytest.mark.parametrize("count", one_in(100))
@pytest.mark.parametrize("operation", [*OPERATIONS, *OF_BATCHES], ids=str)
def test_wherever_the_power_goes(operation: Operation, count: int, tmp_path: Path) -> None:
    cuts = PowerCuts(operation, tmp_path)
    before = None
    for cut in sampled(range(cuts.begun, cuts.disk.now + 1), count):
        for left in (cuts.disk.left(cut), cuts.disk.left(cut, Chance(cut))):
            if left != before:
                cuts.meet(cut, left)
            before = left


def _label(url: Path, value: int) -> None:
    archive.open(url).label({"e0": {"value": value}})


def test_the_power_goes_after_another_process_was_killed(tmp_path: Path) -> None:
    """Nobody's commit outlasts the one that it follows, though the maker of that was killed before he could sync it."""
    (base := tmp_path / "disk").mkdir()
    disk = Disk(base)
    with disk.recorded():
        small_archive(base / "root", 1)
        begun = disk.now
        _label(base / "root", 1)
    before = disk.left(begun)
    for kill in range(disk.now - begun):
        replant(disk := Disk(base), before)
        disk.settle()
        settled = disk.now
        with disk.recorded():
            with disk.killed_after(kill):
                _label(base / "root", 1)
            _label(base / "root", 2)
        for cut in range(settled, disk.now):
            for seed in range(8):
                commits = [int(found[1]) for path in disk.left(cut, Chance(seed)) if (found := COMMIT.search(path))]
                assert sorted(commits) == list(range(1, 1 + len(commits))), (kill, cut)
        replant(disk, disk.left(disk.now))
        assert_whole(found := archive.open(base / "root"))
        assert found.labels["value"].to_pylist()[-1:] == ["2"], kill
