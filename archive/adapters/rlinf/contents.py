"""The trajectories of a buffer in order: rows of transitions in memory, or the archives that they are read from; and
batches drawn from the newest."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.trajectory import Weights, metadata_of
from archive.arrays import Ints
from archive.base import FieldError, NotFoundError, at_once, forking, show
from archive.fields import FieldSpec, Path, dtypes, flatten, mapped, schema, unflatten
from archive.read import Episodes, Gather

Rows = dict[Path, torch.Tensor]  # one row a transition, step by step, envs of a step side by side
Part = tuple[torch.Tensor, Rows]  # places of rows in a batch, and the rows
Signature = frozenset[tuple[Path, torch.dtype, tuple[int, ...]]]  # what rows agree in that lie in one tensor

_SLACK = 1.5  # room taken when more is needed, in proportion to what is
_IN_ROWS = object()  # stands for a tensor that the rows hold in full
MAX_LOOKUPS = 8  # then all is looked up anew, and chunks that were held are read again
MAX_WHOLE_TRANSITIONS = 1_000_000  # whose fields of no single step are kept in memory


# -- a trajectory as rows of transitions --------------------------------------------------------------------------


class Flat(NamedTuple):
    """A trajectory taken apart: rows of transitions, and its leaves, without those that the rows have in full."""

    steps: int  # T
    envs: int  # B
    rows: Rows
    rest: dict[Path, Any]

    @property
    def signature(self) -> Signature:
        return frozenset((path, t.dtype, tuple(t.shape[1:])) for path, t in self.rows.items())


def taken_apart(tree: Mapping[str, Any], steps: int, envs: int) -> Flat:
    """Take a trajectory's tree apart. The rows may share memory with it; what is kept beside them never does."""
    rows: Rows = {}
    rest: dict[Path, Any] = {}
    for path, leaf in trajectories.leaves(tree):
        for key, value in leaf.items() if isinstance(leaf, Mapping) else ():
            if not isinstance(key, str) and _transitions((*path, str(key)), value, steps, envs) is not None:
                named = f"the key {key!r} is a {type(key).__name__}; fields are named by text"
                raise FieldError(f"field {show((*path, str(key)))!r}: {named}")
        found = _transitions(path, leaf, steps, envs)
        if found is not None:
            rows[path] = found.reshape(steps * envs, *found.shape[2:])
        whole = found is not None and found.shape == leaf.shape
        rest[path] = _IN_ROWS if whole else mapped(leaf, _copied)
    return Flat(steps, envs, rows, rest)


def _copied(value: Any) -> Any:
    """Lists and tuples of what never changes, and tensors, as they are now."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value) if type(value) in (list, tuple) else value
    return value.copy() if hasattr(value, "copy") else value


def _transitions(path: Path, value: Any, steps: int, envs: int) -> torch.Tensor | None:
    """The [T, B, ...] part of a field; None if it has none.

    Extra rows, one an epoch, are left out: of done flags those at the beginning of each epoch, of others (values of
    the state after an epoch) those at its end.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != envs or value.shape[0] < steps:
        return None
    is_done = path[0] in trajectories.DONES and len(path) == 1
    found = trajectories.one_a_step(value.detach(), steps, leading=is_done)
    if found is None and is_done:
        extra = len(value) - steps
        raise FieldError(
            f"{path[-1]} has {len(value)} rows, {extra} more than the trajectory's {steps} steps, which are not "
            f"{extra} epochs of equal length; give one extra row an epoch, or none"
        )
    return value.detach()[:steps] if found is None else found


def joined(parts: list[Part], count: int, missing: Any) -> Rows:
    """One batch of `count` rows from parts of it; a lone part has them all, in order.

    missing: what becomes of a field that not all parts have: "error", "skip", or a value to fill in.
    """
    if len(parts) == 1:
        return parts[0][1]
    out: Rows = {}
    for path in dict.fromkeys(path for _, rows in parts for path in rows):
        lacking = any(path not in rows for _, rows in parts)
        if lacking and missing == "skip":
            continue
        if lacking and missing == "error":
            raise FieldError(
                f"some of the trajectories in the window lack field {show(path)!r}, which others have; make the buffer "
                "with missing='skip' to leave such fields out, or missing=VALUE to fill them in"
            )
        first = next(rows[path] for _, rows in parts if path in rows)
        out[path] = torch.empty((count, *first.shape[1:]), dtype=first.dtype)
        for places, rows in parts:
            found = rows.get(path)
            if found is None:
                found = torch.full((len(places), *first.shape[1:]), missing, dtype=first.dtype)
            elif found.dtype != first.dtype or found.shape[1:] != first.shape[1:]:
                raise FieldError(
                    f"field {show(path)!r} is {found.dtype}{list(found.shape[1:])} in one trajectory and "
                    f"{first.dtype}{list(first.shape[1:])} in another, which make no batch; keep them in different "
                    "buffers"
                )
            _assignable(out[path])[places] = _assignable(found)
    return out


def _assignable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype whose rows torch can assign: there are no such kernels for larger unsigned ones."""
    plain = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    return tensor if plain is None else tensor.view(plain)


def check_signature(have: Signature, new: Signature, missing: Any) -> None:
    """Refuse a trajectory whose fields are not those of the others."""
    old = {path: (dtype, shape) for path, dtype, shape in have}
    for path, dtype, shape in sorted(new, key=lambda entry: entry[0]):
        if path in old and old[path] != (dtype, shape):
            raise FieldError(
                f"field {show(path)!r} is {dtype}{list(shape)} here, and {old[path][0]}{list(old[path][1])} in the "
                "trajectories that the buffer has; nothing was added: keep them in different buffers"
            )
    names = {path for path, _, _ in new}
    for paths, what in ((old.keys() - names, "lacks"), (names - old.keys(), "has")):
        if paths and missing == "error":
            raise FieldError(
                f"a trajectory {what} field {show(min(paths))!r}, unlike those that the buffer has; nothing was added. "
                "Make the buffer with missing='skip' to leave such fields out of batches, or missing=VALUE to fill "
                "them in"
            )


class Slab:
    """Rows of trajectories of one signature. Not safe for several threads.

    expected: how many trajectories it will hold at once, if known: then room for as many of the first one's size is
    reserved (and touched only as it is filled).
    """

    def __init__(self, expected: int = 0) -> None:
        self._expected = expected
        self._tensors: Rows = {}
        self._capacity = 0
        self.spans: dict[Hashable, tuple[int, int]] = {}

    def put(self, key: Hashable, rows: Rows, count: int) -> None:
        """Copy a trajectory's rows in."""
        start = self._place(count)
        if start is None:
            self._make_room(rows, count)
            start = self._place(count)
            assert start is not None
        for path, value in rows.items():
            self._tensors[path][start : start + count] = value
        self.spans[key] = (start, start + count)

    def view(self, key: Hashable) -> Rows:
        """A trajectory's rows, not copied."""
        start, stop = self.spans[key]
        return {path: tensor[start:stop] for path, tensor in self._tensors.items()}

    def take(self, index: torch.Tensor) -> Rows:
        """Copies of these rows."""  # 1-d uint16 has no index_select
        return {p: t[index] if t.dim() == 1 else t.index_select(0, index) for p, t in self._tensors.items()}

    def _place(self, count: int) -> int | None:
        """The first row of so many free ones; None if there are none."""
        at = 0
        for start, stop in sorted(self.spans.values()):
            if start - at >= count:
                return at
            at = stop
        return at if self._capacity - at >= count and self._tensors else None

    def _make_room(self, rows: Rows, count: int) -> None:
        """Close the gaps, in larger tensors where those would be left nearly full."""
        needed = count + sum(stop - start for start, stop in self.spans.values())
        if not self._tensors:
            self._capacity = count * max(1, self._expected)
        elif needed * _SLACK > self._capacity:
            self._capacity = int(needed * _SLACK) + 1
        old, spans = self._tensors, sorted(self.spans.items(), key=lambda item: item[1])
        self._tensors = {p: torch.empty((self._capacity, *t.shape[1:]), dtype=t.dtype) for p, t in rows.items()}
        at = 0
        for key, (start, stop) in spans:
            for path, tensor in self._tensors.items():
                tensor[at : at + stop - start] = old[path][start:stop]
            self.spans[key] = (at, at + stop - start)
            at += stop - start


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
        self._episodes = episodes
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
        lengths = self._episodes.lengths()
        if lacking and int(lengths[list(self._held)].sum()) * self._envs > self._most_held:
            self._held, lacking = {}, list(numbers)
        read = self._episodes[np.array(lacking, np.int64)].read(self._whole) if lacking else ()
        for number, data in zip(lacking, read, strict=True):
            rows = taken_apart(_tree_of(data, {"B": self._envs}), int(lengths[number]), self._envs).rows
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


# -- all of them ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """One trajectory of a buffer."""

    trajectory_id: int
    steps: int  # T
    envs: int  # B
    weights: Weights
    home: Home | None = None  # where it can be read, once that is committed
    name: str = ""  # its episode's id there
    original: int | None = None  # the id that its episode's metadata says
    slab: Slab | None = None  # of its rows, if they are in memory
    rest: Mapping[Path, Any] | None = None  # what those do not have

    @property
    def samples(self) -> int:
        return self.steps * self.envs


def read(entries: Sequence[Entry]) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Trajectories that lie in archives, whole, in order; read ahead in bounded memory."""
    homes = {home: [e.name for e in entries if e.home is home] for home in dict.fromkeys(e.home for e in entries)}
    trees = {home: home.trees(names) for home, names in homes.items() if home is not None}
    for entry in entries:
        assert entry.home is not None
        yield entry, next(trees[entry.home])


class Window(NamedTuple):
    """The trajectories that are sampled, and where the rows of each are."""

    entries: list[Entry]
    ends: torch.Tensor  # running number of transitions
    starts: torch.Tensor
    sources: list[Slab | Home]
    source: torch.Tensor  # the number of its slab or home
    base: torch.Tensor  # first row in the slab
    total: int

    def gather(self, drawn: torch.Tensor) -> tuple[list[Part], list[Callable[[], list[Part]]]]:
        """Rows of the transitions drawn (numbers within the window): those in memory, and calls that read the rest."""
        which = torch.bucketize(drawn, self.ends, right=True)
        row = drawn - self.starts[which]
        if len(self.sources) == 1 and isinstance(slab := self.sources[0], Slab):
            return [(torch.arange(len(drawn)), slab.take(self.base[which] + row))], []
        of = self.source[which]
        parts: list[Part] = []
        reads: list[Callable[[], list[Part]]] = []
        for number in torch.unique(of).tolist():
            source, places = self.sources[number], torch.nonzero(of == number).reshape(-1)
            mine = which[places]
            if isinstance(source, Slab):
                parts.append((places, source.take(self.base[mine] + row[places])))
            else:
                reads.append(partial(source.take, self.entries, places, mine, row[places]))
        return parts, reads


class Contents:
    """The trajectories of a buffer. Not safe for several threads.

    missing: see `joined`.  in_memory: how many stay in memory of those that can be read from an archive.  most: how
    many stay at all; None for all.
    """

    def __init__(self, missing: Any, in_memory: int | None, most: int | None) -> None:
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.cached: OrderedDict[Entry, None] = OrderedDict()  # those in memory, in the order in which they came there
        self.total_samples = 0
        self._missing = missing
        self._in_memory = in_memory
        self._most = math.inf if most is None else most
        self._slabs: dict[Signature, Slab] = {}
        self._window: tuple[int, Window] | None = None

    def check(self, flats: Iterable[Flat]) -> None:
        """Refuse trajectories whose fields don't go with those there are."""
        have = next(iter(self._slabs), None)
        for flat in flats:
            have = have or flat.signature
            check_signature(have, flat.signature, self._missing)

    def add(self, entry: Entry, flat: Flat | None = None) -> None:
        """A trajectory more, the newest; in memory, if its rows are given."""
        self.entries[entry.trajectory_id] = entry
        self.total_samples += entry.samples
        self._window = None
        if flat is not None:
            self.remember(entry, flat)

    def evict(self) -> list[int]:
        """The oldest beyond those that stay leave the buffer; their ids."""
        left: list[int] = []
        while len(self.entries) > self._most:
            number, gone = self.entries.popitem(last=False)
            self.forget(gone)
            self.total_samples -= gone.samples
            left.append(number)
            self._window = None
        return left

    def remember(self, entry: Entry, flat: Flat) -> None:
        """Copy a trajectory's rows into memory."""
        slab = self._slabs.setdefault(flat.signature, Slab(self._in_memory or 0))
        slab.put(entry, flat.rows, flat.steps * flat.envs)
        entry.slab, entry.rest = slab, flat.rest
        self.cached[entry] = None
        self._window = None

    def forget(self, entry: Entry) -> None:
        """Free the memory of a trajectory's rows."""
        if entry.slab is None:
            return
        del entry.slab.spans[entry], self.cached[entry]
        entry.slab = entry.rest = None
        spent = [signature for signature, slab in self._slabs.items() if not slab.spans]
        for signature in spent[: len(self._slabs) - 1]:  # the last one stays, for what comes
            del self._slabs[signature]
        self._window = None

    def trim(self) -> None:
        """Free the memory of the oldest that can be read, beyond those that stay there."""
        if self._in_memory is not None:
            self.forget_read(len(self.cached) - self._in_memory)

    def forget_read(self, count: int) -> None:
        """Free the memory of those among the oldest `count` there that can be read from an archive."""
        for entry in list(self.cached)[: max(0, count)]:
            if entry.home is not None:
                self.forget(entry)

    def tree(self, entry: Entry) -> dict[str, Any]:
        """A trajectory in memory, as it was given; its tensors are not copied."""
        assert entry.slab is not None
        assert entry.rest is not None
        rows, shape = entry.slab.view(entry), (entry.steps, entry.envs)
        whole = {path: rows[path].reshape(*shape, *rows[path].shape[1:]) for path in rows}
        return unflatten({path: whole[path] if leaf is _IN_ROWS else leaf for path, leaf in entry.rest.items()})

    def window(self, size: int) -> Window:
        """The newest `size` trajectories; 0 for all."""
        if self._window is None or self._window[0] != size:
            every = list(self.entries.values())
            self._window = size, self._made(every[-size:] if size else every)
        return self._window[1]

    def _made(self, entries: list[Entry]) -> Window:
        ends = torch.cumsum(torch.tensor([e.samples for e in entries], dtype=torch.int64), 0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])[:-1]
        places: list[Slab | Home] = [e.slab or e.home for e in entries if e.slab or e.home]  # type: ignore[misc]
        sources = list(dict.fromkeys(places))
        source = torch.tensor([sources.index(place) for place in places], dtype=torch.int64)
        base = torch.tensor([0 if e.slab is None else e.slab.spans[e][0] for e in entries], dtype=torch.int64)
        return Window(entries, ends, starts, sources, source, base, int(ends[-1]) if entries else 0)
