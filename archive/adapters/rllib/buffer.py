"""A replay buffer of episodes of RLlib's: saved, followed by a journal, and restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from ray.rllib.utils.replay_buffers import (
    EpisodeReplayBuffer,
    MultiAgentEpisodeReplayBuffer,
    PrioritizedEpisodeReplayBuffer,
)

from archive.adapters import Item, LiveBuffer, Report, Saved, Tracked, common, kept_items, live, reading
from archive.adapters.rllib import contents
from archive.adapters.rllib.contents import columns_of, packed, starts_of
from archive.adapters.rllib.episodes import MULTI, SINGLE, SYSTEM, decode, encode, kind_of, mark_of
from archive.arrays import spans
from archive.base import UpgradeError, UsageError
from archive.checkpoint import Pending
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Share, ShareBuffer

_FORMAT = 1
_ORDER = "order"  # the attribute with the number of an episode in its buffer, from the first that it ever held
_VERBS = ("add", "sample", "update_priorities", "set_state")

_tracked: Tracked[dict[int, Item]] = Tracked()


def save(buffers: Any, writer: Writer, *, step: int, **options: Any) -> Pending:
    """Checkpoint an episode replay buffer, or several by name; only episodes that are new, or have grown, are written.

    options: those of `Writer.checkpoint`.
    """
    return live.save(_buffers(buffers), writer, step, **options)


def follow(buffers: Any, writer: Writer) -> None:
    """Have the journal of a writer (`journal_s=`) keep a buffer, or several by name, between saves.

    At each tick it takes in the episodes that are new or have grown, those that left, priorities and the state. After
    a crash the checkpoint that is recovered is restored as any other. Call it after `restore`, with the writer that
    resumes, once. From then on the buffer's own verbs that change it take turns with the journal.
    """
    every = _buffers(buffers)
    for one in every.values() if writer.journaled else ():
        _take_turns(one.buffer)
    live.follow(lambda: every, writer)


def restore(
    buffers: Any,
    source: Any,
    rank: int | None = None,
    *,
    existing: str = "error",
    agent_to_module_mapping_fn: Callable[..., Any] | None = None,
) -> Any:
    """Fill episode replay buffers from a share, or from a checkpoint of a world of the same size (`rank=`); a Report,
    by name for a dict.

    existing: "replace" empties a buffer that holds something.  agent_to_module_mapping_fn: that of the episodes of
    several agents, for agents that they do not have yet; functions are not archived. Default: RLlib's own.
    """
    every = _buffers(buffers, agent_to_module_mapping_fn)
    return common.as_given(buffers, live.restore(every, source, rank, existing))


def _buffers(buffers: Any, mapping: Any = None) -> dict[str, RLlibBuffer]:
    return {name: RLlibBuffer(buffer, name, mapping) for name, buffer in common.several(buffers).items()}


class _Held(NamedTuple):
    """An episode of a share."""

    age: int  # episodes that its buffer was given from it on
    rank: int
    number: int
    place: int  # among the episodes of the share
    name: str
    episode: Any


class _Ready(NamedTuple):
    """A share as its buffer takes it."""

    part: ShareBuffer
    values: dict[str, Any]  # the buffer's attributes by name
    items: dict[int, Item]
    report: Report


class RLlibBuffer(LiveBuffer):
    """An episode replay buffer of RLlib. Each episode is one of the archive's, with its number in the buffer as an
    attribute; indices and priorities are columns; counters, metrics and the random generator are state."""

    system = SYSTEM
    unit = "episodes"

    def __init__(self, buffer: Any, name: str, mapping: Callable[..., Any] | None = None) -> None:
        """mapping: of agents to modules, for episodes that are restored."""
        super().__init__(name)
        if not isinstance(buffer, EpisodeReplayBuffer):
            raise UsageError(
                f"an EpisodeReplayBuffer of RLlib's, or one of its kinds, is expected, not {type(buffer).__name__}"
            )
        self.buffer = buffer
        self.multi = isinstance(buffer, MultiAgentEpisodeReplayBuffer)
        self.prioritized = isinstance(buffer, PrioritizedEpisodeReplayBuffer)
        self._mapping = mapping

    def still(self) -> AbstractContextManager[Any]:
        return _turns.get(self.buffer, nullcontext())

    @property
    def held(self) -> int:
        return len(self.buffer.episodes)

    # -- saved ---------------------------------------------------------------------------------------------------------

    def append(self, part: Buffer) -> Saved:
        first, episodes = self.buffer._num_episodes_evicted, list(self.buffer.episodes)
        known = _tracked.of(self.buffer, part) or {}

        def add(number: int) -> str:
            before = known.get(number)
            return _added(part, episodes[number - first], None if before is None else before.episode_id)

        found = ((number, mark_of(one)) for number, one in enumerate(episodes, first))
        items = _tracked.keep(self.buffer, part, kept_items(part, known, found, add))
        numbers = {item.episode_id: number for number, item in items.items()}
        starts, (runs, ids) = starts_of(episodes), part.live_runs()
        at = spans(starts[[numbers[name] - first for name in ids]], runs.length) if ids else starts[:0]
        columns = columns_of(self.buffer, prioritized=self.prioritized)
        return Saved({name: one[at] for name, one in columns.items()}, {_ORDER: numbers}, self._state())

    def _state(self) -> dict[str, Any]:
        """The state of the buffer, without its episodes and their steps."""
        buffer = self.buffer
        state = {
            "system": SYSTEM,
            "format": _FORMAT,
            "class": type(buffer).__name__,
            "multi": self.multi,
            "prioritized": self.prioritized,
            "capacity": buffer.capacity,
            "evicted": buffer._num_episodes_evicted,
            "episodes": len(buffer.episodes),
            "rng": buffer.rng,
            "metrics": contents.metrics_state(buffer),
            "modules": list(getattr(buffer, "_module_to_indices", ())),
            "numbers": {name: getattr(buffer, name) for name in contents.numbers(multi=self.multi)},
        }
        if self.multi:
            state["of_modules"] = {name: dict(getattr(buffer, name)) for name in contents.OF_MODULES}
        if self.prioritized:
            trees = [(module, self._trees(module)) for module in (None, *state["modules"])]
            state |= {"alpha": buffer._alpha, "trees": trees}
        return state

    def _trees(self, module: Any) -> dict[str, Any]:
        """The state of the trees of a module's steps, or (None) of the episodes' own, beside their leaves."""

        def of(name: str) -> Any:
            every = getattr(self.buffer, contents.tree_attribute(name, module))
            return every if module is None else every[module]

        return {
            "max_priority": of("max_priority"),
            "max_idx": of("max_idx"),
            "last_sampled": np.array(of("last_sampled_indices"), np.int64),
            "free": packed(of("free_nodes")),
        }

    # -- restored ------------------------------------------------------------------------------------------------------

    def prepared(self, share: Share, part: ShareBuffer, states: Mapping[int, Any]) -> _Ready:
        where = f"buffer {self.name!r} of checkpoint {part.checkpoint.name!r}"
        with reading(where, "buffer of RLlib's"):
            self._check(states, where)
            held = self._read(part, states, where)
            own = states.get(share.rank) if share.plan.is_identity else None
            own = own if own and own["capacity"] == self.buffer.capacity else None
            renamed = _with_ids_of_their_own([one.episode for one in held])
            found = contents.Contents(self.buffer, [one.episode for one in held], states, own, share.rank, where)
            starts = starts_of([one.episode for one in sorted(held, key=lambda one: one.place)])
            lengths = np.array([len(one.episode) for one in held], np.int64)
            at = spans(starts[[one.place for one in held]], lengths) if held else starts[:0]
            columns = {name: one[at] for name, one in part.columns.items()}
            values = found.values(columns, part.seed, [one.number for one in held])
        items = {
            number: Item(None if one.episode.id_ in renamed else mark_of(one.episode), one.name)
            for number, one in enumerate(held, values["_num_episodes_evicted"])
        }
        notes = () if own else ("dealt out anew: the random generator and the metrics begin anew",)
        return _Ready(part, values, items, Report(len(held), int(lengths.sum()), {"renamed": len(renamed)}, notes))

    def _check(self, states: Mapping[int, Any], where: str) -> None:
        """Refuse what another kind of buffer, or a later version, saved."""
        if not states:
            raise UsageError(f"{where} was not saved by archive.adapters.rllib, or by none of its ranks")
        for state in states.values():
            if state["format"] > _FORMAT:
                raise UpgradeError(f"{where} is of format {state['format']}, known is {_FORMAT}: upgrade this library")
            if (state["multi"], state["prioritized"]) != (self.multi, self.prioritized):
                raise UsageError(
                    f"{where} was saved of a {state['class']}, which a {type(self.buffer).__name__} cannot take over: "
                    "give a buffer of that kind"
                )
            if self.prioritized and state["alpha"] != self.buffer._alpha:
                raise UsageError(
                    f"{where} has priorities for alpha={state['alpha']}, this buffer has alpha={self.buffer._alpha}: "
                    "make it with the same"
                )

    def _read(self, part: ShareBuffer, states: Mapping[int, Any], where: str) -> list[_Held]:
        """The episodes of a share, oldest first: of several ranks' the newest are of the same age."""
        numbers, known_at = part.attributes.get(_ORDER, {}), part.layout
        out = []
        for i, (known, fields) in enumerate(part.stream()):
            one = decode(fields, known.metadata, int(known_at.length[i]), where=f"episode {known.id!r} of {where}")
            if kind_of(one) != (MULTI if self.multi else SINGLE):
                raise UsageError(f"{where} has episodes of {kind_of(one)} agents, which this buffer does not hold")
            if self._mapping is not None:
                one.agent_to_module_mapping_fn = self._mapping
            rank, number = int(known_at.source_rank[i]), numbers[known.id]
            age = states[rank]["evicted"] + states[rank]["episodes"] - number
            out.append(_Held(age, rank, number, i, known.id, one))
        return sorted(out, key=lambda one: (-one.age, one.rank))

    def put(self, ready: _Ready) -> Report:
        with self.still():
            for name, value in ready.values.items():
                setattr(self.buffer, name, value)
        _tracked.restored(self.buffer, ready.part, ready.items)
        return ready.report


def _with_ids_of_their_own(episodes: list[Any]) -> set[str]:
    """Give episodes whose ids others have, of other learners, new ones, which are returned."""
    known, renamed = set[str](), set[str]()
    for episode in episodes:
        name, number = episode.id_, 1
        while episode.id_ in known:
            number += 1
            episode.id_ = f"{name}#{number}"
        known.add(episode.id_)
        if number > 1:
            renamed.add(episode.id_)
            for agent in getattr(episode, "agent_episodes", {}).values():
                agent.multi_agent_episode_id = episode.id_
    return renamed


def _added(part: Buffer, episode: Any, before: str | None) -> str:
    """Add an episode to the archive; its id there, a new one: learners may have the same episodes. before: that of an
    earlier revision, which had less of it."""
    one = encode(episode)
    return part.add_episode(
        one.fields,
        metadata=one.metadata,
        schema=one.schema,
        first=one.first,
        last=one.last,
        terminated=one.terminated,
        truncated=one.truncated,
        episode_id=before,
        replace=before is not None,
    )


# -- a buffer that is followed -------------------------------------------------------------------------------------

_turns: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


def _take_turns(buffer: Any) -> None:
    """Have the buffer's own verbs take turns with the journal: RLlib has no lock for them."""
    if buffer not in _turns:
        lock = _turns[buffer] = threading.RLock()
        for name in _VERBS:
            if verb := getattr(buffer, name, None):
                setattr(buffer, name, partial(_locked, lock, verb))


def _locked(lock: Any, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with lock:
        return verb(*args, **options)
