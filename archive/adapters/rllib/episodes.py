"""Pure, no I/O: an episode of RLlib's, of one agent or of several, as an episode of the archive, and back.

Of one agent: `obs` and `infos` have a row more than there are steps, `actions`, `rewards` and `extra_model_outputs/...`
one a step; rows that RLlib keeps of before the episode's first step are below `lookback`. Of several agents: all
that an agent has is below `agents/<agent>`, whole, with `agent_t`, its own step at each env step (-1: none). The rest
is in the metadata: types of items, spaces, what hangs between two steps of an agent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from archive.adapters import live, reading
from archive.adapters.rllib.values import arrays_of, cast, casts_of, items_of, leaf_paths, space_of, space_tree
from archive.base import CorruptStateError, FieldError, UpgradeError, UsageError
from archive.fields import Path, Schema, lookup, unflatten

SYSTEM = "rllib"
FORMAT = 1
SINGLE, MULTI = "single", "multi"
_INFOS = "infos"
_SKIPPED = -1  # where an agent has no observation at an env step
_ALL = ("id_", "is_terminated", "is_truncated", "_start_time", "_last_step_time", "_custom_data")
_OF_AGENT = (*_ALL, "agent_id", "module_id", "multi_agent_episode_id", "t_started", "t")
_OF_AGENTS = (*_ALL, "env_t_started", "env_t", "_len_lookback_buffers", "_agent_to_module_mapping")
_HANGING = {  # what agents did, or were given, whose next observation is not there yet: with the kind of dict
    "agent_t_started": int,
    "_hanging_actions_end": None,
    "_hanging_extra_model_outputs_end": dict,
    "_hanging_rewards_end": float,
    "_hanging_rewards_begin": float,
}


class Encoded(NamedTuple):
    """An episode as the archive takes it."""

    fields: dict[str, Any]
    schema: Schema
    metadata: dict[str, Any]
    first: bool
    last: bool
    terminated: bool | None
    truncated: bool | None


def kind_of(episode: Any) -> str:
    """SINGLE or MULTI."""
    return MULTI if isinstance(episode, MultiAgentEpisode) else SINGLE


def mark_of(episode: Any) -> tuple[Any, ...]:
    """A mark that changes with the episode, which RLlib only adds to."""
    agents = list(getattr(episode, "agent_episodes", {None: episode}).values())
    numpy = tuple(one.rewards.finalized for one in agents)
    return len(episode), bool(episode.is_terminated), bool(episode.is_truncated), *map(len, agents), numpy


def encode(episode: Any) -> Encoded:
    """The episode with its exact values; a FieldError or StateError names what cannot be kept."""
    kind, where = kind_of(episode), f"episode {episode.id_!r}"
    writing = _Writing(where)
    about = writing.single(episode, ()) if kind == SINGLE else writing.several(episode)
    metadata = {
        "format": FORMAT,
        "kind": kind,
        "id": str(episode.id_),
        "steps": len(episode),
        "spaces": live.as_text(writing.spaces, where),
        "about": live.as_text(about, where),
    }
    started = episode.t_started if kind == SINGLE else episode.env_t_started
    done = bool(episode.is_terminated or episode.is_truncated)
    ends = (bool(episode.is_terminated), bool(episode.is_truncated)) if done else (None, None)
    schema = Schema(axes=writing.axes, json=writing.json)
    return Encoded(unflatten(writing.fields), schema, {SYSTEM: metadata}, not started, done, *ends)


def decode(fields: Mapping[str, Any], metadata: Mapping[str, Any], steps: int, *, where: str) -> Any:
    """The episode of RLlib's that was archived so, of which there are so many steps."""
    known = metadata.get(SYSTEM)
    if not isinstance(known, Mapping):
        raise CorruptStateError(f"{where} was not saved by archive.adapters.rllib: it has no such metadata")
    with reading(where, "episode of RLlib's"):
        if known["format"] > FORMAT:
            raise UpgradeError(f"{where} is of format {known['format']}, known is {FORMAT}: upgrade this library")
        if known["steps"] != steps:
            raise UsageError(
                f"{where} has {known['steps']} steps, of which {steps} are left, and RLlib's episodes stay whole: plan "
                "with capacity= or max_episodes= rather than max_length="
            )
        found = _Reading(fields, _spaces(known["spaces"]))
        about = live.from_text(known["about"], where)
        return found.single(about, ()) if known["kind"] == SINGLE else found.several(about)


@lru_cache(maxsize=64)
def _spaces(text: str) -> list[Any]:
    """The spaces of an episode: one object for all that have the same."""
    return [space_of(tree) for tree in live.from_text(text, "a space")]


def _columns(episode: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The buffers of an episode of one agent, by their names in the archive."""
    yield ("obs",), episode.observations
    yield (_INFOS,), episode.infos
    yield ("actions",), episode.actions
    yield ("rewards",), episode.rewards
    for key, values in episode.extra_model_outputs.items():
        yield ("extra_model_outputs", key), values


class _Writing:
    """The fields of an episode, and the spaces that it names by their number."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.fields: dict[Path, Any] = {}
        self.axes: dict[Path, str] = {}
        self.json: list[Path] = []
        self.spaces: list[Any] = []
        self._numbers: dict[int, int] = {}

    def single(self, episode: Any, prefix: Path) -> dict[str, Any]:
        """Add the fields of an episode of one agent; what else is known of it."""
        episode.validate()
        buffers = []
        for name, values in _columns(episode):
            axis = "free" if prefix else "offset" if name in (("obs",), (_INFOS,)) else "step"
            rows = episode.observations.len_incl_lookback()
            buffers.append((name, self._buffer((*prefix, *map(str, name)), values, axis, rows)))
        if len(episode) != len(episode.rewards):
            raise FieldError(f"{self._where} says that it has {len(episode)} steps, and has {len(episode.rewards)}")
        about = _attributes(episode, _OF_AGENT)
        spaces = self._space(episode.observation_space), self._space(episode.action_space)
        return about | {"spaces": spaces, "buffers": buffers}

    def several(self, episode: Any) -> dict[str, Any]:
        """Add the fields of an episode of several agents; what else is known of it."""
        names = [str(agent) for agent in {**episode.agent_episodes, **episode.env_t_to_agent_t}]
        if len(set(names)) < len(names):
            raise FieldError(f"{self._where}: two of its agents have the same name: {', '.join(names)}")
        self.fields[("env_t",)] = np.arange(episode.env_t_started, episode.env_t, dtype=np.int64)
        agents = [(agent, self.single(one, _below(agent))) for agent, one in episode.agent_episodes.items()]
        steps = []
        for agent, at in episode.env_t_to_agent_t.items():
            known = [_SKIPPED if one == episode.SKIP_ENV_TS_TAG else one for one in at.data]
            self._put((*_below(agent), "agent_t"), np.array(known, np.int64), "free")
            steps.append((agent, at.lookback))
        spaces = [self._of_agents(one) for one in (episode.observation_space, episode.action_space)]
        about = _attributes(episode, _OF_AGENTS) | {name: dict(getattr(episode, name)) for name in _HANGING}
        return about | {"spaces": spaces, "agents": agents, "steps": steps}

    def _buffer(self, path: Path, values: Any, axis: str, rows: int) -> dict[str, Any]:
        """Add the rows of a buffer; its form. rows: those of the observations. Infos of agents are there, even empty
        ones: episodes of other fields go to other shards."""
        about = {"lookback": values.lookback, "finalized": values.finalized, "space": self._space(values.space)}
        if not values.len_incl_lookback():
            return about | {"data": values.data}
        if path[-1] == _INFOS and not values.finalized:
            if axis != "free" and len(values.data) == rows and all(info == {} for info in values.data):
                return about | {"empty": True}
            self._rows(path, values.data, values.lookback, axis, json=True)
            return about | {"casts": casts_of(values.data)}
        arrays, form = arrays_of(values.data, f"{self._where}, {'/'.join(path)!r}")
        for names, array in arrays.items():
            self._rows((*path, *names), array, values.lookback, axis)
        return about | {"form": form}

    def _rows(self, path: Path, rows: Any, lookback: int, axis: str, *, json: bool = False) -> None:
        if axis != "free" and lookback:
            self._put(("lookback", *path), rows[:lookback], "free", json=json)
            rows = rows[lookback:]
        self._put(path, rows, axis, json=json)

    def _put(self, path: Path, rows: Any, axis: str, *, json: bool = False) -> None:
        if path in self.fields:
            raise FieldError(f"{self._where} has two fields {'/'.join(path)!r}: give its outputs names that differ")
        self.fields[path] = rows
        self.axes[path] = axis
        self.json += [path] if json else []

    def _space(self, space: Any) -> int | None:
        """The number of a space, which is kept once."""
        if space is None:
            return None
        if id(space) not in self._numbers:
            self._numbers[id(space)] = len(self.spaces)
            self.spaces.append(space_tree(space))
        return self._numbers[id(space)]

    def _of_agents(self, spaces: Any) -> Any:
        """Spaces by agent: a dict of them, or a space of its own."""
        if type(spaces) is dict:
            return {agent: self._space(space) for agent, space in spaces.items()}
        return self._space(spaces)


class _Reading:
    """The fields of an episode that was read, and its spaces by number."""

    def __init__(self, fields: Mapping[str, Any], spaces: list[Any]) -> None:
        self._fields = fields
        self._spaces = spaces

    def single(self, about: Mapping[str, Any], prefix: Path) -> Any:
        episode = SingleAgentEpisode(id_=about["id_"])
        extra = {}
        for name, known in about["buffers"]:
            buffer = self._buffer((*prefix, *map(str, name)), known, episode.observations.len_incl_lookback())
            if name[0] == "extra_model_outputs":
                extra[name[1]] = buffer
            else:
                setattr(episode, {"obs": "observations"}.get(name[0], name[0]), buffer)
        _set_attributes(episode, _OF_AGENT, about)
        episode.extra_model_outputs = extra
        episode._observation_space, episode._action_space = map(self._space, about["spaces"])
        episode.validate()
        return episode

    def several(self, about: Mapping[str, Any]) -> Any:
        episode = MultiAgentEpisode(id_=about["id_"])
        _set_attributes(episode, _OF_AGENTS, about)
        for name, factory in _HANGING.items():
            setattr(episode, name, about[name] if factory is None else defaultdict(factory, about[name]))
        episode.observation_space, episode.action_space = map(self._of_agents, about["spaces"])
        episode.agent_episodes = {agent: self.single(one, _below(agent)) for agent, one in about["agents"]}
        for agent, lookback in about["steps"]:
            known = np.asarray(lookup(self._fields, (*_below(agent), "agent_t"))).tolist()
            buffer = InfiniteLookbackBuffer()
            buffer.data = [episode.SKIP_ENV_TS_TAG if one == _SKIPPED else one for one in known]
            buffer.lookback = lookback
            episode.env_t_to_agent_t[agent] = buffer
        episode.validate()
        return episode

    def _buffer(self, path: Path, about: Mapping[str, Any], rows: int) -> Any:
        out = InfiniteLookbackBuffer()
        if "data" in about:
            out.data = about["data"]
        elif "empty" in about:
            out.data = [{} for _ in range(rows)]
        elif "casts" in about:
            out.data = cast([*(lookup(self._fields, ("lookback", *path)) or ()), *self._rows(path)], about["casts"])
        else:
            arrays = {}
            for names in leaf_paths(about["form"]):
                own, before = self._rows((*path, *names)), lookup(self._fields, ("lookback", *path, *names))
                arrays[names] = np.array(own) if before is None else np.concatenate([before, own])
            out.data = items_of(arrays, about["form"])
        out.lookback, out.finalized = about["lookback"], about["finalized"]
        out.space = self._space(about["space"])
        return out

    def _rows(self, path: Path) -> Any:
        rows = lookup(self._fields, path)
        if rows is None:
            raise CorruptStateError(f"field {'/'.join(path)!r} is not there")
        return rows

    def _space(self, number: int | None) -> Any:
        return None if number is None else self._spaces[number]

    def _of_agents(self, spaces: Any) -> Any:
        if isinstance(spaces, Mapping):
            return {agent: self._space(number) for agent, number in spaces.items()}
        return self._space(spaces)


def _attributes(episode: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The attributes of these names that the episodes of this Ray have."""
    return {name: getattr(episode, name) for name in names if hasattr(episode, name)}


def _set_attributes(episode: Any, names: tuple[str, ...], about: Mapping[str, Any]) -> None:
    for name in names:
        if name in about and hasattr(episode, name):
            setattr(episode, name, about[name])


def _below(agent: Any) -> Path:
    """The place of what an agent has."""
    return "agents", str(agent)
