"""The reader and writer that formats of datasets share: one checkpoint a dataset, its episodes, and the fields by
their role."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archive import Archive
from archive.base import ArchiveError, FieldError, IntegrityError, NotFoundError, UsageError
from archive.checkpoint import Checkpoint
from archive.fields import Array as Array
from archive.fields import Path, Schema, flatten, lookup, to_path
from archive.read import Episode, Episodes

ROLES = {
    "observations": ("observations", "observation", "obs", "time_step/observation"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward", "next/reward", "time_step/reward"),
}
_QUOTED = 200
LEAVE_OUT = "name the fields to export, with fields= (--field)"


@dataclass(frozen=True)
class Imported:
    """One episode of a dataset; one that has neither end is unfinished."""

    steps: Mapping[str, Any]
    terminated: bool = False
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@contextmanager
def reading(where: str, what: str = "dataset") -> Iterator[None]:
    """Say of what lies at `where` that it is no `what`, whatever goes wrong: other people's readers of other people's
    files may end in any error. IntegrityError with its cause; the library's own errors stay."""
    try:
        yield
    except ArchiveError:
        raise
    except Exception as e:
        why = str(e).strip().partition("\n")[0][:_QUOTED]
        raise IntegrityError(f"{where} is no readable {what}: {type(e).__name__}: {why}") from e


def _each(episodes: Iterable[Imported], where: str) -> Iterator[Imported]:
    """The episodes, read one after the other."""
    following = iter(episodes)
    while True:
        with reading(where):
            one = next(following, None)
        if one is None:
            return
        yield one


def archive_dataset(
    arc: Archive,
    name: str,
    episodes: Iterable[Imported],
    about: Mapping[str, Any],
    schema: Schema,
    run: str,
    where: str,
) -> Checkpoint:
    """Add the episodes and commit them as one checkpoint: all of them or, if anything is wrong, none.

    `about` becomes its progress; they are read from what lies at `where`.
    """
    session = f"import-{secrets.token_hex(4)}"
    with arc.writer(0, 1, session=session, run=run, schema=schema) as w:
        for one in _each(episodes, where):
            ended = one.terminated or one.truncated
            w.add_episode(
                one.steps,
                terminated=one.terminated if ended else None,
                truncated=one.truncated if ended else None,
                metadata=one.metadata,
                last=ended,
            )
        return w.checkpoint(0, name, progress=dict(about)).result()


def episodes_of(source: Any) -> Episodes:
    """The episodes of an archive, a checkpoint or a share, or those given; without those of no steps, which no format
    has."""
    found = source if isinstance(source, Episodes) else getattr(source, "episodes", None)
    if not isinstance(found, Episodes):
        raise UsageError(f"give an archive, a checkpoint, a share or episodes, not {type(source).__name__}")
    full = found[np.flatnonzero(found.lengths())]
    if not len(full):
        raise NotFoundError("there are no episodes with steps to export")
    return full


def about_of(source: Any, system: str) -> Mapping[str, Any]:
    """The notes that an import of that system made beside the episodes; empty where it was no import."""
    progress = source.progress if isinstance(source, Checkpoint) else None
    noted = progress.get(system) if isinstance(progress, Mapping) else None
    return noted if isinstance(noted, Mapping) else {}


def by_role(
    source: Any, fields: Any, given: Mapping[str, str | None]
) -> Iterator[tuple[Episode, dict[str, Any], dict[str, Path]]]:
    """The episodes, each with its steps and, by role, the path of the field (or nest of fields) that has it: the one
    given, or the first of its usual names."""
    for episode, steps in episodes_of(source).stream(fields):
        yield episode, steps, {role: _path_of(steps, role, name) for role, name in given.items()}


def _path_of(steps: Mapping[str, Any], role: str, given: str | None) -> Path:
    names = ROLES[role] if given is None else (given,)
    for name in names:
        if lookup(steps, to_path(name)) is not None:
            return to_path(name)
    fields = ", ".join("/".join(path) for path, _ in flatten(steps))
    raise FieldError(f"which field has the {role}? There is no {' or '.join(names)}; give {role}=. Fields: {fields}")


def row(array: Any, length: int, name: str) -> Array:
    """An array of one row a step; of one row more the last is left out."""
    if not isinstance(array, np.ndarray) or len(array) not in (length, length + 1):
        raise FieldError(f"field {name!r} is not one row a step, which this format needs; convert it, or {LEAVE_OUT}")
    return array[:length]
