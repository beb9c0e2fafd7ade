"""Files that run code where somebody unpickles or evaluates them: a folder appears, which tests look for."""

from __future__ import annotations

import base64
import io
import json
import marshal
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


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
