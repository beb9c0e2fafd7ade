"""Pure, no I/O: the library's error for a request that failed, in words, without credentials."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from archive.base import (
    AccessDeniedError,
    AlreadyExistsError,
    AmbiguousWriteError,
    ArchiveError,
    DeadlineError,
    MissingObjectError,
    NotExclusiveError,
    ShortReadError,
    StorageError,
    StorageFullError,
    visible,
)
from archive.store.drivers import Kind, chain_of, unreached


@dataclass(eq=False)
class GaveUpError(Exception):
    """Internal: a request that will not be tried again. Never leaves the storage layer."""

    cause: Exception
    kind: Kind
    attempts: int
    elapsed_s: float
    landed: bool = False

    @property
    def answered_no(self) -> bool:
        """Whether the store said plainly that the object is not there, or already is: callers often ask for that."""
        return self.kind in (Kind.MISSING, Kind.EXISTS) and not self.landed


def explain(gave_up: GaveUpError, verb: str, url: str, scrub: Callable[[str], str]) -> ArchiveError:
    """The library's error for a request that failed: what, where, what to do. The cause is not chained here."""
    detail = described(gave_up.cause, scrub)
    where = scrub(f"{verb} {url}")
    if verb == "create" and gave_up.landed:
        return AmbiguousWriteError(
            f"{where}: no answer whether it was made, after {_tries(gave_up)} ({detail}); "
            "read it back and compare, or repeat the same call"
        )
    if verb == "create" and gave_up.kind is Kind.UNSUPPORTED:
        return NotExclusiveError(
            f"{where}: the store has no create-only put (it does not know If-None-Match: {detail}), so two writers "
            "could overwrite each other; nothing was written. Use another store, or open with single_writer=True if "
            "one process alone writes there"
        )
    if gave_up.kind is Kind.TRANSIENT:
        return DeadlineError(
            f"{where}: gave up after {_tries(gave_up)}; the last one: {detail}; "
            f"{'nothing can be reached there: ' * unreached(gave_up.cause)}check the "
            f"{'address (endpoint_url), ' * unreached(gave_up.cause)}network and the store, or raise deadline_s"
        )
    if gave_up.kind is Kind.OTHER and isinstance(gave_up.cause, ArchiveError):
        return gave_up.cause
    if "non-partial response" in detail:  # of obstore, which looks at the status
        return StorageError(f"{where}: the server or a proxy ignores byte ranges; use one that honours them ({detail})")
    if _is_mocked(gave_up.cause):
        return StorageError(f"{where}: {_MOCKED} ({detail})")
    cls, text = _ERRORS[gave_up.kind]
    return cls(f"{where}: {text} ({detail})")


def described(error: Exception, scrub: Callable[[str], str]) -> str:
    """An error in a line, without credentials."""
    detail = scrub(" ".join(f"{type(error).__name__}: {error}".split()))
    return f"{detail[:400]}..." if len(detail) > 400 else detail


_MOCKED = (
    "moto's mock_aws patches botocore within the process, which no asynchronous client (s3fs) works with: leave it "
    "out, and take the pytest fixture archive_s3 (pip install 'trajectory-archive[testing]'), or start "
    "moto.server.ThreadedMotoServer(port=0) and open the archive with storage_options={'endpoint_url': <its address>}; "
    "see archive/docs/how-to/testing.md, 'Test your own code'"
)


def _is_mocked(cause: Exception) -> bool:
    """Whether an answer came from mock_aws, which is a plain value where a coroutine is awaited, or the reverse."""
    mixed_up = isinstance(cause, (AttributeError, TypeError)) and re.search(
        r"\bcoroutine\b|'await'|\bawait", str(cause)
    )
    return "moto" in sys.modules and bool(mixed_up)


def _tries(gave_up: GaveUpError) -> str:
    plural = "" if gave_up.attempts == 1 else "s"
    return f"{gave_up.attempts} attempt{plural} in {gave_up.elapsed_s:.1f} s"


_ERRORS: dict[Kind, tuple[type[ArchiveError], str]] = {
    Kind.MISSING: (MissingObjectError, "not there; check the name, and that nothing has deleted it"),
    Kind.DENIED: (AccessDeniedError, "refused; check the credentials and what they permit"),
    Kind.EXPIRED: (
        AccessDeniedError,
        "the credentials have expired and nothing has renewed them; renew them where they come from, or leave them out "
        "of storage_options and have the environment, the AWS configuration or the machine's role give them",
    ),
    Kind.FULL: (StorageFullError, "no space left; free some or raise the quota, then repeat"),
    Kind.EXISTS: (AlreadyExistsError, "already there; it was not overwritten"),
    Kind.RANGE: (ShortReadError, "the object ends before the bytes asked for; it is damaged or not the one meant"),
    Kind.SHORT: (ShortReadError, "fewer bytes than asked for; the object is damaged or the connection cuts answers"),
    Kind.BROKEN: (StorageError, "damaged answers, or none; check the store, and what lies on the way to it"),
    Kind.UNSUPPORTED: (StorageError, "the store does not know such a request"),
    Kind.OTHER: (StorageError, "failed; see the cause"),
}


def printable_cause(error: Exception, scrub: Callable[[str], str]) -> Exception:
    """`error`, or a plain stand-in where its text, or that of what caused it,
    holds a credential or acts on a terminal."""
    texts = [text for one in chain_of(error) for text in (str(one), repr(one))]
    if all(visible(scrub(text)) == text for text in texts):
        return error
    return StorageError(scrub(f"{type(error).__name__}: {error}"))
