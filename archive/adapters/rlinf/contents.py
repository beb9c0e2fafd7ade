"""The trajectories of a buffer in order: rows of transitions in memory, or an archive that is asked for them; and
batches drawn from the newest."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.trajectory import NUMBER, Steps, Weights
from archive.base import FieldError, UsageError, show
from archive.fields import Path, dtypes, mapped, unflatten

if TYPE_CHECKING:
    from archive.adapters.rlinf.stored import Home

Rows = dict[Path, torch.Tensor]  # one row a transition, step by step, envs of a step side by side
Part = tuple[torch.Tensor, Rows]  # places of rows in a batch, and the rows
Signature = frozenset[tuple[Path, torch.dtype, tuple[int, ...]]]  # what rows agree in that lie in one tensor

_SLACK = 1.5  # room taken when more is needed, in proportion to what is
_IN_ROWS = object()  # stands for a tensor that the rows hold in full


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


class Taken(NamedTuple):
    """One trajectory as it was given."""

    made: Steps
    flat: Flat

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.flat.rows.values())

    def as_episode(self, number: int, more: Mapping[str, Any] | None = None) -> Steps:
        """The episode that the archive gets of it, with its id and its weights in the metadata, and more if given."""
        uuid, count = self.made.weights
        metadata = {NUMBER: number, **self.made.metadata, **(more or {})}
        metadata |= {"model_weights_uuid": uuid, "model_update_count": count}
        return dataclasses.replace(self.made, metadata=metadata)


def taken(trajectory: Any, weights: Weights) -> Taken | None:
    """A trajectory's parts; None for one without any steps; an error if it cannot be kept.

    weights: as the caller gives them; they go before what the trajectory says.
    """
    try:
        given = trajectories.tree_of(trajectory)
    except TypeError:
        given = {}
    if not given.keys() & {*trajectories.FIELDS}:
        wanted = "give RLinf's Trajectory, or an object or a dict with the same fields"
        raise UsageError(f"a {type(trajectory).__name__} is no trajectory: {wanted}")
    if not isinstance(given.get("model_weights_id", ""), str):
        given = given | {"model_weights_id": str(given["model_weights_id"] or "")}
    tree = mapped(given, lambda leaf: dtypes.to_torch(leaf) if type(leaf) is np.ndarray else leaf)
    shape = trajectories.shape_of(tree)
    if shape == (0,):
        return None
    if len(shape) < 2:
        raise FieldError(f"a trajectory's tensors are [T, B, ...]; the first of these has shape {list(shape)}")
    if not shape[0] * shape[1]:
        return None

    def said(*names: str) -> Any:
        found = (tree.get(name, getattr(trajectory, name, None)) for name in names)
        return next((value for value in found if value is not None), None)

    own = Weights(said("model_weights_uuid"), said("model_update_count", "update_count"))
    made = trajectories.to_steps(tree)
    made = dataclasses.replace(made, weights=weights.or_else(own).or_else(made.weights))
    return Taken(made, taken_apart(tree, int(shape[0]), int(shape[1])))


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


# -- all of them ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
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
