"""A redaction that ends with SIGKILL at its k-th storage operation, in a process of its own."""

from __future__ import annotations

import archive
from tests.support.checkpoint_kill import die_at
from tests.support.processes import FORKSERVER, end

SIGKILLED = -9


def redact_and_die(url: str, name: str, k: int) -> None:
    """Plan a redaction, then carry it out up to its k-th operation."""
    plan = archive.open(url).forget(ids=[name], redact=True)
    die_at(k)
    plan.commit()


def killed_at(url: str, name: str, k: int) -> bool:
    """Whether a redaction that is to die at its k-th operation came to that."""
    child = FORKSERVER.Process(target=redact_and_die, args=(url, name, k))
    child.start()
    try:
        child.join(60)
        assert child.exitcode in (0, SIGKILLED)
        return child.exitcode == SIGKILLED
    finally:
        end(child)
