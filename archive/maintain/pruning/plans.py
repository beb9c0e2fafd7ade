"""Pure, no I/O: what a prune will delete and what it leaves, and why; for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from archive.base import UsageError, logger, one_line, size, visible, written
from archive.manifest import Commit
from archive.observe import operation
from archive.views import reports

COLUMNS = ("what", "objects", "bytes", "", "why")
_VERSIONED = (
    "this bucket keeps versions: deleting frees nothing by itself, {} stay as noncurrent versions. Give the bucket a "
    "lifecycle rule that lets noncurrent versions expire (NoncurrentVersionExpiration)"
)
_MAX_ERRORS = 5  # that are told one by one

Progress = Callable[[int, int], None]  # told how many objects are deleted, and of how many
Carry = Callable[["PrunePlan", float | None, Progress | None], "PrunePlan"]


@dataclass(frozen=True, slots=True)
class Going:
    """An object that goes. reason: "forgotten" or "left behind"; why: the same in more words.

    listed: an earlier prune, which did not come to its end, has committed it already.
    """

    key: str
    bytes: int
    reason: str
    why: str
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Objects of one kind (shards, states or manifest) that fare alike, for one reason."""

    kind: str
    goes: bool
    why: str
    objects: int
    bytes: int


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would delete, and what it leaves and why, as of a commit. `commit()` carries it out.

    going: the objects.  groups: all objects of the archive that the newest commit does not need, and those that go, by
    kind and reason.  clock: what time it was, as the store says.  versioned: whether the bucket keeps what is deleted
    (None: it does not say).  Once carried out: `made`, the commit (None if all was in the list of an earlier prune),
    `deleted` objects, and the `errors` of those that are still there, which the next prune tries again.
    """

    url: str
    as_of: int
    older_than_s: float
    clock: datetime
    versioned: bool | None
    going: tuple[Going, ...] = field(repr=False)
    groups: tuple[Group, ...]
    made: Commit | None = None
    deleted: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)
    _carry: Carry | None = field(default=None, repr=False, compare=False)

    @property
    def objects(self) -> int:
        """How many objects go; a shard that is a directory is one."""
        return len(self.going)

    @property
    def bytes(self) -> int:
        """How many bytes go."""
        return sum(one.bytes for one in self.going)

    @property
    def empty(self) -> bool:
        """Whether nothing goes."""
        return not self.going

    def commit(self, *, per_second: float | None = None, progress: Progress | None = None) -> PrunePlan:
        """Delete what the plan says and still nothing needs, and nothing else; gives the plan with what was done.

        per_second: delete at most so many objects a second.  progress: told (deleted, of how many).  Killed in between,
        the next prune goes on. UsageError if it was carried out already.
        """
        if per_second is not None and per_second <= 0:
            raise UsageError(f"per_second={per_second} must be above zero, or None for no limit")
        if self.empty:
            return self
        if self._carry is None:
            raise UsageError("this plan was carried out, or comes from another process: plan again by arc.prune()")
        with operation("prune", objects=self.objects, bytes=self.bytes) as done:
            pruned = self._carry(self, per_second, progress)
        told = (pruned.deleted, self.objects, size(self.bytes), self.url, done.seconds)
        logger.info("deleted %d of %d objects (%s) of %s, %.1f s", *told)
        return pruned

    def to_json(self) -> dict[str, Any]:
        """All that it says, as values of JSON."""
        groups = [
            {"kind": one.kind, "goes": one.goes, "why": one.why, "objects": one.objects, "bytes": one.bytes}
            for one in self.groups
        ]
        objects = [{"key": one.key, "bytes": one.bytes, "reason": one.reason, "why": one.why} for one in self.going]
        return {
            "url": self.url, "as_of": self.as_of, "older_than_s": self.older_than_s, "clock": self.clock.isoformat(),
            "versioned": self.versioned, "goes": {"objects": self.objects, "bytes": self.bytes}, "groups": groups,
            "objects": objects, "commit": None if self.made is None else self.made.number, "deleted": self.deleted,
            "errors": dict(self.errors),
        }  # fmt: skip

    @property
    def about(self) -> dict[str, Any]:
        """What goes in all, for people."""
        return {
            "prune": self.url, "as of commit": self.as_of, "older than": written(self.older_than_s),
            "by the store's clock": f"{self.clock:%Y-%m-%d %H:%M:%S} UTC",
            "objects that go": f"{self.objects}, {size(self.bytes)}",
            "done by commit": None if self.made is None else self.made.number,
            "deleted": self.deleted or None, "still there": len(self.errors) or None,
        }  # fmt: skip

    @property
    def warnings(self) -> list[str]:
        """What one should know beside: versions that stay, objects that could not be deleted."""
        kept = [_VERSIONED.format(size(self.bytes))] if self.versioned and not self.empty else []
        return kept + [f"not deleted: {key}: {error}" for key, error in list(self.errors.items())[:_MAX_ERRORS]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row a group, for people."""
        values = ([g.kind, g.objects, size(g.bytes), "goes" if g.goes else "stays", g.why] for g in self.groups)
        return [dict(zip(COLUMNS, row, strict=True)) for row in values]

    @property
    def told(self) -> str:
        """What goes, what stays and why, and what was done, as text."""
        head = [f"{name}: {value}" for name, value in self.about.items() if value is not None]
        lines = [COLUMNS, *([one_line(str(value)) for value in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return visible("\n".join([*head, "", *table, "", *self.warnings]).rstrip())

    def __str__(self) -> str:
        ending = "" if self._carry is None or self.empty else "\n\nnothing is deleted yet: plan.commit() does it"
        return self.told + ending

    def _repr_html_(self) -> str:
        return reports.rows("Prune", COLUMNS, [list(row.values()) for row in self.rows]).notebook()

    def __getstate__(self) -> dict[str, Any]:
        return {name: None if name == "_carry" else getattr(self, name) for name in self.__dataclass_fields__}


def grouped(fates: Iterable[tuple[str, int, bool, str]]) -> tuple[Group, ...]:
    """Groups of (kind, bytes, whether it goes, why) of objects: first what goes, the largest first."""
    counts: dict[tuple[str, bool, str], list[int]] = {}
    for kind, nbytes, goes, why in fates:
        found = counts.setdefault((kind, goes, why), [0, 0])
        found[0] += 1
        found[1] += nbytes
    groups = (Group(*place, *found) for place, found in counts.items())
    return tuple(sorted(groups, key=lambda g: (not g.goes, -g.bytes, g.kind, g.why)))
