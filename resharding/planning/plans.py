"""Plans: frozen values that say which target rank gets which steps, where they stand there, and what is dropped.

A plan is made from the manifest alone; it prints as its own dry run, compares, and survives a round trip through JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from archive.base import UsageError, cached_property, size, visible
from archive.checkpoint import Checkpoint
from archive.manifest import Origin, place
from archive.views import plots, reports
from resharding.placing import FILTERED, Placement, Rules, Source
from resharding.planning import plantext
from resharding.sharing import Share


@dataclass(frozen=True, eq=False)
class Plan:
    """Who gets what. `share(rank)` gives one target rank its part; any process can compute its own."""

    source: Source  # the checkpoint
    world_size: int
    rules: Mapping[str, Rules]  # by buffer
    placements: Mapping[str, Placement]
    is_identity: bool
    seen: int  # number of the newest commit that was known when it was made
    conditions: str | None = None
    origin: Origin | None = None  # what a session goes on from, if not what the checkpoint says

    def __post_init__(self) -> None:
        for placement in self.placements.values():
            for column in (*placement.parts, *placement.dropped):
                column.setflags(write=False)
        object.__setattr__(self, "placements", MappingProxyType(dict(self.placements)))
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))

    def __reduce__(self) -> Any:
        rest = (dict(self.rules), dict(self.placements), self.is_identity, self.seen, self.conditions, self.origin)
        return Plan, (self.source, self.world_size, *rest)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.source.checkpoint

    def share(self, rank: int | None = None) -> Share:
        """What one target rank gets; the rank defaults to that of torch.distributed or RANK."""
        rank = place(rank, self.world_size, "main", "-").rank if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not one of the plan's {self.world_size}; ranks count from 0")
        _ = self._drops_logged
        return Share(self, rank)

    @cached_property
    def _drops_logged(self) -> None:
        """Log what is dropped, once: whoever takes a share may never print the plan. What `filter` leaves out was
        meant."""
        for reason, gone in self.dropped.items():
            if reason == FILTERED:
                continue
            logging.getLogger("archive").warning(
                "the plan of checkpoint %r for %d ranks drops %d of %d steps, of %d episodes (%s); "
                "plan.dropped_episodes() lists "
                "them", self.checkpoint.name, self.world_size, gone["steps"],
                sum(self.steps) + sum(n["steps"] for n in self.dropped.values()), gone["episodes"], reason,
            )  # fmt: skip

    @property
    def episodes(self) -> list[int]:
        """Episodes per target rank."""
        return self._totals(lambda p: np.ones(len(p.unit), np.int64))

    @property
    def steps(self) -> list[int]:
        """Steps per target rank."""
        return self._totals(lambda p: p.steps)

    def _totals(self, of: Any) -> list[int]:
        out = np.zeros(self.world_size, np.int64)
        for placement in self.placements.values():
            np.add.at(out, placement.parts.target, of(placement.parts))
        return [int(n) for n in out]

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Why -> how many episodes (wholly or in part) and steps no target gets."""
        out: dict[str, dict[str, int]] = {}
        for name in self.placements:
            for reason, counts in self.dropped_of(name).items():
                total = out.setdefault(reason, {"episodes": 0, "steps": 0})
                for key in total:
                    total[key] += counts[key]
        return out

    def dropped_of(self, buffer: str) -> dict[str, dict[str, int]]:
        """Of one buffer: why -> how many episodes (wholly or in part) and steps no target gets."""
        gone = self.placements[buffer].dropped
        out: dict[str, dict[str, int]] = {}
        for reason in dict.fromkeys(gone.reason.tolist()):
            mine = gone.reason == reason
            episodes, steps = len(np.unique(gone.unit[mine])), int((gone.hi - gone.lo)[mine].sum())
            out[reason] = {"episodes": episodes, "steps": steps}
        return out

    def dropped_episodes(self, buffer: str = "replay") -> list[dict[str, Any]]:
        """What is dropped, one by one: episode id, reason, steps [start, stop) of its live ones."""
        gone = self.placements[buffer].dropped
        ids = self.source.ids(buffer)
        columns = (gone.unit.tolist(), gone.reason.tolist(), gone.lo.tolist(), gone.hi.tolist())
        return [{"episode_id": ids[u], "reason": r, "start": a, "stop": b} for u, r, a, b in zip(*columns, strict=True)]

    @property
    def moved(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> steps that go there."""
        source = self.source
        out = np.zeros((max(self.checkpoint.ranks, default=0) + 1, self.world_size), np.int64)
        for name, placement in self.placements.items():
            ranks = source.units(source.buffers[name]).rank[placement.parts.unit]
            np.add.at(out, (ranks, placement.parts.target), placement.parts.steps)
        return {(int(s), int(t)): int(out[s, t]) for s, t in np.argwhere(out)}

    @property
    def about(self) -> dict[str, Any]:
        """What it is, for people."""
        return {
            "checkpoint": self.checkpoint.name, "source ranks": self.checkpoint.world_size,
            "target ranks": self.world_size, "as it was": self.is_identity, "only": self.conditions,
        }  # fmt: skip

    def plot(self) -> Any:
        """Draw which target rank gets how many steps of which source rank; Matplotlib's Axes. Reads no data."""
        title = f"{self.checkpoint.name}: {self.checkpoint.world_size} ranks to {self.world_size}"
        return plots.plan(self.moved, self.world_size, title)

    def to_html(self) -> str:
        """A page of its own: who gets what, as a picture and in numbers. Reads no data, but the chunk tables."""
        return self._report([(size(cost["bytes"]), cost["requests"]) for cost in self.cost()]).page()

    def _repr_html_(self) -> str:
        return self._report([()] * self.world_size).notebook()

    def _report(self, costs: Sequence[tuple[Any, ...]]) -> reports.Report:
        counts = zip(self.episodes, self.steps, costs, strict=True)
        ranks = [(episodes, steps, *cost) for episodes, steps, cost in counts]
        return reports.plan(self.about, self.moved, ranks, self.dropped)

    def seed(self, rank: int) -> int:
        """A seed for a target rank, the same everywhere and another for each (commit, world size, rank)."""
        import hashlib

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
        lines.append(f"{'rank':>4} {'episodes':>9} {'steps':>10} {'MB':>9} {'requests':>8}")
        costs = self.cost()
        for rank, (episodes, steps, cost) in enumerate(zip(self.episodes, self.steps, costs, strict=True)):
            lines.append(f"{rank:>4} {episodes:>9} {steps:>10} {cost['bytes'] / 1e6:>9.2f} {cost['requests']:>8}")
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
        """What it says; the same whenever it is made."""
        return {
            "format": plantext.FORMAT, "commit": self.checkpoint.number, "digest": self.checkpoint.commit.digest,
            "world_size": self.world_size, "identity": self.is_identity, "conditions": self.conditions,
            "origin": None if self.origin is None else list(self.origin),
            "buffers": {
                name: {"rules": vars(self.rules[name]), "parts": _lists(p.parts), "dropped": _lists(p.dropped)}
                for name, p in self.placements.items()
            },
        }  # fmt: skip

    @classmethod
    def from_json(cls, text: str, checkpoint: Checkpoint) -> Plan:
        """The plan of that text; `checkpoint` must be the one that it was made for."""
        said = plantext.read(text)
        if said.digest != checkpoint.commit.digest:
            raise UsageError(f"the plan was made for commit {said.commit}, not for checkpoint {checkpoint.name!r}")
        source = Source(checkpoint)
        placements = plantext.placements(said, {name: buffer.steps for name, buffer in source.buffers.items()})
        rules = {name: one.rules.made() for name, one in said.buffers.items()}
        origin = None if said.origin is None else said.origin.made()
        seen = said.commit if said.seen is None else said.seen
        return cls(source, said.world_size, rules, placements, said.identity, seen, said.conditions, origin)


def _lists(columns: Any) -> list[Any]:
    return [c.tolist() for c in columns]
