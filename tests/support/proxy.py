"""Does I/O: a reverse proxy in front of an S3 server that breaks requests on order and remembers all of them.

The Host header passes unchanged, so signatures still verify at the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import aiohttp
from aiohttp import web
from yarl import URL

from archive.testing.s3roots import KEY, REGION, SECRET
from tests.support import servers
from tests.support.iam import Policy, permits

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect", "proxy-authorization"}
_NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>injected</Message></Error>'


@dataclass
class Fault:
    """What to do to the next `times` requests that match (-1: to all), after letting `skip` of them pass.

    They match by `method`, `path` (a regular expression), `signed_by` (an access key), a part of the client's name for
    itself (`agent`), or whether they ask for a range or on condition that nothing is there; without any of these all
    do.

    status        answer with `status` and `code` and do not ask the server (403, ExpiredToken: renew and ask again)
    reset         cut the connection before the server sees the request
    reset_after   let the server do it, then cut the connection instead of answering
    truncate      announce the whole body, send `keep` bytes of it, close
    shorten       a well-formed answer with only `keep` bytes
    corrupt       flip one bit in the middle of the body
    stall         send half of the body and the rest after `seconds`
    delay         pass it on after `seconds`
    cut_upload    have the server get half of what is sent, then cut both connections
    corrupt_upload  flip one bit in the middle of what is sent
    ignore_range  answer with the whole object and 200
    ignore_condition  pass it on without its If-None-Match
    """

    action: str
    method: str = ""
    path: str = ""
    signed_by: str = ""
    agent: str = ""
    ranged: bool | None = None
    conditional: bool | None = None
    times: int = 1
    skip: int = 0
    status: int = 500
    code: str = "InternalError"
    seconds: float = 1.0
    keep: int = 0

    def takes(self, request: web.Request) -> bool:
        """Whether this request is to be broken; counts it."""
        matches = (
            self.times != 0
            and self.method in ("", request.method)
            and re.search(self.path, request.raw_path) is not None
            and self.signed_by in ("", _signer(request))
            and self.agent in request.headers.get("User-Agent", "")
            and self.ranged in (None, "Range" in request.headers)
            and self.conditional in (None, "If-None-Match" in request.headers)
        )
        if matches and self.skip > 0:
            self.skip -= 1
            return False
        if matches and self.times > 0:
            self.times -= 1
        return matches


@dataclass
class Seen:
    """One request that came, who signed it (an access key), the body bytes in and out, when it came (by
    `time.monotonic`), the status that the server answered, 0 if it was not asked, whether it was to happen only if
    nothing is there, what it copies, and the body of one that deletes many."""

    method: str
    path: str
    range: str | None
    action: str
    signed_by: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    at_s: float = field(default_factory=time.monotonic)
    conditional: bool = False
    copies: str = ""
    deletes: bytes = b""

    def same_as(self, other: Seen) -> bool:
        """Whether it asks for the same: one may be a further try of the other."""
        return (self.method, self.path, self.range) == (other.method, other.path, other.range)


@dataclass
class FaultProxy:
    """`with FaultProxy(endpoint) as proxy:` serves at `proxy.endpoint` from a thread of its own."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    log: list[Seen] = field(default_factory=list)
    endpoint: str = ""
    policies: Sequence[Policy] = ()  # what is asked for, and these do not allow, is refused, once there are any
    refused: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        begun: Future[None] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(begun),), name="fault-proxy", daemon=True)
        self._thread.start()
        begun.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def add(self, action: str, **settings: Any) -> Fault:
        """From now on, break requests like this."""
        fault = Fault(action, **settings)
        self.faults.append(fault)
        return fault

    def reset(self) -> None:
        """Forget all faults and all requests."""
        self.faults.clear()
        self.log.clear()

    def verbs(self) -> list[str]:
        """The methods of the requests seen so far."""
        return [seen.method for seen in self.log]

    async def _serve(self, begun: Future[None]) -> None:
        """Serve until it is over. The loop of this coroutine then cancels requests whose clients have left, and waits
        for them: a connection that one of these was making would stay open."""
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=256)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner, listening = web.AppRunner(app, access_log=None, shutdown_timeout=0.1), servers.listening()
        async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout, connector=connector) as self._client:
            try:
                await runner.setup()
                await web.SockSite(runner, listening).start()
            except BaseException as e:
                begun.set_exception(e)
                raise
            self.endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
            begun.set_result(None)
            await self._over.wait()
            await servers.accepted(listening)
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = next((one for one in self.faults if one.takes(request)), Fault("pass"))
        headers = request.headers
        seen = Seen(request.method, request.raw_path, headers.get("Range"), fault.action, _signer(request))
        seen.conditional, seen.copies = "If-None-Match" in headers, headers.get("x-amz-copy-source", "")
        self.log.append(seen)
        body = await request.read()
        seen.bytes_in = len(body)
        seen.deletes = body if "delete" in request.query else b""
        if self.policies and not permits(self.policies, request.method, request.raw_path, headers, body):
            self.refused.append(f"{request.method} {request.raw_path}")
            return web.Response(status=403, text=_ERROR.format("AccessDenied"), content_type="application/xml")
        if fault.action == "status":
            return web.Response(status=fault.status, text=_ERROR.format(fault.code), content_type="application/xml")
        if fault.action == "reset":
            _cut(request)
        if fault.action == "delay":
            await asyncio.sleep(fault.seconds)
        try:
            return await self._pass_on(request, body, fault, seen)
        except (OSError, aiohttp.ClientError):
            if fault.action != "cut_upload":
                raise
            _cut(request)

    async def _pass_on(self, request: web.Request, body: bytes, fault: Fault, seen: Seen) -> web.StreamResponse:
        whole = fault.action == "ignore_range"
        headers = self._signed(request) if whole else _end_to_end(request.headers.items())
        if fault.action == "ignore_condition":
            headers = [(name, value) for name, value in headers if name.lower() != "if-none-match"]
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._client.request(
            request.method,
            url,
            headers=headers,
            data=_sent_on(body, fault.action),
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
        ) as answer:
            data = await answer.read()
            seen.status = answer.status
            seen.bytes_out = 0 if request.method == "HEAD" else len(data)
            if fault.action == "reset_after":
                _cut(request)
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            response.headers.extend(_end_to_end(answer.headers.items()))
            return await _send(request, response, data, fault)

    def _signed(self, request: web.Request) -> list[tuple[str, str]]:
        """Range is a signed header: without it the request needs a new signature."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        fresh = AWSRequest(request.method, self.upstream + request.raw_path, headers={"Host": request.host})
        S3SigV4Auth(Credentials(KEY, SECRET), "s3", REGION).add_auth(fresh)
        return list(fresh.headers.items())


async def _send(request: web.Request, response: web.StreamResponse, data: bytes, fault: Fault) -> web.StreamResponse:
    if request.method == "HEAD" or response.status in (204, 304):
        await response.prepare(request)
        return response
    if fault.action == "shorten":
        data = data[: fault.keep]
    if fault.action == "corrupt" and data:
        data = _flipped(data)
    response.headers["Content-Length"] = str(len(data))
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):  # the client gave up meanwhile
        await _send_body(request, response, data, fault)
    return response


async def _send_body(request: web.Request, response: web.StreamResponse, data: bytes, fault: Fault) -> None:
    if fault.action == "truncate":
        await response.write(data[: fault.keep])
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.close()
        raise asyncio.CancelledError
    if fault.action == "stall":
        half = len(data) // 2
        await response.write(data[:half])
        await asyncio.sleep(fault.seconds)
        data = data[half:]
    await response.write(data)
    await response.write_eof()


def _sent_on(body: bytes, action: str) -> io.BytesIO | AsyncIterator[bytes] | None:
    """What the server is sent of the body of a request."""
    if action == "cut_upload" and body:
        return _half(body)
    return io.BytesIO(_flipped(body) if action == "corrupt_upload" else body) if body else None


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    await asyncio.sleep(0.02)  # it is on its way
    raise ConnectionAbortedError("cut")


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _signer(request: web.Request) -> str:
    """The access key of a request, or nothing."""
    found = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
    return found[1] if found else ""


def _end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


def _cut(request: web.Request) -> NoReturn:
    """Closes so that the client sees a reset, not an end."""
    transport = request.transport
    if transport is not None:
        plain = transport.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    raise asyncio.CancelledError
