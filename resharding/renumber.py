"""Pure, no I/O: env ids and trajectory ids in the fields of episodes become those of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import FieldError, show
from archive.fields import Path, Ragged, ShardSchema, lookup

Roles = dict[Path, str]


def roles_of(schema: ShardSchema) -> Roles:
    """Field -> "env_id" or "episode_id", of a shard's schema."""
    names = [(n, "env_id") for n in schema.env_id] + [(n, "episode_id") for n in schema.episode_id]
    return {schema.by_name[name].path: role for name, role in names if name in schema.by_name}


def renumber(data: dict[str, Any], roles: Roles, env: int, place: int, name: str) -> None:
    """Replace the values of id fields by the env row `env` (unless there is none: -1), or the trajectory's new id:
    `place` in fields of numbers, `name` in fields of text."""
    for path, role in roles.items():
        inner = lookup(data, path[:-1], {})
        number, text = (env, str(env)) if role == "env_id" else (place, name)
        if path[-1] in inner and number >= 0:
            inner[path[-1]] = _filled(inner[path[-1]], number, text, path)


def renumber_rows(batch: dict[str, Any], roles: Roles, env: Ints, place: Ints, names: Sequence[str]) -> None:
    """Renumber a batch: item i is of the episode of env row env[i], place[i] and names[i]. Where the env row or the
    place is -1, the old id stays."""
    for path, role in roles.items():
        inner = lookup(batch, path[:-1], {})
        numbers, texts = (env, list(map(str, env.tolist()))) if role == "env_id" else (place, list(names))
        if path[-1] in inner:
            inner[path[-1]] = _filled_rows(inner[path[-1]], numbers, texts, path)


def renumber_places(array: np.ndarray[Any, Any], rows: Ints, numbers: Ints, path: Path) -> None:
    """Set rows rows[i] of an array of ids to numbers[i]."""
    if len(rows):
        _check_holds(array, int(numbers.max()), path)
        array[rows] = numbers.reshape(-1, *[1] * (array.ndim - 1))


def _filled_rows(old: Any, numbers: Ints, texts: list[str], path: Path) -> Any:
    if isinstance(old, Ragged):
        owner = np.repeat(np.arange(len(numbers)), old.lengths)
        return Ragged(_filled_rows(old.values, numbers[owner], [texts[i] for i in owner], path), old.lengths)
    if not isinstance(old, np.ndarray) or old.dtype.kind not in "iuf" or not len(old):
        filled = [_filled(v, n, t, path) if n >= 0 else v for v, n, t in zip(old, numbers.tolist(), texts, strict=True)]
        return np.array(filled, object if old.dtype == object else None) if isinstance(old, np.ndarray) else filled
    _check_holds(old, int(numbers.max()), path)
    new = numbers.astype(old.dtype).reshape(-1, *[1] * (old.ndim - 1))
    return np.where((numbers >= 0).reshape(new.shape), new, old)


def _filled(old: Any, number: int, text: str, path: Path) -> Any:
    """A value of the same form, with the new id everywhere; an array of numbers is that array,
    which may be the caller's."""
    if isinstance(old, list):
        return [_filled(value, number, text, path) for value in old]
    if not isinstance(old, np.ndarray):
        return text if isinstance(old, str) else number
    if old.dtype == object:
        return np.full(old.shape, text if all(isinstance(v, str) for v in old.flat) else number, object)
    if old.dtype.kind == "U":
        return np.full(old.shape, text)
    _check_holds(old, number, path)
    old[...] = number
    return old


def _check_holds(old: np.ndarray[Any, Any], number: int, path: Path) -> None:
    if old.dtype == bool or (old.dtype.kind in "iu" and number > np.iinfo(old.dtype).max):
        raise FieldError(
            f"field {show(path)!r} of dtype {old.dtype} cannot hold the new id {number}; read the share without it "
            "(fields=...), or archive it with a wider dtype"
        )
