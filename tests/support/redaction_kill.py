"""A redaction that ends with SIGKILL at its k-th storage operation, in a process of its own."""

from __future__ import annotations

import archive
from tests.support.checkpoint_kill import die_at


def redact_and_die(url: str, k: int, name: str = "") -> None:
    """Plan to redact an episode, then carry it out up to its k-th operation."""
    plan = archive.open(url).forget(ids=[name], redact=True)
    die_at(k)
    plan.commit()
