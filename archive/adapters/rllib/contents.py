"""Pure, no I/O: the contents of a replay buffer of RLlib's beside its episodes, as columns and state, and back.

A column has a value for each step of the episodes, oldest first: `sample` is the step's place in the buffer's list of
indices, `node` its leaf in the trees of priorities, `priority` the leaf's value. Steps of agents, of which a buffer has
a list for each module, have columns of their own, by agent: the agent's k-th step is at the episode's k-th.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, ascending, group_of
from archive.base import CapacityError, CorruptStateError, UsageError
from archive.fields import Array

# the types of priorities: sums are made in them, and decide which steps are drawn
_TYPES: tuple[type, ...] = (float, np.float64, np.float32, np.float16, int, np.int64)
_NONE = -1
_NUMBERS = ("_num_timesteps", "_num_timesteps_added", "sampled_timesteps")
_OF_AGENTS = ("_num_agent_timesteps", "_num_agent_timesteps_added")
OF_MODULES = (
    "_num_module_timesteps",
    "_num_module_timesteps_added",
    "_num_module_episodes",
    "_num_module_episodes_evicted",
    "sampled_timesteps_per_module",
)
_TREES = (
    "max_priority",
    "sum_segment",
    "min_segment",
    "free_nodes",
    "max_idx",
    "tree_idx_to_sample_idx",
    "last_sampled_indices",
)
_LISTED = ("sample", "node", "priority", "priority_type")


class Listed(NamedTuple):
    """A list of indices: of all episodes' steps, or of a module's agents'."""

    episode: Ints  # the number of each one's episode, from the oldest that is held
    agent: list[Any] | None
    step: Ints  # within the episode, or the agent's
    node: list[int]  # leaves; none without priorities
    priority: list[Any]

    def indices(self, evicted: int) -> list[tuple[Any, ...]]:
        """The list as RLlib has it: it counts evicted episodes, too."""
        columns: list[Any] = [(self.episode + evicted).tolist(), self.step.tolist()]
        columns[1:1] = [] if self.agent is None else [self.agent]
        return list(zip(*columns, *([self.node] if self.node else []), strict=True))


def starts_of(episodes: Sequence[Any]) -> Ints:
    """The place of each episode's first step among all steps, and the number of these."""
    return np.cumsum([0, *map(len, episodes)], dtype=np.int64)


def module_of(episode: Any, agent: Any) -> Any:
    """The module of an agent. RLlib does not note it where the agent came with a later piece of the episode."""
    return episode._agent_to_module_mapping.get(agent, episode.agent_episodes[agent].module_id)


# -- from a buffer ---------------------------------------------------------------------------------------------------


def columns_of(buffer: Any, *, prioritized: bool) -> dict[str, Array]:
    """The columns of a buffer, in the order of the buffer's episodes."""
    starts, evicted = starts_of(buffer.episodes), buffer._num_episodes_evicted
    tree = buffer._sum_segment if prioritized else None
    out = _columns(None, list(enumerate(buffer._indices)), tree, starts, evicted)
    for module, indices in getattr(buffer, "_module_to_indices", {}).items():
        by_agent: dict[Any, list[Any]] = {}
        for place, (episode, agent, *rest) in enumerate(indices):
            by_agent.setdefault(agent, []).append((place, (episode, *rest)))
        tree = buffer._module_to_sum_segment[module] if prioritized else None
        for agent, some in by_agent.items():
            found = _columns(agent, some, tree, starts, evicted)
            mine = found[f"sample/{agent}"] != _NONE  # in other episodes, the agent may have another module
            out |= {name: np.where(mine, column, out.get(name, column)) for name, column in found.items()}
    return out


def _columns(agent: Any, listed: list[Any], tree: Any, starts: Ints, evicted: int) -> dict[str, Array]:
    """The columns of some indices with their places in the list: (place, (episode, step, leaf))."""
    rows = np.array([one for _, one in listed], np.int64).reshape(len(listed), -1 if listed else 3)
    episode, step, length = rows[:, 0] - evicted, rows[:, 1], np.diff(starts)
    known = (episode >= 0) & (episode < len(length)) & (step >= 0)
    known[known] = step[known] < length[episode[known]]
    at = starts[np.where(known, episode, 0)] + step
    if not known.all() or len(ascending(at)) < len(at):
        raise UsageError(
            f"the buffer's indices name {'steps' if agent is None else f'steps of agent {agent!r}'} twice, or such as "
            "its episodes do not have: it cannot be saved as it is; clear it, or restore it"
        )
    out: dict[str, Array] = {"sample": np.full(int(starts[-1]), _NONE)}
    out["sample"][at] = [place for place, _ in listed]
    if tree is not None:
        types = {kind: i for i, kind in enumerate(_TYPES)}
        values = [tree.value[tree.capacity + node] for node in rows[:, 2].tolist()]
        if strange := sorted({type(one).__name__ for one in values if type(one) not in types}):
            raise UsageError(f"priorities of the type {strange[0]} are not kept: update_priorities takes a numpy array")
        out |= {name: np.full_like(out["sample"], _NONE) for name in ("node", "priority_type")}
        out["priority"] = np.full(len(out["sample"]), np.nan)
        out["node"][at], out["priority"][at] = rows[:, 2], values
        out["priority_type"][at] = [types[type(one)] for one in values]
    return out if agent is None else {f"{name}/{agent}": column for name, column in out.items()}


# -- into a buffer ---------------------------------------------------------------------------------------------------


def lists_of(
    episodes: Sequence[Any], columns: Mapping[str, Array], *, prioritized: bool, as_it_was: bool, where: str
) -> dict[Any, Listed]:
    """The lists of indices by module (None: of the episodes' own steps) of episodes, oldest first, and their columns.

    as_it_was: in their order, with their leaves. Else steps are listed as they are held, and take leaves anew.
    """
    starts, parts = starts_of(episodes), dict[Any, list[tuple[Any, Ints]]]()
    parts[None] = [(None, np.flatnonzero(columns["sample"] != _NONE))]
    for agent in dict.fromkeys(agent for one in episodes for agent in getattr(one, "agent_episodes", ())):
        if (sample := columns.get(f"sample/{agent}")) is None:
            continue
        at = np.flatnonzero(sample != _NONE)
        of = group_of(starts[:-1], at)
        modules = [module_of(episodes[i], agent) for i in of.tolist()]
        for module in dict.fromkeys(modules):
            parts.setdefault(module, []).append((agent, at[[one == module for one in modules]]))
    return {
        module: _listed(some, columns, starts, prioritized=prioritized, as_it_was=as_it_was, where=where)
        for module, some in parts.items()
    }


def _listed(
    parts: list[tuple[Any, Ints]],
    columns: Mapping[str, Array],
    starts: Ints,
    *,
    prioritized: bool,
    as_it_was: bool,
    where: str,
) -> Listed:
    """One list of the steps of some agents, or (agent None) of the episodes."""
    at = np.concatenate([steps for _, steps in parts])
    agents = [agent for agent, steps in parts for _ in steps]
    found = {
        name: np.concatenate([columns[name if agent is None else f"{name}/{agent}"][s] for agent, s in parts])
        for name in (_LISTED if prioritized else _LISTED[:1])
    }
    of = group_of(starts[:-1], at)
    order = np.argsort(found["sample"]) if as_it_was else np.argsort(of, kind="stable")
    whole = not as_it_was or np.array_equal(found["sample"][order], np.arange(len(order)))
    node: list[int] = []
    priority: list[Any] = []
    if prioritized:
        kinds, values = found["priority_type"][order].tolist(), found["priority"][order].tolist()
        whole &= all(0 <= kind < len(_TYPES) for kind in kinds)
        priority = [_TYPES[kind](value) for kind, value in zip(kinds, values, strict=True)] if whole else []
        node = found["node"][order].tolist() if as_it_was else list(range(len(order)))
        whole &= len(set(node)) == len(node) and min(node, default=0) >= 0
    if not whole:
        raise CorruptStateError(f"{where}: the order of its steps, or their priorities, are damaged; restore another")
    chosen = agents if parts[0][0] is not None else None
    listed = None if chosen is None else [chosen[i] for i in order.tolist()]
    return Listed(of[order], listed, (at - starts[of])[order], node, priority)


def fill_tree(tree: Any, nodes: Sequence[int], values: Sequence[Any]) -> Any:
    """A new tree of RLlib's, of sums or of minima, with these leaves."""
    value, join = tree.value, tree.operation
    for node, one in zip(nodes, values, strict=True):
        value[tree.capacity + node] = one
    touched = {(tree.capacity + node) >> 1 for node in nodes}
    while touched:
        for at in touched:
            value[at] = join(value[2 * at], value[2 * at + 1])
        touched = {at >> 1 for at in touched if at > 1}
    return tree


# -- what is long, in few numbers ------------------------------------------------------------------------------------


def packed(numbers: Sequence[int]) -> dict[str, Any]:
    """Whole numbers of which neighbours mostly differ by the same: the first, the differences and how often each."""
    array = np.array(numbers, np.int64)
    steps = np.diff(array)
    heads = np.flatnonzero(np.diff(steps, prepend=np.nan)) if len(steps) else np.zeros(0, np.int64)
    counts = np.diff(heads, append=len(steps))
    return {"first": array[:1], "steps": steps[heads], "counts": counts}


def unpacked(known: Mapping[str, Any], most: int) -> Iterator[int]:
    """The numbers again; no more than so many."""
    counts = known["counts"]
    if (counts < 0).any() or int(counts.sum()) >= max(1, most):
        raise CorruptStateError("free leaves of a tree are damaged; restore another checkpoint")
    steps = np.repeat(known["steps"], counts)
    return iter(np.cumsum(np.concatenate([known["first"], steps])).tolist() if len(known["first"]) else [])


# -- all of a buffer ---------------------------------------------------------------------------------------------------


def numbers(*, multi: bool) -> tuple[str, ...]:
    """The names of a buffer's counters."""
    return _NUMBERS + _OF_AGENTS if multi else _NUMBERS


def tree_attribute(name: str, module: Any) -> str:
    """The name under which RLlib keeps a part of a module's trees, by module, or (None) that of the episodes' own."""
    return f"_{name}" if module is None else f"_module_to_{name}"


class Contents:
    """The contents of a buffer: as its own state has them, or, where that is None, dealt out anew.

    Of what was counted over a lifetime, each rank then has its own steps, and rank 0 the rest, so that the sums stay.
    """

    def __init__(
        self, buffer: Any, episodes: list[Any], states: Mapping[int, Any], own: Any, rank: int, where: str
    ) -> None:
        """episodes: oldest first.  states: of all ranks that saved."""
        self._buffer = buffer
        self._episodes = episodes
        self._states = list(states.values())
        self._own = own
        self._rest = rank == 0
        self._where = where
        self._multi, self._prioritized = (self._states[0][name] for name in ("multi", "prioritized"))

    def values(self, columns: Mapping[str, Array], seed: int, order: list[int]) -> dict[str, Any]:
        """The attributes by name. order: the numbers that the episodes had."""
        own, episodes = self._own, self._episodes
        evicted = own["evicted"] if own else self._total("evicted")
        names = [episode.id_ for episode in episodes]
        if own and order != list(range(evicted, evicted + len(order))):
            raise CorruptStateError(f"{self._where}: episodes are missing; restore another checkpoint")
        if not own and sum(map(len, episodes)) > self._buffer.capacity and len(episodes) > 1:
            raise CapacityError(
                f"{self._where}: the share has {sum(map(len, episodes))} steps, the buffer room for "
                f"{self._buffer.capacity}; plan with capacity={self._buffer.capacity}, which drops the oldest episodes "
                "and counts them, or make it larger"
            )
        lists = lists_of(episodes, columns, prioritized=self._prioritized, as_it_was=own is not None, where=self._where)
        modules = list(dict.fromkeys([*(m for one in self._states for m in one["modules"]), *lists]))
        modules.remove(None)
        out = {
            "episodes": deque(episodes),
            "episode_id_to_index": dict(zip(names, range(evicted, evicted + len(names)), strict=True)),
            "_num_episodes_evicted": evicted,
            "_indices": lists[None].indices(evicted),
            "rng": own["rng"] if own else np.random.default_rng(seed),
        } | (own["numbers"] if own else self._counted())
        if _has_metrics(self._buffer):
            out["metrics"] = self._metrics()
        if self._multi:
            out["_module_to_indices"] = defaultdict(list, {m: self._list(lists, m).indices(evicted) for m in modules})
            out |= own_modules(own) if own else self._counted_by_module()
        if self._prioritized:
            out |= self._trees(lists, modules)
        return out

    def _list(self, lists: Mapping[Any, Listed], module: Any) -> Listed:
        none = np.zeros(0, np.int64)
        return lists.get(module, Listed(none, None if module is None else [], none, [], []))

    def _metrics(self) -> Any:
        logger = type(self._buffer.metrics)(root=False)
        for path, state in self._own["metrics"] if self._own else ():
            inner = logger.stats
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = logger.stats_cls_lookup[state["stats_cls_identifier"]].from_state(state)
        return logger

    # -- counters --------------------------------------------------------------------------------------------------

    def _total(self, *path: str) -> int:
        """The sum over all states, of rank 0; of the others 0."""
        out = 0
        for state in self._states if self._rest else ():
            value: Any = state
            for key in path:
                value = value[key]
            out += value
        return out

    def _counted(self) -> dict[str, int]:
        kinds = [("_num_timesteps", sum(map(len, self._episodes)))]
        if self._multi:
            kinds.append(("_num_agent_timesteps", sum(one.agent_steps() for one in self._episodes)))
        out = {"sampled_timesteps": self._total("numbers", "sampled_timesteps")}
        for name, held in kinds:
            left = self._total("numbers", f"{name}_added") - self._total("numbers", name)
            out |= {name: held, f"{name}_added": held + left}
        return out

    def _counted_by_module(self) -> dict[str, Any]:
        steps, episodes = Counter[Any](), Counter[Any]()
        for one in self._episodes:
            for agent, own in one.agent_episodes.items():
                module = module_of(one, agent)
                steps[module] += len(own)
                episodes[module] += 1
        before = {name: self._sum(one["of_modules"][name] for one in self._states) for name in OF_MODULES}
        added = steps.copy()
        for name, sign in (("_num_module_timesteps_added", 1), ("_num_module_timesteps", -1)):
            for module, count in before[name].items():
                added[module] += sign * count
        counts = before | dict(zip(OF_MODULES, (steps, added, episodes), strict=False))
        return {name: defaultdict(int, counts[name]) for name in OF_MODULES}

    def _sum(self, every: Iterable[Mapping[Any, int]]) -> Counter[Any]:
        out = Counter[Any]()
        for one in every if self._rest else ():
            for module, count in one.items():
                out[module] += count
        return out

    # -- priorities ------------------------------------------------------------------------------------------------

    def _trees(self, lists: Mapping[Any, Listed], modules: Sequence[Any]) -> dict[str, Any]:
        out = {}
        for name, value in self._tree(self._list(lists, None), None).items():
            out[tree_attribute(name, None)] = value
        if self._multi:
            out["_sample_idx_to_tree_idx"] = dict(enumerate(self._list(lists, None).node))
            for name in _TREES:
                every = getattr(self._buffer, tree_attribute(name, "")).copy()  # it makes what a new module has
                every.clear()
                out[tree_attribute(name, "")] = every
        for module in modules if self._multi else ():
            for name, value in self._tree(self._list(lists, module), module).items():
                out[tree_attribute(name, module)][module] = value
        return out

    def _tree(self, listed: Listed, module: Any) -> dict[str, Any]:
        """The parts of the trees of one list, by name."""
        trees = self._buffer._sum_segment, self._buffer._min_segment
        room, nodes = trees[0].capacity, listed.node
        if len(nodes) > room:
            raise CapacityError(
                f"{self._where}: {len(nodes)} steps of {module!r} have priorities, and the buffer has room for {room}; "
                "make it with a larger capacity"
            )
        states = [dict(state["trees"]) for state in ([self._own] if self._own else self._states)]
        known = [one[module] for one in states if module in one]
        best: Any = max((one["max_priority"] for one in known), default=1.0)
        free: deque[int] = deque(range(len(nodes), room), maxlen=room)
        last: list[int] = []
        if self._own and known:
            free = deque(unpacked(known[0]["free"], room), maxlen=room)
            last = known[0]["last_sampled"].tolist()
            if not np.array_equal(np.sort(np.array([*free, *nodes], np.int64)), np.arange(room)):
                raise CorruptStateError(f"{self._where}: the leaves of its trees are damaged; restore another")
        highest = known[0]["max_idx"] if self._own and known else max(len(nodes) - 1, 0)
        sums, least = (fill_tree(type(tree)(room), nodes, listed.priority) for tree in trees)
        index = {node: i for i, node in enumerate(nodes)}
        return dict(zip(_TREES, (best, sums, least, free, highest, index, last), strict=True))


def metrics_state(buffer: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, state) of each of a buffer's statistics: the logger's own state allows no ids of agents but texts."""
    out: list[Any] = []
    left: list[Any] = [((), buffer.metrics.stats)] if _has_metrics(buffer) else []
    while left:
        path, node = left.pop()
        if isinstance(node, Mapping):
            left += [((*path, key), inner) for key, inner in node.items()]
        else:
            state = node.get_state()
            out.append((path, {key: list(v) if isinstance(v, deque) else v for key, v in state.items()}))
    return out[::-1]


def _has_metrics(buffer: Any) -> bool:
    """False for those of a Ray whose statistics have no state of their own."""
    return hasattr(getattr(buffer, "metrics", None), "stats_cls_lookup")


def own_modules(state: Mapping[str, Any]) -> dict[str, Any]:
    """The counters by module as they were."""
    return {name: defaultdict(int, state["of_modules"][name]) for name in OF_MODULES}
