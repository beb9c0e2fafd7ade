"""Pure, no I/O: the bytes of one of RLinf's trajectory files as its tree. The only module that reads pickles, and those
with nothing in them but tensors, arrays and plain values."""

from __future__ import annotations

import importlib
import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from archive.adapters import load_torch
from archive.base import IntegrityError, UsageError

_ALLOWED = {
    *("collections.OrderedDict", "_codecs.encode", "builtins.complex", "builtins.set"),
    *("torch.Size", "torch.device", "torch.Tensor", "numpy.ndarray", "numpy.dtype"),
    *(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter")),
    *(
        f"numpy.{core}.{name}"
        for core in ("core", "_core")
        for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
    ),
}
_STORAGE = "torch.storage._load_from_bytes"  # how a tensor's bytes lie in a pickle: a file of torch.save within it


def load(name: str, data: bytes, *, pickled: bool) -> dict[str, Any]:
    """The tree of a `.pt` file, or with `pickled` of a `.pkl` one; IntegrityError for what cannot be loaded."""
    try:
        tree = _Plain(io.BytesIO(data)).load() if pickled and name.endswith(".pkl") else _load_pt(data)
    except UsageError:
        raise
    except Exception as e:  # a damaged file may end in any error
        raise IntegrityError(f"{len(data)} bytes cannot be loaded: {type(e).__name__}: {_first_line(e)}") from e
    if not isinstance(tree, dict):
        raise IntegrityError(f"it holds a {type(tree).__name__}, not a dict of fields")
    return tree


def dump(tree: Mapping[str, Any], kind: str) -> bytes:
    """The bytes of a `.pt` or `.pkl` file, as RLinf writes them."""
    if kind == "pkl":
        return pickle.dumps(dict(tree))
    out = io.BytesIO()
    torch.save(dict(tree), out)
    return out.getvalue()


class _Plain(pickle.Unpickler):
    """Makes tensors, arrays and plain values; a file with anything else in it is refused."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == _STORAGE:
            return _load_pt
        if full in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it needs {full}, which is no part of a tensor or plain value")


def _load_pt(data: bytes) -> Any:
    """As torch.load, but a flipped bit is noticed."""
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            bad = members.testzip()
        if bad is not None:
            raise ValueError(f"its member {bad} does not match its checksum")
    return load_torch(io.BytesIO(data))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or "no more is known"
