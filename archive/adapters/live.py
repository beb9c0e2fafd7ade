"""Live buffers of other systems, all kept by one way: saved, followed by a journal between saves, and restored.

A `LiveBuffer` is what an adapter says of its system: which of its data are steps, columns, attributes and state, and
how these become the buffer again. `Tracked` remembers what an archive has of an object. The rest is here.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from archive.adapters.common import (
    Report,
    Saved,
    check_room,
    checkpoint,
    part_of,
    saved_by,
    share_buffer,
    share_of,
)
from archive.arrays import Ints
from archive.base import CorruptStateError, UsageError
from archive.checkpoint import Checkpoint, Checkpoints, Pending
from archive.fields import trees
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Share, ShareBuffer

STATE = "live_state"  # the attribute in which a journal keeps a buffer's state, at one of its episodes
Known = TypeVar("Known")
_WRITER = ("session", "stream_rank")
Units = frozenset[tuple[int, int, int, str]]  # runs of live steps of one episode: env row, position, steps, episode id


class LiveBuffer(ABC):
    """One live buffer of a system, under the name that it has in the archive."""

    system: str  # the name that its saved states carry
    unit = "steps"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def what(self) -> str:
        """The words for it in errors."""
        return f"buffer {self.name!r}"

    def still(self) -> AbstractContextManager[Any]:
        """Nobody else changes the buffer within this context."""
        return nullcontext()

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of units that it holds."""

    @abstractmethod
    def append(self, part: Buffer) -> Saved:
        """Append what the writer has not seen, evict what has left; give columns, attributes and state."""

    @abstractmethod
    def prepared(self, share: Share, part: ShareBuffer, states: Mapping[int, Any]) -> Any:
        """Make ready what `put` takes, and refuse what does not fit; nothing is changed. states: by source rank."""

    @abstractmethod
    def put(self, ready: Any) -> Report:
        """Fill the buffer with it."""


def save(every: Mapping[str, LiveBuffer], writer: Writer, step: int, **options: Any) -> Pending:
    """Checkpoint buffers by name, all as they are at one moment; options: those of `Writer.checkpoint`."""
    wait, saved = bool(options.pop("wait", False)), {}
    with ExitStack() as still:
        for one in every.values():
            still.enter_context(one.still())
        for name, one in every.items() if options.get("save_replay", True) else ():
            saved[name] = appended(writer, name, one.append)
        pending = checkpoint(writer, step, saved, **options)
    if wait:
        pending.result()
    return pending


def restore(every: Mapping[str, LiveBuffer], source: Any, rank: int | None, existing: str) -> dict[str, Report]:
    """Put a share, or what `rank` had in a checkpoint, into buffers by name; nothing is changed if one does not fit."""
    share = share_of(source, rank, tails="ignore").as_saved()
    parts = {name: share_buffer(share, name) for name in every}
    for one in every.values():
        check_room(existing, one.held, one.what, one.unit)
    ready = {name: one.prepared(share, parts[name], states_of(parts[name], one.system)) for name, one in every.items()}
    return {name: one.put(ready[name]) for name, one in every.items()}


def follow(every: Callable[[], Mapping[str, LiveBuffer]], writer: Writer) -> None:
    """Have the writer's journal take in at each tick what has changed in buffers by name since it last looked."""

    def take_in(name: str, writer: Writer) -> None:
        one = every()[name]
        with one.still():
            appended(writer, name, one.append)

    for name in every():
        writer.follow(name, partial(take_in, name))


def appended(writer: Writer, name: str, append: Callable[[Buffer], Saved]) -> Saved:
    """Give a buffer's steps to the writer by `append`; what it adds to a checkpoint. A journal has them together
    with their columns, attributes and state, or not at all: after an error the writer has none of them."""
    part = part_of(writer, name)
    with part.exclusive(bounded=False) if part.journaled else part.together():
        saved = append(part)
        if part.journaled:
            _said.setdefault(part, Said()).journal(writer, part, saved)
    return saved


# -- what an archive has of a live object ------------------------------------------------------------------------------


class _Entry(NamedTuple, Generic[Known]):
    part: ref[Buffer] | None  # None: a restore left it
    units: Units
    known: Known


class Tracked(Generic[Known]):
    """The knowledge of live objects: for each writer's buffer that keeps one what it has of it. What a restore found
    waits for the writer that goes on with just these steps: what another session wrote may never be committed."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Any, list[_Entry[Known]]] = WeakKeyDictionary()

    def of(self, live: Any, part: Buffer) -> Known | None:
        """The knowledge that this writer's buffer has of the object; None if it has none."""
        every = [entry for entry in self._entries.get(live, []) if entry.part is None or entry.part() is not None]
        found = next((entry for entry in every if entry.part is not None and entry.part() is part), None)
        if found is None and any(entry.part is None for entry in every):
            units = live_units(part)
            found = next((entry for entry in every if entry.part is None and entry.units == units), None)
            every = [entry._replace(part=ref(part)) if entry is found else entry for entry in every]
        self._entries[live] = every
        return None if found is None else found.known

    def keep(self, live: Any, part: Buffer, known: Known) -> Known:
        """Remember what a writer's buffer has of it."""
        before = self._entries.get(live, [])
        part.undone(partial(self._entries.__setitem__, live), before)
        others = [entry for entry in before if entry.part is None or entry.part() is not part]
        self._entries[live] = [*others, _Entry(ref(part), frozenset(), known)]
        return known

    def restored(self, live: Any, part: ShareBuffer, known: Known) -> None:
        """Remember what was put into it, and nothing else."""
        where, ids = part.layout, part.episodes.columns(["episode_id"])["episode_id"].to_pylist()
        self._entries[live] = [_Entry(None, units_of(where.env_id, where.position, where.length, ids), known)]

    def forget(self, live: Any) -> None:
        """Its contents are replaced: nothing is known of them."""
        self._entries.pop(live, None)

    def all(self, live: Any) -> list[Known]:
        """The knowledge that all writers have of it."""
        return [entry.known for entry in self._entries.get(live, [])]


def live_units(part: Buffer) -> Units:
    """The units that a writer's buffer holds."""
    runs, ids = part.live_runs()
    return units_of(runs.stream, runs.lo, runs.length, ids)


def units_of(env: Ints, position: Ints, length: Ints, ids: list[str]) -> Units:
    """Runs of steps, neighbours of one episode as one."""
    out: list[tuple[int, int, int, str]] = []
    for row, start, steps, name in sorted(zip(env.tolist(), position.tolist(), length.tolist(), ids, strict=True)):
        before = out[-1] if out else None
        if before and (row, name, start) == (before[0], before[3], before[1] + before[2]):
            out[-1] = (row, before[1], before[2] + steps, name)
        elif steps:
            out.append((row, start, steps, name))
    return frozenset(out)


class Item(NamedTuple):
    """An item that is in an archive as one episode; `mark` tells another item of the same key apart."""

    mark: Any
    episode_id: str


def kept_items(
    part: Buffer, known: Mapping[Any, Item], found: Iterable[tuple[Any, Any]], add: Callable[[Any], str | None]
) -> dict[Any, Item]:
    """Items by key, as the writer's buffer has them from now on. found: key and mark of each; add: writes an item that
    is new or another one, and gives its episode's id, or None where it is left out. What is no item leaves."""
    live, held = set(part.live["episode_id"].to_pylist()), dict[Any, Item]()
    for key, mark in found:
        item = known.get(key)
        if item is None or item.episode_id not in live or item.mark != mark:
            name = add(key)
            item = None if name is None else Item(mark, name)
        if item is not None:
            held[key] = item
    part.remove(live - {item.episode_id for item in held.values()})
    return held


# -- the journal -------------------------------------------------------------------------------------------------------


class Said:
    """The attributes and the state of one buffer as its journal has them: those that stay are not journaled again. Of
    columns, the journal finds that out by itself."""

    def __init__(self) -> None:
        self._attributes: Mapping[str, Mapping[str, Any]] = {}
        self._state: str | None = None
        self._holder = ""  # the episode that has the state
        self._number = 0  # of states; a recovery may bring an episode back that had an earlier one
        self._cuts = -1  # checkpoints of the buffer so far: each is what later ticks are added to

    def journal(self, writer: Writer, part: Buffer, saved: Saved) -> None:
        """Journal what has changed since the last call, or the last checkpoint."""
        part.undone(vars(self).update, dict(vars(self)))
        if part.cuts != self._cuts:
            self._attributes, self._state = {}, None
        _, ids = part.live_runs()
        state, holder = as_text(saved.state if saved.tick is None else saved.tick), ids[-1] if ids else ""
        attributes: dict[str, dict[str, Any]] = {}
        for name, values in saved.attributes.items():
            before = self._attributes.get(name, {})
            if new := {one: value for one, value in values.items() if one not in before or before[one] != value}:
                attributes[name] = new
        if holder and (state, holder) != (self._state, self._holder):
            gone = {self._holder: None} if self._holder in ids else {}
            self._number += 1
            attributes[STATE] = gone | {holder: {"session": writer.session, "number": self._number, "state": state}}
        part.journal(saved.columns, attributes)
        self._attributes = {name: dict(values) for name, values in saved.attributes.items()}
        self._state, self._holder, self._cuts = state, holder, part.cuts


_said: WeakKeyDictionary[Buffer, Said] = WeakKeyDictionary()


def as_text(state: Any, where: str = "state") -> str:
    """A state as JSON, arrays within."""
    tree, arrays = trees.flatten(state, where=where)
    data = {key: [a.dtype.str, list(a.shape), base64.b64encode(a.tobytes()).decode()] for key, a in arrays.items()}
    return json.dumps({"tree": tree, "arrays": data}, separators=(",", ":"))


def from_text(text: Any, where: str) -> Any:
    """The state again."""
    try:
        given = json.loads(text)
        arrays = {
            key: np.frombuffer(base64.b64decode(data, validate=True), trees.build_dtype(dtype)).reshape(shape)
            for key, (dtype, shape, data) in given["arrays"].items()
        }
        tree = given["tree"]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise CorruptStateError(f"{where}: the state is damaged: {e}; restore an earlier checkpoint") from e
    return trees.unflatten(tree, arrays, where=where)


def states_of(part: ShareBuffer, system: str) -> dict[int, Any]:
    """Source rank -> the state that this system's adapter saved; of a recovered checkpoint, the one journaled last."""
    ck = part.checkpoint
    if ck.record.recovered is None:
        return saved_by(system, part.source_states)
    return saved_by(system, {rank: _recovered(ck, rank, part.name) for rank in ck.ranks})


def _recovered(ck: Checkpoint, rank: int, name: str) -> Any:
    """The state of a rank when its journal ended; an error if the journal has steps that no state knows of."""
    recovered = ck.record.recovered
    if recovered is None:
        return ck.state(rank, name)
    given = ck.attributes(rank, name).get(STATE, {}).values()
    states = [one for one in given if isinstance(one, Mapping) and one.get("session") == ck.session]
    newest = max(states, key=_number, default=None)
    if newest is not None and sum(_number(one) == _number(newest) for one in states) == 1:
        return from_text(newest.get("state"), f"buffer {name!r} of rank {rank} of checkpoint {ck.name!r}")
    tail, live = recovered.tails.get(rank), _live_rows(ck, rank, name)
    said_nothing = (tail is None or not tail.objects) and recovered.base != ck.staged(rank).index.resumed_from
    if said_nothing or not live:
        return ck.state(rank, name)
    began = None if recovered.base is None else Checkpoints(ck.snapshot.storage, ck.commit).at_commit(recovered.base)
    if began is not None and rank in began.ranks and _live_rows(began, rank, name) == live:
        return _recovered(began, rank, name)  # nothing came after it
    base = recovered.name or "none"
    raise UsageError(
        f"checkpoint {ck.name!r} was recovered from journals, and the saved state of this buffer knows nothing of what "
        f"came after checkpoint {base!r}: restore that one, by resharding.plan(arc.checkpoints[{base!r}], "
        "world_size=..., tails='ignore'); what came later stays in the archive"
    )


def _number(state: Mapping[str, Any]) -> int:
    """The number of a journaled state; -1 of one that has none, from an earlier version."""
    number = state.get("number")
    return number if isinstance(number, int) else -1


def _live_rows(ck: Checkpoint, rank: int, name: str) -> Units:
    """The live steps of a rank's buffer, by the streams that wrote them."""
    rows = ck.live.filter(
        (np.asarray(ck.live["rank"]) == rank) & (np.asarray(ck.live["buffer"].cast("string"), object) == name)
    )
    writers = [f"{session}/{of}" for session, of in zip(*(rows[k].to_pylist() for k in _WRITER), strict=True)]
    env, lo, hi = (np.asarray(rows[key]) for key in ("stream_env", "lo", "hi"))
    return units_of(env, lo, hi - lo, writers)
