"""The exports that formats of datasets share: episodes, and their fields by their role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive.base import FieldError, NotFoundError, UsageError
from archive.checkpoint import Checkpoint
from archive.fields import Array as Array
from archive.fields import Path, flatten, lookup, to_path
from archive.read import Episode, Episodes

ROLES = {
    "observations": ("observations", "observation", "obs", "time_step/observation"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward", "next/reward", "time_step/reward"),
}
LEAVE_OUT = "name the fields to export, with fields= (--field)"


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
