"""Brings all steps of a gather into its cache in the background, behind what is asked for."""

from __future__ import annotations

import threading

import numpy as np

from archive.arrays import Ints, spans
from archive.base import forking
from archive.read import Gather

_BYTES_AT_ONCE = 8 * 1024 * 1024
_HEAD_START_S = 0.5  # for the first batch
_LOOKED_AT = 1 << 18  # steps at most, to say how much is local


def _raised() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class Filling:
    """A thread that loads some episodes step by step, in bounded bytes, and stands aside while a batch is fetched.

    It ends when all is local, or when the memory is full and there is no disk cache: more would push out what is held.
    """

    def __init__(self, gather: Gather, episodes: Ints) -> None:
        self._gather = gather
        lengths = gather.lengths[episodes]
        self._numbers = np.repeat(episodes, lengths)
        self._steps = spans(np.zeros(len(episodes), np.int64), lengths)
        self._stopped = forking.own(self, "_stopped", threading.Event)
        self._clear = forking.own(self, "_clear", _raised)
        self._begun = forking.own(self, "_begun", threading.Event)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = forking.own(self, "_thread", lambda: None)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="archive-filling", daemon=True)
            self._thread.start()

    def __enter__(self) -> None:
        """While a batch is fetched, nothing more is begun here. Raises what failed in the background, once."""
        error, self._error = self._error, None
        if error is not None:
            self._thread = None  # starting again tries again
            raise error
        self._clear.clear()

    def __exit__(self, *_: object) -> None:
        self._clear.set()
        self._begun.set()

    @property
    def ready(self) -> float:
        """Which part of the bytes is in memory or in the disk cache, from 0 to 1."""
        count = len(self._numbers)
        if not count:
            return 1.0
        some = slice(None) if count <= _LOOKED_AT else np.linspace(0, count - 1, _LOOKED_AT).astype(np.int64)
        return self._gather.local(self._numbers[some], self._steps[some])

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it ends; whether it did. Raises what failed."""
        self._begun.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self:
            return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._clear.set()
        self._begun.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._begun.wait(_HEAD_START_S)
        try:
            start = 0
            while start < len(self._numbers):
                self._clear.wait()
                if not self._wanted() or (self._gather.full and self._gather.disk_cache is None):
                    return
                stop = start + max(1, _BYTES_AT_ONCE // self._gather.step_bytes)
                self._gather.load(self._numbers[start:stop], self._steps[start:stop], wanted=self._wanted)
                start = stop
        except BaseException as e:
            self._error = e

    def _wanted(self) -> bool:
        return not self._stopped.is_set()
