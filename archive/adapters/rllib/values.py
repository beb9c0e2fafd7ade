"""Pure, no I/O: the values of RLlib's episodes as arrays and JSON, and back, each of its own type; and spaces as trees.

RLlib has the values of an episode as a list of items, each a nest, or as one nest of arrays ("numpy"). Either becomes
arrays by path, and a form, a tree that says what the items were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from archive.base import CorruptStateError, FieldError, show
from archive.fields import Array, Path

_ARRAY = "array"
_PYTHON: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_MOST_ALIKE = 2**24  # elements that are kept as one number
_EXACT = 2**53  # larger integers are no floats


# -- arrays of items -------------------------------------------------------------------------------------------------


def arrays_of(data: Any, where: str) -> tuple[dict[Path, Array], Any]:
    """The arrays by path of a list of items, or of a nest of arrays, of at least one row; and their form."""
    if not isinstance(data, list):
        form = _form(data, where)
        return {names: np.asarray(_at(data, keys)) for names, keys, _ in _leaves(form)}, form
    forms = [_form(item, where) for item in data]
    runs = [(form, sum(1 for _ in some)) for form, some in itertools.groupby(forms)]
    every = {form: [(names, kind) for names, _, kind in _leaves(form)] for form, _ in runs}
    paths = [names for names, _ in every[forms[0]]]
    if not paths:
        raise FieldError(f"{where}: its items are nests without a value; leave them out")
    if any([names for names, _ in leaves] != paths for leaves in every.values()):
        raise FieldError(f"{where}: its items are nests of different keys; give all items of an episode the same ones")
    out = {}
    for names, keys, _ in _leaves(forms[0]):
        kinds = {dict(leaves)[names] for leaves in every.values()}
        out[names] = _column([_at(item, keys) for item in data], kinds, f"{where}, {show(names)!r}" if names else where)
    return out, runs


def items_of(arrays: Mapping[Path, Array], form: Any) -> Any:
    """The items, or the nest, that `arrays_of` was given."""
    if not isinstance(form, list):
        return _built(form, (), lambda names, _: arrays[names])
    out: list[Any] = []
    for one, count in form:
        if (end := len(out) + count) > min(map(len, arrays.values()), default=0):
            raise CorruptStateError(f"{end} items are to be made of fewer rows: the archive is damaged")
        columns = {names: _typed(arrays[names][len(out) : end], kind) for names, _, kind in _leaves(one)}
        out += columns[()] if isinstance(one, str) else _items(one, columns, count)
    return out


def _items(form: Any, columns: Mapping[Path, list[Any]], count: int) -> Iterator[Any]:
    for i in range(count):
        yield _built(form, (), lambda names, _, i=i: columns[names][i])  # type: ignore[misc]


def leaf_paths(form: Any) -> list[Path]:
    """The paths of the arrays that `items_of` takes for a form."""
    return [names for names, _, _ in _leaves(form[0][0] if isinstance(form, list) else form)]


def _form(value: Any, where: str) -> Any:
    """The type of a leaf, or those of a nest, as a tree: a text for a leaf."""
    kind = type(value)
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise FieldError(f"{where}: a key of a dict is no str; RLlib's spaces have names")
        return "dict", tuple((key, _form(one, where)) for key, one in value.items())
    if kind in (tuple, list):
        return kind.__name__, tuple((i, _form(one, where)) for i, one in enumerate(value))
    if kind is np.ndarray and value.dtype.kind != "O":
        return _ARRAY
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.dtype.str
    if kind.__name__ in _PYTHON and kind is _PYTHON[kind.__name__]:
        return kind.__name__
    raise FieldError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: numbers, strings, numpy arrays "
        "and dicts, lists and tuples of these can"
    )


def _leaves(form: Any, names: Path = (), keys: tuple[Any, ...] = ()) -> Iterator[tuple[Path, tuple[Any, ...], str]]:
    """(path, keys, type) of each leaf of a form."""
    if isinstance(form, str):
        yield names, keys, form
        return
    for key, one in form[1]:
        yield from _leaves(one, (*names, str(key)), (*keys, key))


def _at(value: Any, keys: Iterable[Any]) -> Any:
    for key in keys:
        value = value[key]
    return value


def _built(form: Any, names: Path, leaf: Callable[[Path, str], Any]) -> Any:
    """The nest of a form, with these leaves."""
    if isinstance(form, str):
        return leaf(names, form)
    parts = [(key, _built(one, (*names, str(key)), leaf)) for key, one in form[1]]
    return dict(parts) if form[0] == "dict" else {"tuple": tuple, "list": list}[form[0]](one for _, one in parts)


def _column(values: list[Any], kinds: set[str], where: str) -> Array:
    """The values of one leaf as one array, in which none is rounded."""
    if kinds == {_ARRAY}:
        if len({(value.dtype, value.shape) for value in values}) > 1:
            raise FieldError(f"{where}: its arrays differ in dtype or shape; give all of an episode the same")
        return np.stack(values)
    if kinds == {"str"}:
        out = np.empty(len(values), object)
        out[:] = values
        return out
    array = np.array(values) if kinds.isdisjoint({_ARRAY, "str"}) else np.empty(0, object)
    rounded = array.dtype.kind in "fc" and any(
        isinstance(value, int | np.integer) and abs(int(value)) > _EXACT for value in values
    )
    if array.dtype.kind == "O" or rounded:
        raise FieldError(f"{where}: values of the types {', '.join(sorted(kinds))} do not fit one array; give one type")
    return array


def _typed(rows: Array, kind: str) -> list[Any]:
    """The rows, as values of that type."""
    if kind == _ARRAY:
        return list(rows) if rows.ndim > 1 else [np.asarray(row) for row in rows]
    if kind in _PYTHON:
        return list(map(_PYTHON[kind], rows.tolist()))
    return list(rows.astype(np.dtype(kind)))


# -- infos -----------------------------------------------------------------------------------------------------------


def casts_of(infos: Sequence[Any]) -> list[tuple[Any, int]]:
    """The numpy numbers among values that JSON keeps as Python's: (their places and dtypes, values in a row)."""
    found = [tuple(_casts(info, ())) for info in infos]
    return [(places, sum(1 for _ in some)) for places, some in itertools.groupby(found)]


def cast(infos: list[Any], casts: Sequence[tuple[Any, int]]) -> list[Any]:
    """The values with these numbers as numpy had them."""
    rows = iter(infos)
    for places, count in casts:
        for info in itertools.islice(rows, count):
            for keys, dtype in places:
                inner = _at(info, keys[:-1])
                inner[keys[-1]] = np.asarray(inner[keys[-1]], np.dtype(dtype))[()]
    return infos


def _casts(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        yield keys, value.dtype.str
    elif type(value) in (dict, list):  # a number within a tuple stays one of Python's
        for key, one in value.items() if type(value) is dict else enumerate(value):
            yield from _casts(one, (*keys, key))


# -- spaces ----------------------------------------------------------------------------------------------------------


def space_tree(space: Any) -> Any:
    """A gymnasium space (None: no space) as a tree of arrays, numbers and texts; its random generator is no part."""
    if space is None:
        return None
    name, inner = type(space).__name__, getattr(space, "spaces", {})
    if type(space).__module__.partition(".")[0] != "gymnasium" or name not in _MADE:
        raise FieldError(f"a space of the type {type(space).__qualname__} cannot be stored; known: {', '.join(_MADE)}")
    if name == "Dict":
        return name, [(key, space_tree(one)) for key, one in inner.items()]
    if name == "Tuple":
        return name, [space_tree(one) for one in inner]
    return name, [_packed(getattr(space, one)) for one in _MADE[name]]


def space_of(tree: Any) -> Any:
    """The space of a tree."""
    if tree is None:
        return None
    name, given = tree
    if name == "Dict":
        return spaces.Dict({key: space_of(one) for key, one in given})
    if name == "Tuple":
        return spaces.Tuple(map(space_of, given))
    one: dict[str, Any] = {key: _unpacked(value) for key, value in zip(_MADE[name], given, strict=True)}
    if name == "Text":
        return spaces.Text(one["max_length"], min_length=one["min_length"], charset=one["characters"])
    if name in ("Box", "Discrete", "MultiDiscrete"):
        one["dtype"] = one["dtype"].type
    return getattr(spaces, name)(**one)


_MADE = {
    "Box": ("low", "high", "shape", "dtype"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
    "Text": ("max_length", "min_length", "characters"),
    "Dict": (),
    "Tuple": (),
}


def _packed(value: Any) -> Any:
    """A value of a space; an array of one number, such as the bounds of an image, as that number."""
    if isinstance(value, np.ndarray) and 1 < value.size <= _MOST_ALIKE and (value == value.flat[0]).all():
        return ("all", value.flat[0], value.shape)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("all",):
        if math.prod(value[2]) > _MOST_ALIKE:
            raise CorruptStateError(f"a space has bounds of shape {value[2]}, more than any: the archive is damaged")
        return np.full(value[2], value[1])
    return value
