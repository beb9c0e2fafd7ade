"""Whatever a file or a bucket holds, nothing in it is run: each kind of hostile file on each way in."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import archive
import resharding
from archive import cli
from archive.adapters import alf, common, lerobot, npz, rlinf
from archive.base.errors import ArchiveError, IntegrityError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from archive.testing import small_archive, steps
from tests.support.canaries import RUNNERS, payloads
from tests.support.dataset_files import fresh, write_lerobot
from tests.support.places import DATA
from tests.support.sampling import few_of

FIRST = ("bare pickle", "torch of old", "npz of objects", "json")  # others as a soak
KINDS = [*FIRST, *sorted(payloads(Path("/nowhere")).keys() - set(FIRST))]
few = pytest.mark.parametrize("kind", few_of(KINDS, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What appears where anything runs; and it has not, at the end."""
    made = tmp_path / "canary"
    yield made
    assert not made.exists(), "code of a file was run"


def refused(call: Callable[[], Any]) -> ArchiveError:
    """The library's error; anything else goes on."""
    with pytest.raises(ArchiveError) as raised:
        call()
    return raised.value


def importing(*arguments: str) -> None:
    """The same by the command line, which says so and ends."""
    done = CliRunner().invoke(cli.main, ["import", f"memory://{uuid.uuid4().hex}", *arguments])
    assert isinstance(done.exception, SystemExit), done.output
    assert done.exit_code != 0, done.output


@pytest.mark.parametrize("kind", RUNNERS)
def test_the_canaries_sing(tmp_path: Path, kind: str) -> None:
    """Each of these files runs where it is loaded as it must not be."""
    with suppress(Exception):
        RUNNERS[kind](payloads(tmp_path / "canary")[kind])
    assert (tmp_path / "canary").is_dir()


@few
def test_files_of_alf(tmp_path: Path, folder: Path, kind: str) -> None:
    path = tmp_path / "ckpt-7-replay_buffer"
    path.write_bytes(payloads(folder)[kind])
    refused(lambda: alf.import_checkpoint(path, fresh()))
    refused(lambda: alf.import_checkpoint(path.as_uri(), fresh()))
    importing(str(path), "-f", "alf")


@few
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_files_of_rlinf(tmp_path: Path, folder: Path, kind: str, allow_pickle: bool) -> None:
    """Even where pickles are allowed, one with code in it is refused."""
    source = Path(shutil.copytree(DATA / "rlinf", tmp_path / "source"))
    found = sorted(source.glob("rank_*/trajectory_[0-9]*"))
    for i, path in enumerate(found):
        path.write_bytes(payloads(folder)[kind])
        path.rename(path.with_suffix((".pkl", ".pt")[i % 2 if allow_pickle else 1]))
    refused(lambda: rlinf.import_checkpoint(source, fresh(), allow_pickle=allow_pickle))
    with suppress(ArchiveError):
        rlinf.import_checkpoint(source, fresh(), allow_pickle=allow_pickle, on_missing="skip")
    importing(str(source), "-f", "rlinf", "--set", f"allow_pickle={str(allow_pickle).lower()}")
    for path in (*source.glob("rank_*/*.json"), *source.glob("*.json")):
        path.write_bytes(payloads(folder)[kind])
    refused(lambda: rlinf.import_checkpoint(source, fresh(), allow_pickle=allow_pickle))


@few
@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".h5"])
def test_files_of_arrays(tmp_path: Path, folder: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_bytes(payloads(folder)[kind])
    if kind == "hdf5" and suffix != ".npz":  # texts and attributes, which are imported as such
        npz.import_dataset(path, fresh())
        return
    refused(lambda: npz.import_dataset(path, fresh()))
    importing(str(path), "-f", "d3rlpy")


@few
def test_data_sets_of_lerobot(tmp_path: Path, folder: Path, kind: str) -> None:
    source = write_lerobot(tmp_path / "lerobot")
    for path in sorted(source.rglob("*.*")):
        whole = path.read_bytes()
        path.write_bytes(payloads(folder)[kind])
        with suppress(ArchiveError):  # the tasks' table, say, may be any two columns
            lerobot.import_dataset(source, fresh())
        path.write_bytes(whole)
    (source / lerobot_info()).write_bytes(payloads(folder)[kind])
    importing(str(source), "-f", "lerobot")


def lerobot_info() -> str:
    from archive.adapters.lerobot.layout import INFO

    return INFO


@few
@pytest.mark.filterwarnings("ignore")
def test_data_sets_of_minari(tmp_path: Path, folder: Path, kind: str, pen: Any) -> None:
    """They are read by Minari itself; what it does not take ends as it likes."""
    from archive.adapters import minari

    for path in sorted((tmp_path / "minari").rglob("*.*")):
        if path.is_file():
            whole = path.read_bytes()
            path.write_bytes(payloads(folder)[kind])
            with suppress(Exception):
                minari.import_dataset("hand/pen-v0", fresh())
            path.write_bytes(whole)


def objects_of(root: Path) -> list[Path]:
    """One object of each kind: folders of different depth, and suffixes."""
    kinds = {(path.relative_to(root).parts[0], path.suffix): path for path in sorted(root.rglob("*")) if path.is_file()}
    return list(kinds.values())


def all_that_is_read(root: Path) -> None:
    """Looks at everything an archive has, as far as it goes."""
    with suppress(ArchiveError):
        arc = archive.open(root)
        for look in (
            lambda: arc.episodes.read(), lambda: arc.checkpoints.latest, lambda: arc.checkpoints.latest.state(0),
            lambda: resharding.plan(arc.checkpoints.latest, world_size=2).share(0).read(), 
            lambda: CliRunner().invoke(cli.main, ["verify", str(root)]), lambda: arc.recover(), lambda: arc.tags,
            lambda: arc.labels,
        ):  # fmt: skip
            with suppress(ArchiveError, AttributeError):
                look()


@pytest.mark.parametrize("kind", few_of(KINDS, 1))
@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_objects_of_an_archive(tmp_path: Path, folder: Path, kind: str, layout: str) -> None:
    root = tmp_path / "a"
    arc = small_archive(root, 2, layout=layout)
    with arc.writer(journal_s=60.0) as w:
        w.append(steps(3, 9), env_ids=0)
        w.checkpoint(9, state={"rng": np.random.default_rng(0).bit_generator.state, "t": torch.ones(2)}, wait=True)
        w.append(steps(3, 10), env_ids=0)
        w.sync()
    arc.tag("paper", arc.refresh().checkpoints.latest)
    arc.label({"e0": {"success": True}})
    for path in objects_of(root):
        whole = path.read_bytes()
        path.write_bytes(payloads(folder)[kind])
        all_that_is_read(root)
        path.write_bytes(whole)


@few
def test_what_a_buffer_loads(tmp_path: Path, folder: Path, kind: str) -> None:
    """RLinf's interface on a folder of RLinf's own files, which hold code."""
    source = Path(shutil.copytree(DATA / "rlinf" / "rank_0", tmp_path / "source"))
    for path in source.iterdir():
        path.write_bytes(payloads(folder)[kind])
    with suppress(ArchiveError):
        TrajectoryReplayBuffer(seed=0).load_checkpoint(str(source))


def test_torch_that_runs_code_all_the_same_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"rewards": torch.ones(2)}, tmp_path / "x.pt")
    assert common.load_torch(tmp_path / "x.pt")["rewards"].tolist() == [1, 1]
    for version, safe in {"2.5.1+cu121": False, "2.4.0": False, "2.6.0": True, "2.10.1": True, "3.0.0a0": True}.items():
        monkeypatch.setattr(torch, "__version__", version)
        if safe:
            common.load_torch(tmp_path / "x.pt")
            continue
        with pytest.raises(UsageError, match=r"torch 2\.6 or newer"):
            alf.import_checkpoint(tmp_path / "x.pt", fresh())
        with pytest.raises(UsageError, match=r"torch 2\.6 or newer"):
            rlinf.import_checkpoint(DATA / "rlinf", fresh())


# -- files that lead to other files ------------------------------------------------------------------------------------


@contextmanager
def hdf5(path: Path) -> Iterator[Any]:
    import h5py

    with h5py.File(path, "w") as file:
        for name in ("actions", "rewards"):
            file[name] = np.ones(4, np.float32)
        file["terminals"] = np.zeros(4, bool)
        yield file


def test_an_hdf5_file_brings_no_other_file_along(tmp_path: Path) -> None:
    """Its data may be said to lie in any file of this machine, of this user's."""
    import h5py

    (tmp_path / "id_rsa").write_bytes(b"PRIVATE-KEY-DATA")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.arange(4.0)
    with hdf5(tmp_path / "raw.h5") as file:
        file.create_dataset("observations", (4,), "f4", external=[(str(tmp_path / "id_rsa"), 0, 16)])
    with hdf5(tmp_path / "virtual.h5") as file:
        layout = h5py.VirtualLayout((4,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (4,))
        file.create_virtual_dataset("observations", layout)
    with hdf5(tmp_path / "linked.h5") as file:
        file["observations"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    for name, why in {"raw": "another file", "virtual": "another file", "linked": "no 'observations'"}.items():
        assert why in str(refused(lambda name=name: npz.import_dataset(tmp_path / f"{name}.h5", fresh())))  # type: ignore[misc]


@pytest.mark.parametrize(
    "template",
    [
        "{chunk_index.__class__.__init__.__globals__}", "{chunk_index:9999999999d}", "{chunk_index:>99999999999}",
        "{0}", "{}", "{x}", "{chunk_index!r:3}", "{chunk_index", "}", None, 7, ["{chunk_index}"],
        "../../../{chunk_index:03d}.parquet", "/etc/passwd", "data/../../x",
    ],
)  # fmt: skip
def test_a_path_that_a_data_set_names_is_no_program(tmp_path: Path, template: Any) -> None:
    source = write_lerobot(tmp_path / "lerobot", data_path=template)
    refused(lambda: lerobot.import_dataset(source, fresh()))


def test_an_array_of_objects_is_said_to_be_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", observations=np.array([{}], object))
    with pytest.raises(IntegrityError, match="allow_pickle=False"):
        npz.import_dataset(tmp_path / "x.npz", fresh())


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY", "one array"], ids=["empty", "cut", "header", "npy"])
def test_what_is_no_file_of_arrays_is_said_to_be_none(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "x.npz"
    if data == "one array":
        np.save(tmp_path / "x.npy", np.ones(3))
        data = (tmp_path / "x.npy").read_bytes()
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"no readable \.npz"):
        npz.import_dataset(path, fresh())
