"""Does I/O: S3 through s3fs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from archive.store.drivers.driver import LARGEST_PUT_BYTES, PAGE, Buffer, Listed, Location, ObjectInfo
from archive.store.drivers.failures import BrokenAnswerError
from archive.store.drivers.plain import BucketDriver, StreamingDriver, complete, join

_SECOND = timedelta(microseconds=999_999)  # what a Date leaves out, at most
_PART_BYTES = 64 * 1024**2  # of an object that is too large for one PUT; 10,000 of them are allowed
_PARTS_AT_ONCE = 8
_PIECE_BYTES = 1024 * 1024  # at most: what the connection has, which is less, is then not cut up once more


class S3Driver(StreamingDriver):
    """Objects of an S3 bucket. s3fs and botocore retry nothing: that is ours to do."""

    transport = "s3fs"

    def __init__(self, fs: Any, path: str, place: Location) -> None:
        super().__init__(fs, path, place)
        fs.retries = 1

    @staticmethod
    def defaults(options: Mapping[str, Any], place: Location) -> dict[str, Any]:
        read_s, connect_s = place.timeouts_s
        config = {
            "max_pool_connections": max(64, place.width),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "read_timeout": read_s,
            "connect_timeout": connect_s,
            **_sending_once(),
            **options.get("config_kwargs", {}),
        }
        return {**BucketDriver.defaults(options, place), "config_kwargs": config}

    def _reopen(self) -> None:
        super()._reopen()
        self._fs.retries = 1

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        return self._head_explained(key, timeout_s, lambda: super(S3Driver, self).head(key, timeout_s))

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        return self._call_async(self._get(key, start, stop), timeout_s)  # type: ignore[no-any-return]

    async def _get(self, key: str, start: int, stop: int | None) -> Buffer:
        answer = await self._answer(key, start, stop)
        body = answer["Body"]
        try:
            data = await body.read()
        finally:
            body.close()
        return complete(data, _told(answer))

    async def _answer(self, key: str, start: int, stop: int | None) -> Mapping[str, Any]:
        """The answer to a GET of bytes [start, stop), of which only the head has come."""
        bucket, name, version = self._fs.split_path(self._path(key))
        of = {"VersionId": version} if version else {}
        last = "" if stop is None else stop - 1
        answer: Mapping[str, Any] = await self._fs._call_s3(
            "get_object", Bucket=bucket, Key=name, Range=f"bytes={start}-{last}", **of
        )
        return answer

    def _pour(self, key: str, start: int, stop: int, take: Callable[[Buffer], bool], timeout_s: float) -> None:
        self._call_async(self._stream(key, start, stop, take), timeout_s)

    async def _stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], bool]) -> None:
        """Read like s3fs, but without joining the pieces, which would keep its only thread busy."""
        body = (await self._answer(key, start, stop))["Body"]
        try:
            while (piece := await body.read(_PIECE_BYTES)) and take(piece):
                pass
        finally:
            body.close()

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """One PUT, of which s3fs would make an upload in parts from 100 MB on."""
        how = {"mode": "create", "chunksize": LARGEST_PUT_BYTES}
        self._call("pipe_file", self._path(key), join(parts), **how, timeout_s=timeout_s)

    def create_in_parts(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._call_async(self._create_in_parts(key, join(parts)), timeout_s)

    async def _create_in_parts(self, key: str, data: bytes) -> None:
        """Upload like s3fs, but keep the store's answer to the last request, whatever it says to the abort."""
        call, (bucket, stem) = self._fs._call_s3, self._place()
        place = {"Bucket": bucket, "Key": f"{stem}{key}"}
        upload = place | {"UploadId": (await call("create_multipart_upload", **place))["UploadId"]}
        starts, made = range(0, max(1, len(data)), _PART_BYTES), list[Mapping[str, Any]]()
        try:
            for first in range(0, len(starts), _PARTS_AT_ONCE):
                some = enumerate(starts[first : first + _PARTS_AT_ONCE], first + 1)
                bodies = ((number, data[at : at + _PART_BYTES]) for number, at in some)
                sent = (call("upload_part", **upload, PartNumber=number, Body=body) for number, body in bodies)
                made += await asyncio.gather(*sent)
            tags = [{"PartNumber": number, "ETag": one["ETag"]} for number, one in enumerate(made, 1)]
            await call("complete_multipart_upload", **upload, MultipartUpload={"Parts": tags}, IfNoneMatch="*")
        except BaseException:
            with contextlib.suppress(Exception):  # the bucket's rules remove what stays
                await call("abort_multipart_upload", **upload)
            raise

    def locate(self, key: str) -> str:
        return self._path(key)

    def copy(self, source: str, key: str, timeout_s: float) -> None:
        self._call("cp_file", source, self._path(key), timeout_s=timeout_s)

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        """Send the request itself, as s3fs's own verb ignores errors."""
        bucket, stem = self._place()
        asked = {"Objects": [{"Key": f"{stem}{key}"} for key in keys], "Quiet": True}
        answer = self._call("call_s3", "delete_objects", Bucket=bucket, Delete=asked, timeout_s=timeout_s)
        return {one["Key"].removeprefix(stem): _failure(one) for one in answer.get("Errors", ())}

    def versioned(self, timeout_s: float) -> bool:
        bucket, _ = self._place()
        answer = self._call("call_s3", "get_bucket_versioning", Bucket=bucket, timeout_s=timeout_s)
        return answer.get("Status") in ("Enabled", "Suspended")  # suspended: older versions stay, all the same

    def now(self, folder: str, timeout_s: float) -> datetime | None:
        bucket, stem = self._place()
        asked = {"Bucket": bucket, "Prefix": f"{stem}{folder}/", "MaxKeys": 1}
        answer = self._call("call_s3", "list_objects_v2", **asked, timeout_s=timeout_s)
        said = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            return parsedate_to_datetime(said).astimezone(UTC) + _SECOND
        except ValueError:
            return None

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        _, stem = self._place()
        begin = {"StartAfter": f"{stem}{after}"} if after else {}
        for answer in self._pages(f"{prefix}/" if prefix else "", begin, timeout_s):
            if page := [_found(stem, one) for one in answer.get("Contents", ()) if not one["Key"].endswith("/")]:
                yield page

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        _, stem = self._place()
        folder = f"{prefix}/" if prefix else ""
        pages = list(self._pages(folder, {"Delimiter": "/"}, timeout_s))
        keys = [one["Key"] for answer in pages for one in answer.get("Contents", ())]
        keys += [one["Prefix"] for answer in pages for one in answer.get("CommonPrefixes", ())]
        names = (key.removeprefix(f"{stem}{folder}") for key in keys)
        return [name for name in names if name], len(pages)

    def _pages(self, prefix: str, begin: Mapping[str, str], timeout_s: float) -> Iterator[Mapping[str, Any]]:
        """The answers to a LIST of keys that begin with `prefix`. BrokenAnswerError for one that does not say if it is
        complete: botocore takes an empty answer for an empty folder."""
        bucket, stem = self._place()
        asked = {"Bucket": bucket, "Prefix": f"{stem}{prefix}", "MaxKeys": PAGE, **begin}
        place: Mapping[str, str] | None = {}
        while place is not None:
            answer = self._call("call_s3", "list_objects_v2", **asked, **place, timeout_s=timeout_s)
            if "IsTruncated" not in answer:
                raise BrokenAnswerError(f"LIST of {bucket}/{stem}{prefix}: the answer does not say whether it is all")
            yield answer
            place = {"ContinuationToken": answer["NextContinuationToken"]} if answer["IsTruncated"] else None

    def _place(self) -> tuple[str, str]:
        """The bucket, and the prefix of keys in it."""
        bucket, _, path = self._root.partition("/")
        return bucket, f"{path}/".lstrip("/")


def _told(answer: Mapping[str, Any]) -> int:
    """The number of bytes that the store announced for its answer: "bytes 0-9/100" is ten."""
    said = re.fullmatch(r"bytes (\d+)-(\d+)/.*", answer.get("ContentRange") or "")
    return int(said[2]) - int(said[1]) + 1 if said else 0


def _found(stem: str, entry: Mapping[str, Any]) -> Listed:
    return Listed(entry["Key"].removeprefix(stem), int(entry["Size"]), entry["LastModified"].astimezone(UTC))


def _failure(error: Mapping[str, Any]) -> Exception:
    """One object's error among the answers to a request for many, as botocore gives that of a request."""
    from botocore.exceptions import ClientError

    said = {"Error": {"Code": error.get("Code", ""), "Message": error.get("Message", "")}}
    failure: Exception = ClientError(said, "DeleteObjects")
    return failure


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
