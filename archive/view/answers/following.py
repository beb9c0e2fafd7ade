"""New commits, as they come. The store is asked for one object at a time, however many look."""

from __future__ import annotations

import threading
import time

from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

LEAST_S = 1.0  # between two questions to the store


class Following:
    """When the store was asked last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0.0

    def ask(self, shown: Shown) -> None:
        """Show the newest commit, unless somebody asked just now."""
        with self._lock:
            if time.monotonic() - self._asked < LEAST_S:
                return
            with shown.writing:
                shown.arc.refresh()
            self._asked = time.monotonic()


def news(shown: Shown, query: Query) -> Reply:
    """The newest commit, asked of the store: {commit, episodes, pinned}. An archive that was opened at a commit has no
    news."""
    if not shown.arc.pinned:
        shown.kept("following", Following).ask(shown)
    head = shown.arc.head
    return json_reply({"commit": head.number, "created_at": head.created_at, "pinned": shown.arc.pinned})
