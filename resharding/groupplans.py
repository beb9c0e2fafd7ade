"""Plans of the target ranks of one group of a shared plan, read from its object, which is checked whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, numbers, sums
from archive.base import CorruptStateError, cached_property
from archive.checkpoint import Checkpoint
from archive.index import EpisodeIndex, Snapshot
from archive.log import Commit, Origin, commits
from archive.read import Episodes
from archive.saved import WholeObject
from archive.tables import NO_ENV, among
from archive.write import Resume
from resharding.groups import NONE, PARTS, PIECES, UNITS, GroupIndex
from resharding.placement import Placement
from resharding.plans import Plan, target_rank
from resharding.share import Share
from resharding.source import SourceBuffer

if TYPE_CHECKING:
    import pyarrow as pa

    from resharding.shared import SharedPlan

Columns = Mapping[str, Ints]


class _GroupCheckpoint(Checkpoint):
    """A checkpoint of which the rows of some episodes are at hand; questions about all of it ask all of it."""

    def __init__(self, commit: Commit, served_by: Commit, like: Checkpoint, rows: Sequence[pa.Table]) -> None:
        """like: another checkpoint of the archive.  rows: of the live, segments and chunk tables."""
        super().__init__(like.storage, commit, served_by, like.annotations)
        live, segments, chunks = rows
        snapshot = Snapshot.of(like.storage, served_by, segments, like.annotations, chunks)
        self.__dict__["live"], self.__dict__["index"] = live, EpisodeIndex(snapshot, None, self._branch)

    def __reduce__(self) -> Any:
        return Checkpoint, (self.storage, self.commit, self.served_by, self.annotations)

    @cached_property
    def all(self) -> Checkpoint:
        """The whole checkpoint."""
        found = Checkpoint(self.storage, self.commit, self.served_by, self.annotations)
        found.seen = self.seen
        return found

    @property
    def whole_index(self) -> EpisodeIndex:
        return self.all.whole_index

    @property
    def groups(self) -> tuple[Ints, Ints]:
        return self.all.groups

    @property
    def episodes(self) -> Episodes:
        """The episodes that are live in it, of all ranks."""
        return self.all.episodes

    @property
    def steps_per_rank(self) -> dict[int, int]:
        """Rank -> its live steps, in all buffers."""
        return self.all.steps_per_rank

    def to_resume(self, rank: int | None = None) -> Resume:
        """The start of the same rank in a world of the same size."""
        return self.all.to_resume(rank)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GroupPlan(Plan):
    """The plan of the target ranks of one group, whose steps alone its placements have; questions about others ask the
    whole plan. planned: the whole checkpoint; index: that of the group; ranks: its target ranks; shared: the plan that
    it is of."""

    planned: Checkpoint
    index: GroupIndex
    ranks: range
    shared: SharedPlan

    def __reduce__(self) -> Any:
        return self.shared.group_of, (self.ranks.start,)

    @property
    def all(self) -> Plan:
        """The whole plan, made anew when it is first asked for."""
        return self.shared.whole()

    def share(self, rank: int | None = None) -> Share:
        """The share of one target rank, which defaults to that of torch.distributed or RANK."""
        rank = target_rank(rank, self.world_size)
        return super().share(rank) if rank in self.ranks else self.shared.share(rank)

    @property
    def dealt(self) -> int:
        """Steps of all target ranks together."""
        return self.index.dealt

    def dropped_of(self, buffer: str) -> dict[str, dict[str, int]]:
        """Reason -> the number of episodes and steps of one buffer that no target rank of the whole plan gets."""
        return {reason: dict(counts) for reason, counts in self.index.dropped[buffer].items()}

    def dropped_steps(self, buffer: str) -> Steps:
        """Steps of one buffer that no target rank gets, of the units of the whole plan, and the reason."""
        return self.all.dropped_steps(buffer) if self.dropped_of(buffer) else super().dropped_steps(buffer)

    def dropped_episodes(self, buffer: str = "replay") -> list[dict[str, Any]]:
        """A list of the dropped steps of the whole plan."""
        return self.all.dropped_episodes(buffer)

    def holders(self) -> dict[str, int]:
        """Episode id -> the rank that gets it, of all target ranks."""
        return self.all.holders()

    def _totals(self, of: Any) -> list[int]:
        return self.all._totals(of)

    @property
    def moved(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> steps that go there, of all target ranks."""
        return self.all.moved

    def cost(self) -> list[dict[str, int]]:
        """Requests and bytes that reading each share takes, of all target ranks."""
        return self.all.cost()

    @property
    def _body(self) -> dict[str, Any]:
        return self.all._body

    def __repr__(self) -> str:
        return f"<Plan {self.checkpoint.name!r} for ranks {self.ranks.start} to {self.ranks[-1]} of {self.world_size}>"


def read(checkpoint: Checkpoint, key: str, ranks: range, shared: SharedPlan) -> GroupPlan:
    """The plan of the target ranks of the group at `key`. checkpoint: the one that was to be planned."""
    storage = checkpoint.storage
    data = WholeObject(GroupIndex, storage.get(key), key, storage.full_url(key))
    index, sources, placements = data.index, dict[str, SourceBuffer](), dict[str, Placement]()
    if index.world_size != shared.world_size:
        raise _strange(data)
    ck = _checkpoint_of(checkpoint, data)
    for at, (name, one) in enumerate(index.buffers.items()):
        pieces, units, parts = (
            _columns(data, f"{kind}/{at}", getattr(one, kind), keys)
            for kind, keys in (("pieces", PIECES), ("units", UNITS), ("parts", PARTS))
        )
        if not (
            _pieces_there(ck, name, pieces) and _units_there(ck, pieces, units) and _parts_there(units, parts, ranks)
        ):
            raise _strange(data)
        sources[name] = _source(ck, name, pieces, units)
        beside = {key: parts[key] for key in ("target", "env", "position")}
        why: Any = np.zeros(0, object)
        dropped = Steps(NONE, NONE, NONE, follows=(), reason=why)
        steps = Steps(parts["unit"], parts["lo"], parts["hi"], follows=(), **beside)
        placements[name] = Placement(one.rules, steps, dropped)
    return GroupPlan(
        ck, sources, index.world_size, placements, index.identity, index.seen, index.conditions,
        None if index.origin is None else Origin(*index.origin), index.takes_all,
        planned=ck.all, index=index, ranks=ranks, shared=shared,
    )  # fmt: skip


def _checkpoint_of(asked: Checkpoint, data: WholeObject[GroupIndex]) -> _GroupCheckpoint:
    """The checkpoint of a group, which may have been recovered from the one that was to be planned."""
    index, storage = data.index, asked.storage
    found = [asked.commit, asked.served_by, asked.annotations.head]
    commit, served = (
        next((one for one in found if one.number == number), None) or commits.read_of(storage, number, asked.commit)
        for number in (index.commit, index.served)
    )
    if commit.digest != index.digest:
        raise CorruptStateError(
            f"{data.where} is of another commit {index.commit} than that of the archive; {data.damage}"
        )
    parts = {"live": [data.table("live")]}
    for kind in ("segments", "chunks"):
        files = data.files([f"{kind}-{i}.parquet" for i in range(getattr(index, kind))])
        parts[kind] = [tables.loads(one, kind, where=data.where) for one in files]
    made = _GroupCheckpoint(commit, served, asked, [tables.concat(kind, some) for kind, some in parts.items()])
    made.seen = index.seen
    return made


def _columns(data: WholeObject[GroupIndex], path: str, count: int, keys: Sequence[str]) -> Columns:
    """The columns of an array, by name."""
    array = data.array(path, count)
    if array.dtype != np.int64 or array.shape != (count, len(keys)):
        raise _strange(data)
    return {key: np.ascontiguousarray(array[:, i]) for i, key in enumerate(keys)}


def _source(ck: Checkpoint, name: str, pieces: Columns, units: Columns) -> SourceBuffer:
    follow = {key: pieces[key] for key in ("position", "at", "run", "rank", "env")}
    own = Steps(pieces["row"], pieces["lo"], pieces["hi"], follows=("position", "at"), **follow)
    beside: dict[str, Any] = {key: units[key] for key in ("rank", "env", "age")}
    beside |= {key: units[key].astype(bool) for key in ("headless", "tailless", "open")}
    number = np.arange(len(units["head"]))
    about = Steps(number, np.zeros_like(number), units["steps"], follows=(), **beside)
    return SourceBuffer.of(ck, name, own, units["head"], units["number"], about)


def _within(values: Ints, stop: int, start: int = 0) -> bool:
    return bool(((values >= start) & (values < stop)).all())


def _pieces_there(ck: Checkpoint, name: str, pieces: Columns) -> bool:
    """True if the ranges of segments are there, and live in this buffer."""
    row, run, lo, hi = (pieces[key] for key in ("row", "run", "lo", "hi"))
    if not (_within(row, ck.snapshot.rows) and _within(run, ck.live.num_rows)):
        return False
    length = numbers(ck.snapshot.columns(["length"])["length"])[row]
    ranges = (lo >= 0) & (lo <= hi) & (hi <= length) & (pieces["at"] >= 0) & among(ck.live["buffer"], {name})[run]
    own = [pieces[key] == numbers(ck.live[of])[run] for key, of in (("rank", "rank"), ("env", "env_id"))]
    return bool(ranges.all()) and all(of.all() for of in own)


def _units_there(ck: Checkpoint, pieces: Columns, units: Columns) -> bool:
    """True if the units are episodes that are there, and have the steps of their pieces."""
    heads, count = units["head"], len(pieces["row"])
    begins = heads[:1].tolist() == [0][:count] and bool((np.diff(heads) > 0).all())
    if not (begins and _within(heads, count) and _within(units["number"], len(ck.index))):
        return False
    offsets = np.append(heads, count)
    owner = np.repeat(np.arange(len(heads)), np.diff(offsets))
    alike = [pieces[key] == units[key][owner] for key in ("rank", "env")]
    alike += [ck.index.episode_of_row[pieces["row"]] == units["number"][owner]]
    alike += [sums(pieces["hi"] - pieces["lo"], offsets) == units["steps"]]
    flags = all(_within(units[key], 2) for key in ("headless", "tailless", "open"))
    return flags and all(of.all() for of in alike)


def _parts_there(units: Columns, parts: Columns, ranks: range) -> bool:
    """True if what target ranks get is there, each step once, and they are of this group, in order."""
    unit, lo, hi, target = (parts[key] for key in ("unit", "lo", "hi", "target"))
    if not (_within(unit, len(units["head"])) and _within(target, ranks.stop, ranks.start)):
        return False
    given = (lo >= 0) & (lo <= hi) & (hi <= units["steps"][unit]) & (parts["env"] >= NO_ENV) & (parts["position"] >= 0)
    order = np.lexsort((lo, unit))
    again = np.diff(unit[order]) == 0
    follows = (lo[order][1:] >= hi[order][:-1]) & (lo[order][1:] > lo[order][:-1])
    return bool(given.all() and (np.diff(target) >= 0).all() and follows[again].all())


def _strange(data: WholeObject[GroupIndex]) -> CorruptStateError:
    return CorruptStateError(f"{data.where} has places that are not there: {data.damage}")
