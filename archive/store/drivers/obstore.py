"""Does I/O: the stores of obstore (S3, GCS, Azure), where it is registered with fsspec.

Its blocking calls are used, in threads of our own, never its coroutines: those are answered by a thread of Rust's that
calls into Python. When the program ends just then, Python ends that thread, which Rust takes for a fatal error, and the
process aborts (SIGABRT). The threads here are waited for at exit, and no others touch Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from archive.base import StorageError, thread_pool
from archive.store.drivers.driver import LARGEST_PUT_BYTES, PAGE, Buffer, Listed, Location, ObjectInfo
from archive.store.drivers.plain import StreamingDriver, answer_of, complete, join

T = TypeVar("T")

_MAX_TIMEOUT_S = 30.0  # obstore's own default
_PIECE_BYTES = 64 * 1024  # are handed over as they come; larger ones would be new memory each time
_used_by: list[int] = []  # the process whose threads obstore has


class ObstoreDriver(StreamingDriver):
    """Objects of a bucket. Not for forked children; the store itself checks the condition of `create`."""

    transport = "obstore"

    def __init__(self, fs: Any, path: str, place: Location) -> None:
        super().__init__(fs, path, place)
        self._pool = thread_pool(place.width, "archive-storage-obstore")

    @staticmethod
    def defaults(options: Mapping[str, Any], place: Location) -> dict[str, Any]:
        timeout = f"{min(_MAX_TIMEOUT_S, place.deadline_s) * 1000:.0f}ms"
        client = {"timeout": timeout, **(options.get("client_options") or {})}
        ours = {"skip_instance_cache": True, "retry_config": {"max_retries": 0}}
        return {**ours, **options, "client_options": client}

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        span = {"offset": start} if stop is None else (start, stop)
        whole = start == 0 and stop is None

        def read(store: Any, path: str) -> Buffer:
            answer = _opened(store, path, span, whole)
            first, after = answer.range
            return complete(memoryview(answer.bytes()), after - first)

        return self._ask(self._path(key), read, timeout_s)

    def _pour(self, key: str, start: int, stop: int, take: Callable[[Buffer], bool], timeout_s: float) -> None:
        def read(store: Any, path: str) -> None:
            for piece in store.get(path, options={"range": (start, stop)}).stream(min_chunk_size=_PIECE_BYTES):
                if not take(memoryview(piece)):
                    return

        self._ask(self._path(key), read, timeout_s)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        data = join(parts)
        in_parts = len(data) > LARGEST_PUT_BYTES
        self._ask(self._path(key), lambda store, path: store.put(path, data, use_multipart=in_parts), timeout_s)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        data = join(parts)

        def create(store: Any, path: str) -> None:  # one PUT: a multipart upload would not be conditional
            store.put(path, data, mode="create", use_multipart=False)

        self._ask(self._path(key), create, timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        self._ask(self._path(key), lambda store, path: store.delete(path), timeout_s)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        return self._head_explained(key, timeout_s, lambda: self._head(key, timeout_s))

    def _head(self, key: str, timeout_s: float) -> ObjectInfo:
        found = self._ask(self._path(key), lambda store, path: store.head(path), timeout_s)
        return ObjectInfo(int(found["size"]), str(found["e_tag"] or ""), found["last_modified"])

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        paths = [self._fs._split_path(self._path(key))[1] for key in keys]
        self._ask(self._root, lambda store, _: store.delete(paths), timeout_s)
        return {}

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        stem = f"{self._fs._split_path(self._root)[1]}/".lstrip("/")

        def begin(store: Any, path: str) -> Any:
            return store.list(path or None, offset=f"{stem}{after}" if after else None, chunk_size=PAGE)

        pages = self._ask(f"{self._root}/{prefix}".rstrip("/"), begin, timeout_s)
        while page := self._ask(self._root, lambda store, path: next(pages, None), timeout_s):
            yield [Listed(one["path"][len(stem) :], int(one["size"]), one["last_modified"]) for one in page]

    def _entries(self, folder: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        found = self._ask(folder, lambda store, path: store.list_with_delimiter(path), timeout_s)
        bucket, _ = self._fs._split_path(folder)
        files = [{"name": f"{bucket}/{one['path']}", "type": "file"} for one in found["objects"]]
        folders = [{"name": f"{bucket}/{path}", "type": "directory"} for path in found["common_prefixes"]]
        return files + folders

    def _ask(self, full_path: str, call: Callable[[Any, str], T], timeout_s: float) -> T:
        """Run a blocking call of obstore in a thread, so that Ctrl-C is heard and the wait is bounded."""
        if _used_by and _used_by[0] != os.getpid():
            raise StorageError(
                "obstore cannot be used in a process that was forked after its first use (its threads are gone and it "
                "would wait for ever): start processes with 'spawn', or read through s3fs"
            )
        _used_by[:] = [os.getpid()]
        bucket, path = self._fs._split_path(full_path)
        return answer_of(self._pool.submit(call, self._fs._construct_store(bucket), path), timeout_s)


def _opened(store: Any, path: str, span: Any, whole: bool) -> Any:
    """The answer to a GET of a range, of which only the head has come. It says how many bytes there are, so that one
    that ends too early is known; where the server ignores ranges, a whole object comes without it."""
    try:
        return store.get(path, options={"range": span})
    except Exception as error:
        if not (whole and "non-partial response" in str(error)):
            raise
    return store.get(path)
