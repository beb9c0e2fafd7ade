"""Does I/O: the filesystems of fsspec: those of other packages, of buckets, of web servers, of memory.

Imports no fsspec.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from archive.base import Gate, ShortReadError, StorageError, forking, in_child
from archive.store.drivers.driver import PAGE, Buffer, Driver, Listed, Location, ObjectInfo
from archive.store.drivers.failures import Cause, judge, unexplained

T = TypeVar("T")

RENEW_LEAST_S = 1.0  # between two looks at the source of credentials
_GIVEN = ("key", "secret", "username", "password", "anon", "skip_signature")
_GIVEN_ENDINGS = ("access_key_id", "secret_access_key")
_TIMES = ("LastModified", "mtime", "modified", "last_modified", "updated", "created")  # as filesystems call it
_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)


class FsspecDriver(Driver):
    """Objects of an fsspec filesystem below a path. It creates nothing: what fsspec offers is exists, then write."""

    def __init__(self, fs: Any, path: str, place: Location) -> None:
        self._fs = fs
        self._root = path.rstrip("/")
        self._query = f"?{place.query}" if place.query else ""

    @staticmethod
    def defaults(options: Mapping[str, Any], place: Location) -> dict[str, Any]:
        """Give `options` of the filesystem over our own defaults."""
        return dict(options)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        data = self._call("cat_file", self._path(key), start=start, end=stop, timeout_s=timeout_s)
        return data if isinstance(data, bytes) else bytes(data)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._call("pipe_file", self._path(key), join(parts), timeout_s=timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        self._call("rm_file", self._path(key), timeout_s=timeout_s)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        info: Mapping[str, Any] = self._call("info", self._path(key), timeout_s=timeout_s)
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return ObjectInfo(int(info["size"] or 0), str(info.get("ETag") or ""), _modified(info))

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        folder = f"{self._root}/{prefix}" if prefix else self._root
        self._fs.invalidate_cache()
        try:
            below: Mapping[str, Mapping[str, Any]] = self._call("find", folder, detail=True, timeout_s=timeout_s)
        except (FileNotFoundError, NotADirectoryError):
            return
        stem = f"{prefix}/" if prefix else ""
        files = [(_below(folder, entry), entry) for entry in below.values() if entry["type"] == "file"]
        found = [_found(f"{stem}{name}", entry) for name, entry in files if name]
        yield from in_pages(sorted(one for one in found if one.key > after))

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        folder = f"{self._root}/{prefix}" if prefix else self._root
        try:
            entries = self._entries(folder, timeout_s)
        except (FileNotFoundError, NotADirectoryError):
            return [], 1
        names = (_below(folder, entry) for entry in entries)
        return [name for name in names if name], max(1, -(-len(entries) // PAGE)) if self.remote else 1

    def _entries(self, folder: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """The entries directly in a folder, as fsspec describes them: at least name and type."""
        self._fs.invalidate_cache(folder)
        found: Sequence[Mapping[str, Any]] = self._call("ls", folder, detail=True, timeout_s=timeout_s)
        return found

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}{self._query}"

    def _call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a method of the filesystem, from any thread, within `timeout_s` where it is an async one."""
        if not _is_async(self._fs):
            return getattr(self._fs, method)(*args, **kwargs)
        return self._call_async(getattr(self._fs, f"_{method}")(*args, **kwargs), timeout_s)

    def _call_async(self, coroutine: Any, timeout_s: float) -> Any:
        """Run a coroutine on the filesystem's own loop, from any other thread; it is cancelled after `timeout_s`."""
        try:
            blocked = asyncio.get_running_loop() is self._fs.loop
        except RuntimeError:
            blocked = False
        if blocked:
            coroutine.close()
            raise StorageError(
                "called from fsspec's own event loop, which would wait for itself: call from another thread"
            )
        return answer_of(asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop), timeout_s)


class BucketDriver(FsspecDriver):
    """Objects of a bucket, by a filesystem that sends a create as a conditional request (gcsfs, adlfs).

    The store itself checks the condition of `create`. Credentials that have expired are looked for anew.
    """

    exclusive = True
    lists_at_once = True  # S3, GCS and Azure all say so

    def __init__(self, fs: Any, path: str, place: Location) -> None:
        super().__init__(fs, path, place)
        self._renewal = Renewal()

    @staticmethod
    def defaults(options: Mapping[str, Any], place: Location) -> dict[str, Any]:
        return {"use_listings_cache": False, "skip_instance_cache": True, **options}

    def renew(self) -> bool:
        if given_for_good(self._fs.storage_options):
            return False
        self._renewal.once(self._reopen)
        return True

    def _reopen(self) -> None:
        """Go on through a new filesystem of the same options, which has yet to look for its credentials.

        The old one, and its connections, go with the last request that is under way.
        """
        old = self._fs
        self._fs = type(old)(*old.storage_args, **{**old.storage_options, "skip_instance_cache": True})

    def _head_explained(self, key: str, timeout_s: float, head: Callable[[], ObjectInfo]) -> ObjectInfo:
        """The answer of `head`. If it is refused without a reason, a GET shows if the credentials expired."""
        try:
            return head()
        except Exception as error:
            if unexplained(error):
                self._raise_expired(key, timeout_s)
            raise

    def _raise_expired(self, key: str, timeout_s: float) -> None:
        try:
            self.get(key, 0, 1, timeout_s)
        except Exception as why:
            if judge(why).kind is Cause.EXPIRED:
                raise

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._call("pipe_file", self._path(key), join(parts), mode="create", timeout_s=timeout_s)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self.create(key, parts, timeout_s)


class StreamingDriver(BucketDriver):
    """Objects of a bucket, whose bytes are handed over as they come."""

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        gate = Gate()
        try:
            self._pour(key, start, stop, lambda piece: gate.through(partial(take, piece)), timeout_s)
        finally:
            gate.close()

    @abstractmethod
    def _pour(self, key: str, start: int, stop: int, take: Callable[[Buffer], bool], timeout_s: float) -> None:
        """Call `take` with the pieces, until it wants no more."""


class HttpDriver(FsspecDriver):
    """Objects of a web server, whose paths are quoted."""

    def _path(self, key: str) -> str:
        return super()._path(quote(key))


class MemoryDriver(FsspecDriver):
    """Objects in memory. One process is all there is, so a lock makes `create` atomic."""

    remote = False
    exclusive = True

    def now(self, folder: str, timeout_s: float) -> datetime:
        """Look at the clock that fsspec does."""
        return datetime.now(UTC)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with _lock: self._look_and_put(key, parts, timeout_s)  # fmt: skip  # noqa: E701 (see IOStats.add)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self.create(key, parts, timeout_s)

    def _look_and_put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        try:
            self.head(key, timeout_s)
        except FileNotFoundError:
            self.put(key, parts, timeout_s)
        else:
            raise FileExistsError(key)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        """Looks by the name alone: fsspec looks whether any other one begins with it, through all that there are."""
        held = self._fs.store.get(self._fs._strip_protocol(self._path(key)))
        if held is None:
            raise FileNotFoundError(key)
        return ObjectInfo(int(held.size), "", held.modified)

    def delete(self, key: str, timeout_s: float) -> None:
        self._fs._rm(self._path(key))

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        """fsspec's own way looks through all objects for each folder."""
        stem = f"{self._root}/{prefix}/" if prefix else f"{self._root}/"
        held = [(path, file) for path, file in self._fs.store.copy().items() if path.startswith(stem)]
        found = [Listed(path[len(self._root) + 1 :], file.size, file.modified) for path, file in held]
        return in_pages(sorted(one for one in found if one.key > after))


class Renewal:
    """One renewal for all threads that are told at about the same time that their credentials have expired."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = -math.inf

    def once(self, renew: Callable[[], None]) -> None:
        """Call `renew`, unless another thread just has. If that fails, nothing changes."""
        with self._lock:
            if time.monotonic() - self._at < RENEW_LEAST_S:
                return
            with contextlib.suppress(Exception):  # the source may be away for a moment; the request tells if it stays
                renew()
            self._at = time.monotonic()


def given_for_good(options: Mapping[str, Any]) -> bool:
    """True if options of a filesystem hold the credentials themselves, or want none, so that nothing renews them."""
    inner = [value for name in ("client_kwargs", "config") if isinstance(value := options.get(name), Mapping)]
    pairs = [pair for one in (options, *inner) for pair in one.items()]
    return any(value and (name in _GIVEN or name.lower().endswith(_GIVEN_ENDINGS)) for name, value in pairs)


def answer_of(future: concurrent.futures.Future[T], timeout_s: float) -> T:
    """Wait for a result, and cancel what takes longer than `timeout_s`: TimeoutError."""
    try:
        failure = future.exception(timeout_s)
    except concurrent.futures.TimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:.1f} s") from None
    finally:
        future.cancel()
    if failure is not None and not failure.__suppress_context__:
        failure.__cause__ = failure.__context__  # raised here, it would have what the caller handles in its place
    return future.result()


def complete(data: Buffer, told: int) -> Buffer:
    """`data` if it has as many bytes as the store announced; ShortReadError if the answer ended before.

    The requested range does not decide: it may reach beyond the object's end.
    """
    if len(data) < told:
        raise ShortReadError(f"{len(data)} of the {told} bytes that the store said it sends came")
    return data


def join(parts: Sequence[Buffer]) -> bytes:
    """Give one buffer of a kind that HTTP clients take."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)


def in_pages(found: Sequence[Listed]) -> Iterator[Sequence[Listed]]:
    """Split what was found at once."""
    return (list(found[at : at + PAGE]) for at in range(0, len(found), PAGE))


def _found(key: str, entry: Mapping[str, Any]) -> Listed:
    modified = _modified(entry)
    if modified is None:
        raise NotImplementedError(f"this filesystem does not say when {key} was made")
    return Listed(key, int(entry["size"] or 0), modified)


def _modified(entry: Mapping[str, Any]) -> datetime | None:
    """The time when an object was made, in any form that a filesystem has for it."""
    said = next((entry[name] for name in _TIMES if entry.get(name)), None)
    if isinstance(said, int | float):
        return datetime.fromtimestamp(said, UTC)
    when = datetime.fromisoformat(said) if isinstance(said, str) else said
    if not isinstance(when, datetime):
        return None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)


def _is_async(fs: Any) -> bool:
    """True if coroutines work all the way down: a wrapper claims to be async whatever it wraps."""
    inner = getattr(fs, "fs", None)
    return bool(getattr(fs, "async_impl", False)) and (inner is None or _is_async(inner))


def _below(folder: str, entry: Mapping[str, Any]) -> str:
    """The entry's name relative to `folder`; empty for the folder's own marker object."""
    name = str(entry["name"])
    stem = f"{folder.strip('/')}/" if folder.strip("/") else ""
    bare = name.lstrip("/")
    if not bare.startswith(stem):
        return ""
    relative = bare[len(stem) :].rstrip("/")
    return f"{relative}/" if relative and entry["type"] == "directory" else relative


def _renew_loop() -> None:
    """fsspec before 2025.3.1 goes on waiting for its parent's event loop."""
    asyn: Any = sys.modules.get("fsspec.asyn")
    if asyn is not None and not hasattr(asyn, "reset_after_fork"):
        asyn.reset_lock()


in_child(_renew_loop)
