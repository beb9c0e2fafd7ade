"""Pure, no I/O: fields that follow from other fields, computed when steps are read and never stored.

A derivation says which fields it takes and how many steps before and after a step it looks, so that whoever reads a
window reads that much more of those fields and of no others. No derivation looks past what follows on in time: an
episode's end, or a hole in the live steps of a checkpoint.

By name: "next_FIELD", "has_next", "terminated", "truncated", "done". With arguments: `next_of`, `n_step_return`,
`n_step_discount`, `discounted_return`, `frame_stack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archive.arrays import Ints, spans
from archive.base import FieldError, UsageError, show
from archive.fields.nests import Array, mapped
from archive.fields.schema import Path, to_path

Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Rows:
    """The steps whose values are wanted, among rows of the fields that a derivation takes.

    at: the row of each step.  begin, stop: rows [begin, stop) around it follow one another in time.
    ends: whether row stop - 1 is the last step of its episode.  terminated, truncated: how that episode ended.
    """

    at: Ints
    begin: Ints
    stop: Ints
    ends: Bools
    terminated: Bools
    truncated: Bools


@dataclass(frozen=True)
class Derivation(ABC):
    """A field called `name`, computed from `fields`, `before` steps back to `after` steps on (None: to the end)."""

    name: Path
    fields: tuple[Path, ...] = ()
    before: int = 0
    after: int | None = 0

    @abstractmethod
    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        """One value for each of `rows.at`; `values` has the rows of each of `fields`, maybe a nest of them."""

    def of(self, data: Mapping[str, Any], rows: Rows) -> Any:
        """The same as `compute`, from a nest that has the rows."""
        return self.compute({path: _found(data, path) for path in self.fields}, rows)


@dataclass(frozen=True)
class _Next(Derivation):
    ahead: int = 1

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        (value,) = values.values()
        return mapped(value, lambda leaf: _take(leaf, np.minimum(rows.at + self.ahead, _stop(leaf, rows) - 1)))


@dataclass(frozen=True)
class _HasNext(Derivation):
    ahead: int = 1

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        return rows.at + self.ahead < rows.stop


@dataclass(frozen=True)
class _NStep(Derivation):
    gamma: float = 1.0
    steps: int = 1

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        reward = _numbers(self, values)
        out = np.zeros((len(rows.at), *reward.shape[1:]), _float_of(reward))
        for k in range(self.steps):
            inside = rows.at + k < rows.stop
            out[inside] += self.gamma**k * reward[rows.at[inside] + k]
        return out


@dataclass(frozen=True)
class _Discount(Derivation):
    gamma: float = 1.0
    steps: int = 1

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        rewards = np.minimum(self.steps, rows.stop - rows.at)
        over = rows.ends & rows.terminated & (rows.stop - rows.at <= self.steps)
        return np.where(over, 0, self.gamma ** rewards.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True)
class _Returns(Derivation):
    gamma: float = 1.0

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        reward = _numbers(self, values)
        begins, which = np.unique(rows.begin, return_index=True)
        counts = rows.stop[which] - begins
        places, left = spans(begins, counts), spans(np.zeros_like(begins), counts)
        left = np.repeat(counts, counts) - left  # rows from each to the end of its run
        sums = reward.astype(np.float64)
        reach = 1  # sums[i] has the rewards of `reach` rows; twice as many after each pass
        with np.errstate(over="ignore", invalid="ignore"):  # rewards that are infinite have sums that are, or none
            while reach < int(counts.max(initial=0)):
                inside = places[left > reach]
                sums[inside] += self.gamma**reach * sums[inside + reach]
                reach *= 2
        return sums[rows.at].astype(_float_of(reward))


@dataclass(frozen=True)
class _Stack(Derivation):
    frames: int = 1

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        (value,) = values.values()
        back = np.arange(self.frames - 1, -1, -1)
        places = np.maximum(rows.at[:, None] - back, rows.begin[:, None])
        return mapped(value, lambda leaf: self._stacked(leaf, places))

    def _stacked(self, leaf: Any, places: Ints) -> Any:
        if not isinstance(leaf, np.ndarray):
            raise FieldError(f"frames of {show(self.fields[0])!r} cannot be stacked: it is not one array of rows")
        return leaf[places]


@dataclass(frozen=True)
class _Flag(Derivation):
    kinds: tuple[str, ...] = field(default=("terminated", "truncated"))

    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        last = rows.ends & (rows.at == rows.stop - 1)
        return last & np.logical_or.reduce([getattr(rows, kind) for kind in self.kinds])


def next_of(name: str = "obs", ahead: int = 1, *, as_name: Any = None) -> Derivation:
    """The value of a field `ahead` steps later, as "next_NAME". Where the episode has no such step it is the last value
    there is: the final row of a field of T + 1 rows, else the last step's, and then "has_next" is False."""
    path = to_path(name)
    default = (f"next_{path[0]}", *path[1:])
    return _Next(_name(as_name, default), (path,), 0, _at_least_one(ahead, "ahead"), ahead)


def has_next(ahead: int = 1, *, as_name: Any = "has_next") -> Derivation:
    """True where the episode has a step `ahead` steps later."""
    return _HasNext(_name(as_name), (), 0, _at_least_one(ahead, "ahead"), ahead)


def n_step_return(gamma: float, n: int, *, reward: str = "reward", as_name: Any = "n_step_return") -> Derivation:
    """The discounted sum of this step's reward and the next n - 1 of its episode, fewer at its end."""
    return _NStep(_name(as_name), (to_path(reward),), 0, _at_least_one(n, "n") - 1, gamma, n)


def n_step_discount(gamma: float, n: int, *, as_name: Any = "n_step_discount") -> Derivation:
    """The weight of the value of `next_of(..., ahead=n)` in a target beside the n-step return: gamma to the number of
    rewards in it, and 0 where the episode terminates among them."""
    return _Discount(_name(as_name), (), 0, _at_least_one(n, "n") - 1, gamma, n)


def discounted_return(gamma: float, *, reward: str = "reward", as_name: Any = "discounted_return") -> Derivation:
    """The discounted sum of rewards from each step to the end of its episode; at step 0 it is the episode's own."""
    return _Returns(_name(as_name), (to_path(reward),), 0, None, gamma)


def frame_stack(name: str, k: int, *, as_name: Any = None) -> Derivation:
    """The last k rows of a field, oldest first, on a new axis behind the step's, as "NAME_stack"; before the episode's
    first step its first row is repeated. as_name=NAME puts it in the field's own place."""
    path = to_path(name)
    return _Stack(_name(as_name, (*path[:-1], f"{path[-1]}_stack")), (path,), _at_least_one(k, "k") - 1, 0, k)


def terminated(*, as_name: Any = "terminated") -> Derivation:
    """True at the step at which the episode terminated."""
    return _Flag(_name(as_name), kinds=("terminated",))


def truncated(*, as_name: Any = "truncated") -> Derivation:
    """True at the step at which the episode was truncated."""
    return _Flag(_name(as_name), kinds=("truncated",))


def done(*, as_name: Any = "done") -> Derivation:
    """True at the step at which the episode terminated or was truncated; an open episode has none."""
    return _Flag(_name(as_name))


_BY_NAME = {"has_next": has_next, "terminated": terminated, "truncated": truncated, "done": done}


def parse(derive: Any) -> tuple[Derivation, ...]:
    """Derivations and names of such, one or several."""
    given = [derive] if isinstance(derive, (str, Derivation)) else list(derive or ())
    out = tuple(map(_parsed, given))
    names = [d.name for d in out]
    if len(set(names)) < len(names):
        raise UsageError(f"derive={given!r} gives several fields the same name; rename one with as_name=")
    return out


def _parsed(given: Any) -> Derivation:
    if isinstance(given, Derivation):
        return given
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    if isinstance(given, str) and given.startswith("next_") and given != "next_":
        return next_of(given.removeprefix("next_"))
    raise UsageError(
        f"derive has {given!r}, which is no derivation; give next_FIELD, {', '.join(_BY_NAME)}, or what "
        "archive.fields.derived.next_of, n_step_return, n_step_discount, discounted_return or frame_stack return"
    )


def put(data: dict[str, Any], derivation: Derivation, value: Any) -> dict[str, Any]:
    """The nest with a derived field in it; what was not derived from is never replaced."""
    if derivation.name not in derivation.fields and _at(data, derivation.name) is not _ABSENT:
        raise FieldError(
            f"the steps have a field {show(derivation.name)!r} already; give the derived one another name with as_name="
        )
    return _with(data, derivation.name, value)


_ABSENT = object()


def _at(nest: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(nest, Mapping) or key not in nest:
            return _ABSENT
        nest = nest[key]
    return nest


def _found(data: Any, path: Path) -> Any:
    value = _at(data, path)
    if value is _ABSENT:
        raise FieldError(f"the data has no field {show(path)!r} to derive from; read it as well")
    return value


def _with(nest: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    below = nest.get(path[0])
    inner = _with(below if isinstance(below, Mapping) else {}, path[1:], value) if len(path) > 1 else value
    return {**nest, path[0]: inner}


def _take(leaf: Any, places: Ints) -> Any:
    return leaf[places] if isinstance(leaf, np.ndarray) else [leaf[i] for i in places]


def _stop(leaf: Any, rows: Rows) -> Ints:
    """Rows beyond the last step's (of a field of T + 1 rows) go on with the run that reaches the end."""
    return np.where(rows.stop == rows.stop.max(initial=0), np.maximum(rows.stop, len(leaf)), rows.stop)


def _numbers(derivation: Derivation, values: Mapping[Path, Any]) -> Array:
    ((path, value),) = values.items()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise FieldError(f"{show(derivation.name)!r} needs a field of numbers; {show(path)!r} is none")
    return value


def _float_of(values: Array) -> Any:
    return values.dtype if values.dtype.kind == "f" else np.dtype(np.float32)


def _name(given: Any, default: Path = ()) -> Path:
    return default if given is None else to_path(given)


def _at_least_one(value: int, what: str) -> int:
    if value < 1:
        raise UsageError(f"{what}={value}: it must be at least 1")
    return value
