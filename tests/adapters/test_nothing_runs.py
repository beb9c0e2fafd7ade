"""Whatever a file or a bucket holds, nothing in it is run: each kind of hostile file on each way in."""

from __future__ import annotations

import base64
import io
import json
import marshal
import os
import pickle
import shutil
import tarfile
import uuid
import zipfile
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
from tests.support.archives import fresh
from tests.support.dataset_files import write_lerobot
from tests.support.places import DATA
from tests.support.sampling import few_of


class Canary:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _zipped(pickled: bytes, name: str) -> bytes:
    """What torch.save makes, of this pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as members:
        members.writestr("archive/data.pkl", pickled)
        members.writestr("archive/version", "3\n")
        members.writestr("archive/byteorder", "little")
        members.writestr(f"archive/{name}", pickled)
    return out.getvalue()


def _torch(value: Any, new: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save({"rewards": value}, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


def _tarred(pickled: bytes) -> bytes:
    """As torch saved before it had a format of its own: members that it unpickles one by one."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as members:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(pickled)
            members.addfile(info, io.BytesIO(pickled))
    return out.getvalue()


def _saved(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, allow_pickle=True, **arrays)
    return out.getvalue()


def _npy(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([value], object), allow_pickle=True)
    return out.getvalue()


def _objects(value: Any) -> bytes:
    array = np.empty(3, object)
    array[:] = [value] * 3
    flat = dict.fromkeys(("observations", "actions", "rewards", "terminals", "columns", "observations_0"), array)
    return _saved(num_episodes=1, **flat)


def _safetensors(pickled: bytes) -> bytes:
    header = {
        "__metadata__": {"format": "pt", "pickle": base64.b64encode(pickled).decode()},
        "rewards": {"dtype": "O", "shape": [1], "data_offsets": [0, len(pickled)]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + pickled


def _hdf5(pickled: bytes) -> bytes:
    import h5py

    out = io.BytesIO()
    with h5py.File(out, "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            made = file.create_dataset(name, data=np.array([pickled.hex()] * 2, object), dtype=h5py.string_dtype())
            made.attrs["PYTHON_OBJECT"] = np.void(pickled)
            made.attrs["TYPE"] = "pickle"
    return out.getvalue()


def _extension(pickled: bytes) -> bytes:
    """Parquet of a column whose type is in a pickle, which pyarrow of old looked at."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled}
    field = pa.field("task_index", pa.int64(), metadata=about)
    out = io.BytesIO()
    pq.write_table(pa.table([pa.array([0, 1])], schema=pa.schema([field])), out)
    return out.getvalue()


def _named(folder: Path) -> bytes:
    """JSON that names classes and functions in the ways in which libraries take them."""
    call = {"args": [str(folder)], "kwargs": {}, "py/object": "os.mkdir", "py/reduce": [{"py/function": "os.mkdir"}]}
    call |= {"__class__": "os.mkdir", "_target_": "os.mkdir", "$class": "os.mkdir", "entry_point": "os:mkdir"}
    call |= {"$tensordict": call.copy(), "$np.dtype": "os.mkdir", "class": ["os", "mkdir"], "codec": {"id": "pickle"}}
    call |= {"name": "numcodecs.pickle", "configuration": call.copy()}
    return json.dumps(call | {"trajectory_index": {"0": call}, "features": {"a": call}, "fields": [call]}).encode()


def payloads(folder: Path) -> dict[str, bytes]:
    """Name -> a hostile file; each would make `folder` where it is run."""
    canary = Canary(folder)
    pickled = {protocol: pickle.dumps({"rewards": canary}, protocol) for protocol in range(6)}
    code = marshal.dumps(compile(f"import os; os.mkdir({str(folder)!r})", "canary", "exec"))
    return {
        **{f"pickle {protocol}": data for protocol, data in pickled.items()},
        "bare pickle": pickle.dumps(canary), "torch": _torch(canary), 
        "torch by hand": _zipped(pickled[2], "constants.pkl"),
        "torchscript": _zipped(pickled[2], "code/__torch__.py"), "torch of old": _torch(canary, new=False),
        "torch in tar": _tarred(pickled[2]), "npy": _npy(canary), "npz": _saved(rewards=np.array([canary], object)),
        "npz of objects": _objects(canary), "safetensors": _safetensors(pickled[4]), "hdf5": _hdf5(pickled[2]),
        "parquet": _extension(pickled[2]), "marshal": code, "json": _named(folder),
        "yaml": f"!!python/object/apply:os.mkdir ['{folder}']\n".encode(),
        "python": f"__import__('os').mkdir({str(folder)!r})\n".encode(),
    }  # fmt: skip


RUNNERS: dict[str, Callable[[bytes], Any]] = {
    "bare pickle": pickle.loads,
    "pickle 5": pickle.loads,
    "torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "torch of old": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    "npz": lambda data: dict(np.load(io.BytesIO(data), allow_pickle=True)),
    "marshal": lambda data: exec(marshal.loads(data)),
    "python": lambda data: exec(data),
}


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
    from archive.adapters.lerobot.files import INFO

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
