"""Imports ahead, in the background, what the first checkpoint needs: else it would wait for that, most of a second."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from archive import tables
from archive.base import logger
from archive.shard import writer

FORK_WAIT_S = 10.0

_thread: threading.Thread | None = None
_lock = threading.Lock()


def start(*more: Callable[[], object]) -> None:
    """Begin, once a process, `more` (what is slow the first time) too; returns at once.

    At its end the interpreter waits for it, as an import cannot be broken off.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_load, args=(more,), name="archive-imports")
            _thread.start()


def wait(timeout_s: float | None = None) -> None:
    """Until all is there, or the time is up."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(timeout_s)


def _load(more: tuple[Callable[[], object], ...]) -> None:
    for load in (*more, tables.load, writer.load):
        try:
            load()
        except Exception:  # whoever needs it meets the same error, where it can be raised
            logger.debug("importing ahead failed", exc_info=True)


def _before_fork() -> None:
    """A module that is half imported stays locked in a child for ever: fork when none is."""
    wait(FORK_WAIT_S)


def _in_child() -> None:
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
