"""Functions of users: what is stored of the one that made a column, and a digest by which another version is known."""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def told(fn: Any, provenance: Any) -> dict[str, Any]:
    """A record of the function that makes columns: its name, the version of its package, and its digest."""
    module = getattr(fn, "__module__", None) or ""
    out = {"function": f"{module}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"}
    package = sys.modules.get(module.partition(".")[0])
    version = getattr(fn, "__version__", None) or getattr(package, "__version__", None)
    if version is not None:
        out["version"] = str(version)
    out["source"] = digest(fn)
    return out if provenance is None else {**out, "provenance": provenance}


def digest(fn: Any) -> str:
    """A digest of a function, a class or an object that is called: of its text, of the plain values that are bound to
    it, of the constants of its module that it names, and of the functions and classes of its module that it uses. So
    another version has another one, and the same one has the same in another process. Where there is no text, as of one
    typed at a prompt, its code counts. Values that may change, such as lists, count by their type."""
    return hashlib.sha256("\n".join(_texts(fn, set())).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _texts(what: Any, seen: set[int]) -> Iterator[str]:
    """The texts of something that is used, and of what it uses; each function and class once."""
    if isinstance(what, partial):
        yield from _all([what.func, *what.args], seen)
        for name, value in sorted(what.keywords.items()):
            yield name
            yield from _texts(value, seen)
    elif isinstance(what, MethodType):
        yield from _all([what.__func__, what.__self__], seen)
    elif isinstance(what, FunctionType):
        if id(what) not in seen:
            seen.add(id(what))
            yield from _of_function(what, seen)
    elif isinstance(what, type):
        if id(what) not in seen:
            seen.add(id(what))
            yield from _of_class(what, seen)
    elif callable(what) and type(what).__module__ != "builtins":
        yield getattr(what, "__name__", "")
        yield from _of_class(type(what), seen)
        for name, value in sorted(getattr(what, "__dict__", {}).items()):
            yield name
            yield from _texts(value, seen) if callable(value) else [_plain(value)]
    else:
        yield getattr(what, "__qualname__", None) or _plain(what)


def _all(some: Iterable[Any], seen: set[int]) -> Iterator[str]:
    for one in some:
        yield from _texts(one, seen)


def _of_class(what: type, seen: set[int]) -> Iterator[str]:
    yield what.__qualname__
    yield str(getattr(what, "__version__", ""))
    if what.__module__ == "builtins":
        return
    try:
        yield inspect.getsource(what)
    except (OSError, TypeError):  # typed at a prompt
        for name, one in sorted(vars(what).items()):
            if isinstance(one, FunctionType):
                yield from _texts(one, seen)
            elif not name.startswith("__"):
                yield f"{name} = {_plain(one)}"
    yield from _all((one for one in what.__bases__ if one.__module__ == what.__module__), seen)


def _of_function(what: FunctionType, seen: set[int]) -> Iterator[str]:
    code = what.__code__
    try:
        yield inspect.getsource(what)  # of a wrapped one that is the inner text, with its decorators
        is_told = what.__name__ != "<lambda>"  # several lambdas may be on one line
    except (OSError, TypeError):  # typed at a prompt
        is_told = False
    if not is_told:
        yield _of_code(code)
    yield str(getattr(what, "__version__", ""))
    yield from _all(what.__defaults__ or (), seen)
    for cell in what.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield from _texts(cell.cell_contents, seen)
    for name in sorted(_globals(code)):
        value = what.__globals__.get(name)
        is_own = isinstance(value, (FunctionType, type)) and value.__module__ == what.__module__
        if is_own or isinstance(value, (bool, int, float, str, bytes, tuple)):
            yield name
            yield from _texts(value, seen)


def _globals(code: CodeType) -> set[str]:
    """The global names that some code reads, and does not set."""
    read: set[str] = set()
    set_by: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop()
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        for step in dis.get_instructions(one):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(step.argval)
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                set_by.add(step.argval)
    return read - set_by


def _of_code(code: CodeType) -> str:
    return repr((code.co_code, _plain(code.co_consts), code.co_names))


def _plain(value: Any) -> str:
    """Plain values as text; of others the type, as they may change, and their text may have an address."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, CodeType):
        return _of_code(value)
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return repr(value) if is_plain else type(value).__qualname__
