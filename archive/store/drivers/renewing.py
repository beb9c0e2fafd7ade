"""Does no I/O of its own: when credentials that have expired are asked for anew, and where that is of no use."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LEAST_S = 1.0  # between two looks at the source
_GIVEN = ("key", "secret", "username", "password", "anon", "skip_signature")
_GIVEN_ENDINGS = ("access_key_id", "secret_access_key")


class Renewal:
    """One renewal for all threads that are told at about the same time that their credentials have expired."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = -math.inf

    def once(self, renew: Callable[[], None]) -> None:
        """Call `renew`, unless somebody just has. Where that fails, all stays as it was."""
        with self._lock:
            if time.monotonic() - self._at < LEAST_S:
                return
            with contextlib.suppress(Exception):  # the source may be away for a moment; the request tells if it stays
                renew()
            self._at = time.monotonic()


def given_for_good(options: Mapping[str, Any]) -> bool:
    """Whether options of a filesystem hold the credentials themselves, or want none, so that nothing renews them."""
    inner = [value for name in ("client_kwargs", "config") if isinstance(value := options.get(name), Mapping)]
    pairs = [pair for one in (options, *inner) for pair in one.items()]
    return any(value and (name in _GIVEN or name.lower().endswith(_GIVEN_ENDINGS)) for name, value in pairs)
