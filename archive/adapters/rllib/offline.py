"""Offline training of RLlib's from an archive: its episodes as those that RLlib learns from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.offline.offline_prelearner import OfflinePreLearner

import archive
import archive.ray
from archive.base import FieldError, NotFoundError, UsageError, show
from archive.fields import FieldSpec, Path, to_path, unflatten
from archive.read import Episodes

NAMES: Mapping[str, tuple[str, ...]] = {  # what RLlib needs: the fields that are taken for it, the first that is there
    "obs": ("obs", "observation", "observations"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward", "next/reward"),
    "next_obs": ("next/obs", "next/observation", "next_obs", "new_obs"),
    "extra_model_outputs": ("extra_model_outputs",),
}
_NEEDED = ("obs", "actions", "rewards")
_OPENING = ("commit", "storage_options", "allow_bases")
_READING = ("override_num_blocks", "concurrency", "ray_remote_args")
_MANGLED = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")  # pathlib takes a slash from a URL
_SHOWN = 3  # ids in an error


class ArchiveOfflineData(OfflineData):  # type: ignore[misc]
    """The episodes of an archive for RLlib's offline algorithms.

        config.offline_data(
            offline_data_class=rllib.ArchiveOfflineData, input_=["s3://bucket/run"],
            input_read_method_kwargs={"filter": {"complete": True, "where": "return > 10"}, "names": {"obs": "image"}},
        )

    `input_read_method_kwargs`: `names`, the field by what RLlib calls it (default: `NAMES`); `filter`, the conditions
    of `Episodes.filter`, or `where` alone; `commit`, `storage_options` and `allow_bases` of `archive.open`; and
    `override_num_blocks`, `concurrency` and `ray_remote_args` of `archive.ray.read`. RLlib gets whole episodes, as with
    `input_read_episodes`: of one agent, and all done. What cannot be trained on is refused before training.
    """

    def __init__(self, config: Any) -> None:
        if config.is_multi_agent:
            raise UsageError("RLlib's offline algorithms train one agent: the config has several policies or modules")
        url, given = url_of(config.input_), dict(config.input_read_method_kwargs)
        names = {what: (name,) for what, name in given.pop("names", {}).items()}
        opening = {name: given.pop(name) for name in _OPENING if name in given}
        conditions = dict(given.pop("filter", {})) | {name: given.pop(name) for name in ("where",) if name in given}
        if unknown := {*names} - {*NAMES} or {*given} - {*_READING}:
            raise UsageError(
                f"{min(unknown)!r} is not known: input_read_method_kwargs takes names (of {', '.join(NAMES)}), filter, "
                f"where, {', '.join((*_OPENING, *_READING))}"
            )
        episodes = _checked(archive.open(url, **opening).episodes.filter(**conditions), url)
        found = _found(episodes, {**NAMES, **names}, url, with_last=not config.ignore_final_observation)
        archive.ray.register()
        own = config.copy(copy_frozen=False)
        own.input_, own.input_read_method, own.input_filesystem = [episodes], "read_archive", None
        own.input_read_episodes, own.input_read_sample_batches = False, True
        fields = sorted({path for one in found.values() for path in one.paths})
        own.input_read_method_kwargs = {**given, "fields": fields, "columns": ["terminated", "truncated"]}
        super().__init__(own)
        own.input_, self.path = [url], [url]
        kinds = (_PreLearner, own.prelearner_class or OfflinePreLearner)
        self.prelearner_class = type("ArchivePreLearner", kinds, {"rows": _Rows(found, config)})


def url_of(given: Any) -> Any:
    """The URL of the one archive that `input_` names, as it was before it was made a path."""
    every = list(given) if isinstance(given, list | tuple) else [given]
    if len(every) != 1 or not isinstance(every[0], str | PurePath):
        raise UsageError(f"input_={given!r}: give the URL of one archive; resharding.merge makes one of several")
    return _MANGLED.sub(r"\1://", str(every[0]))


def _checked(episodes: Episodes, url: str) -> Episodes:
    """The episodes with steps; an error for those that RLlib cannot train on."""
    episodes = episodes.pick(np.flatnonzero(episodes.lengths() > 0)).frozen()
    if not len(episodes):
        raise NotFoundError(f"{url} has no episode with steps, or none that meets the filter")
    if len(left := episodes.filter(complete=False)):
        ids = ", ".join(map(repr, left.columns(["episode_id"])["episode_id"].to_pylist()[:_SHOWN]))
        raise UsageError(
            f"{len(left)} of {len(episodes)} episodes of {url} are open, or lack steps, such as {ids}; RLlib trains on "
            'whole ones: leave them out with input_read_method_kwargs={"filter": {"complete": True}}'
        )
    return episodes


class _Field(NamedTuple):
    """A field, or nest of fields, for what RLlib needs: the specs by their paths within it."""

    specs: dict[Path, FieldSpec]

    @property
    def paths(self) -> list[Path]:
        return [spec.path for spec in self.specs.values()]

    @property
    def has_last(self) -> bool:
        """True if it has a row more than there are steps."""
        return all(spec.axis == "offset" and spec.extra >= 1 for spec in self.specs.values())


def _found(episodes: Episodes, names: Mapping[str, tuple[str, ...]], url: str, *, with_last: bool) -> dict[str, _Field]:
    """The fields by what RLlib calls them. with_last: the observation after the last step is needed."""
    specs = {
        spec.path: spec for schema in episodes.schemas for spec in schema.fields if spec.axis in ("step", "offset")
    }
    every = {spec.path for schema in episodes.schemas for spec in schema.fields}
    out: dict[str, _Field] = {}
    for what, candidates in names.items():
        for path in map(to_path, candidates):
            inner = {known[len(path) :]: spec for known, spec in specs.items() if known[: len(path)] == path}
            if inner and what not in out:
                out[what] = _Field(inner)
    for what in _NEEDED:
        if what in out:
            continue
        if any(path[0] == "agents" for path in every):
            raise UsageError(f"{url} has episodes of several agents, which RLlib does not train on offline")
        raise FieldError(
            f"{url} has no field {' or '.join(map(repr, names[what]))} of a row a step, which RLlib needs as {what}; "
            f'it has {", ".join(episodes.fields)}: name it by input_read_method_kwargs={{"names": {{"{what}": ...}}}}'
        )
    if out["obs"].has_last or not with_last:
        out.pop("next_obs", None)
    elif "next_obs" not in out:
        raise FieldError(
            f"{url} has no observation after the last step: none of {', '.join(names['next_obs'])}, and obs has no row "
            'more than there are steps; name it by "next_obs", or, for BC, set ignore_final_observation=True'
        )
    for what, one in out.items():
        for schema in episodes.schemas:
            if lacking := {*one.paths} - {spec.path for spec in schema.fields}:
                raise FieldError(
                    f"{url}: some episodes lack field {show(min(lacking))!r}, which RLlib needs as {what}: choose "
                    "those that have it, with filter"
                )
    return out


class _PreLearner:
    """The beginning of a prelearner of RLlib's: what it takes for a batch of samples are rows of an archive."""

    rows: _Rows

    def _map_sample_batch_to_episode(self, *given: Any, **_: Any) -> dict[str, Any]:
        batch = next(one for one in given if isinstance(one, Mapping))
        return {"episodes": [self.rows.episode(batch, i) for i in range(len(batch["episode_id"]))]}


class _Rows:
    """Rows of a dataset, each of which is an episode."""

    def __init__(self, found: Mapping[str, _Field], config: Any) -> None:
        self._columns = {what: {path: spec.name for path, spec in one.specs.items()} for what, one in found.items()}
        self._spaces = {"obs": config.observation_space, "actions": config.action_space}

    def episode(self, batch: Mapping[str, Any], i: int) -> Any:
        """The episode of a row, in arrays."""
        leaves = {
            what: {path: np.asarray(batch[name][i]) for path, name in columns.items()}
            for what, columns in self._columns.items()
        }
        steps = len(leaves["rewards"][()])
        for path, rows in leaves["obs"].items():
            after = leaves["next_obs"][path][-1:] if "next_obs" in leaves else rows[steps:][:1]
            after = after if len(after) else np.zeros_like(rows[:1])  # RLlib's ignore_final_observation
            leaves["obs"][path] = np.concatenate([rows[:steps], after])
        values: dict[str, Any] = {
            what: leaves[what][()] if () in leaves[what] else unflatten(leaves[what]) for what in leaves
        }
        obs, actions = (_as_space(values[what], space) for what, space in self._spaces.items())
        extra = values.get("extra_model_outputs", {})
        ended = bool(batch["terminated"][i])
        return SingleAgentEpisode(
            id_=str(batch["episode_id"][i]),
            infos=[{} for _ in range(steps + 1)],
            observations=InfiniteLookbackBuffer(obs),
            actions=InfiniteLookbackBuffer(actions),
            rewards=InfiniteLookbackBuffer(values["rewards"]),
            extra_model_outputs={name: InfiniteLookbackBuffer(value) for name, value in extra.items()},
            terminated=ended,
            truncated=bool(batch["truncated"][i]) or not ended,
            len_lookback_buffer=0,
        )


def _as_space(nest: Any, space: Any) -> Any:
    """A nest with tuples where its space has them: in an archive, their parts have numbers for names."""
    if isinstance(space, spaces.Tuple):
        return tuple(_as_space(nest[str(i)], one) for i, one in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        return {name: _as_space(nest[name], one) for name, one in space.spaces.items()}
    return nest
