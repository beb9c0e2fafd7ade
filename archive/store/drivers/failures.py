"""Pure, no I/O: the meaning of a storage client's exceptions."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from archive.base import ArchiveError, ShortReadError


class BrokenAnswerError(Exception):
    """The answer does not fit the request, or is incomplete."""


class Cause(StrEnum):
    """The cause of a failed request, as far as the caller needs it."""

    MISSING = "missing"
    DENIED = "denied"
    EXPIRED = "expired"  # the credentials are no longer valid, until their source renews them
    FULL = "full"
    EXISTS = "exists"
    RANGE = "range"
    SHORT = "short"
    BROKEN = "broken"  # the client saw that an answer is damaged or no answer
    UNSUPPORTED = "unsupported"  # the store does not know such a request
    TRANSIENT = "transient"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. `landed`: a write may have been made all the same."""

    kind: Cause
    landed: bool = False


_CODES = {
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket", "NotFound", "NoSuchUpload"), Cause.MISSING),
    **dict.fromkeys(
        ("PreconditionFailed", "BlobAlreadyExists", "FileAlreadyExists", "ObjectAlreadyExists"), Cause.EXISTS
    ),
    **dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), Cause.DENIED),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), Cause.EXPIRED),
    **dict.fromkeys(("InvalidRange",), Cause.RANGE),
    **dict.fromkeys(("NotImplemented",), Cause.UNSUPPORTED),
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"), Cause.FULL),
}
_NOT_DONE = frozenset(
    ("SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
     "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict",
     "OperationAborted")
)  # fmt: skip
_STATUSES = {404: Cause.MISSING, 410: Cause.MISSING, 412: Cause.EXISTS, 401: Cause.DENIED, 403: Cause.DENIED,
             416: Cause.RANGE, 507: Cause.FULL, 501: Cause.UNSUPPORTED, 505: Cause.OTHER}  # fmt: skip
_STATUS_NOT_DONE = frozenset((408, 409, 425, 429))
_NAMES = {  # the first of these that is in the chain of an error
    **dict.fromkeys(("CredentialRetrievalError", "MetadataRetrievalError"), Cause.EXPIRED),  # their source fails now
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "UnauthenticatedError"), Cause.DENIED),
    **dict.fromkeys(("PermissionDeniedError",), Cause.DENIED),
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), Cause.EXISTS),
    **dict.fromkeys(("NotSupportedError",), Cause.UNSUPPORTED),
    **dict.fromkeys(("FlexibleChecksumError", "BrokenAnswerError"), Cause.BROKEN),
}
_TRANSPORT = frozenset(
    ("HTTPClientError", "ResponseParserError", "IncompleteReadError", "ResponseStreamingError", "ClientPayloadError",
     "ClientConnectionError", "HttpProcessingError", "ServiceRequestError", "ServiceResponseError", "HttpRequestError")
)  # fmt: skip
_NEVER_SENT = frozenset(("ClientConnectorError", "ConnectTimeoutError", "ConnectionRefusedError", "gaierror"))
_ERRNOS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Cause.FULL),
    **dict.fromkeys((errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ENETUNREACH, errno.EHOSTUNREACH), Cause.TRANSIENT),
    errno.EROFS: Cause.DENIED,
    errno.ENOSYS: Cause.UNSUPPORTED,
}
_TYPES: tuple[tuple[type[Exception], Cause], ...] = (
    (FileExistsError, Cause.EXISTS),
    (FileNotFoundError, Cause.MISSING),
    (NotADirectoryError, Cause.MISSING),
    (IsADirectoryError, Cause.MISSING),
    (PermissionError, Cause.DENIED),
    (TimeoutError, Cause.TRANSIENT),
    (ConnectionError, Cause.TRANSIENT),
    (NotImplementedError, Cause.UNSUPPORTED),
)
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_OBSTORE_TRANSPORT = re.compile(r"error sending|decoding|timed out|timeout|connect|HTTP error|body", re.IGNORECASE)
_ELSEWHERE = re.compile(r"redirect without LOCATION|status code: 30[17]|PermanentRedirect|AuthorizationHeaderMalformed")
_OBSTORE_NEVER_SENT = re.compile(r"tcp connect error|connection refused|dns error", re.IGNORECASE)


def judge(error: Exception) -> Failure:
    """The meaning of `error`. The client libraries are recognised by shape, so none of them is imported."""
    meant = getattr(error, "meant", None)
    if isinstance(meant, Failure):
        return meant
    if isinstance(error, ShortReadError):
        return Failure(Cause.SHORT)
    if isinstance(error, ArchiveError):
        return Failure(Cause.OTHER)
    chain = list(chain_of(error))
    for one in chain:
        code, status = _answer(one)
        if code or status:
            return _of_answer(code, status)
    return _of_types(error, chain)


def answered(error: BaseException) -> str:
    """The status and the code of the store's answer that an error is of; empty if it is of none."""
    found = (_answer(one) for one in chain_of(error))
    code, status = next((one for one in found if any(one)), ("", 0))
    return f"{status or ''} {code}".strip()


def in_place_of(error: Exception, shown: Exception) -> Exception:
    """`shown`, which has less text than `error`, with the meaning of that: obstore's errors have it in words."""
    shown.__dict__["meant"] = judge(error)
    return shown


def unreached(error: Exception) -> bool:
    """True if a request was never sent, because no server listens at that address or it has no such name."""
    chain = list(chain_of(error))
    names = {cls.__name__ for one in chain for cls in type(one).__mro__}
    return bool(names & _NEVER_SENT) or any(
        type(one).__module__.startswith("obstore") and _OBSTORE_NEVER_SENT.search(str(one)) for one in chain
    )


def unexplained(error: Exception) -> bool:
    """True if a request was refused without a word, as a HEAD is, whose answers have no body."""
    for one in chain_of(error):
        code, status = _answer(one)
        if code or status:
            return (not code or code.isdigit()) and (status or int(code)) in (400, 401, 403)
    return False


def wrong_region(error: Exception) -> bool:
    """True if obstore was told that the bucket is in another region: by a redirect or by the signature."""
    return type(error).__module__.startswith("obstore") and bool(_ELSEWHERE.search(str(error)))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _answer(error: BaseException) -> tuple[str, int]:
    """Error code and HTTP status, as botocore, obstore, aiohttp, gcsfs and azure carry them."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    if type(error).__module__.startswith("obstore"):
        match = _OBSTORE_STATUS.search(str(error))
        code_match = re.search(r"<Code>(\w+)</Code>", str(error))
        return (code_match[1] if code_match else "", int(match[1])) if match else ("", 0)
    if type(error).__module__ == "aiohttp.http_exceptions":  # a broken answer; its code is not the server's
        return "", 0
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 400 <= value < 600:
            return "", value
    return "", 0


def _of_answer(code: str, status: int) -> Failure:
    if code.isdigit() and not status:
        status = int(code)
    if code in _CODES:
        return Failure(_CODES[code])
    if code in _NOT_DONE or status in _STATUS_NOT_DONE:
        return Failure(Cause.TRANSIENT)
    if status in _STATUSES:
        return Failure(_STATUSES[status])
    return Failure(Cause.TRANSIENT, landed=True) if status >= 500 or code == "InternalError" else Failure(Cause.OTHER)


def _of_types(error: Exception, chain: list[BaseException]) -> Failure:
    names = {cls.__name__ for one in chain for cls in type(one).__mro__}
    landed = not names & _NEVER_SENT
    for cls, kind in _TYPES:
        if isinstance(error, cls):
            return Failure(kind, kind is Cause.TRANSIENT and landed)
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        kind = _ERRNOS[error.errno]
        return Failure(kind, kind is Cause.TRANSIENT and landed)
    for name, kind in _NAMES.items():
        if name in names:
            return Failure(kind)
    if type(error).__module__.startswith("obstore"):
        return _of_obstore(str(error))
    broken = bool(names & _TRANSPORT) or any(isinstance(one, ConnectionError | TimeoutError) for one in chain)
    return Failure(Cause.TRANSIENT, landed) if broken else Failure(Cause.OTHER)


def _of_obstore(text: str) -> Failure:
    if "invalid list response" in text:
        return Failure(Cause.BROKEN)
    if not _OBSTORE_TRANSPORT.search(text):
        return Failure(Cause.OTHER)
    return Failure(Cause.TRANSIENT, landed=not _OBSTORE_NEVER_SENT.search(text))
