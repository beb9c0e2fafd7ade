"""Episodes of the same fields, of which single transitions are gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.buffer.flatten import Rows
from archive.arrays import Ints
from archive.fields import FieldSpec, ShardSchema, dtypes, flatten, schema, unflatten
from archive.read import Episodes, Gather


class Kind:
    """Episodes of the same fields and the same number of envs side by side (0: one, without an axis for it)."""

    def __init__(
        self, episodes: Episodes, made: ShardSchema, envs: int, *, cache_bytes: int, disk_cache: Any = None
    ) -> None:
        fields = [f for f in made.fields if f.path[0] != trajectories.REST and _is_tensor(f)]
        by_step = [f.path for f in fields if f.axis == "step" and (not envs or f.shape[:1] == (envs,))]
        self.envs = envs
        self.whole = [f.path for f in fields if f.axis == "free" and f.shape[:1] == (envs,) and not f.scalar]
        self._gather = Gather(episodes, by_step, cache_bytes=cache_bytes, disk_cache=disk_cache) if by_step else None

    def take(self, numbers: Ints, step: torch.Tensor, env: torch.Tensor) -> Rows:
        """Transition (step[i], env[i]) of episode numbers[i]; fields that have one row a step."""
        if self._gather is None:
            return {}
        found = self._gather.rows(numbers, step.numpy())
        rows = {path: dtypes.to_torch(value) for path, value in flatten(found)}
        if not self.envs:
            return rows
        each = torch.arange(len(numbers))
        return {path: value[:, 0] if self.envs == 1 else value[each, env] for path, value in rows.items()}

    def close(self) -> None:
        if self._gather is not None:
            self._gather.close()


def kinds_of(episodes: Episodes, envs: Ints, cache_bytes: int, disk_cache: Any) -> tuple[list[Kind], Ints, Ints]:
    """The kinds of some episodes; which of them each is, and its number there."""
    spans = episodes.step_spans()
    firsts = spans.rows[spans.offsets[:-1]]
    texts = episodes.reader.snapshot.take(firsts, ["schema"])["schema"].to_pylist()
    each = list(zip(texts, envs.tolist(), strict=True))
    place = {key: i for i, key in enumerate(dict.fromkeys(each))}
    kind = np.array([place[key] for key in each], np.int64)
    within = np.zeros(len(each), np.int64)
    kinds = []
    for (text, count), number in place.items():
        mine = np.flatnonzero(kind == number)
        within[mine] = np.arange(len(mine))
        share = cache_bytes * len(mine) // len(each)
        kinds.append(Kind(episodes[mine], schema.loads(text), count, cache_bytes=share, disk_cache=disk_cache))
    return kinds, kind, within


def tree_of(data: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """A trajectory as it was given, or an episode of one env as a trajectory [T, 1, ...]."""
    if "B" in about:
        return trajectories.from_steps(data, about)
    tensors = {path: dtypes.to_torch(v) for path, v in flatten(data) if isinstance(v, np.ndarray) and v.ndim}
    return unflatten({path: t[:, None] for path, t in tensors.items() if isinstance(t, torch.Tensor)})


def _is_tensor(field: FieldSpec) -> bool:
    if field.axis in schema.NODES or field.dtype in ("str", "json"):
        return False
    return field.dtype in dtypes.ML_NAMES or dtypes.is_native(dtypes.to_numpy(field.dtype))
