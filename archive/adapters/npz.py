"""Offline datasets as npz or HDF5 files, laid out as D4RL and d3rlpy do, into an archive and back.

```python
ck = npz.import_dataset("hopper-medium.npz", arc)  # or .hdf5, on any filesystem
npz.export_dataset(ck.episodes.filter(complete=True), "whole.h5")  # d3rlpy's ReplayBuffer.load reads it
npz.export_dataset(ck, "all.npz")
```

| in the file | in the archive |
|---|---|
| flat: `observations`, `actions`, `rewards` and any other array of one row a step | fields of the same names |
| flat: `terminals`; `timeouts` or `episode_terminals` | ends of episodes: terminated, truncated; others are open |
| by episode (d3rlpy 2): `observations_0`, `actions_0`, ... | fields; of several observations `observations/0`, ... |
| by episode: `terminated_0` | terminated, else truncated |
| arrays of another length | left out, their names in `ck.progress["npz"]["left_out"]` |
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from archive import Archive
from archive.adapters import Array, Imported, Source, archive_dataset, by_role, check_option, reading, row, system
from archive.arrays import ascending
from archive.base import FieldError, IntegrityError, UsageError, cached_property
from archive.checkpoint import Checkpoint
from archive.fields import Path, Schema, flatten, lookup, unflatten
from archive.jobs import Crew, Progress
from archive.read import Episode
from archive.store import read_file, write_file

__all__ = [
    "export_dataset",
    "import_dataset",
]

HDF5 = (".h5", ".hdf5")
REQUIRED = ("observations", "actions", "rewards")
ENDS = ("terminals", "timeouts", "episode_terminals")
_SMALL_BYTES = 1 << 24  # which may be all one value, that is stored nowhere
_MOST_TIMES = 1100  # of its bytes that a compressed file may hold
VERSION = "2.1"  # of d3rlpy's layout of episodes


def import_dataset(
    url: Any, arc: Archive, *, name: str | None = None, run: str = "main",
    storage_options: Mapping[str, Any] | None = None, engine: str = "local", job: str | None = None,
    workers: int | None = None, num_cpus: float | None = None, progress: Progress | bool = False,
) -> Checkpoint:  # fmt: skip
    """Add the episodes of a file, as one checkpoint named after it.

    engine, workers, num_cpus: as of `episodes.map`; each worker reads the file.  job: a name under which staged
    episodes are kept: after whatever stopped it, the same call goes on.  progress: as of `episodes.map`.
    """
    source = _File(url, storage_options)
    about = {"npz": {"left_out": source.laid_out.left_out}}
    return archive_dataset(
        arc,
        name or PurePath(str(url)).stem,
        source,
        about,
        Schema(),
        run,
        crew=Crew(engine, workers, num_cpus),
        job=job,
        progress=progress,
    )


class _LaidOut(NamedTuple):
    """The episodes of a file: how many, and each by its number. left_out: the names of other arrays."""

    episodes: int
    episode: Callable[[int], Imported]
    left_out: Sequence[str] = ()


class _File(Source):
    """A file, which is read whole."""

    def __init__(self, url: Any, storage_options: Mapping[str, Any] | None) -> None:
        self.where = str(url)
        self._url = url
        self._options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._options)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        suffix, data = _suffix_of(self._url), read_file(self._url, self._options)
        with reading(self.where, f"{suffix} file"):
            return _read_npz(data, self.where) if suffix == ".npz" else _read_hdf5(data)

    @cached_property
    def laid_out(self) -> _LaidOut:
        """Its episodes."""
        arrays = self._arrays
        with reading(self.where, f"{_suffix_of(self._url)} file"):
            return _by_episode(arrays) if "num_episodes" in arrays else _flat(arrays, self.where)

    def sizes(self) -> list[int]:
        nbytes = sum(np.asarray(array).nbytes for array in self._arrays.values())
        count = self.laid_out.episodes
        return [nbytes // max(1, count)] * count

    def read(self, episodes: Sequence[int]) -> Iterator[Imported]:
        return map(self.laid_out.episode, episodes)


def export_dataset(
    source: Any,
    url: Any,
    *,
    fields: Any = None,
    observations: str | None = None,
    actions: str | None = None,
    rewards: str | None = None,
    layout: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write episodes to one file, `.npz` or `.h5`.

    fields: read only these.  observations, actions, rewards: names of the fields, where not the usual ones. Of
    observations with one row more than steps the last is left out, and so are episodes without steps.
    layout: "flat", or "episodes" (default for HDF5: that of d3rlpy 2).
    """
    suffix = _suffix_of(url)
    layout = layout or ("episodes" if suffix in HDF5 else "flat")
    check_option("layout", layout, ("flat", "episodes"))
    names = {"observations": observations, "actions": actions, "rewards": rewards}
    parts = [(e, _rows_by_role(e, steps, roots)) for e, steps, roots in by_role(source, fields, names)]
    arrays = _one_after_the_other(parts) if layout == "episodes" else _end_to_end(parts)
    write_file(url, _encoded(suffix, arrays), storage_options)


def _suffix_of(url: Any) -> str:
    suffix = PurePath(str(url)).suffix
    if suffix not in (".npz", *HDF5):
        raise UsageError(f"{url}: the name must end in .npz, {' or '.join(HDF5)}")
    return suffix


# -- layouts -----------------------------------------------------------------------------------------------------------


def _rows_by_role(episode: Episode, steps: dict[str, Any], roots: Mapping[str, Path]) -> dict[str, Any]:
    """One row a step of observations (an array, or a list of one of each kind), actions and rewards of an episode."""

    def rows(values: Any, name: str) -> Array:
        array = row(values, episode.length, name)
        if array.dtype.kind == "V":
            raise FieldError(
                f"field {name!r} is {array.dtype}, which these files don't know; archive it as another dtype"
            )
        return array.astype(str) if array.dtype.kind == "O" else array  # strings of any width would be pickled

    found = {role: lookup(steps, root) for role, root in roots.items()}
    if isinstance(seen := found["observations"], Mapping):
        found["observations"] = [rows(leaf, "/".join(path)) for path, leaf in flatten({"observations": seen})]
    return {role: value if isinstance(value, list) else rows(value, role) for role, value in found.items()}


def _one_after_the_other(parts: list[tuple[Episode, dict[str, Any]]]) -> dict[str, Any]:
    out: dict[str, Any] = {"columns": [*REQUIRED, "terminated"], "num_episodes": len(parts), "version": VERSION}
    for i, (episode, roles) in enumerate(parts):
        observations, actions, rewards = (roles[name] for name in REQUIRED)
        if isinstance(observations, list):
            out |= {f"observations_{i}_{j}": kind for j, kind in enumerate(observations)}
        else:
            out[f"observations_{i}"] = observations
        out[f"actions_{i}"] = actions[:, None] if actions.ndim == 1 else actions
        out[f"rewards_{i}"] = rewards.reshape(len(rewards), -1)
        out[f"terminated_{i}"] = bool(episode.terminated)
    return out


def _by_episode(arrays: Mapping[str, Any]) -> _LaidOut:
    columns = [name.decode() if isinstance(name, bytes) else str(name) for name in arrays["columns"]]
    for name in columns:
        [*name]  # noqa: B018 (an error where numpy gives characters that are none)

    def episode(i: int) -> Imported:
        found: dict[str, Any] = {}
        for name in columns:
            several = [arrays[f"{name}_{i}_{j}"] for j in range(len(arrays)) if f"{name}_{i}_{j}" in arrays]
            if f"{name}_{i}" not in arrays and not several:
                raise IntegrityError(f"episode {i} of the file has no {name}; it was cut off, or written by other code")
            found[name] = arrays[f"{name}_{i}"] if not several else {str(j): one for j, one in enumerate(several)}
        terminated = bool(found.pop("terminated", False))
        return Imported(found, terminated, not terminated)

    count = int(arrays["num_episodes"])
    if count > len(arrays):
        raise IntegrityError(f"it says that it has {count} episodes, and has {len(arrays)} arrays: it was cut off")
    return _LaidOut(count, episode)


def _end_to_end(parts: list[tuple[Episode, dict[str, Any]]]) -> dict[str, Any]:
    if any(isinstance(roles["observations"], list) for _, roles in parts):
        raise FieldError("the flat layout has one array of observations; name one field, or give layout='episodes'")
    out = {}
    for name in REQUIRED:
        arrays = [roles[name] for _, roles in parts]
        if len({array.shape[1:] for array in arrays}) > 1:
            raise FieldError(
                f"{name} differ in shape between episodes; the flat layout has one, so give layout='episodes'"
            )
        out[name] = np.concatenate(arrays)
    ends = np.cumsum([episode.length for episode, _ in parts]) - 1
    terminals, last = np.zeros((2, int(ends[-1]) + 1), bool)
    terminals[ends] = [bool(episode.terminated) for episode, _ in parts]
    last[ends] = True
    return out | {"terminals": terminals, "timeouts": last & ~terminals, "episode_terminals": last}


def _flat(arrays: Mapping[str, Any], where: str) -> _LaidOut:
    """The episodes of a flat file."""
    missing = [name for name in (*REQUIRED, "terminals") if name not in arrays]
    if missing:
        raise FieldError(
            f"{where} has no {missing[0]!r}, so it is no such dataset; it has: {', '.join(sorted(arrays))}"
        )
    length = int(np.size(arrays["terminals"]))
    odd = [name for name in (*REQUIRED, *ENDS) if name in arrays and np.shape(arrays[name])[:1] != (length,)]
    if odd or not length:
        what = f"{odd[0]} of shape {list(np.shape(arrays[odd[0]]))}" if odd else "no steps"
        raise FieldError(f"{where} has {length} terminals and {what}; it takes one or more rows, as many of each")
    terminals = np.asarray(arrays["terminals"], bool).reshape(length)
    over = np.asarray(arrays.get("timeouts", arrays.get("episode_terminals", terminals)), bool).reshape(length)
    kept = {name: array for name, array in arrays.items() if name not in ENDS and np.shape(array)[:1] == (length,)}
    bounds = ascending(np.r_[0, np.flatnonzero(terminals | over) + 1, length]).tolist()

    def episode(i: int) -> Imported:
        start, stop = bounds[i], bounds[i + 1]
        terminated = bool(terminals[stop - 1])
        steps = _nested({name: array[start:stop] for name, array in kept.items()})
        return Imported(steps, terminated, bool(over[stop - 1]) and not terminated)

    return _LaidOut(len(bounds) - 1, episode, sorted(set(arrays) - set(kept) - set(ENDS)))


def _nested(steps: dict[str, Array]) -> dict[str, Any]:
    folders = {name[:i] for name in steps for i, c in enumerate(name) if c == "/"}
    if both := sorted(folders & set(steps)):
        raise FieldError(f"the file has an array {both[0]!r} and others below it, such as '{both[0]}/...'; rename one")
    return unflatten({tuple(name.split("/")): array for name, array in steps.items()})


# -- files -------------------------------------------------------------------------------------------------------------


def _read_npz(data: bytes, where: str) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        _check_size(where, sum(member.file_size for member in file.zip.infolist()), len(data))
        return {name: file[name] for name in file.files}


def _read_hdf5(data: bytes) -> dict[str, Any]:
    h5py = system("h5py", "h5py")
    with h5py.File(io.BytesIO(data), "r") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        out = {name: _dataset(file[name]) for name in names}
    return {name: value for name, value in out.items() if not isinstance(value, bytes) or name == "version"}


def _dataset(item: Any) -> Any:
    if item.external or item.is_virtual:
        raise IntegrityError(
            f"{item.name} of the HDF5 file has its data in another file of this machine, which was not opened; copy "
            "all into one file"
        )
    _check_size(repr(item.name), item.nbytes, item.id.get_storage_size())
    texts = item.dtype.kind == "O" and item.shape
    return np.asarray(item.asstr()[()]).astype(str) if texts else item[()]


def _check_size(what: str, nbytes: int, stored: int) -> None:
    if nbytes > max(_SMALL_BYTES, _MOST_TIMES * stored):
        raise IntegrityError(f"{what} says that it has {nbytes} bytes, which the file cannot hold")


def _encoded(suffix: str, arrays: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    if suffix == ".npz":
        named: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
        np.savez_compressed(out, **named)
    else:
        with system("h5py", "h5py").File(out, "w") as file:
            for name, value in arrays.items():
                texts = isinstance(value, np.ndarray) and value.dtype.kind == "U"
                file.create_dataset(name, data=value.astype(object) if texts else value)
    return out.getvalue()
