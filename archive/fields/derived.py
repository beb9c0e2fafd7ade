"""Pure, no I/O: fields that follow from other fields, computed when steps are read and never stored.

A derivation names the fields that it takes, and the numbers of steps before and after a step that it needs, so that a
window reads that much more of those fields and of no others. No derivation looks past a gap in time: an
episode's end, or a hole in the live steps of a checkpoint.

By name: "next_FIELD", "has_next", "terminated", "truncated", "done". With arguments: `next_of`, `n_step_return`,
`n_step_discount`, `discounted_return`, `frame_stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from archive.arrays import Ints, spans
from archive.base import FieldError, UsageError, show
from archive.fields.nests import Array, lookup, mapped
from archive.fields.schema import Path, to_path

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Values = Mapping[Path, Any]  # rows of fields, or of nests of them, by path


@dataclass(frozen=True)
class Rows:
    """The wanted steps, among rows of the fields that a derivation takes.

    at: the row of each step.  begin, stop: rows [begin, stop) around it follow one another in time.
    ends: mask: row stop - 1 is the last step of its episode.  terminated, truncated: the end of that episode.
    """

    at: Ints
    begin: Ints
    stop: Ints
    ends: Bools
    terminated: Bools
    truncated: Bools


@dataclass(frozen=True)
class Derivation:
    """A field called `name`, computed from `fields`, `before` steps back to `after` steps on (None: to the end).

    compute: gives one value for each of `rows.at`; `values` has the rows of each of `fields`, maybe a nest of them.
    """

    name: Path
    compute: Callable[[Values, Rows], Any] = field(repr=False)
    fields: tuple[Path, ...] = ()
    before: int = 0
    after: int | None = 0

    def of(self, data: Mapping[str, Any], rows: Rows) -> Any:
        """The same as `compute`, from a nest that has the rows."""
        return self.compute({path: _found(data, path) for path in self.fields}, rows)


# -- derivations by name --------------------------------------


def next_of(name: str = "obs", ahead: int = 1, *, as_name: Any = None) -> Derivation:
    """The value of a field `ahead` steps later, as "next_NAME". If the episode has no such step it is the last value:
    the final row of a field of T + 1 rows, else the last step's, and then "has_next" is False."""
    path = to_path(name)
    own = (f"next_{path[0]}", *path[1:]) if as_name is None else to_path(as_name)
    return Derivation(own, partial(_later, ahead), (path,), after=_at_least_one(ahead, "ahead"))


def _later(ahead: int, values: Values, rows: Rows) -> Any:
    (value,) = values.values()
    return mapped(value, lambda leaf: _take(leaf, np.minimum(rows.at + ahead, _stop(leaf, rows) - 1)))


def has_next(ahead: int = 1, *, as_name: Any = "has_next") -> Derivation:
    """True where the episode has a step `ahead` steps later."""
    return Derivation(to_path(as_name), partial(_goes_on, ahead), after=_at_least_one(ahead, "ahead"))


def _goes_on(ahead: int, values: Values, rows: Rows) -> Any:
    return rows.at + ahead < rows.stop


def n_step_return(gamma: float, n: int, *, reward: str = "reward", as_name: Any = "n_step_return") -> Derivation:
    """The discounted sum of this step's reward and the next n - 1 of its episode, fewer at its end."""
    own = to_path(as_name)
    return Derivation(own, partial(_summed, own, gamma, n), (to_path(reward),), after=_at_least_one(n, "n") - 1)


def _summed(own: Path, gamma: float, n: int, values: Values, rows: Rows) -> Any:
    reward = _numbers(own, values)
    out = np.zeros((len(rows.at), *reward.shape[1:]), _float_of(reward))
    for k in range(n):
        inside = rows.at + k < rows.stop
        out[inside] += gamma**k * reward[rows.at[inside] + k]
    return out


def n_step_discount(gamma: float, n: int, *, as_name: Any = "n_step_discount") -> Derivation:
    """The weight of the value of `next_of(..., ahead=n)` in a target beside the n-step return: gamma to the number of
    rewards in it, and 0 where the episode terminates among them."""
    return Derivation(to_path(as_name), partial(_discount, gamma, n), after=_at_least_one(n, "n") - 1)


def _discount(gamma: float, n: int, values: Values, rows: Rows) -> Any:
    rewards = np.minimum(n, rows.stop - rows.at)
    over = rows.ends & rows.terminated & (rows.stop - rows.at <= n)
    return np.where(over, 0, gamma ** rewards.astype(np.float64)).astype(np.float32)


def discounted_return(gamma: float, *, reward: str = "reward", as_name: Any = "discounted_return") -> Derivation:
    """The discounted sum of rewards from each step to the end of its episode; at step 0 it is the episode's own."""
    own = to_path(as_name)
    return Derivation(own, partial(_returns, own, gamma), (to_path(reward),), after=None)


def _returns(own: Path, gamma: float, values: Values, rows: Rows) -> Any:
    reward = _numbers(own, values)
    begins, which = np.unique(rows.begin, return_index=True)
    counts = rows.stop[which] - begins
    places, left = spans(begins, counts), spans(np.zeros_like(begins), counts)
    left = np.repeat(counts, counts) - left  # rows from each to the end of its run
    sums = reward.astype(np.float64)
    reach = 1  # sums[i] has the rewards of `reach` rows; twice as many after each pass
    with np.errstate(over="ignore", invalid="ignore"):  # rewards that are infinite have sums that are, or none
        while reach < int(counts.max(initial=0)):
            inside = places[left > reach]
            sums[inside] += gamma**reach * sums[inside + reach]
            reach *= 2
    return sums[rows.at].astype(_float_of(reward))


def frame_stack(name: str, k: int, *, as_name: Any = None) -> Derivation:
    """The last k rows of a field, oldest first, on a new axis behind the step's, as "NAME_stack"; before the episode's
    first step its first row is repeated. as_name=NAME puts it in the field's own place."""
    path = to_path(name)
    own = (*path[:-1], f"{path[-1]}_stack") if as_name is None else to_path(as_name)
    return Derivation(own, partial(_stack, k), (path,), before=_at_least_one(k, "k") - 1)


def _stack(k: int, values: Values, rows: Rows) -> Any:
    ((path, value),) = values.items()
    places = np.maximum(rows.at[:, None] - np.arange(k - 1, -1, -1), rows.begin[:, None])

    def stacked(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            raise FieldError(f"frames of {show(path)!r} cannot be stacked: it is not one array of rows")
        return leaf[places]

    return mapped(value, stacked)


def terminated(*, as_name: Any = "terminated") -> Derivation:
    """True at the step at which the episode terminated."""
    return Derivation(to_path(as_name), partial(_last, ("terminated",)))


def truncated(*, as_name: Any = "truncated") -> Derivation:
    """True at the step at which the episode was truncated."""
    return Derivation(to_path(as_name), partial(_last, ("truncated",)))


def done(*, as_name: Any = "done") -> Derivation:
    """True at the step at which the episode terminated or was truncated; an open episode has none."""
    return Derivation(to_path(as_name), partial(_last, ("terminated", "truncated")))


def _last(how: Sequence[str], values: Values, rows: Rows) -> Any:
    return rows.ends & (rows.at == rows.stop - 1) & np.logical_or.reduce([getattr(rows, one) for one in how])


def _numbers(own: Path, values: Values) -> Array:
    ((path, value),) = values.items()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise FieldError(f"{show(own)!r} needs a field of numbers; {show(path)!r} is none")
    return value


def _float_of(values: Array) -> Any:
    return values.dtype if values.dtype.kind == "f" else np.dtype(np.float32)


def _take(leaf: Any, places: Ints) -> Any:
    return leaf[places] if isinstance(leaf, np.ndarray) else [leaf[i] for i in places]


def _stop(leaf: Any, rows: Rows) -> Ints:
    """Rows beyond the last step's (of a field of T + 1 rows) go on with the run that reaches the end."""
    return np.where(rows.stop == rows.stop.max(initial=0), np.maximum(rows.stop, len(leaf)), rows.stop)


def _at_least_one(value: int, what: str) -> int:
    if value < 1:
        raise UsageError(f"{what}={value}: it must be at least 1")
    return value


# -- requested derivations ------------------------------------------------


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
    """The nest with a derived field in it; other fields are never replaced."""
    if derivation.name not in derivation.fields and lookup(data, derivation.name, _ABSENT) is not _ABSENT:
        raise FieldError(
            f"the steps have a field {show(derivation.name)!r} already; give the derived one another name with as_name="
        )
    return _with(data, derivation.name, value)


_ABSENT = object()


def _found(data: Any, path: Path) -> Any:
    value = lookup(data, path, _ABSENT)
    if value is _ABSENT:
        raise FieldError(f"the data has no field {show(path)!r} to derive from; read it as well")
    return value


def _with(nest: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    below = nest.get(path[0])
    inner = _with(below if isinstance(below, Mapping) else {}, path[1:], value) if len(path) > 1 else value
    return {**nest, path[0]: inner}
