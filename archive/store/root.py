"""Pure, no I/O: the place of an archive, the names that are safe below it, and the secrets that must not be printed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from archive.base import UnsafePathError, UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_BROKEN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/(?!/).*)?", re.DOTALL)  # of one letter it is a Windows drive
_LOCAL_PREFIX = re.compile(r"(?:file|local):(?://)?")
_SECRET_OPTION = re.compile(
    r"key|secret|token|passw|pwd|sas|credential|signature|connection_string|auth|cookie|headers", re.IGNORECASE
)
_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
)
_USER = re.compile(r"://([^/?#\s]*)@")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_MIN_SECRET = 4  # shorter values cannot be told from ordinary text
_MIN_PART = 8  # and shorter parts of what has several
_HTTP = ("http", "https")


def check_key(key: str) -> str:
    """`key` itself if it is a relative POSIX path that stays below the root, else UnsafePathError."""
    parts = key.split("/")
    if "\\" in key or _UNPRINTABLE.search(key) or any(part in ("", ".", "..") for part in parts):
        raise UnsafePathError(
            f"the name {key!r} is not a plain relative path (no empty, '.' or '..' parts, no backslash, no control "
            "character): it was not used; if it came from the bucket, remove that object"
        )
    return key


def check_listed(name: str, folder: str) -> str:
    """`name` itself if it is safe below `folder`; a listed folder ends with "/"."""
    try:
        check_key(name.removesuffix("/"))
    except UnsafePathError as error:
        raise UnsafePathError(f"list {folder}: {error}") from None
    return name


@dataclass(frozen=True, slots=True, repr=False)
class StoreRoot:
    """A parsed root. `target` and `options` open it; only `url` may be shown."""

    target: str
    options: dict[str, Any]
    url: str
    protocol: str
    query: str = ""
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"StoreRoot({self.url!r})"

    def full_url(self, key: str) -> str:
        if not key:
            return self.url
        return f"{self.url}{key}" if self.url.endswith("/") else f"{self.url}/{key}"

    def scrub(self, text: str) -> str:
        """`text` without any known credential."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_root(url: object, options: Mapping[str, Any] | None) -> StoreRoot:
    """A root from a URL, a path or a UPath-like object; nothing is opened."""
    merged = dict(options or {})
    if hasattr(url, "protocol") and hasattr(url, "storage_options") and hasattr(url, "path"):
        merged = {**url.storage_options, **merged}
        bare = str(url.path)
        named = str(url.protocol) not in ("", "file", "local")
        return _parse_text(f"{url.protocol}://{bare.lstrip('/')}", merged) if named else _local(bare, merged)
    if isinstance(url, os.PathLike):
        return _local(_checked_path(os.fsdecode(url)), merged)
    if not isinstance(url, str) or not url:
        raise UsageError(
            f"an archive's root is a URL or a path, not {type(url).__name__}: pass for example 's3://bucket/x'"
        )
    return _parse_text(url, merged)


def _parse_text(url: str, options: dict[str, Any]) -> StoreRoot:
    if "::" in url and not url.startswith(("/", ".")):
        return _chained(url, options)
    if _LOCAL_PREFIX.match(url):
        return _local(_LOCAL_PREFIX.sub("", url, count=1), options)
    match = _SCHEME.fullmatch(url)
    if match is None:
        return _local(_checked_path(url), options)
    return _remote(match[1].lower(), match[2], options)


def split_file(url: object) -> tuple[str, str]:
    """The folder that a file of any filesystem lies in, as a root, and the file's name."""
    text = str(url)
    folder, slash, name = text.rpartition("/")
    if folder.endswith(":/"):  # memory://x.npz
        folder += slash
    if not name or "::" in text:
        raise UsageError(f"{text} names no file: give a path, or a URL such as s3://bucket/folder/file")
    return folder or slash or ".", name


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path of this machine; a URL is refused, as it would become a folder called "s3:"."""
    text = os.fspath(path)
    if _SCHEME.fullmatch(text) and not _LOCAL_PREFIX.match(text):
        raise UsageError(f"{what} {text} is a URL; it must be a path on this machine")
    return Path(_checked_path(_LOCAL_PREFIX.sub("", text, count=1))).expanduser()


def _checked_path(path: str) -> str:
    """A local path; one that looks like a URL without a slash (as pathlib makes of it) is refused."""
    if match := _BROKEN.fullmatch(path):
        scheme = match[1]
        raise UsageError(
            f"{path!r} is neither a URL nor a usual path, and would make a folder {scheme + ':'!r}: write "
            f"{scheme}://... as text (pathlib drops a slash), or ./{path} for a local folder of that name"
        )
    return path


def _local(path: str, options: dict[str, Any]) -> StoreRoot:
    full = Path(os.path.abspath(os.path.expanduser(path))).as_posix()  # noqa: PTH100, PTH111 (pathlib keeps "..")
    trimmed = re.sub("/{2,}", "/", full).rstrip("/")
    shown = trimmed if trimmed.startswith("/") else f"/{trimmed}"
    return StoreRoot(trimmed, options, f"file://{shown}", "file", "", _secrets(options))


def _remote(protocol: str, rest: str, options: dict[str, Any]) -> StoreRoot:
    rest, _, query = rest.partition("?")
    path = re.sub("/{2,}", "/", rest).strip("/")
    if query and protocol not in _HTTP:
        raise UsageError(f"{protocol}:// roots take no '?query': pass such settings in storage_options")
    if not path and protocol != "memory":
        raise UsageError(f"{protocol}:// names no bucket or host: write {protocol}://bucket/folder")
    secrets = _secrets(options, *_url_secrets(protocol, path, query))
    return StoreRoot(
        f"{protocol}://{path}", options, f"{protocol}://{_shown(protocol, path)}", protocol, query, secrets
    )


def _chained(url: str, options: dict[str, Any]) -> StoreRoot:
    parts, shown, secrets = url.split("::"), [], []
    for part in parts:
        protocol, mark, rest = part.partition("://")
        bare, _, query = rest.partition("?")
        secrets += list(_url_secrets(protocol, bare, query))
        shown.append(f"{protocol}{mark}{_shown(protocol, bare)}")
    return StoreRoot(url.rstrip("/"), options, "::".join(shown).rstrip("/"), parts[0], "", _secrets(options, *secrets))


def _shown(protocol: str, path: str) -> str:
    host, slash, tail = path.partition("/")
    user, at, bare = host.rpartition("@")
    hidden = at and (":" in user or protocol in _HTTP)
    return f"{bare if hidden else host}{slash}{tail}"


def _url_secrets(protocol: str, path: str, query: str) -> Iterator[str]:
    user, at, _ = path.partition("/")[0].rpartition("@")
    if at and (":" in user or protocol in _HTTP):
        yield user
        yield user.partition(":")[2]
    yield query
    yield from (value for _, value in parse_qsl(query))


def _secrets(options: Mapping[str, Any], *more: str) -> tuple[str, ...]:
    environment = (os.environ.get(name, "") for name in _SECRET_VARIABLES)
    plain = {value for value in (*_value_secrets(options, False), *more, *environment) if len(value) >= _MIN_SECRET}
    every = plain | {quote(value, safe="") for value in plain}
    return tuple(sorted(every, key=lambda value: (-len(value), value)))


def _value_secrets(value: Any, secret: bool) -> Iterator[str]:
    """The secret texts in an option's value: all of a `secret` one, else the user in a URL."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _value_secrets(one, secret or bool(_SECRET_OPTION.search(str(name))))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (found for one in value for found in _value_secrets(one, secret))
    elif isinstance(value, bytes):
        yield from _value_secrets(value.decode(errors="replace"), secret)
    elif isinstance(value, str):
        yield from _text_secrets(value) if secret else ()
        yield from (part for user in _USER.findall(value) for part in (user, user.partition(":")[2]))


def _text_secrets(text: str) -> Iterator[str]:
    """A secret, and the parts of one that has several, as "Basic x" and "AccountName=x;AccountKey=y" do."""
    yield text
    yield from (part for part in text.split(" ") if len(part) > _MIN_PART)
    yield from (part.partition("=")[2] for part in text.split(";") if len(part) > _MIN_PART)
