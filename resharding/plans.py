"""Plans: frozen values that assign steps to target ranks, with their places there, and the steps that are dropped.

A plan is made from the manifest alone; it prints as its own dry run, compares, and survives a round trip through JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from archive.arrays import Mask, Steps, ascending
from archive.base import (
    Count,
    IntegrityError,
    Positive,
    Record,
    UsageError,
    cached_property,
    logger,
    records,
    stored,
    tabulate,
    visible,
)
from archive.checkpoint import Checkpoint, resumption
from archive.log import Origin, place
from resharding.placement import FILTERED, Placement
from resharding.share import Share
from resharding.source import SourceBuffer, sources_of

FORMAT = 1
_WHAT = "the text of this plan"
_DROPS = (
    "the plan of checkpoint %r for %d ranks drops %d of %d steps, of %d episodes (%s); "
    "plan.dropped_episodes() lists them"
)
_MOST_RANKS = 1 << 20  # a plan counts for each


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan of a redistribution. `share(rank)` gives one target rank its part; any process can compute its own."""

    checkpoint: Checkpoint
    sources: Mapping[str, SourceBuffer]  # the checkpoint's buffers
    world_size: int
    placements: Mapping[str, Placement]  # by buffer
    is_identity: bool
    seen: int  # number of the newest commit known when it was made
    conditions: str | None = None
    origin: Origin | None = None  # what a session goes on from, if not what the checkpoint says
    takes_all: bool = False  # nothing that the run had journaled when it was made is left behind

    def __post_init__(self) -> None:
        for placement in self.placements.values():
            for steps in (placement.parts, placement.dropped):
                for column in (steps.stream, steps.lo, steps.hi, *steps.columns.values()):
                    column.setflags(write=False)
        for name in ("sources", "placements"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> Any:
        given = [getattr(self, one.name) for one in fields(self)]
        return Plan, tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in given)

    def share(self, rank: int | None = None) -> Share:
        """The share of one target rank, which defaults to that of torch.distributed or RANK."""
        rank = target_rank(rank, self.world_size)
        if rank == 0:  # once for all
            _ = self._drops_logged
        return Share(self, rank)

    @cached_property
    def _drops_logged(self) -> None:
        """Log the dropped steps, once: a user of a share may never print the plan. Steps that `filter` leaves out are
        meant."""
        for reason, gone in self.dropped.items():
            if reason == FILTERED:
                continue
            every = self.dealt + sum(n["steps"] for n in self.dropped.values())
            told = self.checkpoint.name, self.world_size, gone["steps"], every, gone["episodes"], reason
            logger.warning(_DROPS, *told)

    def holders(self) -> dict[str, int]:
        """Episode id -> the rank that gets it, the first if several get steps of it."""
        out = dict[str, int]()
        for name, placement in self.placements.items():
            parts = placement.parts
            numbers = self.sources[name].number[parts.stream]
            out = resumption.first_ranks(self.checkpoint.index, numbers, parts["target"]) | out
        return out

    @property
    def episodes(self) -> list[int]:
        """Episodes per target rank."""
        return self._totals(lambda parts: np.ones(len(parts), np.int64))

    @property
    def steps(self) -> list[int]:
        """Steps per target rank."""
        return self._totals(lambda parts: parts.length)

    def _totals(self, of: Any) -> list[int]:
        out = np.zeros(self.world_size, np.int64)
        for placement in self.placements.values():
            np.add.at(out, placement.parts["target"], of(placement.parts))
        return [int(n) for n in out]

    @property
    def dealt(self) -> int:
        """Steps of all target ranks together."""
        return sum(self.steps)

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Reason -> the number of episodes (whole or in part) and steps that no target gets."""
        out: dict[str, dict[str, int]] = {}
        for name in self.placements:
            for reason, counts in self.dropped_of(name).items():
                total = out.setdefault(reason, {"episodes": 0, "steps": 0})
                for key in total:
                    total[key] += counts[key]
        return out

    def dropped_of(self, buffer: str) -> dict[str, dict[str, int]]:
        """The same of one buffer."""
        every = self.placements[buffer].dropped
        out: dict[str, dict[str, int]] = {}
        for reason in dict.fromkeys(every["reason"].tolist()):
            gone = every.pick(every["reason"] == reason)
            out[reason] = {"episodes": len(ascending(gone.stream)), "steps": int(gone.length.sum())}
        return out

    def dropped_steps(self, buffer: str) -> Steps:
        """Steps of the units of one buffer that no target gets, and the reason."""
        return self.placements[buffer].dropped

    def dropped_episodes(self, buffer: str = "replay") -> list[dict[str, Any]]:
        """A list of dropped steps: episode id, reason, steps [start, stop) of its live ones."""
        gone = self.placements[buffer].dropped
        ids = self.sources[buffer].episodes.columns(["episode_id"])["episode_id"].to_pylist()
        columns = (gone.stream.tolist(), gone["reason"].tolist(), gone.lo.tolist(), gone.hi.tolist())
        return [{"episode_id": ids[u], "reason": r, "start": a, "stop": b} for u, r, a, b in zip(*columns, strict=True)]

    @property
    def moved(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> steps that go there."""
        out = np.zeros((max(self.checkpoint.ranks, default=0) + 1, self.world_size), np.int64)
        for name, placement in self.placements.items():
            parts = placement.parts
            np.add.at(out, (self.sources[name].units["rank"][parts.stream], parts["target"]), parts.length)
        return {(int(s), int(t)): int(out[s, t]) for s, t in np.argwhere(out)}

    @property
    def about(self) -> dict[str, Any]:
        """A short summary of the plan, for people."""
        return {
            "checkpoint": self.checkpoint.name,
            "source ranks": self.checkpoint.world_size,
            "target ranks": self.world_size,
            "as it was": self.is_identity,
            "only": self.conditions,
        }

    def plot(self) -> Any:
        """Draw how many steps each target rank gets of each source rank; Matplotlib's Axes. Reads no data."""
        from archive.view import plots

        title = f"{self.checkpoint.name}: {self.checkpoint.world_size} ranks to {self.world_size}"
        return plots.plan(self.moved, self.world_size, title)

    def to_html(self) -> str:
        """A page of its own: the assignment, as a picture and in numbers. Reads no data, only the chunk tables."""
        from archive.view import pages

        return pages.checkpoint(self.checkpoint, self)

    def _repr_html_(self) -> str:
        from archive.view import notebook

        ranks = zip(self.episodes, self.steps, strict=True)
        return notebook.plan(self.about, self.moved, ranks, self.dropped)

    def seed(self, rank: int) -> int:
        """A seed for a target rank, the same everywhere and another for each (commit, world size, rank)."""
        text = f"{self.checkpoint.commit.digest}/{self.world_size}/{rank}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

    def cost(self) -> list[dict[str, int]]:
        """Requests and bytes that reading each share takes; reads the chunk tables, no data."""
        return [self.share(rank).cost() for rank in range(self.world_size)]

    def __str__(self) -> str:
        lines = [
            f"{self.checkpoint.name!r}: {self.checkpoint.world_size} ranks -> {self.world_size}"
            + (" (as it was)" if self.is_identity else "")
        ]
        costs, names = self.cost(), ("rank", "episodes", "steps", "MB", "requests")
        counts = zip(self.episodes, self.steps, costs, strict=True)
        rows = [(rank, e, n, f"{c['bytes'] / 1e6:.2f}", c["requests"]) for rank, (e, n, c) in enumerate(counts)]
        lines += tabulate(names, rows, right=names)
        lines += [f"dropped ({why}): {n['episodes']} episodes, {n['steps']} steps" for why, n in self.dropped.items()]
        live, touched = sum(c["needed_bytes"] for c in costs), sum(c["shard_bytes"] for c in costs)
        if touched and live < touched / 2:
            lines.append(
                f"live: {live / 1e6:.1f} of {touched / 1e6:.1f} MB in the shards touched; `archive compact` would help"
            )
        return visible("\n".join(lines))

    def __repr__(self) -> str:
        ranks = f"{self.checkpoint.world_size} -> {self.world_size} ranks"
        return f"<Plan {self.checkpoint.name!r} {ranks}, steps {self.steps}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._body == other._body

    def __hash__(self) -> int:
        return hash((self.checkpoint.commit.digest, self.world_size))

    def to_json(self) -> str:
        """The plan as text; `Plan.from_json(text, checkpoint)` is its inverse."""
        return json.dumps({**self._body, "seen": self.seen}, separators=(",", ":"), sort_keys=True)

    @property
    def _body(self) -> dict[str, Any]:
        """The document, which is the same whenever the plan is made."""
        text = _PlanText(
            self.checkpoint.number,
            self.checkpoint.commit.digest,
            self.world_size,
            self.is_identity,
            self.placements,
            conditions=self.conditions,
            origin=self.origin,
        )
        return {"format": FORMAT, **text.to_json()}

    @classmethod
    def from_json(cls, text: str, checkpoint: Checkpoint) -> Plan:
        """The plan of that text; `checkpoint` must be the one that it was made for.

        UsageError for a text that is no plan, or is of another checkpoint; IntegrityError for a damaged one.
        """
        try:
            body = records.parse(text, what=_WHAT, error=IntegrityError)
        except IntegrityError as e:
            raise UsageError(f"this is no plan: it is not JSON ({e})") from e
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UsageError(f"this is no plan of format {FORMAT}")
        said = _PlanText.from_json(body, what=_WHAT, error=IntegrityError, remedy="make the plan again")
        if said.world_size > _MOST_RANKS:
            raise _damaged(f"it is for {said.world_size} ranks")
        if said.digest != checkpoint.commit.digest:
            raise UsageError(f"the plan was made for commit {said.commit}, not for checkpoint {checkpoint.name!r}")
        sources = sources_of(checkpoint)
        if strange := said.buffers.keys() - sources.keys():
            raise _damaged(f"the checkpoint has no buffer {min(strange)!r:.80}")
        for name, one in said.buffers.items():
            _check_steps(one, said.world_size, sources[name].units)
        origin = None if said.origin is None else Origin(*said.origin)
        seen = said.commit if said.seen is None else said.seen
        return cls(checkpoint, sources, said.world_size, said.buffers, said.identity, seen, said.conditions, origin)


def target_rank(rank: int | None, world_size: int) -> int:
    """A target rank of a plan, which defaults to that of torch.distributed or RANK; UsageError for any other."""
    rank = place(rank, world_size, "main", "-").rank if rank is None else rank
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of the plan's {world_size}; ranks count from 0")
    return rank


# -- the text of a plan, and its checks ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlanText(Record):
    """The whole text, but for its format."""

    commit: Count
    digest: str
    world_size: Positive
    identity: bool
    buffers: Mapping[str, Placement]
    seen: Count | None = None
    conditions: str | None = stored(None, always=True)
    origin: tuple[str, str, Count, Mapping[int, int], Mapping[int, int] | None] | None = stored(None, always=True)


def _check_steps(placement: Placement, world_size: int, units: Steps) -> None:
    """IntegrityError for ranks and steps that do not exist."""
    target = placement.parts["target"]
    _check((target >= 0) & (target < world_size), "a rank beyond its world size")
    for steps in (placement.parts, placement.dropped):
        _check((steps.stream >= 0) & (steps.stream < len(units)), "episodes that the checkpoint has not")
        whole = (steps.lo >= 0) & (steps.lo <= steps.hi) & (steps.hi <= units.length[steps.stream])
        _check(whole, "steps that are not there")


def _check(held: Mask, what: str) -> None:
    if not held.all():
        raise _damaged(f"it has {what}")


def _damaged(why: str) -> IntegrityError:
    return IntegrityError(f"{_WHAT} is damaged ({why}); make the plan again")
