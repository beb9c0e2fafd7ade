"""Archives that refer to shards of other archives: reading from several roots,
each opened only if the caller allows it.

A key `base:<archive id>:<key>` is in another archive, whose URL the commit names. A bucket alone never makes the
library open another one: the caller lists the allowed URLs (or beginnings of URLs) when opening the archive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import count, groupby
from typing import Any

from archive.base import ByteRange, UnsafePathError
from archive.store.drivers import Buffer
from archive.store.reads import Filling
from archive.store.root import check_key, parse_root
from archive.store.storage import Storage

_KEY = re.compile(r"base:([0-9a-f]{32}):(.+)\Z", re.DOTALL)
_AMBIGUOUS = re.compile(r"::|[?#]|%2[ef]|%5c", re.IGNORECASE)  # characters that some protocols read as another place


def split_key(key: str) -> tuple[str | None, str]:
    """(archive id, key within it); None for the archive itself."""
    match = _KEY.match(key)
    return (match[1], match[2]) if match else (None, key)


def join_key(archive_id: str | None, key: str) -> str:
    """A key in the form in which another archive refers to it; a key that already refers elsewhere stays."""
    return key if archive_id is None or _KEY.match(key) else f"base:{archive_id}:{key}"


class Roots:
    """Reads from an archive's own root and from its bases."""

    def __init__(self, own: Storage, bases: Mapping[str, str]) -> None:
        """bases: archive id -> URL of the archives whose shards are referred to."""
        self._own = own
        self._bases = dict(bases)
        self._opened: dict[str, Storage] = {}
        self.url = own.url

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._own, self._bases)

    def full_url(self, key: str) -> str:
        base, rest = split_key(key)
        return self._own.full_url(key) if base is None else f"{self._bases.get(base, '?')}/{rest}"

    def get(self, key: str) -> bytes:
        """A whole object."""
        base, rest = split_key(key)
        return self.storage(base).get(rest)

    def get_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The same as Storage.get_ranges, wherever the keys lie."""
        places: dict[str | None, dict[int, ByteRange]] = {}
        for i, one in enumerate(ranges):
            places.setdefault(split_key(one.key)[0], {})[i] = _inside(one)
        found: dict[int, bytes] = {}
        for base, mine in places.items():
            found.update(zip(mine, self.storage(base).get_ranges(list(mine.values())), strict=True))
        return [found[i] for i in range(len(ranges))]

    def iter_ranges(self, ranges: Iterable[ByteRange], *, max_bytes: int) -> Generator[Buffer, None, None]:
        """The same as Storage.iter_ranges, wherever the keys lie."""
        for base, mine in groupby(ranges, key=lambda one: split_key(one.key)[0]):
            yield from self.storage(base).iter_ranges(map(_inside, mine), max_bytes=max_bytes)

    def fill(self, fillings: Iterable[Filling], use: Callable[[int], None], *, max_bytes: int) -> None:
        """The same as Storage.fill, wherever the keys lie."""
        first = 0
        for base, mine in groupby(fillings, key=lambda one: split_key(one.key)[0]):
            counted = count(first)
            inside = (one._replace(key=split_key(one.key)[1]) for one, _ in zip(mine, counted, strict=False))
            self.storage(base).fill(inside, _counted_from(first, use), max_bytes=max_bytes)
            first = next(counted)

    def scatter(self, key: str, start: int, rooms: Sequence[memoryview], *, again: bool = False) -> None:
        """The same as Storage.scatter, wherever the key lies."""
        base, rest = split_key(key)
        self.storage(base).scatter(rest, start, rooms, again=again)

    def is_remote(self, keys: Iterable[str]) -> bool:
        """True if all of these keys are behind a network, so that a request costs more than some bytes."""
        return all(self.storage(base).driver.remote for base in {split_key(key)[0] for key in keys})

    def scatters(self, keys: Iterable[str]) -> bool:
        """True if Storage.scatter works for all of these keys."""
        return all(self.storage(base).driver.can("read_into") for base in {split_key(key)[0] for key in keys})

    def url_of(self, base: str) -> str:
        """The URL of a base, by the commit; empty if it has none."""
        return self._bases.get(base, "")

    def allows(self, base: str | None) -> bool:
        """True if a base (None: the archive itself) may be read."""
        return base is None or _allowed(self.url_of(base), self._own.allowed_bases)

    def storage(self, base: str | None) -> Storage:
        """The storage of a base (None: the archive itself); UnsafePathError for one that is not allowed."""
        if base is None:
            return self._own
        if base not in self._opened:
            url = self.url_of(base)
            if not self.allows(base):
                raise UnsafePathError(
                    f"the archive at {self._own.url} refers to shards of the archive {url or base!r}, which was not "
                    f"allowed; open it with archive.open(..., allow_bases=[{url!r}]) if you trust it"
                )
            _, options = self._own.spec() if _same_server(url, self.url) else ("", {})  # credentials stay home
            storage = Storage.connect(url, options, concurrency=self._own.concurrency, deadline_s=self._own.deadline_s)
            storage.stats, storage.allowed_bases = self._own.stats, self._own.allowed_bases
            self._opened[base] = storage
        return self._opened[base]


def _counted_from(first: int, use: Callable[[int], None]) -> Callable[[int], None]:
    return lambda i: use(first + i)


def _inside(one: ByteRange) -> ByteRange:
    return ByteRange(split_key(one.key)[1], one.start, one.stop)


def as_allowed(given: Any) -> bool | tuple[str, ...]:
    """The user's `allow_bases` (True, or one or several URLs or paths) in the form that is compared."""
    if isinstance(given, bool):
        return given
    one = isinstance(given, (str, os.PathLike)) or hasattr(given, "protocol")
    return tuple(parse_root(url, {}).url for url in ([given] if one else given))


_OF_ONE_SERVER = frozenset(("s3", "s3a", "gs", "gcs", "az", "file", "memory"))  # what the options say, not the URL


def _same_server(url: str, own: str) -> bool:
    """True if requests to a URL go to the same server by the same options, and may so be signed as the archive's own;
    of other kinds (http, sftp and the like) the URL names the host."""
    (protocol, _, rest), (mine, _, ours) = url.partition("://"), own.partition("://")
    return protocol == mine and (protocol in _OF_ONE_SERVER or rest.partition("/")[0] == ours.partition("/")[0])


def _allowed(url: str, allowed: bool | Sequence[str]) -> bool:
    """True if a base's URL is an allowed one, or is below one; ambiguous URLs are not allowed."""
    if isinstance(allowed, bool):
        return allowed and bool(url)
    return url in allowed or any(_below(url, root if root.endswith("/") else f"{root}/") for root in allowed)


def _below(url: str, root: str) -> bool:
    rest = url.removeprefix(root)
    if rest == url or _AMBIGUOUS.search(rest):
        return False
    try:
        return bool(check_key(rest))
    except UnsafePathError:
        return False
