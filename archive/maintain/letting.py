"""Pure, no I/O: what a forgetting will do, for people and as JSON: each checkpoint and group of episodes with its
reason, and the objects and bytes that go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from archive.base import UsageError, logger, one_line, size, visible
from archive.maintain.keeping import CheckpointFate
from archive.maintain.standing import EpisodeGroup
from archive.manifest import Commit
from archive.observe import operation
from archive.views import reports

MAX_GOING = 40  # checkpoints that go, of a plan for people: the newest; more are summed up
CHECKPOINT_COLUMNS = ("checkpoint", "run", "step", "commit", "stays", "why")
EPISODE_COLUMNS = ("episodes", "steps", "stays", "why", "for example")
NO_RULE = "no rule wants it"


@dataclass(frozen=True)
class Redacted:
    """What a redaction takes. steps: of other episodes, in the shards that are written anew; bytes: of these shards.

    obstacles: what stands in its way, and what to do: as long as there is any, nothing can be committed.
    """

    episodes: int
    shards: int
    steps: int
    bytes: int
    obstacles: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.episodes} episodes; {self.shards} shards ({size(self.bytes)}) go, {self.steps} steps move"


@dataclass(frozen=True)
class ForgetPlan:
    """What would go, and what stays and why, as of a commit. `commit()` carries it out; `made` is the commit then.

    checkpoints: all of them, oldest first.  episodes: all of them, in groups.  objects, bytes: what nothing leads to
    any more but older commits; a prune may delete it.
    """

    url: str
    as_of: int
    asked: str
    checkpoints: tuple[CheckpointFate, ...]
    episodes: tuple[EpisodeGroup, ...]
    episodes_gone: int
    objects: int
    bytes: int
    redacted: Redacted | None = None
    made: Commit | None = None
    _commit: Callable[[], Commit] | None = field(default=None, repr=False, compare=False)

    @property
    def checkpoints_gone(self) -> int:
        """How many checkpoints go."""
        return sum(not one.stays for one in self.checkpoints)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """What stands in the way of a redaction."""
        return () if self.redacted is None else self.redacted.obstacles

    @property
    def empty(self) -> bool:
        """Whether nothing goes."""
        return not self.checkpoints_gone and all(one.stays for one in self.episodes)

    def commit(self) -> Self:
        """Forget what the plan says, and nothing else; the plan with the commit that was `made` (none if it is empty).

        ConflictError if something else would go by now: plan again. UsageError if it was carried out, or if something
        stands in the way of a redaction.
        """
        if self.obstacles:
            raise UsageError(f"the redaction at {self.url} was not done: {'; '.join(self.obstacles)}")
        if self.empty:
            return self
        if self._commit is None:
            raise UsageError("this plan was carried out, or comes from another process: plan again by arc.forget()")
        with operation("forget", checkpoints=self.checkpoints_gone, episodes=self.episodes_gone) as done:
            made = self._commit()
        told = (made.number, self.checkpoints_gone, self.episodes_gone, self.asked, done.seconds)
        logger.info("commit %d let go of %d checkpoints and %d episodes (%s), %.1f s", *told)
        return replace(self, made=made, _commit=None)

    def to_json(self) -> dict[str, Any]:
        """All that it says, as values of JSON."""
        checkpoints = [
            {
                "commit": one.commit, "run": one.run, "name": one.name, "step": one.step, "stays": one.stays,
                "created_at": one.created_at.isoformat(), "reasons": list(one.reasons),
            }
            for one in self.checkpoints
        ]  # fmt: skip
        episodes = [
            {
                "stays": one.stays, "reason": one.reason, "episodes": one.episodes, "steps": one.steps,
                "examples": list(one.examples),
            }
            for one in self.episodes
        ]  # fmt: skip
        goes = {
            "checkpoints": self.checkpoints_gone, "episodes": self.episodes_gone, "objects": self.objects,
            "bytes": self.bytes,
        }  # fmt: skip
        made = None if self.made is None else self.made.number
        about = {"url": self.url, "as_of": self.as_of, "asked": self.asked, "commit": made}
        redacted = {} if self.redacted is None else {"redacted": asdict(self.redacted)}
        return about | redacted | {"goes": goes, "checkpoints": checkpoints, "episodes": episodes}

    def checkpoint_rows(self) -> list[dict[str, Any]]:
        """A row for each checkpoint that stays, and for the newest that go, the newest first; a last one sums up how
        many more go. For people."""
        going = [one for one in self.checkpoints if not one.stays]
        older = {one.commit for one in going[:-MAX_GOING]}
        rows = [_checkpoint(one) for one in self.checkpoints[::-1] if one.commit not in older]
        rows += [_summed(going[:-MAX_GOING])] if older else []
        return [dict(zip(CHECKPOINT_COLUMNS, row, strict=True)) for row in rows]

    def episode_rows(self) -> list[dict[str, Any]]:
        """A row a group of episodes, for people."""
        return [dict(zip(EPISODE_COLUMNS, row, strict=True)) for row in map(_group, self.episodes)]

    @property
    def about(self) -> dict[str, Any]:
        """What goes in all, for people."""
        return {
            "forget": self.asked, "at": self.url, "as of commit": self.as_of,
            "checkpoints that go": f"{self.checkpoints_gone} of {len(self.checkpoints)}",
            "episodes that go": f"{self.episodes_gone} of {sum(g.episodes for g in self._whole())}",
            "objects that go": f"{self.objects}, {size(self.bytes)}",
            "redacts": None if self.redacted is None else str(self.redacted),
            "stands in the way": "; ".join(self.obstacles) or None,
            "done by commit": None if self.made is None else self.made.number,
        }  # fmt: skip

    def _whole(self) -> Iterator[EpisodeGroup]:
        """The groups of whole episodes: each episode is in one."""
        return (one for one in self.episodes if not one.superseded)

    def __str__(self) -> str:
        rows, groups = ([_texts(row) for row in of] for of in (self.checkpoint_rows(), self.episode_rows()))
        head = [f"{name}: {value}" for name, value in self.about.items() if value is not None]
        tables = [*_aligned(CHECKPOINT_COLUMNS, rows), "", *_aligned(EPISODE_COLUMNS, groups)]
        ending = ["nothing is forgotten yet: plan.commit() does it"]
        if self.made is not None or self.empty or self.obstacles:
            ending = []
        return visible("\n".join([*head, "", *tables, *ending]))

    def _repr_html_(self) -> str:
        checkpoints, episodes = self.checkpoint_rows(), self.episode_rows()
        return reports.letting_go(self.about, checkpoints, episodes).notebook()

    def __getstate__(self) -> dict[str, Any]:
        return {name: None if name == "_commit" else getattr(self, name) for name in self.__dataclass_fields__}


def _checkpoint(one: CheckpointFate) -> tuple[Any, ...]:
    why = "; ".join(one.reasons) or NO_RULE
    return one.name, one.run, one.step, one.commit, "stays" if one.stays else "goes", why


def _summed(going: Sequence[CheckpointFate]) -> tuple[Any, ...]:
    """A row for several checkpoints that go."""
    runs = list(dict.fromkeys(one.run for one in going))
    steps, numbers = ([getattr(one, name) for one in going] for name in ("step", "commit"))
    spans = (f"{min(values)} to {max(values)}" for values in (steps, numbers))
    return f"and {len(going)} more", runs[0] if len(runs) == 1 else f"{len(runs)} runs", *spans, "go", NO_RULE


def _group(one: EpisodeGroup) -> tuple[Any, ...]:
    return one.episodes, one.steps, "stay" if one.stays else "go", one.reason, ", ".join(one.examples)


def _texts(row: Mapping[str, Any]) -> list[str]:
    return [one_line(str(value)) for value in row.values()]


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of text."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    every = (zip(row, widths, strict=True) for row in (columns, *rows))
    return ["  ".join(text.ljust(width) for text, width in row).rstrip() for row in every]
