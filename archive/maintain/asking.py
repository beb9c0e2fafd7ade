"""Pure, no I/O: what a forgetting is asked for, and what makes no sense to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archive.base import UsageError
from archive.checkpoint import Keep

UNREFERENCED, SUPERSEDED = "unreferenced", "superseded"
_REMEDY = (
    "say which checkpoints stay, by keep=archive.Keep(last=5, every=100, within='7d', best=('return', 3)), or which "
    "episodes go, by episodes='unreferenced', episodes='superseded', where=... or ids=[...]"
)


@dataclass(frozen=True)
class Asked:
    """Which checkpoints are to stay (None: all), and which episodes may go.

    episodes: "unreferenced", "superseded" or None; where and ids narrow it, and say it by themselves where it is None.
    run: nothing of other runs may go.  anyhow: a policy that wants none of the checkpoints leaves what is protected.
    redact: nothing of these episodes may be left.
    """

    keep: Keep | None = None
    episodes: str | None = None
    where: Any = None
    ids: tuple[str, ...] | None = None
    run: str | None = None
    anyhow: bool = False
    redact: bool = False

    @property
    def chosen(self) -> bool:
        """Whether episodes are chosen by name or by a condition."""
        return self.where is not None or self.ids is not None

    @property
    def lets_episodes_go(self) -> bool:
        """Whether any episode may go."""
        return self.chosen or self.episodes is not None

    def __str__(self) -> str:
        given = (
            ("keep", self.keep), ("episodes", self.episodes), ("where", self.where), ("run", self.run),
        )  # fmt: skip
        parts = [f"{name}={value}" for name, value in given if value is not None]
        ids = [] if self.ids is None else [f"{len(self.ids)} ids"]
        return ", ".join([*parts, *ids, *(["redact"] if self.redact else [])])


def asked(keep: Any, episodes: Any, where: Any, ids: Any, run: Any, *, redact: bool) -> Asked:
    """What was asked for; UsageError where that is nothing, or makes no sense."""
    if redact and (ids is None or any(given is not None for given in (episodes, where, run))):
        raise UsageError(
            "redact=True takes all that there is of some episodes: give their ids=[...], and keep= at most, not "
            "episodes=, where= or run="
        )
    if keep is not None and not isinstance(keep, Keep):
        raise UsageError(f"keep={keep!r}: {_REMEDY}")
    if keep == Keep():
        raise UsageError(f"keep=Keep() says nothing of what stays: {_REMEDY}")
    if episodes not in (None, UNREFERENCED, SUPERSEDED):
        raise UsageError(f"episodes={episodes!r}: give {UNREFERENCED!r}, {SUPERSEDED!r} or None; {_REMEDY}")
    found = Asked(keep, episodes, where, None if ids is None else _names(ids), run, redact=redact)
    if keep is None and not found.lets_episodes_go:
        raise UsageError(f"nothing was said of what is to be forgotten: {_REMEDY}")
    return found


def _names(ids: Any) -> tuple[str, ...]:
    names = (ids,) if isinstance(ids, str) else tuple(ids)
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"ids={ids!r:.200}: give the ids of one or several episodes")
    return tuple(dict.fromkeys(names))
