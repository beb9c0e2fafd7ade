"""Pure, no I/O: plans of what is forgotten or deleted, and of what stays and why: for people, as JSON, and to be
carried out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from archive.base import UsageError, logger, size, tabulate, visible, written
from archive.jobs import Crew
from archive.log import Commit
from archive.observe import operation

MAX_GOING = 40  # the newest checkpoints that go, in a plan for people; more are summed up
_GOES = ("goes", "no rule wants it")
_CHECKPOINT_COLUMNS = ("checkpoint", "run", "step", "commit", "stays", "why")
_EPISODE_COLUMNS = ("episodes", "steps", "stays", "why", "for example")
_OBJECT_COLUMNS = ("what", "objects", "bytes", "", "why")
_MAX_ERRORS = 5  # errors shown one by one
_VERSIONED = (
    "this bucket keeps versions: deleting frees nothing by itself, {} stay as noncurrent versions. Give the bucket a "
    "lifecycle rule that lets noncurrent versions expire (NoncurrentVersionExpiration)"
)

Progress = Callable[[int, int], None]  # called with the number of deleted objects, and of all
Table = tuple[str, Sequence[str], list[tuple[Any, ...]]]  # its title, its columns and its rows, for people


@dataclass(frozen=True, kw_only=True)
class UpkeepPlan(ABC):
    """A plan of what a verb of an archive will do, as of a commit. `commit()` does it; `made` is then the commit."""

    url: str
    as_of: int
    made: Commit | None = None
    _carry: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    verb = ""  # of the archive
    yet = ""  # says that nothing is done before `commit()`

    @property
    @abstractmethod
    def empty(self) -> bool:
        """True if nothing goes."""

    @property
    @abstractmethod
    def about(self) -> dict[str, Any]:
        """A summary of what goes, for people."""

    @property
    @abstractmethod
    def tables(self) -> list[Table]:
        """The rows of what goes and what stays, for people."""

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Sentences on what prevents it."""
        return ()

    @property
    def warnings(self) -> list[str]:
        """Sentences to read before it."""
        return []

    def _carried_out(self, *how: Any) -> Self:
        if self._carry is None:
            raise UsageError(
                f"this plan was carried out already, or comes from another process: plan again by arc.{self.verb}()"
            )
        done: Self = self._carry(self, *how)
        return replace(done, _carry=None)

    def __str__(self) -> str:
        """The plan as text: what goes, what stays and why, and what was done."""
        lines = [f"{name}: {value}" for name, value in self.about.items() if value is not None]
        for _, columns, rows in self.tables:
            lines += ["", *tabulate(columns, rows)]
        is_open = self._carry is not None and not self.empty and not self.obstacles
        told = visible("\n".join([*lines, "", *self.warnings]).rstrip())
        return told + (f"\n\nnothing is {self.yet} yet: plan.commit() does it" if is_open else "")

    def _repr_html_(self) -> str:
        from archive.view import notebook

        found = {title: [dict(zip(columns, row, strict=True)) for row in rows] for title, columns, rows in self.tables}
        return notebook.plan_of(self.verb.capitalize(), self.about, found)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_carry": None}


# -- forgetting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointFate:
    """A checkpoint, and the reason to keep it; without one it goes."""

    commit: int
    run: str
    name: str
    step: int
    created_at: datetime
    session: str
    whole: bool
    manifest: int | None
    reasons: tuple[str, ...] = ()

    @property
    def stays(self) -> bool:
        """True if there is a reason to keep it."""
        return bool(self.reasons)


@dataclass(frozen=True)
class EpisodesFate:
    """Episodes with one fate, for one reason. `steps`: the steps that they have as of now.

    superseded: the episodes stay; steps of theirs go that newer ones replaced.
    """

    stays: bool
    reason: str
    episodes: int
    steps: int
    examples: tuple[str, ...]
    superseded: bool = False


@dataclass(frozen=True)
class Redacted:
    """The extent of a redaction. steps: of other episodes, in the shards that are rewritten; bytes: of these shards.

    obstacles: what prevents it, and what to do; while there is any, nothing can be committed.
    """

    episodes: int
    shards: int
    steps: int
    bytes: int
    obstacles: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.episodes} episodes; {self.shards} shards ({size(self.bytes)}) go, {self.steps} steps move"


@dataclass(frozen=True, kw_only=True)
class ForgetPlan(UpkeepPlan):
    """A plan of what is forgotten, and of what stays and why, as of a commit. `commit()` carries it out; `made` is then
    the commit.

    checkpoints: all of them, oldest first.  episodes: all of them, in groups.  objects, bytes: what only older
    commits lead to afterwards; a prune may delete it.
    """

    asked: str
    checkpoints: tuple[CheckpointFate, ...]
    episodes: tuple[EpisodesFate, ...]
    episodes_gone: int
    objects: int
    bytes: int
    redacted: Redacted | None = None

    verb, yet = "forget", "forgotten"

    @property
    def checkpoints_gone(self) -> int:
        """The number of checkpoints that go."""
        return sum(not one.stays for one in self.checkpoints)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Sentences on what prevents a redaction."""
        return () if self.redacted is None else self.redacted.obstacles

    @property
    def empty(self) -> bool:
        """True if nothing goes."""
        return not self.checkpoints_gone and all(one.stays for one in self.episodes)

    def commit(
        self,
        *,
        engine: str = "local",
        workers: int | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        job: str | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Forget what the plan says, and nothing else; the plan with the commit that was `made` (none if empty).

        Of a redaction: engine, workers, num_cpus, num_gpus: of what rewrites shards, as for `Episodes.map`.  job: a
        name under which rewritten shards are kept: after whatever stopped it, the same plan, made and committed again,
        goes on. What was planned goes by one commit at the end.  progress: called with (batches done, batches).

        ConflictError if other things would go by now: plan again. UsageError if it was carried out, or if something
        prevents a redaction.
        """
        if self.obstacles:
            raise UsageError(f"the redaction at {self.url} was not done: {'; '.join(self.obstacles)}")
        crew = Crew(engine, workers, num_cpus, num_gpus)
        if self.redacted is None and (job is not None or crew != Crew()):
            raise UsageError("job=, engine= and workers= are of a redaction: all else is one commit, made here")
        return self if self.empty else self._carried_out(crew, job, progress)

    def to_json(self) -> dict[str, Any]:
        """The plan as values of JSON."""
        goes = {
            "checkpoints": self.checkpoints_gone,
            "episodes": self.episodes_gone,
            "objects": self.objects,
            "bytes": self.bytes,
        }
        checkpoints = [
            _some(one, "commit", "run", "name", "step", "stays")
            | {"created_at": one.created_at.isoformat(), "reasons": list(one.reasons)}
            for one in self.checkpoints
        ]
        episodes = [
            _some(one, "stays", "reason", "episodes", "steps") | {"examples": list(one.examples)}
            for one in self.episodes
        ]
        redacted = {} if self.redacted is None else {"redacted": asdict(self.redacted)}
        return {
            **_some(self, "url", "as_of", "asked"),
            "commit": _number(self.made),
            **redacted,
            "goes": goes,
            "checkpoints": checkpoints,
            "episodes": episodes,
        }

    @property
    def about(self) -> dict[str, Any]:
        """A summary of what goes, for people."""
        every = sum(one.episodes for one in self.episodes if not one.superseded)  # each episode is in one group
        return {
            "forget": self.asked,
            "at": self.url,
            "as of commit": self.as_of,
            "checkpoints that go": f"{self.checkpoints_gone} of {len(self.checkpoints)}",
            "episodes that go": f"{self.episodes_gone} of {every}",
            "objects that go": f"{self.objects}, {size(self.bytes)}",
            "redacts": None if self.redacted is None else str(self.redacted),
            "stands in the way": "; ".join(self.obstacles) or None,
            "done by commit": _number(self.made),
        }

    @property
    def tables(self) -> list[Table]:
        """A row for each checkpoint that stays and for the newest that go, newest first, and one that sums up the
        others that go; and a row for each group of episodes."""
        going = [one for one in self.checkpoints if not one.stays]
        older = going[:-MAX_GOING]
        summed = {one.commit for one in older}
        checkpoints = [
            (one.name, one.run, one.step, one.commit, *(("stays", "; ".join(one.reasons)) if one.stays else _GOES))
            for one in self.checkpoints[::-1]
            if one.commit not in summed
        ]
        episodes = [
            (one.episodes, one.steps, "stay" if one.stays else "go", one.reason, ", ".join(one.examples))
            for one in self.episodes
        ]
        return [
            ("Checkpoints", _CHECKPOINT_COLUMNS, checkpoints + ([_summed(older)] if older else [])),
            ("Episodes", _EPISODE_COLUMNS, episodes),
        ]


def _summed(going: Sequence[CheckpointFate]) -> tuple[Any, ...]:
    """A row for several checkpoints that go."""
    runs = list(dict.fromkeys(one.run for one in going))
    steps, numbers = ([getattr(one, name) for one in going] for name in ("step", "commit"))
    spans = (f"{min(values)} to {max(values)}" for values in (steps, numbers))
    return f"and {len(going)} more", runs[0] if len(runs) == 1 else f"{len(runs)} runs", *spans, "go", _GOES[1]


# -- deleting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectFate:
    """An object that the newest commit does not need. reason: "forgotten" or "left behind"; None: it stays; why: a
    sentence."""

    key: str
    bytes: int
    why: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """Objects of one kind (shards, states, journal or manifest) with one fate, for one reason."""

    kind: str
    goes: bool
    why: str
    objects: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PrunePlan(UpkeepPlan):
    """A plan of what is deleted, and of what stays and why, as of a commit. `commit()` carries it out.

    going: the objects.  groups: all objects of the archive that the newest commit does not need, and those that go, by
    kind and reason.  clock: the time by the store's clock.  versioned: true if the bucket keeps deleted versions
    (None: unknown).  Once carried out: `made`, the commit (None if all was in the list of an earlier prune),
    `deleted` objects, and the `errors` of those that are still there, which the next prune tries again.
    """

    older_than_s: float
    clock: datetime
    versioned: bool | None
    going: tuple[ObjectFate, ...] = field(repr=False)
    groups: tuple[ObjectGroup, ...]
    deleted: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)

    verb, yet = "prune", "deleted"

    @property
    def objects(self) -> int:
        """The number of objects that go; a shard that is a directory is one."""
        return len(self.going)

    @property
    def bytes(self) -> int:
        """The number of bytes that go."""
        return sum(one.bytes for one in self.going)

    @property
    def empty(self) -> bool:
        """True if nothing goes."""
        return not self.going

    def commit(self, *, per_second: float | None = None, progress: Progress | None = None) -> Self:
        """Delete those objects of the plan that are still unneeded, and no others; the plan with what was done.

        per_second: the most objects to delete a second.  progress: called with (deleted, total).  After a kill in
        between the next prune goes on. UsageError if it was carried out already.
        """
        if per_second is not None and per_second <= 0:
            raise UsageError(f"per_second={per_second} must be above zero, or None for no limit")
        if self.empty:
            return self
        with operation("prune", objects=self.objects, bytes=self.bytes) as done:
            pruned = self._carried_out(per_second, progress)
        told = (pruned.deleted, self.objects, size(self.bytes), self.url, done.seconds)
        logger.info("deleted %d of %d objects (%s) of %s, %.1f s", *told)
        return pruned

    def to_json(self) -> dict[str, Any]:
        """The plan as values of JSON."""
        return {
            **_some(self, "url", "as_of", "older_than_s", "versioned", "deleted"),
            "clock": self.clock.isoformat(),
            "goes": {"objects": self.objects, "bytes": self.bytes},
            "groups": [asdict(one) for one in self.groups],
            "objects": [_some(one, "key", "bytes", "reason", "why") for one in self.going],
            "commit": _number(self.made),
            "errors": dict(self.errors),
        }

    @property
    def about(self) -> dict[str, Any]:
        """A summary of what goes, for people."""
        return {
            "prune": self.url,
            "as of commit": self.as_of,
            "older than": written(self.older_than_s),
            "by the store's clock": f"{self.clock:%Y-%m-%d %H:%M:%S} UTC",
            "objects that go": f"{self.objects}, {size(self.bytes)}",
            "done by commit": _number(self.made),
            "deleted": self.deleted or None,
            "still there": len(self.errors) or None,
        }

    @property
    def tables(self) -> list[Table]:
        """A row for each group of objects."""
        return [
            (
                "Objects",
                _OBJECT_COLUMNS,
                [
                    (one.kind, one.objects, size(one.bytes), "goes" if one.goes else "stays", one.why)
                    for one in self.groups
                ],
            )
        ]

    @property
    def warnings(self) -> list[str]:
        """Versions that stay, and objects that could not be deleted."""
        kept = [_VERSIONED.format(size(self.bytes))] if self.versioned and not self.empty else []
        return kept + [f"not deleted: {key}: {error}" for key, error in list(self.errors.items())[:_MAX_ERRORS]]


def grouped(fates: Iterable[ObjectFate]) -> tuple[ObjectGroup, ...]:
    """The groups of these objects: those that go first, the largest first."""
    counts: dict[tuple[str, bool, str], list[int]] = {}
    for one in fates:
        found = counts.setdefault((one.key.partition("/")[0], one.reason is not None, one.why), [0, 0])
        found[0] += 1
        found[1] += one.bytes
    groups = (ObjectGroup(*place, *found) for place, found in counts.items())
    return tuple(sorted(groups, key=lambda group: (not group.goes, -group.bytes, group.kind, group.why)))


def _some(one: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _number(made: Commit | None) -> int | None:
    return None if made is None else made.number
