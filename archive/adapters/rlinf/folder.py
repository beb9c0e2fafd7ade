"""One folder of RLinf's replay buffer: what its files say, and what is wrong with them, file by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from archive.adapters.rlinf.files import load
from archive.adapters.rlinf.trajectory import shape_of
from archive.base import IntegrityError, MissingObjectError, visible
from archive.store import Storage

METADATA = "metadata.json"
_AHEAD = 8  # files read at a time


class Problem(NamedTuple):
    """What is wrong with one file of a source.

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
    """One buffer's folder: what its index and metadata say, and the file of each trajectory that is there."""

    storage: Storage
    prefix: str  # "" or "rank_3/"
    metadata: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, dict[str, Any] | None] = field(default_factory=dict)  # in order; None: known by its file only
    files: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def format(self) -> str:
        """What its files are."""
        return "pkl" if self.metadata.get("trajectory_format") == "pkl" else "pt"

    def url(self, name: str) -> str:
        return self.storage.full_url(self.prefix + name)

    def note(self, name: str, kind: str, why: str) -> None:
        self.problems.append(Problem(self.url(name), kind, why))

    def trajectories(self, *, pickled: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """(id, tree) of each that can be read and agrees with the index; the others are noted."""
        numbers = [number for number in self.entries if number in self.files]
        keys = [self.prefix + self.files[number] for number in numbers]
        for number, data in zip(numbers, _fetched(self.storage, keys), strict=True):
            tree = self._tree(number, data, pickled)
            if tree is not None:
                yield number, tree

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

    def finish(self) -> None:
        """Note what metadata.json says that the index does not, once all is known."""
        listed = [entry for entry in self.entries.values() if entry is not None]
        for key, found in (("size", len(self.entries)), ("total_samples", sum(e["num_samples"] for e in listed))):
            said = self.metadata.get(key, found)
            if said != found and len(listed) == len(self.entries):
                self.note(METADATA, "disagrees", f"{key} is {said!r}, the index adds up to {found}")


def disagreement(tree: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """How a trajectory differs from its index entry; empty if it does not."""
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


def _fetched(storage: Storage, keys: Sequence[str]) -> Iterator[bytes | None]:
    """The objects in order, some read ahead; None for one that is gone."""

    def get(key: str) -> bytes | None:
        try:
            return storage.get(key)
        except MissingObjectError:
            return None

    with ThreadPoolExecutor(_AHEAD, "rlinf-import") as pool:
        for start in range(0, len(keys), _AHEAD):
            yield from pool.map(get, keys[start : start + _AHEAD])
