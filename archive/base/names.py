"""Pure, no I/O: names given by users, made safe for zarr nodes, ZIP members and object keys, and back.

`[A-Za-z0-9_-]` stand for themselves, every other byte of the UTF-8 form is `%XX`, and the empty name is `%`.
A leading `__` (reserved by zarr) has its first underscore escaped. The mapping is one to one, so any string
that is legal in Python comes back as it was, and no two names meet in one key.
"""

from __future__ import annotations

import re
from functools import lru_cache

from archive.base.errors import FieldError, UnsafePathError
from archive.base.plaintext import one_line

MAX_ESCAPED_BYTES = 240  # file names end at 255 bytes on common file systems
MAX_PATH_BYTES = 800  # S3 keys end at 1024 bytes; the shard's own key goes before

_NO_FILE = re.compile(r'[/\\:*?"<>|]|^[-~]|^\.+$|[. ]$|^$')
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}  # of Windows
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+\Z")


def escape(name: str) -> str:
    """The key component for a name; `unescape` is its inverse."""
    if name == "":
        return "%"
    raw = name.encode("utf-8", "surrogatepass")
    text = "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in raw)
    return "%5F" + text[1:] if text.startswith("__") else text


def unescape(component: str) -> str:
    """The name behind a key component; anything `escape` cannot have made is refused."""
    if component == "%":
        return ""
    if not _ESCAPED.match(component):
        raise UnsafePathError(f"the name {component!r} in the archive is not one that this library writes")
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), component.encode("ascii"))
    return raw.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=4096)  # a table of chunks names few fields, each thousands of times
def escape_path(path: tuple[str, ...]) -> str:
    """The zarr path of a field: its keys escaped and joined by slashes."""
    parts = [escape(key) for key in path]
    joined = "/".join(parts)
    if any(len(p) > MAX_ESCAPED_BYTES for p in parts) or len(joined) > MAX_PATH_BYTES:
        raise FieldError(
            f"field name {show(path)!r} is too long: at most {MAX_ESCAPED_BYTES} bytes a key and "
            f"{MAX_PATH_BYTES} in all, escaped; use shorter keys"
        )
    return joined


def unescape_path(text: str) -> tuple[str, ...]:
    """The keys of a field from its zarr path."""
    return tuple(unescape(part) for part in text.split("/"))


def show(path: tuple[str, ...]) -> str:
    """A field's path for people: keys joined by slashes, long ones shortened."""
    text = "/".join(path)
    return text if len(text) <= 200 else text[:100] + "..." + text[-60:]


def check_file_name(name: str, what: str) -> str:
    """A name that a file may have on any system, and that acts on no terminal; else an error naming `what`."""
    wrong = (
        one_line(name) != name
        or _NO_FILE.search(name)
        or name.partition(".")[0].lower() in _DEVICES
        or len(name.encode("utf-8", "surrogatepass")) > MAX_ESCAPED_BYTES
    )
    if wrong:
        raise FieldError(f"{what} {name!r:.200} cannot be the name of a file or folder; give it another")
    return name


def check_text(value: object, what: str) -> str:
    """A string that can be stored in a table: str, encodable as UTF-8; else an error naming `what`."""
    if not isinstance(value, str):
        raise FieldError(f"{what} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise FieldError(f"{what} {value!r} holds a lone surrogate and cannot be stored as UTF-8 text") from e
    return value
