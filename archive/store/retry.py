"""Waits, but does no I/O: the one retry layer, with full jitter and a deadline, and the errors for what failed.

No library does it: each try gets the rest of the deadline, a caller that stops ends the pause, and it remembers if an
earlier try may have written something. tenacity and stamina have none of the three. The log has each request that is
tried again, and the reason; errors hold no credentials.
"""

from __future__ import annotations

import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable

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
    logger,
    visible,
)
from archive.store.drivers import Cause, chain_of, judge, unreached

# Steps of 1.2 rather than 2: the cap is reached as late as attempt 26, so twenty refusals in a row cost seconds.
BASE_S, CAP_S, GROWTH = 0.05, 5.0, 1.2
MAX_SHORT_READS = 4
LEAST_TRY_S = 0.25  # with less time left, a try would be cut off with an unknown effect

_BAD_ANSWERS = (Cause.SHORT, Cause.BROKEN)  # repeated ones are damage at rest
TELL_S, TELL_AGAIN_S = 3.0, 30.0

_jitter = random.SystemRandom()  # the program's own stream of random numbers is not ours to draw from


def longest_delay(attempt: int) -> float:
    """Upper bound of the pause after try number `attempt`."""
    return min(CAP_S, BASE_S * GROWTH ** min(attempt - 1, 100))


class Tries:
    """The tries of one request. `landed`: one of them may have written something, whatever the later ones say."""

    def __init__(self, deadline_s: float, short_reads: int = MAX_SHORT_READS) -> None:
        """short_reads: the number of times that an answer may be cut short, or damaged."""
        self.deadline_s = deadline_s
        self.number = 0
        self.kind = Cause.OTHER  # of the last failure
        self.landed = False
        self._short_reads = short_reads
        self._began = time.monotonic()
        self._handled = sys.exception()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def answered_no(self) -> bool:
        """True if the store answered that the object is missing, or already exists: callers often expect that."""
        return self.kind in (Cause.MISSING, Cause.EXISTS) and not self.landed

    def begin(self) -> float:
        """Count a try; the seconds that it may take."""
        self.number += 1
        return max(0.01, self.deadline_s - self.elapsed_s)

    def may_go_on(self, error: Exception, renew: Callable[[], bool]) -> bool:
        """True if another try may succeed after this error. `renew`, called for expired credentials, is true if there
        may be new ones, now or soon."""
        _part(error, self._handled)
        failure = judge(error)
        self.kind, self.landed = failure.kind, self.landed or failure.landed
        again = self.kind is Cause.TRANSIENT or (self.kind in _BAD_ANSWERS and self.number < self._short_reads)
        return again or (self.kind is Cause.EXPIRED and renew())

    def pause(self, stop: threading.Event) -> bool:
        """Wait for the next try; False if no time is left for it, or it was stopped."""
        pause = _jitter.uniform(0, longest_delay(self.number))
        over = self.elapsed_s + pause + min(LEAST_TRY_S, self.deadline_s / 4) >= self.deadline_s
        return not over and not stop.wait(pause)


def _part(error: Exception, handled: BaseException | None) -> None:
    """Detach an error's causes from the exception that the caller was handling, which would be judged as its cause."""
    for one in chain_of(error):
        if handled is not None and one.__context__ is handled:
            one.__context__ = None


class Patience:
    """The patience of one process with one store. Threads may share it: at worst two of them log the same.

    first_answer_s: give up after that while no server could be reached at all; None: go on to the deadline.
    """

    def __init__(self, first_answer_s: float | None = None) -> None:
        self._first_answer_s = first_answer_s
        self._told_at = -math.inf

    def answered(self) -> None:
        """Take note that the server answers."""
        self._first_answer_s = None

    def failed(self, what: str, why: str, error: Exception, elapsed_s: float, deadline_s: float) -> bool:
        """Decide whether to give up on a failed request that may be tried again; after some seconds, log it."""
        if not unreached(error) and judge(error).kind is not Cause.EXPIRED:
            self.answered()
        limit_s = min(deadline_s, self._first_answer_s or deadline_s)
        if elapsed_s >= limit_s:
            return True
        if elapsed_s >= TELL_S and time.monotonic() - self._told_at >= TELL_AGAIN_S:
            self._told_at = time.monotonic()
            rest_s = limit_s - elapsed_s
            text = "%s has failed for %.0f s (%s); it is tried again for up to %.0f s more"
            logger.warning(text, what, elapsed_s, why, rest_s)
        return False


# -- errors ----------------------------------------------------------------------------------------------------


def explain(cause: Exception, tries: Tries, verb: str, url: str, scrub: Callable[[str], str]) -> ArchiveError:
    """The library's error for a request whose last try failed: what, where, what to do. The cause is not chained
    here."""
    detail = described(cause, scrub)
    where = scrub(f"{verb} {url}")
    if verb == "create" and tries.landed:
        return AmbiguousWriteError(
            f"{where}: no answer whether it was made, after {_counted(tries)} ({detail}); "
            "read it back and compare, or repeat the same call"
        )
    if verb == "create" and tries.kind is Cause.UNSUPPORTED:
        return NotExclusiveError(
            f"{where}: the store has no create-only put (it does not know If-None-Match: {detail}), so two writers "
            "could overwrite each other; nothing was written. Use another store, or open with single_writer=True if "
            "one process alone writes there"
        )
    if tries.kind is Cause.TRANSIENT:
        return DeadlineError(
            f"{where}: gave up after {_counted(tries)}; the last one: {detail}; "
            f"{'nothing can be reached there: ' * unreached(cause)}check the "
            f"{'address (endpoint_url), ' * unreached(cause)}network and the store, or raise deadline_s"
        )
    if tries.kind is Cause.OTHER and isinstance(cause, ArchiveError):
        return cause
    if "non-partial response" in detail:  # of obstore, which looks at the status
        return StorageError(f"{where}: the server or a proxy ignores byte ranges; use one that honours them ({detail})")
    if _is_mocked(cause):
        return StorageError(f"{where}: {_MOCKED} ({detail})")
    cls, text = _ERRORS[tries.kind]
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
    """True if an answer came from mock_aws, which is a plain value where a coroutine is awaited, or the reverse."""
    mixed_up = isinstance(cause, (AttributeError, TypeError)) and re.search(
        r"\bcoroutine\b|'await'|\bawait", str(cause)
    )
    return "moto" in sys.modules and bool(mixed_up)


def _counted(tries: Tries) -> str:
    plural = "" if tries.number == 1 else "s"
    return f"{tries.number} attempt{plural} in {tries.elapsed_s:.1f} s"


_ERRORS: dict[Cause, tuple[type[ArchiveError], str]] = {
    Cause.MISSING: (MissingObjectError, "not there; check the name, and that nothing has deleted it"),
    Cause.DENIED: (AccessDeniedError, "refused; check the credentials and what they permit"),
    Cause.EXPIRED: (
        AccessDeniedError,
        "the credentials have expired and nothing has renewed them; renew them where they come from, or leave them out "
        "of storage_options and have the environment, the AWS configuration or the machine's role give them",
    ),
    Cause.FULL: (StorageFullError, "no space left; free some or raise the quota, then repeat"),
    Cause.EXISTS: (AlreadyExistsError, "already there; it was not overwritten"),
    Cause.RANGE: (ShortReadError, "the object ends before the bytes asked for; it is damaged or not the one meant"),
    Cause.SHORT: (ShortReadError, "fewer bytes than asked for; the object is damaged or the connection cuts answers"),
    Cause.BROKEN: (StorageError, "damaged answers, or none; check the store, and what lies on the way to it"),
    Cause.UNSUPPORTED: (StorageError, "the store does not know such a request"),
    Cause.OTHER: (StorageError, "failed; see the cause"),
}


def printable_cause(error: Exception, scrub: Callable[[str], str]) -> Exception:
    """`error`, or a plain stand-in if its text, or its cause's,
    holds a credential or acts on a terminal."""
    texts = [text for one in chain_of(error) for text in (str(one), repr(one))]
    if all(visible(scrub(text)) == text for text in texts):
        return error
    return StorageError(scrub(f"{type(error).__name__}: {error}"))
