"""A machine whose clock is set back again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from archive.checkpoint import joint
from archive.ledger import ledger
from archive.read import notes

_STAMPING = (joint, ledger, notes)  # what gives rows their `created_at`


@contextmanager
def running_backwards(step_s: float = 60) -> Iterator[None]:
    """Each look at the clock finds it so many seconds earlier; 0: it stands still."""
    at = [datetime.now(UTC)]

    class Backwards(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            at[0] -= timedelta(seconds=step_s)
            return at[0].astimezone(tz)

    with pytest.MonkeyPatch.context() as patched:
        for module in _STAMPING:
            patched.setattr(module, "datetime", Backwards)
        yield
