"""Does I/O: drivers over an fsspec filesystem object that somebody else has made. Imports no fsspec.

`write` and `create` are whole or absent as far as the store behind is; each call is one request and no retry.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from archive.base import NotExclusiveError, StorageError, in_child
from archive.store.drivers.failures import Kind, judge
from archive.store.drivers.local import LocalDriver, Part

_PAGE = 1000  # names per LIST answer of the object stores
_CONDITIONAL = ("s3fs", "gcsfs", "adlfs")  # pipe_file(mode="create") is a conditional request of the store
_memory_lock, _alone_lock = threading.Lock(), threading.Lock()
_obstore_pid: list[int] = []


def _renew_lock() -> None:
    global _memory_lock, _alone_lock
    _memory_lock, _alone_lock = threading.Lock(), threading.Lock()


in_child(_renew_lock)


class FsspecDriver:
    """Any fsspec filesystem; not exclusive, since base fsspec's create is exists-then-write."""

    exclusive = False
    remote = True

    def __init__(self, fs: Any, root: str, query: str = "") -> None:
        self._fs, self._root, self._query = fs, root.rstrip("/"), f"?{query}" if query else ""
        self._quoted = type(fs).__module__.endswith("implementations.http")

    def _path(self, key: str) -> str:
        return f"{self._root}/{quote(key) if self._quoted else key}{self._query}"

    def _call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """One method of the filesystem, from any thread, within `timeout_s` where it is an async one."""
        if not _is_async(self._fs):
            return getattr(self._fs, method)(*args, **kwargs)
        return _wait(self._fs.loop, getattr(self._fs, f"_{method}")(*args, **kwargs), timeout_s)

    def read(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        data = self._call("cat_file", self._path(key), start=start, end=stop, timeout_s=timeout_s)
        return data if isinstance(data, bytes) else bytes(data)

    def write(self, key: str, parts: Sequence[Part], timeout_s: float) -> None:
        self._call("pipe_file", self._path(key), join(parts), timeout_s=timeout_s)

    def create(self, key: str, parts: Sequence[Part], timeout_s: float) -> None:
        """Only for a single writer: looks first, then writes."""
        if self.exists(key, timeout_s):
            raise FileExistsError(key)
        self.write(key, parts, timeout_s)

    def _entries(self, folder: str, timeout_s: float) -> list[Mapping[str, Any]]:
        self._fs.invalidate_cache(folder)
        found: list[Mapping[str, Any]] = self._call("ls", folder, detail=True, timeout_s=timeout_s)
        return found

    def delete(self, key: str, timeout_s: float) -> None:
        self._call("rm_file", self._path(key), timeout_s=timeout_s)

    def stamp(self, key: str, timeout_s: float) -> tuple[int, str]:
        """Size of an object, and its ETag where the store has one."""
        info: Mapping[str, Any] = self._call("info", self._path(key), timeout_s=timeout_s)
        return int(info["size"]), str(info.get("ETag", ""))

    def exists(self, key: str, timeout_s: float) -> bool:
        try:
            return bool(self._call("info", self._path(key), timeout_s=timeout_s)["type"] == "file")
        except FileNotFoundError:
            return False

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        """Names directly below `prefix`, folders with a final slash, and the number of requests it took."""
        folder = f"{self._root}/{prefix}" if prefix else self._root
        try:
            entries = self._entries(folder, timeout_s)
        except (FileNotFoundError, NotADirectoryError):
            return [], 1
        names = (_below(folder, entry) for entry in entries)
        return [name for name in names if name], max(1, -(-len(entries) // _PAGE)) if self.remote else 1


class MemoryDriver(FsspecDriver):
    """fsspec's process-wide memory filesystem; a lock makes `create` exclusive."""

    exclusive = True
    remote = False

    def create(self, key: str, parts: Sequence[Part], timeout_s: float) -> None:
        with _memory_lock: super().create(key, parts, timeout_s)  # fmt: skip  # noqa: E701 (see _iostats)

    def delete(self, key: str, timeout_s: float) -> None:
        self._fs._rm(self._path(key))


class ConditionalDriver(FsspecDriver):
    """s3fs, gcsfs, adlfs: `pipe_file(mode="create")` sends a condition that the store itself checks."""

    exclusive = True

    def create(self, key: str, parts: Sequence[Part], timeout_s: float) -> None:
        self._call("pipe_file", self._path(key), join(parts), mode="create", timeout_s=timeout_s)

    @property
    def copies(self) -> bool:
        """Whether the store copies objects by itself: whole, or not at all."""
        return type(self._fs).__module__ == "s3fs.core"

    def copy(self, source: FsspecDriver, source_key: str, key: str, timeout_s: float) -> None:
        """An object of the same store under another name."""
        self._call("cp_file", source._path(source_key), self._path(key), timeout_s=timeout_s)

    def _entries(self, folder: str, timeout_s: float) -> list[Mapping[str, Any]]:
        if type(self._fs).__module__ != "s3fs.core":
            return super()._entries(folder, timeout_s)
        # s3fs's ls() lists the parent as well, page after page, when a folder is empty
        found: list[Mapping[str, Any]] = self._call("lsdir", folder, refresh=True, timeout_s=timeout_s)
        return found


class ObstoreDriver(FsspecDriver):
    """obstore's fsspec filesystem, whose own pipe_file ignores mode="create": its store is asked instead."""

    exclusive = True

    def _store(self, key: str) -> tuple[Any, str]:
        if _obstore_pid and _obstore_pid[0] != os.getpid():
            raise StorageError(
                "obstore cannot be used in a process that was forked after its first use (its threads are gone and it "
                "would wait for ever): start processes with 'spawn', or read through s3fs"
            )
        _obstore_pid[:] = [os.getpid()]
        bucket, path = self._fs._split_path(self._path(key))
        return self._fs._construct_store(bucket), path

    def _call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        self._store("")
        return super()._call(method, *args, timeout_s=timeout_s, **kwargs)

    def read(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        store, path = self._store(key)
        return bytes(_wait(self._fs.loop, _obstore_read(store, path, start, stop), timeout_s))

    def create(self, key: str, parts: Sequence[Part], timeout_s: float) -> None:
        store, path = self._store(key)
        # One PUT: a multipart upload would not be conditional
        _wait(self._fs.loop, _obstore_create(store, path, join(parts)), timeout_s)


async def _obstore_read(store: Any, path: str, start: int, stop: int | None) -> bytes:
    if stop is not None:
        return bytes(await store.get_range_async(path, start=start, end=stop))
    found = await store.get_async(path, options={"range": {"offset": start}} if start else None)
    return bytes(await found.bytes_async())


async def _obstore_create(store: Any, path: str, data: Part) -> None:
    await store.put_async(path, data, mode="create", use_multipart=False)


def _wait(loop: Any, coroutine: Any, timeout_s: float) -> Any:
    """The result of a coroutine that runs on the filesystem's own loop; cancelled after `timeout_s`."""
    try:
        blocked = asyncio.get_running_loop() is loop
    except RuntimeError:
        blocked = False
    if blocked:
        coroutine.close()
        raise StorageError("called from fsspec's own event loop, which would wait for itself: call from another thread")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done() and not future.cancelled():
            raise
        raise TimeoutError(f"no answer within {timeout_s:.1f} s") from None
    finally:
        future.cancel()


def _is_async(fs: Any) -> bool:
    """Whether coroutines work all the way down: a wrapper says that it is async whatever it wraps."""
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


def join(parts: Sequence[Part]) -> Part:
    """One buffer of a kind that HTTP clients take."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)


def create_alone(driver: LocalDriver | FsspecDriver, key: str, parts: Sequence[Part], timeout_s: float) -> None:
    """Look, then create, or only write where the store can't create: for a single process, whose threads take turns.

    Looked at first in any case, as there are stores that pass over a condition which they do not know.
    """
    with _alone_lock:
        if driver.exists(key, timeout_s):
            raise FileExistsError(key)
        if driver.exclusive:
            try:
                driver.create(key, parts, timeout_s)
                return
            except Exception as error:
                if not isinstance(error, NotExclusiveError) and judge(error).kind is not Kind.UNSUPPORTED:
                    raise
        driver.write(key, parts, timeout_s)


def driver_for(fs: Any, root: str, query: str) -> FsspecDriver:
    """The driver that knows this filesystem's way of creating; wrappers around one count as unknown."""
    modules = {cls.__module__.partition(".")[0] for cls in type(fs).__mro__}
    if "obstore" in modules:
        return ObstoreDriver(fs, root, query)
    if modules & set(_CONDITIONAL):
        return ConditionalDriver(fs, root, query)
    if type(fs).__module__ == "fsspec.implementations.memory":
        return MemoryDriver(fs, root, query)
    return FsspecDriver(fs, root, query)


def default_options(
    modules: frozenset[str], options: Mapping[str, Any], *, deadline_s: float, width: int
) -> dict[str, Any]:
    """`options` over defaults that switch off caches and the client's own retries."""
    if "s3fs" in modules:
        config = {
            "max_pool_connections": max(64, width),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "read_timeout": min(15.0, max(1.0, deadline_s / 4)),
            "connect_timeout": min(5.0, max(1.0, deadline_s / 4)),
            **_sending_once(),
            **options.get("config_kwargs", {}),
        }
        return {"use_listings_cache": False, "skip_instance_cache": True, **options, "config_kwargs": config}
    if "obstore" in modules:
        return {"skip_instance_cache": True, "retry_config": {"max_retries": 0}, **options}
    if modules & set(_CONDITIONAL):
        return {"use_listings_cache": False, "skip_instance_cache": True, **options}
    return dict(options)


@functools.cache
def _sending_once() -> dict[str, Any]:
    """botocore settings that stop aiohttp from sending a request again, unasked, when its connection breaks.

    A create whose answer is lost would collide with itself: the store says "exists", and the caller concludes that
    somebody else was first.
    """
    from aiobotocore.config import AioConfig
    from aiobotocore.httpsession import AIOHTTPSession

    get_session = getattr(AIOHTTPSession, "_get_session", None)
    if get_session is None or "http_session_cls" not in inspect.signature(AioConfig.__init__).parameters:
        return {}

    async def get_session_that_sends_once(self: Any, *args: Any) -> Any:
        session = await get_session(self, *args)
        session._retry_connection = False
        return session

    return {"http_session_cls": type("OnceSession", (AIOHTTPSession,), {"_get_session": get_session_that_sends_once})}
