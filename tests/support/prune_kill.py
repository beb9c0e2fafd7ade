"""A prune that ends with SIGKILL at its k-th storage operation, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import archive
from tests.support.checkpoint_kill import die_at
from tests.support.processes import FORKSERVER, end
from tests.support.pruning import NOW

SIGKILLED = -9


def prune_and_die(url: str, k: int) -> None:
    """Plan a prune, then carry it out up to its k-th operation."""
    plan = archive.open(url).prune(**NOW)
    die_at(k)
    plan.commit()


def killed_at(url: str, k: int, task: Callable[[str, int], None] = prune_and_die) -> bool:
    """Whether a prune, or another task, that is to die at its k-th operation came to that."""
    child = FORKSERVER.Process(target=task, args=(url, k))
    child.start()
    try:
        child.join(60)
        assert child.exitcode in (0, SIGKILLED)
        return child.exitcode == SIGKILLED
    finally:
        end(child)
