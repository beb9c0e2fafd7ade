"""RLinf's folders, damaged or half copied: said file by file, the rest imported where asked to."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import archive
import resharding
from archive.adapters import rlinf
from archive.adapters.rlinf.folders import load
from archive.base.errors import IntegrityError, MissingObjectError, NotFoundError, UsageError
from tests.support import rlinf_objects as objects
from tests.support.rlinf_objects import FIXTURE, assert_same

SIZES = [5, 3, 0, 4]  # trajectories of each rank of the fixture


@pytest.fixture
def arc(request: pytest.FixtureRequest) -> archive.Archive:
    return archive.create(f"memory://rlinf-damage-{request.node.name}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the fixture to be damaged."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "source"))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def file_of(source: Path, rank: int, number: int) -> Path:
    return next((source / f"rank_{rank}").glob(f"trajectory_{number}_*"))


def truncate(source: Path) -> None:
    path = file_of(source, 1, 0)
    path.write_bytes(path.read_bytes()[:-600])


def flip(source: Path) -> None:
    path = file_of(source, 1, 0)
    with zipfile.ZipFile(path) as members:
        info = next(i for i in members.infolist() if i.filename.endswith("data/2"))
    data = bytearray(path.read_bytes())
    extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
    data[info.header_offset + 30 + len(info.filename) + extra] ^= 1
    path.write_bytes(data)


def no_dict(source: Path) -> None:
    torch.save([1, 2], file_of(source, 1, 0))


class Harmful:
    ran: bool = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


def code(source: Path) -> None:
    torch.save({"rewards": Harmful()}, file_of(source, 1, 0))


def another(source: Path) -> None:
    shutil.copy(file_of(source, 0, 0), file_of(source, 1, 0))


def other_entry(key: str, value: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        index = source / "rank_1" / "trajectory_index.json"
        edit(index, lambda body: body["trajectory_index"]["0"].update({key: value}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "gone": (lambda s: file_of(s, 1, 1).unlink(), "missing", "lists trajectory 1"),
    "truncated": (truncate, "damaged", "cannot be loaded"),
    "empty": (lambda s: file_of(s, 1, 0).write_bytes(b""), "damaged", "0 bytes cannot be loaded"),
    "flipped": (flip, "damaged", "checksum|CRC"),
    "no dict": (no_dict, "damaged", "holds a list"),
    "code": (code, "damaged", "cannot be loaded: UnpicklingError"),
    "another's": (another, "disagrees", "the index says"),
    "other shape": (other_entry("shape", [9, 2, 4]), "disagrees", "shape"),
    "other weights": (other_entry("model_weights_id", "../../x"), "disagrees", "model_weights_id"),
    "other length": (other_entry("max_episode_length", 9), "disagrees", "max_episode_length"),
    "other count": (other_entry("num_samples", 9), "disagrees", "adds up|samples"),
    "odd entry": (other_entry("shape", 3), "damaged", "entry of trajectory 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_trajectory_is_reported_and_the_rest_imported(
    arc: archive.Archive, source: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, kind, why = DAMAGE[name]
    damage(source)
    with pytest.raises((IntegrityError, MissingObjectError), match=f"nothing was imported(.|\n)*rank_1(.|\n)*({why})"):
        rlinf.import_checkpoint(source, arc)
    assert not Harmful.ran
    assert arc.refresh().checkpoints.latest is None
    assert len(arc.episodes) == 0
    ck = rlinf.import_checkpoint(source, arc, on_missing="skip")
    assert resharding.plan(ck, world_size=4).episodes == [5, 2, 0, 4]
    wrong = [p for p in rlinf.problems(ck) if p.kind != "unlisted"]
    assert {kind} <= {p.kind for p in wrong}
    assert all("rank_1" in p.file for p in wrong)
    assert wrong[0].file in caplog.text


def test_a_gone_file_is_a_file_not_found_error(arc: archive.Archive, source: Path) -> None:
    for number in (0, 2):
        file_of(source, 3, number).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        rlinf.import_checkpoint(source, arc)
    text = str(caught.value)
    assert "trajectory_0_0987" in text
    assert "trajectory_2_bdf4" in text


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_an_index_that_is_gone_or_torn_is_made_up_from_the_files(
    arc: archive.Archive, source: Path, damage: str
) -> None:
    index = source / "rank_0" / "trajectory_index.json"
    index.unlink() if damage == "gone" else index.write_text(index.read_text()[:300])
    with pytest.raises((IntegrityError, MissingObjectError), match=r"trajectory_index\.json"):
        rlinf.import_checkpoint(source, arc)
    ck = rlinf.import_checkpoint(source, arc, on_missing="skip")
    assert [ep.metadata["trajectory_id"] for ep in ck.episodes][:5] == [0, 1, 2, 3, 4]
    assert ck.state(0)["counter"] == 5


def test_metadata_that_disagrees_or_is_gone(arc: archive.Archive, source: Path) -> None:
    edit(source / "rank_0" / "metadata.json", lambda body: body.update(size=9))
    (source / "rank_1" / "metadata.json").unlink()
    shutil.rmtree(source / "rank_2")
    with pytest.raises(IntegrityError, match="size is 9, the index adds up to 5"):
        rlinf.import_checkpoint(source, arc)
    ck = rlinf.import_checkpoint(source, arc, on_missing="skip")
    assert resharding.plan(ck, world_size=4).episodes == SIZES
    found = [(p.file.rpartition("source/")[2], p.kind) for p in rlinf.problems(ck)]
    assert found == [
        ("rank_0/metadata.json", "disagrees"), ("rank_1/metadata.json", "missing"), ("rank_2", "missing"),
    ]  # fmt: skip


def test_files_that_no_index_lists_are_named_and_left_out(arc: archive.Archive, source: Path) -> None:
    shutil.copy(file_of(source, 0, 0), source / "rank_0" / "trajectory_77_x.pt")
    ck = rlinf.import_checkpoint(source, arc)
    (problem,) = rlinf.problems(ck)
    assert problem.kind == "unlisted"
    assert problem.file.endswith("rank_0/trajectory_77_x.pt")
    assert len(ck.episodes) == 12


def test_the_legacy_name_of_the_index(arc: archive.Archive, source: Path) -> None:
    for index in source.rglob("trajectory_index.json"):
        index.rename(index.with_name("trajector_index.json"))
    assert len(rlinf.import_checkpoint(source, arc).episodes) == 12


def test_pickle_only_if_allowed(arc: archive.Archive, source: Path) -> None:
    for path in source.rglob("*.pt"):
        path.with_suffix(".pkl").write_bytes(pickle.dumps(torch.load(path, weights_only=True)))
        path.unlink()
    for path in source.rglob("metadata.json"):
        edit(path, lambda body: body.update(trajectory_format="pkl"))
    with pytest.raises(UsageError, match=r"may run code.*allow_pickle=True"):
        rlinf.import_checkpoint(source, arc)
    ck = rlinf.import_checkpoint(source, arc, allow_pickle=True)
    rlinf.export_checkpoint(ck, source.parent / "out")
    out = source.parent / "out"
    trees = {
        f"{f.relative_to(out)}"[:-4] + ".pt": load(f.name, f.read_bytes(), pickled=True) for f in out.rglob("*.pkl")
    }
    assert_same(objects.saved_trees(FIXTURE), trees)


def test_what_is_no_buffer(arc: archive.Archive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for url in (tmp_path / "other", tmp_path / "gone", "memory://gone"):
        with pytest.raises(NotFoundError, match="no replay buffer of RLinf"):
            rlinf.import_checkpoint(url, arc)
    with pytest.raises(UsageError, match="on_missing='maybe'"):
        rlinf.import_checkpoint(FIXTURE, arc, on_missing="maybe")
