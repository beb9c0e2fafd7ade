"""Pure, no I/O: where a rank's env rows go on after its tail, and which episodes are open there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from archive.tables import NO_ENV

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = ("buffer", "shard", "env_id", "position", "length", "episode_id", "sequence", "last", "reason")


class Ends:
    """Of one buffer. next: env row -> the position of its next step; open: env row -> the id of its open episode.

    What was added without an env row is never open: no step can follow it there.
    """

    def __init__(self, segments: pa.Table, buffer: str) -> None:
        """From the rows of a tail."""
        self.next: dict[int, int] = {}
        self.open: dict[int, str] = {}
        self._newest: dict[int, tuple[int, int, str | None]] = {}  # env -> position, sequence, open episode of its last
        self._closed: dict[str, int] = {}  # episode -> sequence of the row that closes it
        for buf, shard, env, position, length, name, sequence, last, reason in zip(
            *(segments[column].to_pylist() for column in _COLUMNS), strict=True
        ):
            if buf == buffer:
                if shard is None:
                    self._closed[name] = max(sequence, self._closed.get(name, 0))
                else:
                    ended = last or reason is not None or env == NO_ENV
                    self._step(env, position, length, sequence, None if ended else name)
        for env, (_, sequence, opened) in self._newest.items():
            if opened is not None and self._closed.get(opened, -1) < sequence:
                self.open[env] = opened

    def _step(self, env: int, position: int, length: int, sequence: int, opened: str | None) -> None:
        self.next[env] = max(position + max(length, 1), self.next.get(env, 0))
        if (position, sequence) >= self._newest.get(env, (-1, -1, None))[:2]:
            self._newest[env] = (position, sequence, opened)

    def follow(self, following: Mapping[int, int], opened: Mapping[int, str]) -> None:
        """Add what stood before: positions count if they are beyond; episodes where no step has come since."""
        for env, position in following.items():
            self.next[env] = max(position, self.next.get(env, 0))
        for env, name in opened.items():
            if env not in self._newest and name not in self._closed:
                self.open[env] = name
