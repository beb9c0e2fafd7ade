"""Minari datasets into an archive and back.

```python
ck = minari.import_dataset("hand/pen-v0", arc)  # a local dataset's id, or a MinariDataset
minari.export_dataset(ck, "hand/pen-again-v0")
good = ck.episodes.filter(where="return > 100")
if len(good):
    minari.export_dataset(good, "hand/pen-good-v0")  # spaces that are not known are boxes without bounds
```

| of Minari | in the archive |
|---|---|
| observations, infos of T + 1 rows | fields of the same nesting on axis offset; of a tuple, keys `_index_0`, ... |
| actions, rewards, terminations, truncations | fields, one row a step |
| an episode's id, seed and other attributes | its metadata |
| spaces and what else is known of the dataset | progress of the import's checkpoint: `ck.progress["minari"]` |

What is exported is Minari's: a dataset in its own folder, by its own code; images are not made JPEG unless asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive import Archive
from archive.adapters import (
    LEAVE_OUT,
    Imported,
    Source,
    about_of,
    archive_dataset,
    by_role,
    episodes_of,
    reading,
    system,
)
from archive.base import FieldError, NotFoundError, UsageError, cached_property, show
from archive.checkpoint import Checkpoint
from archive.fields import Path, Schema, flatten, lookup, to_path
from archive.jobs import Crew, Progress
from archive.read import Episode

__all__ = [
    "export_dataset",
    "import_dataset",
]

INSTALL = "'minari[hdf5]'"
KEPT = ("observations", "actions", "rewards", "terminations", "truncations")
NOT_KEPT = ("observation_space", "action_space", "data_format", "dataset_size", "total_steps", "total_episodes")


def import_dataset(
    dataset: Any,
    arc: Archive,
    *,
    name: str | None = None,
    run: str = "main",
    engine: str = "local",
    job: str | None = None,
    workers: int | None = None,
    num_cpus: float | None = None,
    progress: Progress | bool = False,
) -> Checkpoint:
    """Add a dataset's episodes, as one checkpoint named after it.

    engine, workers, num_cpus: as of `episodes.map`; the dataset must be on the machines of all.  job: a name under
    which staged episodes are kept: after whatever stopped it, the same call goes on.  progress: as of
    `episodes.map`.
    """
    minari = system("minari", INSTALL)
    if isinstance(dataset, str):
        try:
            dataset = minari.load_dataset(dataset)
        except FileNotFoundError as e:
            raise NotFoundError(
                f"dataset {dataset!r} is not on this machine; minari.download_dataset() brings it"
            ) from e
    source = _Dataset(dataset)
    first = source.first
    length = len(first.steps["rewards"])
    arrays = {path: leaf for path, leaf in flatten(first.steps) if isinstance(leaf, np.ndarray)}
    odd = {path: len(leaf) for path, leaf in arrays.items() if len(leaf) != length}
    schema = Schema(axes={path: "offset" if rows == length + 1 else "free" for path, rows in odd.items()})
    name = name or dataset.spec.dataset_id.replace("/", "-")
    work: dict[str, Any] = {"crew": Crew(engine, workers, num_cpus), "job": job, "progress": progress}
    return archive_dataset(arc, name, source, {"minari": _about(dataset)}, schema, run, **work)


class _Dataset(Source):
    """A dataset of Minari, with the episodes that it is filtered to."""

    def __init__(self, dataset: Any) -> None:
        self.where = f"dataset {dataset.spec.dataset_id!r}"
        self._dataset = dataset
        with reading(self.where):
            self._ids = [int(one) for one in dataset.episode_indices]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset,)

    @cached_property
    def first(self) -> Imported:
        """Its first episode; FieldError if there is none."""
        if not self._ids:
            raise FieldError(f"{self.where} has no episodes")
        with reading(self.where):
            return next(self.read([0]))

    def sizes(self) -> list[int]:
        leaves = (leaf for _, leaf in flatten(self.first.steps))
        return [sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))] * len(self._ids)

    def read(self, episodes: Sequence[int]) -> Iterator[Imported]:
        storage = self._dataset.storage
        for episode in self._dataset.iterate_episodes([self._ids[i] for i in episodes]):
            about = next(iter(storage.get_episode_metadata([episode.id])))
            steps = {name: _named(getattr(episode, name)) for name in (*KEPT, *(["infos"] if episode.infos else []))}
            ends = bool(episode.terminations[-1]), bool(episode.truncations[-1])
            yield Imported(steps, *ends, metadata=_plain(about))


def _named(value: Any) -> Any:
    """Tuples of a space as Minari's own file has them: by number."""
    if isinstance(value, Mapping):
        return {str(key): _named(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {f"_index_{i}": _named(inner) for i, inner in enumerate(value)}
    return np.asarray(value)


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
    next_observations: the field (or nest) whose last row follows the last step, where observations have only one row a
    step; default is what the archive's `Schema(next_of=...)` says.
    spaces: default those that the import noted, else boxes without bounds.  options: those of Minari's
    `create_dataset_from_buffers`.
    """
    minari, buffers, noted = system("minari", INSTALL), [], about_of(source, "minari")
    buffer_of = system("minari.data_collector", INSTALL).EpisodeBuffer
    spaces = {"observation_space": observation_space, "action_space": action_space}
    for key, space in spaces.items():
        if space is None and key in noted:
            spaces[key] = system("minari.serialization", INSTALL).deserialize_space(noted[key])
    following = {path: after for after, path in episodes_of(source).next_of.items()}
    names = {"observations": observations, "actions": actions, "rewards": rewards}
    for i, (episode, steps, roots) in enumerate(by_role(source, fields, names)):
        if next_observations is not None:
            following = {roots["observations"]: to_path(next_observations)}
        arrays = {role: lookup(steps, root) for role, root in roots.items()}
        arrays["observations"] = _one_more(roots["observations"], steps, following, episode)
        for role, key in (("observations", "observation_space"), ("actions", "action_space")):
            spaces[key] = _space_of(arrays[role]) if spaces[key] is None else spaces[key]
            arrays[role] = _as_space(arrays[role], spaces[key])
        _check_names({**arrays, "infos": steps.get("infos", {})})
        last = np.arange(episode.length) == episode.length - 1
        ends = {"terminations": episode.terminated, "truncations": episode.truncated}
        arrays |= {name: steps.get(name, last & bool(end)) for name, end in ends.items()}
        buffers.append(buffer_of(id=i, seed=episode.metadata.get("seed"), infos=steps.get("infos"), **arrays))
    try:
        return minari.create_dataset_from_buffers(dataset_id, buffers, jpeg_encoding=jpeg_encoding, **spaces, **options)
    except (ValueError, TypeError) as e:
        raise UsageError(f"Minari does not take this as dataset {dataset_id!r}: {e}") from e


def _one_more(root: Path, steps: dict[str, Any], following: Mapping[Path, Path], episode: Episode) -> Any:
    """Observations with the one after the last step.

    following: path of an observation, or of a nest of them -> of what follows each of its steps.
    """
    value = lookup(steps, root)
    after = following.get(root)
    if isinstance(value, Mapping):
        below = {(*root, key): (*after, key) for key in value} if after is not None else {}
        return {key: _one_more((*root, key), steps, {**following, **below}, episode) for key in value}
    if len(value) == episode.length + 1:
        return value
    rows = None if after is None else lookup(steps, after)
    if len(value) != episode.length or not isinstance(rows, (np.ndarray, list)) or not len(rows):
        raise FieldError(
            f"episode {episode.id!r} has {len(value)} rows of {show(root)!r} for {episode.length} steps, Minari has "
            "one more: the one after the last step; name the field that has it: next_observations='next/obs' (archives "
            "written with Schema(next_of=...) say it themselves)"
        )
    return np.concatenate([value, rows[-1:]])


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


def _check_names(arrays: Mapping[str, Any]) -> None:
    """FieldError for a name that HDF5, in which Minari keeps nests, takes for a path, or cannot have."""
    for path, _ in flatten({name: value for name, value in arrays.items() if isinstance(value, Mapping)}):
        if odd := [key for key in path if key in ("", ".") or "/" in key or "\0" in key]:
            raise FieldError(
                f"Minari cannot read {show(path)!r} back: HDF5 has no name {odd[0]!r}; {LEAVE_OUT}, or write the field "
                "by another name"
            )
