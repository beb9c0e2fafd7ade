"""Imports in the background what the first checkpoint needs, which would otherwise take it most of a second."""

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
    """Import in the background, once a process; `more` (other slow first calls) too; returns at once.

    At its end the interpreter waits for it, as an import cannot be broken off.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_load, args=(more,), name="archive-imports")
            _thread.start()


def wait(timeout_s: float | None = None) -> None:
    """Wait until all is imported, or the time is up."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(timeout_s)


def _load(more: tuple[Callable[[], object], ...]) -> None:
    for load in (*more, tables.load, writer.load):
        try:
            load()
        except Exception:  # its user gets the same error, where it can be raised
            logger.debug("importing ahead failed", exc_info=True)


def _before_fork() -> None:
    """Wait for imports: a half imported module would stay locked in a child for ever."""
    wait(FORK_WAIT_S)


def _in_child() -> None:
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
