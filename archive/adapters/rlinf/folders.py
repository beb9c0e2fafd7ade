"""RLinf's replay buffer folders on any fsspec filesystem: which there are, what their indexes list, what is wrong with
them, file by file; and folders that its own `load_checkpoint` reads, written. The only module that reads pickles, and
those with nothing in them but tensors, arrays and plain values."""

from __future__ import annotations

import importlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.adapters import load_torch
from archive.adapters.rlinf.trajectory import SYSTEM, Numbered, Trajectories, file_kind, listed_at, shape_of, weights_of
from archive.base import (
    AlreadyExistsError,
    IntegrityError,
    MissingObjectError,
    NotFoundError,
    UsageError,
    one_line,
    thread_pool,
    visible,
)
from archive.store import Storage

METADATA = "metadata.json"
INDEXES = ("trajectory_index.json", "trajector_index.json")  # the second as RLinf's merge tool writes it, too
_AHEAD = 8  # files read at a time
_LISTED = 50  # problems that an error names
_MOST_BYTES = 200  # of weights in a name, which may have 255
_RANK = re.compile(r"rank_(\d{1,9})/")
_FILE = re.compile(r"trajectory_(?P<id>\d{1,18})_(?P<weights>.*)\.(?P<format>pt|pkl)")
_WEIGHTS = re.compile(r"[^/\\\x00-\x1f]*")
_ENTRY = {"num_samples": int, "max_episode_length": int, "shape": list, "model_weights_id": str}
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
    """Load as torch.load does, but notice a flipped bit."""
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            bad = members.testzip()
        if bad is not None:
            raise ValueError(f"its member {bad} does not match its checksum")
    return load_torch(io.BytesIO(data))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or "no more is known"


# -- one folder ----------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A problem of one file of a source.

    kind: "missing", "damaged", "disagrees" (what belongs to it says otherwise); or, which are no reasons to stop,
    "unlisted" (no index lists it; it is left out) and "outlived" (an index lists what RLinf no longer saves).
    """

    file: str
    kind: str
    why: str

    def __str__(self) -> str:
        return visible(f"{self.file} ({self.kind}): {self.why}")


@dataclass
class Folder:
    """One buffer's folder: what its index and metadata say, the file of each trajectory that is there, and what is
    wrong with them."""

    storage: Storage
    prefix: str  # "" or "rank_3/"
    metadata: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, dict[str, Any] | None] = field(default_factory=dict)  # in order; None: known by its file only
    files: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def read(cls, storage: Storage, prefix: str) -> Folder:
        """The folder as its index and metadata have it. Nothing of its trajectories is read."""
        out, names = cls(storage, prefix), storage.list(prefix)
        out.metadata = out._json(METADATA, names) or {}
        index = next((n for n in INDEXES if n in names), INDEXES[0])
        body = out._json(index, names)
        found = {name: int(match["id"]) for name in names if (match := _FILE.fullmatch(name))}
        out.entries = dict.fromkeys(sorted(found.values())) if body is None else out._listed(index, body)
        lacking: dict[int, str] = {}
        for number, entry in out.entries.items():
            exact = "" if entry is None else f"trajectory_{number}_{entry['model_weights_id']}.{out.format}"
            alike = sorted(name for name, other in found.items() if other == number)
            if exact in found or alike:  # of that number, as RLinf's own tool does
                out.files[number] = exact if exact in found else alike[0]
            else:
                lacking[number] = exact or f"trajectory_{number}_*"
        if lacking and out.files and [*lacking] == [*out.entries][: len(lacking)]:
            gone = f"its {len(lacking)} oldest trajectories of {len(out.entries)}"
            out.note(index, "outlived", f"{gone} have no files: RLinf saves its last window only")
        else:
            for number, name in lacking.items():
                out.note(name, "missing", f"the index lists trajectory {number}")
        for name in sorted(found.keys() - set(out.files.values())):
            out.note(name, "unlisted", f"{index} does not list it")
        listed = [entry for entry in out.entries.values() if entry is not None]
        for key, count in (("size", len(out.entries)), ("total_samples", sum(e["num_samples"] for e in listed))):
            said = out.metadata.get(key, count)
            if said != count and len(listed) == len(out.entries):
                out.note(METADATA, "disagrees", f"{key} is {said!r}, the index adds up to {count}")
        return out

    def _json(self, name: str, names: Sequence[str]) -> dict[str, Any] | None:
        if name not in names:
            self.note(name, "missing", "it is not there")
            return None
        data = self.storage.get(self.prefix + name)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as e:
            self.note(name, "damaged", f"{len(data)} bytes are no JSON ({e})")
            return None
        if not isinstance(value, dict):
            self.note(name, "damaged", "it holds no JSON object")
            return None
        return value

    def _listed(self, name: str, body: Mapping[str, Any]) -> dict[int, dict[str, Any] | None]:
        """The index entry of each trajectory in the list's order; those that are not well formed are noted."""
        try:
            entries = {int(key): dict(value) for key, value in body["trajectory_index"].items()}
            numbers = [int(number) for number in body["trajectory_id_list"]]
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            why = f"it has no trajectory_index and trajectory_id_list as RLinf writes them ({e!r})"
            self.note(name, "damaged", why)
            return {}
        out: dict[int, dict[str, Any] | None] = {}
        for number in numbers:
            if number not in entries or number in out:
                how = "twice" if number in out else "in trajectory_id_list only"
                self.note(name, "disagrees", f"it lists trajectory {number} {how}")
            elif not all(isinstance(entries[number].get(key), kind) for key, kind in _ENTRY.items()):
                why = f"its entry of trajectory {number} lacks a field, or has one of another type"
                self.note(name, "damaged", why)
            else:
                out[number] = entries[number]
        for number in sorted(entries.keys() - set(numbers)):
            self.note(name, "disagrees", f"trajectory {number} is not in its trajectory_id_list")
        return out

    @property
    def format(self) -> str:
        """The kind of its files."""
        return file_kind([self.metadata])

    def url(self, name: str) -> str:
        return self.storage.full_url(self.prefix + name)

    def note(self, name: str, kind: str, why: str) -> None:
        self.problems.append(Problem(self.url(name), kind, why))

    def trajectories(self, *, pickled: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """(id, tree) of each that can be read and agrees with the index; the others are noted. Some are read ahead."""
        numbers = [number for number in self.entries if number in self.files]
        with thread_pool(_AHEAD, "rlinf-import") as pool:
            for start in range(0, len(numbers), _AHEAD):
                some = numbers[start : start + _AHEAD]
                for number, data in zip(some, pool.map(self._fetched, some), strict=True):
                    tree = self._tree(number, data, pickled)
                    if tree is not None:
                        yield number, tree

    def _fetched(self, number: int) -> bytes | None:
        try:
            return self.storage.get(self.prefix + self.files[number])
        except MissingObjectError:
            return None

    def _tree(self, number: int, data: bytes | None, pickled: bool) -> dict[str, Any] | None:
        name = self.files[number]
        if data is None:
            self.note(name, "missing", "it was there a moment ago")
            return None
        try:
            tree = load(name, data, pickled=pickled)
        except IntegrityError as e:
            self.note(name, "damaged", str(e))
            return None
        wrong = disagreement(tree, self.entries[number] or {})
        if wrong:
            self.note(name, "disagrees", wrong)
        return None if wrong else tree

    def state(self, *, split: bool) -> dict[str, Any]:
        """The state of the rank that it is imported as."""
        counter, numbers = self.metadata.get("trajectory_counter", 0), list(self.entries)
        counter = max(counter if isinstance(counter, int) else 0, max(numbers, default=-1) + 1)
        state = {"system": SYSTEM, "seed": self.metadata.get("seed"), "trajectory_format": self.format}
        state |= {"counter": counter, "ids": np.array(numbers, np.int64), "split": split}
        state |= {"listed": np.array([] if split else numbers, np.int64), "folder": self.prefix.rstrip("/")}
        return state | {"problems": [list(p) for p in self.problems]}


def disagreement(tree: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """The first difference of a trajectory from its index entry; empty if there is none."""
    shape = list(shape_of(tree))
    if "shape" in entry and list(entry["shape"]) != shape:
        return f"its steps have shape {shape}, the index says {list(entry['shape'])}"
    for key in ("max_episode_length", "model_weights_id"):
        if key in entry and key in tree and tree[key] != entry[key]:
            return f"its {key} is {tree[key]!r}, the index says {entry[key]!r}"
    samples = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if entry.get("num_samples", samples) != samples:
        return f"it has {samples} samples, the index says {entry['num_samples']}"
    return ""


def folders(storage: Storage) -> dict[int, Folder]:
    """Rank -> folder: of `rank_*` below the root, or the root itself as rank 0."""
    names = storage.list("")
    if METADATA in names or any(index in names for index in INDEXES):
        return {0: Folder.read(storage, "")}
    ranks = {int(found[1]): found[0] for name in names if (found := _RANK.fullmatch(name))}
    if not ranks:
        raise NotFoundError(
            f"{storage.url} is no replay buffer of RLinf: it has neither {METADATA} nor rank_* folders. Give the "
            "folder that holds them, such as .../sac_components/replay_buffer"
        )
    out = {}
    for rank in range(max(ranks) + 1):
        out[rank] = Folder.read(storage, ranks[rank]) if rank in ranks else Folder(storage, "")
        if rank not in ranks:
            out[rank].note(f"rank_{rank}", "missing", "folders of higher ranks are there; its trajectories are not")
    return out


def check_pickle(found: Mapping[int, Folder], allow_pickle: bool) -> None:
    """Refuse pickled trajectories unless the caller trusts whoever wrote them."""
    pickled = [f.url(name) for f in found.values() for name in f.files.values() if name.endswith(".pkl")]
    if pickled and not allow_pickle:
        raise UsageError(
            f"{pickled[0]} and {len(pickled) - 1} more are pickle files, and loading those may run code that is in "
            "them: give allow_pickle=True only if you trust everybody who could write them, or save the buffer in the "
            "format 'pt'"
        )


def refuse(found: Mapping[int, Folder]) -> None:
    """Raise an error that lists what is wrong, if anything is."""
    wrong = [p for folder in found.values() for p in folder.problems if p.kind not in ("unlisted", "outlived")]
    if not wrong:
        return
    lines = [f"- {p}" for p in wrong[:_LISTED]]
    if len(wrong) > _LISTED:
        lines.append(f"- and {len(wrong) - _LISTED} more")
    what = "the source is not whole, so nothing was imported; import what is with on_missing='skip':"
    text = "\n".join([what, *lines])
    raise MissingObjectError(text) if all(p.kind == "missing" for p in wrong) else IntegrityError(text)


def largest_update(found: Mapping[int, Folder]) -> int:
    """The largest update count of all trajectories; 0 if none has one."""
    entries = [entry for folder in found.values() for entry in folder.entries.values()]
    return max((weights_of(e["model_weights_id"])[1] or 0 for e in entries if e), default=0)


# -- written ----------------------------------------------------------------------------------------------------


def check_free(storage: Storage, prefix: str) -> None:
    """Refuse a folder that a buffer lies in already."""
    names = storage.list(prefix)
    taken = [name for name in names if name in (METADATA, *INDEXES) or name.startswith(("trajectory_", "rank_"))]
    if taken:
        raise AlreadyExistsError(f"{storage.full_url(prefix + taken[0])} is there already; export to an empty folder")


def write(storage: Storage, prefix: str, found: Trajectories) -> int:
    """Write one buffer's folder; how many trajectories. metadata.json comes last: without it RLinf loads nothing."""
    entries: dict[int, dict[str, Any]] = {}
    kind = found.file_kind

    def files() -> Iterator[tuple[str, bytes]]:
        for one in found:
            entries[one.number] = one.entry
            yield prefix + _name(one, kind), dump(one.tree, kind)

    storage.put_many(files())
    order = sorted(entries, key=listed_at(found.state))
    index = {"trajectory_index": {str(n): entries[n] for n in order}, "trajectory_id_list": order}
    metadata = {
        "trajectory_format": kind,
        "size": len(entries),
        "total_samples": sum(entry["num_samples"] for entry in entries.values()),
        "trajectory_counter": max(int(found.state.get("counter", 0)), max(entries, default=-1) + 1),
        "seed": found.seed,
    }
    storage.put(prefix + INDEXES[0], json.dumps(index).encode())
    storage.put(prefix + METADATA, json.dumps(metadata).encode())
    return len(entries)


def _name(one: Numbered, kind: str) -> str:
    weights = one.entry["model_weights_id"]
    if not _WEIGHTS.fullmatch(weights) or one_line(weights) != weights or len(weights.encode()) > _MOST_BYTES:
        raise UsageError(f"trajectory {one.number}: model_weights_id {weights!r} cannot be part of a file's name")
    return f"trajectory_{one.number}_{weights}.{kind}"
