"""Pure, no I/O: env ids and trajectory ids in an episode's fields become those of the target."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from archive import schema
from archive.errors import FieldError
from archive.names import show

Roles = dict[schema.Path, str]


@lru_cache(maxsize=256)
def roles_of(text: str) -> Roles:
    """Field -> "env_id" or "episode_id", of a shard's schema."""
    of = schema.loads(text)
    names = [(n, "env_id") for n in of.env_id] + [(n, "episode_id") for n in of.episode_id]
    return {of.by_name[name].path: role for name, role in names if name in of.by_name}


def renumber(data: dict[str, Any], roles: Roles, env: int, place: int, name: str) -> None:
    """Every value of an id field becomes the env row `env` (unless there is none: -1), or the trajectory's new id:
    `place` in fields of numbers, `name` in fields of text."""
    for path, role in roles.items():
        if role == "env_id" and env < 0:
            continue
        inner: Any = data
        for key in path[:-1]:
            inner = inner.get(key, {})
        if path[-1] in inner:
            number, text = (env, str(env)) if role == "env_id" else (place, name)
            inner[path[-1]] = _filled(inner[path[-1]], number, text, path)


def _filled(old: Any, number: int, text: str, path: schema.Path) -> Any:
    """A value of the same form, with the new id everywhere."""
    if isinstance(old, list):
        return [_filled(value, number, text, path) for value in old]
    if not isinstance(old, np.ndarray):
        return text if isinstance(old, str) else number
    if old.dtype == object:
        return np.full(old.shape, text if all(isinstance(v, str) for v in old.flat) else number, object)
    if old.dtype.kind == "U":
        return np.full(old.shape, text)
    if old.dtype == bool or (old.dtype.kind in "iu" and number > np.iinfo(old.dtype).max):
        raise FieldError(
            f"field {show(path)!r} of dtype {old.dtype} cannot hold the new id {number}; read the share without it "
            "(fields=...), or archive it with a wider dtype"
        )
    return np.full(old.shape, number, old.dtype)
