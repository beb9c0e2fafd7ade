"""Pure, no I/O: JSON texts as Arrow columns of one type each: of scalars, and of objects by the names of their keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from json import JSONDecoder, JSONEncoder
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from archive.arrays import Ints
from archive.base import IntegrityError, cached_property, jsontree

if TYPE_CHECKING:
    import pyarrow as pa

MOST = 100  # the most frequent names, which have columns
_DEEPEST = 16  # an object below so many others is a text
_BATCH = 1024  # of more, the collector of garbage looks at all again and again
_COMMON = 16  # a key is looked up in all objects of a batch, if one in so many has it
_SURROGATE = re.compile("[\ud800-\udfff]")


class Objects:
    """The values of JSON objects by name: "tools.calls" is the value of the key `calls` in the object `tools`.

    All are parsed once, when the first is asked for. `what` they are is for errors.
    """

    def __init__(self, texts: pa.ChunkedArray, what: str) -> None:
        self._texts = texts
        self._what = what
        self._columns: dict[str, pa.Array] = {}

    @cached_property
    def _values(self) -> dict[str, _NamedValues]:
        found: dict[str, _NamedValues] = {}
        for start in range(0, len(self._texts), _BATCH):
            part = self._texts.slice(start, _BATCH)
            rows, texts = start + np.flatnonzero(part.is_valid().to_numpy()), part.drop_null().to_pylist()
            tagged = np.array(['"$' in text for text in texts], bool)  # not many: they are decoded in Python
            plain = [_parsed(text, self._what) for text in texts if '"$' not in text]
            _Taking(found, _plain_text).objects("", rows[~tagged], plain, 0)
            if tagged.any():
                others = [_decoded(text, self._what) for text in texts if '"$' in text]
                _Taking(found, _tagged_text).objects("", rows[tagged], others, 0)
        return found

    @cached_property
    def names(self) -> list[str]:
        """The names that some row has a value for, sorted; of many, the MOST frequent. A name with a lone surrogate,
        which Arrow refuses as a column, is left out."""
        named = {name: values for name, values in self._values.items() if not _SURROGATE.search(name)}
        counts = {name: values.count for name, values in named.items() if values.count}
        return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:MOST])

    def column(self, name: str) -> pa.Array:
        """One value for each row as bool, int64, double or string; JSON text for lists, or several types; null for
        none. For a name that is an object everywhere, True if there is one."""
        import pyarrow as pa

        if name not in self._columns:
            values = self._values.get(name)
            self._columns[name] = pa.nulls(len(self._texts)) if values is None else values.column(len(self._texts))
        return self._columns[name]

    def is_comparable(self, name: str) -> bool:
        """True if a name has values of one type."""
        values = self._values.get(name)
        return values is None or not values.is_mixed


class _NamedValues:
    """The values that some rows have of one name; batch by batch, rows ascend."""

    def __init__(self) -> None:
        self.objects: list[Ints] = []
        self._rows: list[Ints] = []
        self._parts: list[pa.Array] = []

    @property
    def count(self) -> int:
        """The number of rows that have a value that is no object."""
        return sum(map(len, self._rows))

    def add(self, rows: Ints, values: pa.Array) -> None:
        self._rows.append(rows)
        self._parts.append(values)

    @cached_property
    def _joined(self) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        kinds = {part.type for part in self._parts}
        if kinds == {pa.int64(), pa.float64()}:
            return pa.concat_arrays([pc.cast(part, pa.float64(), safe=False) for part in self._parts])
        return pa.concat_arrays(self._parts if len(kinds) == 1 else [_as_texts(part) for part in self._parts])

    @property
    def is_mixed(self) -> bool:
        """True if there are scalars of several types, or scalars and objects."""
        import pyarrow as pa

        texts = bool(self._parts) and pa.types.is_large_string(self._joined.type) and not are_nested(self._joined)
        return texts or bool(self._parts and self.objects)

    def column(self, count: int) -> pa.Array:
        import pyarrow as pa

        place = np.full(count, -1, np.int64)
        if not self._parts:
            place[np.concatenate(self.objects)] = 0
            return pa.array([True]).take(pa.array(place, mask=place < 0))
        rows = np.concatenate(self._rows)
        place[rows] = np.arange(len(rows))
        found = self._joined.take(pa.array(place, mask=place < 0))
        return found.cast(pa.string()) if pa.types.is_large_string(found.type) else found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_decode = JSONDecoder(parse_constant=_refused).raw_decode
_plain_text = JSONEncoder(separators=(",", ":")).encode


def _tagged_text(value: Any) -> str:
    return jsontree.dumps(value, where="a value")


def _parsed(text: str, what: str) -> dict[str, Any]:
    """The object of a text without tags."""
    value = _quickly(text)
    return value if type(value) is dict else _decoded(text, what)


def _quickly(text: str) -> Any:
    """The value of a text without tags; None where it is no JSON: the strict parser says what is wrong."""
    try:
        value, end = _decode(text)
        return value if end == len(text) else None
    except (ValueError, RecursionError):
        return None


def _decoded(text: str, what: str) -> dict[str, Any]:
    value = jsontree.loads(text, where=what)
    if not isinstance(value, dict):
        raise IntegrityError(f"{what}: {text[:40]!r} is no JSON object: the text is damaged, rewrite it")
    return value if _has_names(value) else {}


def _has_names(value: Any) -> bool:
    return type(value) is dict and bool(value) and all(type(key) is str for key in value)


class _Taking(NamedTuple):
    """Takes the values of objects, one a row; `dumps` makes texts of those that are no scalars."""

    found: dict[str, _NamedValues]
    dumps: Callable[[Any], str]

    def objects(self, prefix: str, rows: Ints, objects: list[dict[str, Any]], depth: int) -> None:
        counts = Counter(chain.from_iterable(objects))
        rare = {key for key, count in counts.items() if count * _COMMON < len(objects)}
        few: dict[str, tuple[list[int], list[Any]]] = {key: ([], []) for key in rare}
        for row, one in zip(rows.tolist(), objects, strict=True) if rare else ():
            for key in one.keys() & rare:
                few[key][0].append(row)
                few[key][1].append(one[key])
        for key in sorted(counts):  # so that a key "a.b" comes after what `a` has of `b`: its value counts
            if key in rare:
                self.values(prefix + key, np.array(few[key][0], np.int64), few[key][1], depth)
            else:
                self.values(prefix + key, rows, [one.get(key) for one in objects], depth)

    def values(self, name: str, rows: Ints, values: list[Any], depth: int) -> None:
        kinds = set(map(type, values))
        own = self.found.setdefault(name, _NamedValues())
        if dict in kinds and depth < _DEEPEST:
            inner = [i for i, value in enumerate(values) if _has_names(value)]
            if inner:
                own.objects.append(rows[inner])
                self.objects(f"{name}.", rows[inner], [values[i] for i in inner], depth + 1)
                values = [None if _has_names(value) else value for value in values]
        if dict in kinds or type(None) in kinds:
            kept = [i for i, value in enumerate(values) if value is not None]
            rows, values = rows[kept], [values[i] for i in kept]
        if values:
            own.add(rows, self.array(values))

    def array(self, values: Sequence[Any]) -> pa.Array:
        """The values as bool, int64, double or string; as JSON texts, large strings here, where that cannot be."""
        import pyarrow as pa

        kinds = set(map(type, values))
        try:
            if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
                return pa.array(values, pa.int64())
            if kinds <= {int, float}:
                return pa.array([float(value) for value in values], pa.float64())
            if kinds in ({bool}, {str}):
                return pa.array(values, pa.bool_() if kinds == {bool} else pa.string())
        except (UnicodeEncodeError, OverflowError):
            pass  # a lone surrogate, or a number beyond all doubles: as a text
        return pa.array([self.dumps(value) for value in values], pa.large_string())


def _as_texts(part: pa.Array) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_large_string(part.type):
        return part
    return pa.array([_tagged_text(value) for value in part.to_pylist()], pa.large_string())


def typed(texts: pa.Array) -> pa.Array | None:
    """The values of JSON texts as bool, int64, double or strings; None if they are of several types, or nested."""
    import pyarrow as pa

    if texts.null_count == len(texts):
        return pa.nulls(len(texts))
    coded = texts.dictionary_encode()
    found = _Taking({}, _tagged_text).array([_value(text) for text in coded.dictionary.to_pylist()])
    return None if pa.types.is_large_string(found.type) else found.take(coded.indices)


def _value(text: str) -> Any:
    """The value of a JSON text."""
    value = None if '"$' in text else _quickly(text)
    return jsontree.loads(text, where="a value") if value is None else value


def are_nested(texts: pa.Array) -> bool:
    import pyarrow.compute as pc

    nested: bool = pc.all(pc.match_substring_regex(texts, r"^[\[{]")).as_py()
    return nested
