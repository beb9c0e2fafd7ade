"""Pure, no I/O: what an exception of a storage client means."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from archive.base import ArchiveError, ShortReadError


class BrokenAnswerError(Exception):
    """The answer is none to what was asked, or not all of it."""


class Kind(StrEnum):
    """The meaning of a failed request to the caller."""

    MISSING = "missing"
    DENIED = "denied"
    EXPIRED = "expired"  # who asks is known no longer, until the source of the credentials renews them
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

    kind: Kind
    landed: bool = False


_CODES = {
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket", "NotFound", "NoSuchUpload"), Kind.MISSING),
    **dict.fromkeys(("PreconditionFailed",), Kind.EXISTS),
    **dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), Kind.DENIED),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), Kind.EXPIRED),
    **dict.fromkeys(("InvalidRange",), Kind.RANGE),
    **dict.fromkeys(("NotImplemented",), Kind.UNSUPPORTED),
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"), Kind.FULL),
}
_NOT_DONE = frozenset(
    ("SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
     "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict",
     "OperationAborted")
)  # fmt: skip
_STATUSES = {404: Kind.MISSING, 410: Kind.MISSING, 412: Kind.EXISTS, 401: Kind.DENIED, 403: Kind.DENIED,
             416: Kind.RANGE, 507: Kind.FULL, 501: Kind.UNSUPPORTED, 505: Kind.OTHER}  # fmt: skip
_STATUS_NOT_DONE = frozenset((408, 409, 425, 429))
_NAMES = {  # the first of these that is in the chain of an error
    **dict.fromkeys(("CredentialRetrievalError", "MetadataRetrievalError"), Kind.EXPIRED),  # nobody gives any now
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "UnauthenticatedError"), Kind.DENIED),
    **dict.fromkeys(("PermissionDeniedError",), Kind.DENIED),
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), Kind.EXISTS),
    **dict.fromkeys(("NotSupportedError",), Kind.UNSUPPORTED),
    **dict.fromkeys(("FlexibleChecksumError", "BrokenAnswerError"), Kind.BROKEN),
}
_TRANSPORT = frozenset(
    ("HTTPClientError", "ResponseParserError", "IncompleteReadError", "ResponseStreamingError", "ClientPayloadError",
     "ClientConnectionError", "HttpProcessingError", "ServiceRequestError", "ServiceResponseError", "HttpRequestError")
)  # fmt: skip
_NEVER_SENT = frozenset(("ClientConnectorError", "ConnectTimeoutError", "ConnectionRefusedError", "gaierror"))
_ERRNOS = {errno.ENOSPC: Kind.FULL, errno.EDQUOT: Kind.FULL, errno.EROFS: Kind.DENIED, errno.ENOSYS: Kind.UNSUPPORTED,
           errno.ESTALE: Kind.TRANSIENT,
           errno.EAGAIN: Kind.TRANSIENT, errno.EBUSY: Kind.TRANSIENT, errno.ENETUNREACH: Kind.TRANSIENT,
           errno.EHOSTUNREACH: Kind.TRANSIENT}  # fmt: skip
_TYPES: tuple[tuple[type[Exception], Kind], ...] = (
    (FileExistsError, Kind.EXISTS),
    (FileNotFoundError, Kind.MISSING),
    (NotADirectoryError, Kind.MISSING),
    (IsADirectoryError, Kind.MISSING),
    (PermissionError, Kind.DENIED),
    (TimeoutError, Kind.TRANSIENT),
    (ConnectionError, Kind.TRANSIENT),
    (NotImplementedError, Kind.UNSUPPORTED),
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
        return Failure(Kind.SHORT)
    if isinstance(error, ArchiveError):
        return Failure(Kind.OTHER)
    chain = list(chain_of(error))
    for one in chain:
        code, status = _answer(one)
        if code or status:
            return _of_answer(code, status)
    return _of_types(error, chain)


def in_place_of(error: Exception, shown: Exception) -> Exception:
    """`shown`, which says less than `error`, and means what that did: of obstore's errors the words tell."""
    shown.__dict__["meant"] = judge(error)
    return shown


def unreached(error: Exception) -> bool:
    """True if a request was never sent, because nobody listens at that address or it has no such name."""
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
    """True if obstore was told that the bucket lies elsewhere: by a redirect or as to the signature."""
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
        return Failure(Kind.TRANSIENT)
    if status in _STATUSES:
        return Failure(_STATUSES[status])
    return Failure(Kind.TRANSIENT, landed=True) if status >= 500 or code == "InternalError" else Failure(Kind.OTHER)


def _of_types(error: Exception, chain: list[BaseException]) -> Failure:
    names = {cls.__name__ for one in chain for cls in type(one).__mro__}
    landed = not names & _NEVER_SENT
    for cls, kind in _TYPES:
        if isinstance(error, cls):
            return Failure(kind, kind is Kind.TRANSIENT and landed)
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        kind = _ERRNOS[error.errno]
        return Failure(kind, kind is Kind.TRANSIENT and landed)
    for name, kind in _NAMES.items():
        if name in names:
            return Failure(kind)
    if type(error).__module__.startswith("obstore"):
        return _of_obstore(str(error))
    broken = bool(names & _TRANSPORT) or any(isinstance(one, ConnectionError | TimeoutError) for one in chain)
    return Failure(Kind.TRANSIENT, landed) if broken else Failure(Kind.OTHER)


def _of_obstore(text: str) -> Failure:
    if "invalid list response" in text:
        return Failure(Kind.BROKEN)
    if not _OBSTORE_TRANSPORT.search(text):
        return Failure(Kind.OTHER)
    return Failure(Kind.TRANSIENT, landed=not _OBSTORE_NEVER_SENT.search(text))
