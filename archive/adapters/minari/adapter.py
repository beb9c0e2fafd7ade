"""Import and export of Minari datasets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive import Archive
from archive.adapters import (
    LEAVE_OUT,
    Imported,
    about_of,
    archive_dataset,
    episodes_of,
    path_of_role,
    reading,
    role_of,
    system,
)
from archive.base import FieldError, NotFoundError, UsageError, show
from archive.checkpoint import Checkpoint
from archive.fields import Path, Schema, flatten, lookup, to_path
from archive.read import Episode

INSTALL = "'minari[hdf5]'"
KEPT = ("observations", "actions", "rewards", "terminations", "truncations")
NOT_KEPT = ("observation_space", "action_space", "data_format", "dataset_size", "total_steps", "total_episodes")


def import_dataset(dataset: Any, arc: Archive, *, name: str | None = None, run: str = "main") -> Checkpoint:
    """Add a dataset's episodes, as one checkpoint named after it."""
    minari = system("minari", INSTALL)
    dataset = _local(minari, dataset) if isinstance(dataset, str) else dataset
    pairs = (
        (_steps(e), e, next(iter(dataset.storage.get_episode_metadata([e.id])))) for e in dataset.iterate_episodes()
    )
    where = f"dataset {dataset.spec.dataset_id!r}"
    with reading(where):
        first = next(pairs, None)
    if first is None:
        raise FieldError(f"{where} has no episodes")

    def every() -> Iterator[Imported]:
        for steps, episode, about in itertools.chain([first], pairs):
            ends = bool(episode.terminations[-1]), bool(episode.truncations[-1])
            yield Imported(steps, *ends, metadata=_plain(about))

    schema = Schema(axes={path: axis for path, axis in _axes(first[0]) if axis != "step"})
    about = {"minari": _about(dataset)}
    return archive_dataset(arc, name or dataset.spec.dataset_id.replace("/", "-"), every(), about, schema, run, where)


def export_dataset(
    source: Any,
    dataset_id: str,
    *,
    fields: Any = None,
    observations: str | None = None,
    actions: str | None = None,
    rewards: str | None = None,
    next_observations: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    jpeg_encoding: bool = False,
    **options: Any,
) -> Any:
    """Make a Minari dataset of episodes that have steps; the MinariDataset.

    fields: read only these.
    observations, actions, rewards: names of the fields, where they are not the usual ones.
    next_observations: the field
    (or nest) whose last row follows the last step, where observations have only one row a step; default is what the
    archive's `Schema(next_of=...)` says.
    spaces: default those that the import noted, else boxes without bounds.  options: those of Minari's
    `create_dataset_from_buffers`.
    """
    minari, buffers = system("minari", INSTALL), []
    noted = about_of(source, "minari")
    spaces = {"observation_space": observation_space, "action_space": action_space}
    for key, space in spaces.items():
        if space is None and key in noted:
            spaces[key] = system("minari.serialization", INSTALL).deserialize_space(noted[key])
    chosen = episodes_of(source)
    following = {path: after for after, path in chosen.next_of.items()}
    for i, (episode, steps) in enumerate(chosen.stream(fields)):
        root = path_of_role(steps, "observations", observations)
        if next_observations is not None:
            following = {root: to_path(next_observations)}
        found = {
            "observation_space": _one_more(root, steps, following, episode),
            "action_space": role_of(steps, "actions", actions),
        }
        for key, value in found.items():
            spaces[key] = _space_of(value) if spaces[key] is None else spaces[key]
        arrays = {
            "observations": _as_space(found["observation_space"], spaces["observation_space"]),
            "actions": _as_space(found["action_space"], spaces["action_space"]),
            "rewards": role_of(steps, "rewards", rewards),
        }
        _check_names({**arrays, "infos": steps.get("infos", {})})
        buffers.append(_buffer(i, episode, steps, arrays))
    try:
        return minari.create_dataset_from_buffers(dataset_id, buffers, jpeg_encoding=jpeg_encoding, **spaces, **options)
    except (ValueError, TypeError) as e:
        raise UsageError(f"Minari does not take this as dataset {dataset_id!r}: {e}") from e


def _check_names(arrays: Mapping[str, Any]) -> None:
    """FieldError for a name that HDF5, in which Minari keeps nests, takes for a path, or cannot have."""
    for path, _ in flatten({name: value for name, value in arrays.items() if isinstance(value, Mapping)}):
        if odd := [key for key in path if key in ("", ".") or "/" in key or "\0" in key]:
            raise FieldError(
                f"Minari cannot read {show(path)!r} back: HDF5 has no name {odd[0]!r}; {LEAVE_OUT}, or write the field "
                "by another name"
            )


def _local(minari: Any, dataset_id: str) -> Any:
    try:
        return minari.load_dataset(dataset_id)
    except FileNotFoundError as e:
        raise NotFoundError(
            f"dataset {dataset_id!r} is not on this machine; minari.download_dataset() brings it"
        ) from e


def _buffer(number: int, episode: Episode, steps: dict[str, Any], arrays: Mapping[str, Any]) -> Any:
    last = np.arange(episode.length) == episode.length - 1
    return system("minari.data_collector", INSTALL).EpisodeBuffer(
        id=number,
        seed=episode.metadata.get("seed"),
        terminations=steps.get("terminations", last & bool(episode.terminated)),
        truncations=steps.get("truncations", last & bool(episode.truncated)),
        infos=steps.get("infos"),
        **arrays,
    )


def _steps(episode: Any) -> dict[str, Any]:
    steps = {name: _named(getattr(episode, name)) for name in KEPT}
    return {**steps, "infos": _named(episode.infos)} if episode.infos else steps


def _named(value: Any) -> Any:
    """Tuples of a space as Minari's own file has them: by number."""
    if isinstance(value, Mapping):
        return {str(key): _named(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {f"_index_{i}": _named(inner) for i, inner in enumerate(value)}
    return np.asarray(value)


def _as_space(value: Any, space: Any) -> Any:
    inner = getattr(space, "spaces", None)
    if isinstance(value, Mapping) and isinstance(inner, tuple):
        return tuple(_as_space(value[f"_index_{i}"], one) for i, one in enumerate(inner))
    if isinstance(value, Mapping):
        return {key: _as_space(one, inner[key] if inner else None) for key, one in value.items()}
    return list(value) if value.dtype.kind in "UO" else value


def _space_of(value: Any) -> Any:
    spaces = system("gymnasium.spaces", "gymnasium")
    if isinstance(value, Mapping):
        return spaces.Dict({key: _space_of(inner) for key, inner in value.items()})
    low, high = (0, 1) if value.dtype == bool else (-np.inf, np.inf)
    if value.dtype.kind in "iu":
        low, high = np.iinfo(value.dtype).min, np.iinfo(value.dtype).max
    return spaces.Box(low, high, value.shape[1:], value.dtype)


def _axes(steps: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    length = len(steps["rewards"])
    for path, leaf in flatten(steps):
        if isinstance(leaf, np.ndarray):
            yield path, "step" if len(leaf) == length else "offset" if len(leaf) == length + 1 else "free"


def _one_more(root: Path, steps: dict[str, Any], following: Mapping[Path, Path], episode: Episode) -> Any:
    """Observations with the one after the last step.

    following: path of an observation, or of a nest of them -> of what follows each of its steps.
    """
    value = lookup(steps, root)
    if isinstance(value, Mapping):
        after = following.get(root)
        below = {(*root, key): (*after, key) for key in value} if after is not None else {}
        return {key: _one_more((*root, key), steps, {**following, **below}, episode) for key in value}
    if len(value) == episode.length + 1:
        return value
    after = following.get(root)
    rows = None if after is None else lookup(steps, after)
    if len(value) != episode.length or not isinstance(rows, (np.ndarray, list)) or not len(rows):
        raise FieldError(
            f"episode {episode.id!r} has {len(value)} rows of {show(root)!r} for {episode.length} steps, Minari has "
            "one more: the one after the last step; name the field that has it: next_observations='next/obs' (archives "
            "written with Schema(next_of=...) say it themselves)"
        )
    return np.concatenate([value, rows[-1:]])


def _about(dataset: Any) -> dict[str, Any]:
    serialize = system("minari.serialization", INSTALL).serialize_space
    spaces = {"observation_space": dataset.observation_space, "action_space": dataset.action_space}
    known = {key: value for key, value in dataset.storage.metadata.items() if key not in NOT_KEPT}
    return {**_plain(known), **{key: serialize(space) for key, space in spaces.items()}}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; sets as sorted lists."""

    def simple(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else value.tolist() if hasattr(value, "tolist") else str(value)

    plain: dict[str, Any] = json.loads(json.dumps(dict(values), default=simple))
    return plain
