"""Import and export of npz and HDF5 files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from archive import Archive
from archive.adapters import Array, Imported, archive_dataset, check_option, episodes_of, reading, role_of, row, system
from archive.base import FieldError, IntegrityError, UsageError
from archive.checkpoint import Checkpoint
from archive.fields import Schema, flatten, unflatten
from archive.read import Episode
from archive.store import read_file, write_file

HDF5 = (".h5", ".hdf5")
REQUIRED = ("observations", "actions", "rewards")
ENDS = ("terminals", "timeouts", "episode_terminals")
_SMALL_BYTES = 1 << 24  # which may be all one value, that is stored nowhere
_MOST_TIMES = 1100  # of its bytes that a compressed file may hold
VERSION = "2.1"  # of d3rlpy's layout of episodes


def import_dataset(
    url: Any,
    arc: Archive,
    *,
    name: str | None = None,
    run: str = "main",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Add the episodes of a file, as one checkpoint named after it."""
    path = PurePath(str(url))
    data = read_file(url, storage_options)
    with reading(str(url), f"{path.suffix} file"):
        arrays = _read(path.suffix, data, str(url))
        several = "num_episodes" in arrays
        episodes, left_out = (_by_episode(arrays), []) if several else _flat(arrays, str(url))
    about = {"npz": {"left_out": left_out}}
    return archive_dataset(arc, name or path.stem, episodes, about, Schema(), run, str(url))


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
    suffix = PurePath(str(url)).suffix
    layout = layout or ("episodes" if suffix in HDF5 else "flat")
    check_option("layout", layout, ("flat", "episodes"))
    names = {"observations": observations, "actions": actions, "rewards": rewards}
    parts = [(e, _by_role(steps, e, names)) for e, steps in episodes_of(source).stream(fields)]
    arrays = _one_after_the_other(parts) if layout == "episodes" else _end_to_end(parts)
    write_file(url, _encoded(suffix, arrays, str(url)), storage_options)


def _by_role(steps: dict[str, Any], episode: Episode, names: Mapping[str, str | None]) -> dict[str, Any]:
    """Observations (an array, or a list of one of each kind), actions and rewards of one episode."""
    found = {role: role_of(steps, role, given) for role, given in names.items()}
    observations = found.pop("observations")
    kinds = [_known(leaf, episode.length, "/".join(path)) for path, leaf in flatten({"observations": observations})]
    rest = {role: _known(array, episode.length, role) for role, array in found.items()}
    return {"observations": kinds if isinstance(observations, Mapping) else kinds[0], **rest}


def _known(values: Any, length: int, name: str) -> Array:
    """One row a step, of a dtype that these files know: strings of fixed width,
    as those of any width would be pickled."""
    array = row(values, length, name)
    if array.dtype.kind == "V":
        raise FieldError(f"field {name!r} is {array.dtype}, which these files don't know; archive it as another dtype")
    return array.astype(str) if array.dtype.kind == "O" else array


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


def _by_episode(arrays: Mapping[str, Any]) -> Iterator[Imported]:
    columns = [name.decode() if isinstance(name, bytes) else str(name) for name in arrays["columns"]]
    for i in range(int(arrays["num_episodes"])):
        found: dict[str, Any] = {}
        for name in columns:
            several = [arrays[f"{name}_{i}_{j}"] for j in range(len(arrays)) if f"{name}_{i}_{j}" in arrays]
            if f"{name}_{i}" not in arrays and not several:
                raise IntegrityError(f"episode {i} of the file has no {name}; it was cut off, or written by other code")
            found[name] = arrays[f"{name}_{i}"] if not several else {str(j): one for j, one in enumerate(several)}
        terminated = bool(found.pop("terminated", False))
        yield Imported(found, terminated, not terminated)


def _flat(arrays: Mapping[str, Any], where: str) -> tuple[Iterator[Imported], list[str]]:
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
    stops = np.flatnonzero(terminals | over) + 1
    stops = np.r_[stops, length] if not len(stops) or stops[-1] < length else stops
    starts = np.r_[0, stops[:-1]]

    def every() -> Iterator[Imported]:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            steps = {name: array[start:stop] for name, array in kept.items()}
            terminated = bool(terminals[stop - 1])
            yield Imported(_nested(steps), terminated, bool(over[stop - 1]) and not terminated)

    return every(), sorted(set(arrays) - set(kept) - set(ENDS))


def _nested(steps: dict[str, Array]) -> dict[str, Any]:
    folders = {name[:i] for name in steps for i, c in enumerate(name) if c == "/"}
    if both := sorted(folders & set(steps)):
        raise FieldError(f"the file has an array {both[0]!r} and others below it, such as '{both[0]}/...'; rename one")
    return unflatten({tuple(name.split("/")): array for name, array in steps.items()})


def _read(suffix: str, data: bytes, where: str) -> dict[str, Any]:
    if suffix == ".npz":
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            inflated = sum(member.file_size for member in file.zip.infolist())
            if inflated > max(_SMALL_BYTES, _MOST_TIMES * len(data)):
                raise IntegrityError(f"{where} says that it has {inflated} bytes, which the file cannot hold")
            return {name: file[name] for name in file.files}
    if suffix in HDF5:
        return _read_hdf5(data)
    raise _no_suffix(where)


def _no_suffix(where: str) -> UsageError:
    return UsageError(f"{where}: the name must end in .npz, {' or '.join(HDF5)}")


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
    if item.nbytes > max(_SMALL_BYTES, _MOST_TIMES * item.id.get_storage_size()):
        raise IntegrityError(f"{item.name!r} says that it has {item.nbytes} bytes, which the file cannot hold")
    texts = item.dtype.kind == "O" and item.shape
    return np.asarray(item.asstr()[()]).astype(str) if texts else item[()]


def _encoded(suffix: str, arrays: Mapping[str, Any], where: str) -> bytes:
    out = io.BytesIO()
    if suffix == ".npz":
        named: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
        np.savez_compressed(out, **named)
    elif suffix in HDF5:
        with system("h5py", "h5py").File(out, "w") as file:
            for name, value in arrays.items():
                texts = isinstance(value, np.ndarray) and value.dtype.kind == "U"
                file.create_dataset(name, data=value.astype(object) if texts else value)
    else:
        raise _no_suffix(where)
    return out.getvalue()
