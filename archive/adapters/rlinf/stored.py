"""Trajectories that lie in archives: single transitions of many, and whole ones, read; the archive and the rank that a
path means; and what a buffer goes on from there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import archive
from archive import Archive
from archive.adapters import planned
from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.contents import Entry, Part, Rows, joined, taken_apart
from archive.adapters.rlinf.trajectory import NUMBER, Weights, distinct_ids, ids_of, metadata_of, next_id
from archive.arrays import Ints
from archive.base import NotFoundError, NothingThereError, UsageError, at_once, forking, logger, process_group
from archive.checkpoint import Checkpoint, Holding
from archive.fields import FieldSpec, dtypes, flatten, schema, unflatten
from archive.log import place
from archive.read import Episodes, Gather
from archive.store import Storage

ADDED = "added"  # metadata of what is journaled: how many trajectories the buffer had been given with this one
_RANK = re.compile(r"(?P<root>.*?)/*(?:^|/)rank_(?P<rank>\d+)/*", re.DOTALL)
MAX_LOOKUPS = 8  # then all is looked up anew, and chunks that were held are read again
MAX_WHOLE_TRANSITIONS = 1_000_000  # whose fields of no single step are kept in memory


# -- trajectories that lie in an archive --------------------------------------------------------------------------


class Home:
    """An archive that trajectories are read from. Safe for several threads, which take turns.

    episodes: gives the archive's episodes as they are now.  cache_bytes: of chunks that are kept in memory.
    disk_cache: as Gather takes it.
    """

    def __init__(self, episodes: Callable[[], Episodes], *, cache_bytes: int = 2**28, disk_cache: Any = None) -> None:
        self._episodes = episodes
        self._cache_bytes = cache_bytes
        self._disk_cache = disk_cache
        self._lock = forking.lock(self)
        self._place: dict[str, tuple[Kind, int]] = {}
        self._lookups = 0

    def take(
        self, entries: Sequence[Entry], places: torch.Tensor, which: torch.Tensor, row: torch.Tensor
    ) -> list[Part]:
        """The transitions `row[i]` of trajectories `entries[which[i]]`, at `places[i]` of a batch; in parts of the same
        fields. `entries` are those that may be asked for next, too."""
        with self._lock:
            distinct, index = torch.unique(which, return_inverse=True)
            self._know([entries[i].name for i in distinct.tolist()], entries)
            found = [self._place[entries[i].name] for i in distinct.tolist()]
            number = torch.tensor([n for _, n in found])[index]
            jobs = []
            for kind in dict.fromkeys(kind for kind, _ in found):
                mine = torch.nonzero(torch.tensor([one is kind for one, _ in found])[index]).reshape(-1)
                jobs.append((places[mine], partial(kind.take, number[mine].numpy(), row[mine])))
            return at_once(lambda job: (job[0], job[1]()), jobs, len(jobs))

    def trees(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These trajectories, whole, in order; read ahead in bounded memory."""
        with self._lock:
            found = self._episodes().filter(episode_id=list(names))
        place = {name: i for i, name in enumerate(found.table["episode_id"].to_pylist())}
        _check_found(names, place, found)
        for episode, data in found.pick(np.array([place[name] for name in names], np.int64)).stream():
            yield _tree_of(data, episode.metadata)

    def _know(self, names: Sequence[str], coming: Sequence[Entry]) -> None:
        """Look up what was not yet, and all that is coming besides: each lookup has a part of the cache of its own."""
        if all(name in self._place for name in names):
            return
        if self._lookups >= MAX_LOOKUPS:
            for kind in dict.fromkeys(kind for kind, _ in self._place.values()):
                kind.close()
            self._place, self._lookups = {}, 0
        new = [e.name for e in coming if e.home is self and e.name not in self._place]
        found = self._episodes().filter(episode_id=new)
        share = self._cache_bytes // (2 * MAX_LOOKUPS if self._lookups else 2)
        self._place.update(_kinds_of(found, share, self._disk_cache))
        self._lookups += 1
        _check_found(names, self._place, found)


def _check_found(names: Iterable[str], have: Mapping[str, Any], episodes: Episodes) -> None:
    lost = [name for name in names if name not in have]
    if lost:
        raise NotFoundError(f"episode {lost[0]!r} is not there any more, in {episodes!r}; run `archive verify`")


class Kind:
    """Episodes of the same fields and the same number of envs side by side (0: one, without an axis for it)."""

    def __init__(
        self, episodes: Episodes, text: str, envs: int, share: float, cache_bytes: int, disk_cache: Any
    ) -> None:
        fields = [f for f in schema.loads(text).fields if f.path[0] != trajectories.REST and _is_tensor(f)]
        by_step = [f.path for f in fields if f.axis == "step" and (not envs or f.shape[:1] == (envs,))]
        held = int(share * cache_bytes)
        self._episodes, self._lengths = episodes, episodes.lengths()
        self._envs = envs
        self._gather = Gather(episodes, by_step, cache_bytes=held, disk_cache=disk_cache) if by_step else None
        self._whole = [f.path for f in fields if f.axis == "free" and f.shape[:1] == (envs,) and not f.scalar]
        self._most_held = int(share * MAX_WHOLE_TRANSITIONS)
        self._held: dict[int, Rows] = {}  # of the fields that are kept whole, done flags with extra rows say

    def take(self, numbers: Ints, row: torch.Tensor) -> Rows:
        """The transitions `row[i]` of episodes `numbers[i]`."""
        step, env = row // max(1, self._envs), row % max(1, self._envs)
        found = {} if self._gather is None else self._gather.rows(numbers, step.numpy())
        rows: Rows = {path: dtypes.to_torch(value) for path, value in flatten(found)}
        if self._envs:
            each = torch.arange(len(numbers))
            rows = {path: value[:, 0] if self._envs == 1 else value[each, env] for path, value in rows.items()}
        if not self._whole or not self._envs:
            return rows
        distinct, place = np.unique(numbers, return_inverse=True)
        self._hold(distinct.tolist())
        parts: list[Part] = []
        for i, number in enumerate(distinct.tolist()):
            at = torch.from_numpy(np.flatnonzero(place == i))
            parts.append((at, {path: held[row[at]] for path, held in self._held[number].items()}))
        return rows | joined(parts, len(numbers), "skip")

    def _hold(self, numbers: Sequence[int]) -> None:
        """Read the fields that are kept whole, once, and keep them in memory."""
        lacking = [n for n in numbers if n not in self._held]
        if lacking and int(self._lengths[list(self._held)].sum()) * self._envs > self._most_held:
            self._held, lacking = {}, list(numbers)
        read = self._episodes[np.array(lacking, np.int64)].read(self._whole) if lacking else ()
        for number, data in zip(lacking, read, strict=True):
            rows = taken_apart(_tree_of(data, {"B": self._envs}), int(self._lengths[number]), self._envs).rows
            self._held[number] = {path: value.clone() for path, value in rows.items()}

    def close(self) -> None:
        if self._gather is not None:
            self._gather.close()


def _kinds_of(episodes: Episodes, cache_bytes: int, disk_cache: Any) -> Iterator[tuple[str, tuple[Kind, int]]]:
    """(episode's id, (its kind, its number there)) of each."""
    spans = episodes.step_spans()
    texts = episodes.reader.snapshot.take(spans.rows[spans.offsets[:-1]], ["schema"])["schema"].to_pylist()
    envs = [int(about.get("B", 0)) for about in metadata_of(episodes)]
    names, each = episodes.table["episode_id"].to_pylist(), list(zip(texts, envs, strict=True))
    for text, count in dict.fromkeys(each):
        mine = [i for i, key in enumerate(each) if key == (text, count)]
        own = episodes[np.array(mine, np.int64)]
        kind = Kind(own, text, count, len(mine) / len(each), cache_bytes, disk_cache)
        yield from ((names[i], (kind, number)) for number, i in enumerate(mine))


def _tree_of(data: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """A trajectory as it was given, or an episode of one env as a trajectory [T, 1, ...]."""
    if "B" in about:
        return trajectories.from_steps(data, about)
    tensors = {path: dtypes.to_torch(v) for path, v in flatten(data) if isinstance(v, np.ndarray) and v.ndim}
    return unflatten({path: t[:, None] for path, t in tensors.items() if isinstance(t, torch.Tensor)})


def _is_tensor(field: FieldSpec) -> bool:
    if field.axis in schema.NODES or field.dtype in ("str", "json"):
        return False
    return field.dtype in dtypes.ML_NAMES or dtypes.is_native(dtypes.to_numpy(field.dtype))


Homes = Callable[[Callable[[], Episodes]], Home]


# -- which rank's data a path means -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """An archive's URL, and the rank that a path names, if it names one."""

    root: str
    rank: int | None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of a path that brings its own

    @property
    def name(self) -> str:
        """The same however the root is written: with or without a scheme, relative, with slashes at the end."""
        return Storage.connect(self.root, self.storage_options).url


def where(path: Any) -> Where:
    """The archive and rank of a path; any fsspec URL or UPath, with or without a last folder `rank_N`."""
    if not path:
        raise UsageError("the path is empty; give a folder or any fsspec URL, such as s3://bucket/replay/rank_0")
    text, options = (path, {}) if isinstance(path, str) else Storage.connect(path).spec()
    found = _RANK.fullmatch(text)
    if found is None or found["root"].endswith(":"):
        return Where(text if text.endswith("://") else text.rstrip("/") or "/", None, options)
    root = found["root"] or ("/" if text.startswith("/") else ".")
    return Where(root, int(found["rank"]), options)


@dataclass
class BufferJob:
    """The job that a buffer belongs to. What is None is asked for when it is needed."""

    rank: int | None
    world_size: int | None
    run: str
    session: str | None
    buffer: str
    storage_options: Mapping[str, Any] | None

    @property
    def own_rank(self) -> int:
        """This process's rank: as given, else from torch.distributed or RANK, else 0."""
        return place(None, None, "main", "-").rank if self.rank is None else self.rank

    def open(self, where: Where, *, create: bool = False) -> Archive:
        """The archive of a path; storage options that were given go before the path's own."""
        options = {**where.storage_options, **(self.storage_options or {})}
        return archive.open(where.root, create=create, storage_options=options)

    def writers(self, rank: int) -> int:
        """The number of ranks that write; 1 where nobody says and the rank is 0."""
        world_size = job_world_size() if self.world_size is None else self.world_size
        if world_size is None and rank:
            raise UsageError(
                f"rank {rank} needs to know how many ranks there are: give world_size=, or set WORLD_SIZE, or start "
                "torch.distributed first"
            )
        return _checked(rank, 1 if world_size is None else world_size, "")[1]


def job_world_size() -> int | None:
    """Ranks of this job, from torch.distributed or WORLD_SIZE; None if neither says."""
    if group := process_group():
        return int(group.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


class Asked(NamedTuple):
    """The part that a rank is to load: its own of what a path means, or part `part` of `world_size`."""

    where: Where
    part: int | None
    world_size: int | None

    def meant(self, known_size: int, saved: str) -> tuple[int, int]:
        """(rank, world size): the path's own rank's, else this process's, or the part that is asked for.

        known_size: of the world that a path with a rank means, where neither the caller nor the job says.  saved: who
        wrote it, for the error.
        """
        size, named = job_world_size() if self.world_size is None else self.world_size, self.where.rank
        if self.part is not None:
            return _checked(self.part, 1 if size is None else size, " (is_distributed=True)")
        if size is None:
            size = 1 if named is None else known_size
        return _checked(place(None, None, "main", "-").rank if named is None else named, size, f" ({saved})")


def _checked(rank: int, world_size: int, why: str) -> tuple[int, int]:
    if world_size <= 0:
        raise UsageError(f"world_size={world_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size}{why}; ranks count from 0")
    return rank, world_size


# -- what a rank goes on from -------------------------------------------------------------------------------------


class Start(NamedTuple):
    """One rank's part of a checkpoint, or of what was committed without one."""

    source: Any  # for arc.writer(resume=source)
    rank: int
    world_size: int
    episodes: Episodes
    numbers: Mapping[str, int]  # episode -> trajectory id
    next_id: int  # which nothing here or elsewhere has
    seeds: Sequence[int | None] = ()  # of the states that were saved
    added: int | None = None  # trajectories so far; None: as many as there are
    generator: torch.Generator | None = None


def find(job: BufferJob, asked: Asked, own: Collection[str] = ()) -> Start:
    """The start of the rank that a path means: all as it was in a world of the same size, else a part of all.

    The newest checkpoint there has it, with what was journaled since; where none was made, what was committed.
    own: sessions of this start of the job, whose journals are no tails: where one of them is the newest, the others go
    on from what it went on from.
    """
    asked = asked._replace(world_size=job.world_size if asked.world_size is None else asked.world_size)
    try:
        arc = job.open(asked.where)
    except NotFoundError as e:
        raise NothingThereError(
            f"{e}. A folder with metadata.json and trajectory files is brought into an archive by "
            "archive.adapters.rlinf.import_checkpoint"
        ) from e
    entry = arc.head.runs.get(job.run)
    if entry is not None and entry.journal and entry.session not in own:
        arc.recover(job.run)  # the run's newest session journaled it beyond its newest checkpoint
    ck = arc.checkpoints.of(job.run).newest(replay=True)
    if ck is None:
        return _of_commits(arc, job, asked)
    if job.buffer not in ck.buffers:
        raise NotFoundError(f"checkpoint {ck.name!r} at {arc.url} has no buffer {job.buffer!r}: {list(ck.buffers)}")
    return _of_share(arc, ck, _share(ck, job.buffer, asked), job.buffer)


def _share(ck: Checkpoint, buffer: str, asked: Asked) -> Any:
    """The share with all as it was in a world of the same size, else with a part by trajectories; where a part is asked
    for, that one of what the path's rank had, or all ranks."""
    index, named = asked.part, asked.where.rank
    if index is None:
        rank, size = asked.meant(ck.world_size, f"checkpoint {ck.name!r} was saved by {ck.world_size}")
        policy = "balanced" if size == ck.world_size else "by_trajectory"
        return planned(ck, world_size=size, policy=policy, tails="ignore").share(rank)
    _, size = asked.meant(1, "")
    chosen = None if named is None else {"episode_id": held_by(ck, buffer, named)}
    if index and index == named and size > 1:
        logger.warning(
            "rank %d of %d loads its part of the trajectories of rank_%d alone, so that nobody has the rest: with "
            "is_distributed=True all ranks give the same path; without it, each gives its own and all is shared out",
            index,
            size,
            index,
        )
    return planned(ck, world_size=size, policy="by_trajectory", filter=chosen, tails="ignore").share(index)


def held_by(ck: Checkpoint, buffer: str, rank: int) -> list[str]:
    """Ids of the episodes that one rank of the checkpoint has."""
    ck.staged(rank)  # an error if it has no such rank
    share = planned(ck, world_size=ck.world_size, tails="ignore").share(rank)
    ids: list[str] = share.buffer(buffer).episodes.table["episode_id"].to_pylist()
    return ids


def _of_share(arc: Archive, ck: Checkpoint, share: Any, buffer: str) -> Start:
    part = share.buffer(buffer)
    renumbered = ck.values.get(NUMBER, {})
    mine = part.episodes if share.plan.is_identity else ck.episodes  # as it was: other ranks' ids do not matter
    numbers = distinct_ids(mine, renumbered)
    taken = [*ids_of(ck.episodes, renumbered), *numbers.values()]
    states = [dict(s) if isinstance(s, Mapping) else {} for s in (part.state, *part.source_states.values())]
    state, generator, added = states[0], torch.Generator(), states[0].get("added")
    saved = state.get("generator", (state.get("live") or {}).get("generator"))
    if isinstance(saved, torch.Generator):
        generator.set_state(saved.get_state())
    else:
        generator.manual_seed(int(share.seed))  # of a new world
    if ck.record.recovered is not None:
        taken += ids_of(arc.episodes.filter(buffer=buffer))  # some came and left after the counter was saved
        if share.plan.is_identity:
            added = _added(mine, numbers, state)
    seeds = [s["seed"] for s in states if "seed" in s]
    found = Start(share, share.rank, share.world_size, part.episodes, numbers, next_id(states, taken), seeds, added)
    unsaved = ck.record.recovered is not None and not any(states)
    return found if unsaved else found._replace(generator=generator)


def _added(held: Episodes, numbers: Mapping[str, int], state: Mapping[str, Any]) -> int | None:
    """The number of trajectories that had been added with the newest one: its episode says it, or a newer state."""
    names: list[str] = held.table["episode_id"].to_pylist()
    counts = {numbers[name]: about.get(ADDED) for name, about in zip(names, metadata_of(held), strict=True)}
    newest = max(counts, default=-1)
    if counts and newest < state.get("counter", 0):
        return state.get("added")
    return counts[newest] if counts else 0


def _of_commits(arc: Archive, job: BufferJob, asked: Asked) -> Start:
    """The start where auto_save committed and nobody made a checkpoint: the trajectories that a rank wrote, in a world
    of as many; else a contiguous part of all, by number. NothingThereError where nothing was committed."""
    every = arc.episodes.filter(buffer=job.buffer)
    other = {name for run, entry in arc.head.runs.items() if run != job.run for name in entry.sessions}
    if (sessions := {*every.table["session"].to_pylist()}) & other:
        every = every.filter(session=sorted(sessions - other))
    if not len(every):
        runs = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NothingThereError(
            f"the archive at {arc.url} (runs: {runs}) has no trajectories of run {job.run!r} in buffer {job.buffer!r}: "
            "auto_save commits them, and save_checkpoint() makes a whole checkpoint once all ranks have called it"
        )
    writers, named = {*every.table["rank"].to_pylist()}, asked.where.rank
    count = max(writers) + 1
    rank, size = asked.meant(max(count, (named or 0) + 1), f"{count} wrote what is at {arc.url}")
    chosen = every.filter(rank=named) if asked.part is not None and named is not None else every
    if asked.part is None and count == size:
        mine = every.filter(rank=rank)
    else:  # as RLinf cuts its list: the first parts have one more
        ids, names = distinct_ids(chosen), chosen.table["episode_id"].to_pylist()
        order = np.argsort(np.array([ids[name] for name in names], np.int64), kind="stable")
        mine = chosen.pick(np.array_split(order, size)[rank])
    logger.info(
        "%s has no whole checkpoint of run %r: rank %d of %d takes %d of the %d trajectories that were committed there",
        *(asked.where.name, job.run, rank, size, len(mine), len(every)),
    )
    numbers = distinct_ids(mine if len(writers) == size else every)
    following = next_id((), [*ids_of(every), *numbers.values()])
    return Start(Holding(mine, job.buffer, job.run, rank, size), rank, size, mine, numbers, following)


def entries_of(episodes: Callable[[], Episodes], homes: Homes, numbers: Mapping[str, int] | None = None) -> list[Entry]:
    """Episodes as trajectories that can be read, by id; those that have no envs side by side are of one."""
    found = episodes()
    numbers = distinct_ids(found) if numbers is None else numbers
    home, out = homes(episodes), []
    for ep, about in zip(found, metadata_of(found), strict=True):
        weights = Weights(ep.model_weights_uuid, ep.update_count)
        entry = Entry(numbers[ep.id], ep.length, int(about.get("B", 1)), weights, home, ep.id, about.get(NUMBER))
        out.append(entry)
    return sorted((e for e in out if e.samples), key=lambda e: e.trajectory_id)
