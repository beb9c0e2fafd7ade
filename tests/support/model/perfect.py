"""The perfect model: what an archive holds, in dicts and tuples. It knows nothing of the library.

Every step has a number of its own, its serial, which its fields, its priority and its late fields follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from archive import Schema

KINDS = ("plain", "image", "text", "ragged")
KIND_OF = {"replay": "image", "demo": "ragged"}  # of what is appended to streams
SCHEMA = Schema(axes={"tokens": "ragged"}, next_of={"next/x": "x"})


def fields_of(kind: str, serials: Sequence[int]) -> dict[str, Any]:
    """The nest of these steps."""
    t = np.array(serials, np.int64)
    out: dict[str, Any] = {"serial": t, "reward": t * 0.5}
    if kind == "image":
        out["obs"] = {"image": np.repeat(t[:, None] % 251, 6, 1).astype(np.uint8).reshape(-1, 2, 3)}
        out["x"] = np.stack([t, -t], 1).astype(np.float32)
        out["next"] = {"x": out["x"] + np.float32(1)}
    elif kind == "text":
        out["text"] = np.array([f"{s}é" * (s % 3) for s in serials], object)
        out["deep"] = {"er": {"flag": t % 2 == 0, "half": t.astype(np.float16)}}
    elif kind == "ragged":
        out["tokens"] = [np.arange(s, s + s % 4, dtype=np.int32) for s in serials]
        out["nested"] = {"id": t.astype(np.int16)}
    return out


def priority(serials: Sequence[int]) -> np.ndarray[Any, Any]:
    """The priority that each of these steps has."""
    return np.asarray(serials, np.float64) * 3 + 1


NO_ENV = -1
MAIN = "replay"


@dataclass(frozen=True)
class Known:
    """An episode as a session has it. stamps: which commits brought its rows, oldest first."""

    buffer: str
    kind: str
    first: bool
    last: bool = False
    serials: tuple[int, ...] = ()
    terminated: bool | None = None
    truncated: bool | None = None
    reason: str | None = None
    metadata: int | None = None
    updates: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    rank: int = 0
    run: str = ""
    stamps: tuple[int, ...] = ()

    def with_steps(self, serials: list[int], update: int | None, weights: str | None) -> Known:
        """The same with more steps at its end."""
        updates = self.updates if update is None else (*self.updates, update)
        names = (*self.weights, weights) if weights and weights not in self.weights else self.weights
        return replace(self, serials=(*self.serials, *serials), updates=updates, weights=names)

    def same_but_for_stamps(self, other: Known | None) -> bool:
        """Whether no row has come to it."""
        return other is not None and replace(self, stamps=(), rank=0, run="") == replace(
            other, stamps=(), rank=0, run=""
        )


Episodes = dict[str, Known]


@dataclass
class Buffer:
    """Live steps of each env row by position, and what is open there."""

    live: dict[int, dict[int, int]] = field(default_factory=dict)  # env -> position -> serial
    empty: dict[tuple[int, int], str] = field(default_factory=dict)  # (env, position) -> live episode without steps
    next: dict[int, int] = field(default_factory=dict)
    open: dict[int, str] = field(default_factory=dict)

    def copy(self) -> Buffer:
        return Buffer({e: dict(r) for e, r in self.live.items()}, dict(self.empty), dict(self.next), dict(self.open))

    def serials(self) -> list[int]:
        """The live steps in live order."""
        return [row[p] for _, row in sorted(self.live.items()) for p in sorted(row)]

    def episodes(self, owner: dict[int, str]) -> list[tuple[str, list[int]]]:
        """Live episodes in order, and their live steps. owner: serial -> its episode."""
        at = [(env, p, owner[s], [s]) for env, row in self.live.items() for p, s in row.items()]
        at += [(env, p, name, []) for (env, p), name in self.empty.items()]
        out: list[tuple[str, list[int]]] = []
        for _, _, name, serial in sorted(at, key=lambda a: a[:2]):
            if out and out[-1][0] == name:
                out[-1][1].extend(serial)
            else:
                out.append((name, list(serial)))
        return out

    def put(self, env: int, position: int, serials: list[int], name: str) -> None:
        """Steps (or an episode without any) from a position on."""
        self.live.setdefault(env, {}).update({position + i: s for i, s in enumerate(serials)})
        if not serials:
            self.empty[env, position] = name
        self.next[env] = position + max(1, len(serials))

    def drop(self, env: int, positions: set[int]) -> None:
        """What stands at these positions has left."""
        row = self.live.get(env, {})
        for position in positions:
            row.pop(position, None)
            self.empty.pop((env, position), None)

    def remove(self, name: str, owner: dict[int, str]) -> int:
        """An episode has left; how many steps."""
        count = 0
        for row in self.live.values():
            gone = [p for p, s in row.items() if owner[s] == name]
            count += len(gone)
            for position in gone:
                del row[position]
        self.empty = {k: v for k, v in self.empty.items() if v != name}
        return count

    def incomplete(self, owner: dict[int, str], seen: Episodes) -> dict[str, dict[str, list[int]]]:
        """By why: live episodes that lack their beginning, or (only) their end or other steps, and their live steps.
        seen: those that its session sees."""
        found: dict[str, list[int]] = {}
        for name, serials in self.episodes(owner):
            found.setdefault(name, []).extend(serials)
        out: dict[str, dict[str, list[int]]] = {}
        for name, serials in found.items():
            known = seen[name]
            headless = not known.first or not {*known.serials[:1]} <= {*serials}
            if headless or not known.last or len(serials) < len(known.serials):
                out.setdefault("headless" if headless else "open", {})[name] = serials
        return out

    def places(self, names: Iterable[str], owner: dict[int, str]) -> set[tuple[int, int]]:
        """Where these episodes stand: env row and position."""
        wanted = set(names)
        steps = {(env, p) for env, row in self.live.items() for p, s in row.items() if owner[s] in wanted}
        return steps | {place for place, name in self.empty.items() if name in wanted}

    def without(self, places: set[tuple[int, int]]) -> Buffer:
        """A copy in which nothing stands there."""
        out = self.copy()
        for env, position in places:
            out.drop(env, {position})
        return out


Buffers = dict[str, Buffer]
Places = dict[str, set[tuple[int, int]]]  # buffer -> env rows and positions


def copied(buffers: Buffers) -> Buffers:
    return {name: one.copy() for name, one in buffers.items()}


@dataclass
class Rank:
    """One rank: its buffers, and the episodes that it has written to, as they are and as they were committed.

    durable: both as of its journal's last tick that is certain, and as of each moment since at which it may have ticked
    by itself; empty: it keeps none. left_out: by buffer, where what the newest checkpoint has left out stands: it was
    not complete, and comes back with no recovery.
    """

    number: int
    buffers: Buffers
    known: Episodes = field(default_factory=dict)
    committed: Episodes = field(default_factory=dict)
    durable: list[tuple[Episodes, Buffers]] = field(default_factory=list)
    left_out: Places = field(default_factory=dict)
    left_ids: set[str] = field(default_factory=set)  # the episodes that stood there
    dead: bool = False
    weights: tuple[int | None, str | None] = (None, None)

    @classmethod
    def of(cls, number: int, buffers: Buffers, seen: Episodes) -> Rank:
        """One that goes on from these buffers; seen: all episodes that its session sees."""
        opened = {name: seen[name] for buffer in buffers.values() for name in buffer.open.values()}
        return cls(number, copied(buffers), opened, dict(opened))

    def ticked(self) -> None:
        """All that it has is in its journal."""
        self.durable = [(dict(self.known), self.without(self.left_out))]

    def maybe_ticked(self) -> None:
        """Nobody knows whether a tick came to be."""
        now = dict(self.known), self.without(self.left_out)
        if self.durable[-1] != now:
            self.durable.append(now)

    def without(self, places: Places) -> Buffers:
        """Its buffers, and nothing that stands there."""
        return {name: one.without(places.get(name, set())) for name, one in self.buffers.items()}

    def stamp(self, stamp: int, run: str) -> None:
        """All that it has written is committed."""
        for name, one in self.known.items():
            before = self.committed.get(name)
            if not one.same_but_for_stamps(before):
                stamped = replace(one, stamps=(*one.stamps, stamp), rank=self.number, run=run)
                self.known[name] = self.committed[name] = stamped


@dataclass
class Session:
    """One start of a job. base: what it sees of those that it goes back to; tree: the first of these.
    drops: most of its checkpoints leave out what is not complete."""

    name: str
    run: str
    tree: str
    ranks: list[Rank]
    base: Episodes
    journal: bool = False
    drops: bool = False
    saved: int = 0
    origin: Saved | None = None

    def seen(self) -> Episodes:
        """All that it has of episodes that are committed."""
        out = dict(self.base)
        for rank in self.ranks:
            out |= rank.committed
        return out

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.dead]


@dataclass
class Saved:
    """A checkpoint. columns: name -> factor; live, known: of each rank that is in it."""

    name: str
    session: str
    run: str
    tree: str
    step: int
    world: int
    replay: bool
    buffers: dict[int, Buffers]
    seen: Episodes
    columns: dict[str, int]
    attributes: dict[int, dict[str, int]]
    recovered: bool = False
    loose: bool = False  # which rank has what is not known
    forgotten: bool = False
    journal: bool = False
    discarded: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.buffers) == self.world

    def live_ids(self, owner: dict[int, str]) -> set[str]:
        """Episodes that are live in it."""
        if not self.replay:
            return set()
        return {name for of in self.buffers.values() for b in of.values() for name, _ in b.episodes(owner)}


@dataclass
class Letting:
    """A forgetting: what was gone before, which checkpoints went, and whether something stands in the way of its
    undoing."""

    before: dict[str, int]
    checkpoints: list[Saved]
    sealed: bool = False
