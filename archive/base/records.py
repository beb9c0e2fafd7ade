"""Pure, no I/O: JSON of a bucket, read back (invalid, too deep or too long texts are errors); and records, frozen
dataclasses whose fields define the content of a document.

The library's own documents (archive.json, commits, staged indexes, zarr.json, schemas, claims) are parsed here alone:
the caller names the document and the kind of error.

One class defines how an object of the bucket is checked, read and written:

    @dataclass(frozen=True, slots=True)
    class Mark(Record):
        name: str                                     # must be there
        commit: Count | None                          # must be there: null, or at least 0
        note: str | None = None                       # may be absent (never null): left out where it is the default
        last: int | None = stored(None, always=True)  # may be absent or null, and is always written
        made_by: str = stored("", required=True)      # must be there; the default is for those that are being made

`Mark.from_json(value, what=..., error=...)` gives a Mark or raises `error`, which names the object and the place in it;
`mark.to_json()` gives what `json.dumps` takes. Keys that no field has (a later version wrote them) are kept in `more`,
and written again.

A field is a str, bool, int (of 64 bits), Count, Positive, float, datetime, Literal, Record, Any (not looked into);
`X | None`; tuple[X, ...] and tuple[X, Y]; Mapping[str, X] and Mapping[int, X] (keys as decimal text); or Annotated with
a Form of its own, such as `pairs(...)`, a mapping as a list of pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from datetime import datetime
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from archive.base.errors import IntegrityError

MAX_DEPTH = 64  # of documents that the library makes; none has ten levels
MAX_SMALL_BYTES = 65_536  # archive.json, claims, answers to requests: none has a thousand
LEAST, MOST = -(1 << 63), (1 << 63) - 1
_QUOTED = 80

X = TypeVar("X")
R = TypeVar("R", bound="Record")


def parse(text: bytes | str, *, what: str, error: type[IntegrityError], max_depth: int | None = None) -> Any:
    """The value of a JSON text; `error` names `what` where it is none, or is nested deeper than that."""
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise error(f"{what} is nested too deeply: it is damaged, or not what its name says") from e
    except ValueError as e:
        raise error(f"{what} is not JSON ({e!s:.{_QUOTED}}): it is damaged") from e
    if max_depth is not None and _is_deeper(value, max_depth):
        raise error(f"{what} is nested more than {max_depth} levels deep: it is damaged, or not what its name says")
    return value


def parse_object(
    text: bytes | str, *, what: str, error: type[IntegrityError], max_depth: int | None = None
) -> dict[str, Any]:
    """The object of a JSON text, else an error as of `parse`. What is in it is checked by a record."""
    value = parse(text, what=what, error=error, max_depth=max_depth)
    if type(value) is not dict:
        raise error(f"{what} is not what it should be (it is no object): it is damaged")
    return value


def check_size(data: bytes, max_bytes: int, *, what: str, error: type[IntegrityError]) -> bytes:
    """`data` itself, if it has at most `max_bytes`: read one byte more than that, and no more, to know."""
    if len(data) > max_bytes:
        raise error(f"{what} has more than {max_bytes} bytes, which none has: it is damaged, or not what its name says")
    return data


def _is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects are nested more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        nodes = [node for node in level if isinstance(node, (dict, list))]
        if not nodes:
            return False
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
    return any(isinstance(node, (dict, list)) for node in level)


class MisshapenError(Exception):
    """A value does not fit its field; the text says where."""


class Form(NamedTuple):
    """The two ways of a field's value: from JSON, and to it. `read(value, at)` raises MisshapenError, by `refuse`."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any]


def refuse(value: Any, at: str, wanted: str) -> NoReturn:
    raise MisshapenError(f"{at or 'it'} is {_quoted(value)}, {wanted}")


def stored(
    default: Any = MISSING, *, key: str | None = None, always: bool = False, required: bool = False, null: bool = False
) -> Any:
    """A field whose form in the document differs from the default.

    key: its name there.  always: written even where it is the default.  required: also an error where it is absent.
    null: may be null there, though it is left out where it is None.
    """
    about = {"key": key, "always": always or required, "required": required, "null": null}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def unstored(default: Any) -> Any:
    """A field that the document does not have."""
    return field(default=default, metadata={"unstored": True})


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object of known keys. `more`: those that no field has."""

    more: Mapping[str, Any] = field(default_factory=dict, kw_only=True, repr=False, hash=False)

    @classmethod
    def from_json(cls, value: Any, *, what: str, error: type[IntegrityError], remedy: str = "") -> Self:
        """The record that a JSON value is; `error` names `what` and the place where it is none."""
        try:
            return _read(cls, value, "")
        except MisshapenError as e:
            raise error(f"{what} is not what it should be ({e}): it is damaged{remedy and '; '}{remedy}") from e

    def to_json(self) -> dict[str, Any]:
        """The document, in the order of the fields."""
        out = {
            one.key: one.form.write(value)
            for one in _stored_fields(type(self))  # type: ignore[arg-type]
            if (value := getattr(self, one.name)) != one.default or one.always
        }
        return out | dict(self.more)


class _FieldForm(NamedTuple):
    """One field of a record, as the document has it."""

    name: str
    key: str
    form: Form
    default: Any
    required: bool
    always: bool


@cache
def _stored_fields(cls: type[Record]) -> tuple[_FieldForm, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        _stored_field(one, hints[one.name])
        for one in fields(cls)
        if one.name != "more" and "unstored" not in one.metadata
    )


def _stored_field(one: Field[Any], hint: Any) -> _FieldForm:
    about = one.metadata
    default = one.default if one.default_factory is MISSING else one.default_factory()
    required, always = default is MISSING or about.get("required", False), about.get("always", False)
    if default is None and not (always or about.get("null")):
        hint = next(each for each in get_args(hint) if each is not type(None))  # absent is not null
    return _FieldForm(one.name, about.get("key") or one.name, _form(hint), default, required, always)


def _read(cls: type[R], value: Any, at: str) -> R:
    if type(value) is not dict:
        refuse(value, at, "no object")
    known = _stored_fields(cls)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for one in known:
        if one.key in value:
            given[one.name] = one.form.read(value[one.key], _below(at, one.key))
        elif one.required:
            raise MisshapenError(f"{_below(at, one.key)} is not there")
    keys = {one.key for one in known}
    return cls(**given, more={key: rest for key, rest in value.items() if key not in keys})


def _below(at: str, key: str) -> str:
    return f"{at}.{key:.{_QUOTED}}" if at else f"{key:.{_QUOTED}}"


def _quoted(value: Any) -> str:
    """The beginning of a value, however large it is."""
    if isinstance(value, int) and abs(value) > MOST:
        return "a number of too many digits"
    return f"{value!r:.{_QUOTED}}" if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"


# -- forms of the types ------------------------------------------------------------------------------------------------


def _form(hint: Any) -> Form:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(one for one in args[1:] if isinstance(one, Form))
    if hint is Any:
        return Form(lambda value, at: value, _same)
    if origin in (Union, UnionType):
        form = _form(next(one for one in args if one is not type(None)))
        return Form(
            lambda value, at: None if value is None else form.read(value, at),
            lambda value: None if value is None else form.write(value),
        )
    if origin is Literal:
        return _one_of(args)
    if origin is tuple:
        return _items(_form(args[0])) if args[-1] is Ellipsis else _fixed([_form(one) for one in args])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(int if args[0] is int else str, _form(args[1]))
    if issubclass(hint, Record):
        return Form(lambda value, at: _read(hint, value, at), lambda record: record.to_json())
    return _PLAIN[hint]


def _one_of(choices: tuple[Any, ...]) -> Form:
    def read(value: Any, at: str) -> Any:
        if not any(type(value) is type(one) and value == one for one in choices):
            refuse(value, at, f"none of {', '.join(map(str, choices))}")
        return value

    return Form(read, _same)


def _items(form: Form) -> Form:
    def read(value: Any, at: str) -> tuple[Any, ...]:
        if type(value) is not list:
            refuse(value, at, "no list")
        return tuple([form.read(one, f"{at}[{i}]") for i, one in enumerate(value)])

    return Form(read, lambda value: [form.write(one) for one in value])


def _fixed(forms: list[Form]) -> Form:
    def read(value: Any, at: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(forms):
            refuse(value, at, f"no list of {len(forms)}")
        return tuple([form.read(one, f"{at}[{i}]") for i, (form, one) in enumerate(zip(forms, value, strict=True))])

    return Form(read, lambda value: [form.write(one) for form, one in zip(forms, value, strict=True)])


def _mapping(key: type, form: Form) -> Form:
    def read(value: Any, at: str) -> dict[Any, Any]:
        if type(value) is not dict:
            refuse(value, at, "no object")
        return {_key(key, k, at): form.read(one, _below(at, k)) for k, one in value.items()}

    return Form(read, lambda value: {str(k): form.write(one) for k, one in value.items()})


def _key(key: type, text: str, at: str) -> str | int:
    if key is str:
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 19) or str(int(text)) != text:
        raise MisshapenError(f"{at} has the key {text!r:.{_QUOTED}}, no number from 0")
    return int(text)


def pairs(first: Form, second: Form) -> Form:
    """A mapping that is written as a list of pairs, as its keys are no text."""
    inner = _items(_fixed([first, second]))
    return Form(lambda value, at: dict(inner.read(value, at)), lambda value: inner.write(value.items()))


def _exactly(kind: type, wanted: str) -> Form:
    """A value that is written as it is; `wanted` describes it in words."""
    return Form(lambda value, at: value if type(value) is kind else refuse(value, at, wanted), _same)


def _whole_from(least: int, wanted: str) -> Form:
    def read(value: Any, at: str) -> int:
        return value if type(value) is int and least <= value <= MOST else refuse(value, at, wanted)

    return Form(read, _same)


def _positive(value: Any, at: str) -> Any:
    return COUNT.read(value, at) or refuse(value, at, "not above 0")


def _number(value: Any, at: str) -> float:
    return value if type(value) is float else _NUMBER.read(value, at)


def _time(value: Any, at: str) -> datetime:
    try:
        return datetime.fromisoformat(TEXT.read(value, at))
    except ValueError:
        refuse(value, at, "no time")


def _same(value: X) -> X:
    return value


TEXT = _exactly(str, "no text")
WHOLE, COUNT = _whole_from(LEAST, "no whole number of 64 bits"), _whole_from(0, "no whole number from 0")
_NUMBER = _whole_from(LEAST, "no number")
Count = Annotated[int, COUNT]
Positive = Annotated[int, Form(_positive, _same)]
_PLAIN = {
    str: TEXT,
    int: WHOLE,
    bool: _exactly(bool, "neither true nor false"),
    float: Form(_number, _same),
    datetime: Form(_time, lambda value: value.isoformat(timespec="microseconds")),
}
