"""Pure, no I/O: a run as a store sees it: its ranks, the steps that they add, journals, checkpoints, retention and
readers; and the rates that follow from these."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, floor, isfinite
from typing import Any

from archive.base import UsageError
from archive.base import seconds_of as seconds
from archive.checkpoint import Keep
from archive.journal import PATIENCE, QUIET_S
from archive.journal import seconds as journal_seconds
from archive.shard import SHARD_BYTES
from archive.tables import MOST_RANKS
from archive.write import slab_bytes

DAY_S = 86_400.0
_COUNTS = ("ranks", "env_rows", "journal_ranks", "viewers")
_ABOVE_0 = ("ranks", "env_rows", "steps_s", "step_bytes", "episode_steps", "journal_ranks", "checkpoint_s")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run, by the figures that its cost depends on.

    ranks: of the world.  env_rows: of each of them.  steps_s: that all ranks add in a second, together.  step_bytes: of
    a step, as stored.  episode_steps: the length of an episode.  call_steps: that one call of a rank's writer adds:
    those of an episode with `add_episode`, of one step of each env row with `append`.

    journal_s: as of `arc.writer`; None: no journal.  journal_ranks: that share a journal's objects: those of a node
    with journal="node".  group: whether the ranks have a process group of torch; without one each of them looks for
    requests of checkpoints by itself.

    checkpoint_s: from one to the next.  wait_s: that ranks wait there for the slowest.  live_steps: of all buffers
    together.  column_bytes: of the columns that change, a live step.  state_bytes: of other state, a rank.

    keep: the retention policy; None keeps all.  forget: what goes with it, as of `arc.writer`.  prunes_day,
    resumes_day: how often a day.

    viewers: that follow the run.  samples_s: random samples a second that are not in the readers' memory.
    sample_bytes: that each brings, which is the chunk that it lies in.  exports_day: how often all that is stored is
    read.  egress: the part of what these read that leaves the store's region.
    """

    ranks: int = 8
    env_rows: int = 1
    steps_s: float = 1000.0
    step_bytes: float = 1000.0
    episode_steps: float = 1000.0
    call_steps: float = 1.0
    journal_s: float | None = None
    journal_ranks: int = 1
    group: bool = True
    checkpoint_s: float = 3600.0
    wait_s: float = 10.0
    live_steps: float = 0.0
    column_bytes: float = 0.0
    state_bytes: float = 0.0
    keep: Keep | None = None
    forget: str = "unreferenced"
    prunes_day: float = 1.0
    resumes_day: float = 1.0
    viewers: int = 0
    samples_s: float = 0.0
    sample_bytes: float = 65_536.0
    exports_day: float = 0.0
    egress: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.type in ("int", "float"):
                _check_number(one.name, getattr(self, one.name))
        if self.ranks > MOST_RANKS:
            raise UsageError(f"ranks={self.ranks} are more than a run may have, {MOST_RANKS}")
        journal_seconds(self.journal_s)
        if self.journal_ranks > self.ranks:
            raise UsageError(f"journal_ranks={self.journal_ranks} is more than there are: ranks={self.ranks}")
        if not isinstance(self.group, bool):
            raise UsageError(f"group={self.group!r}: give True if the ranks have a process group of torch, else False")
        if self.egress > 1:
            raise UsageError(f"egress={self.egress!r}: give the part of what is read that leaves the region, 0 to 1")
        if self.forget not in ("checkpoints", "unreferenced"):
            raise UsageError(f"forget={self.forget!r}: give 'checkpoints', or 'unreferenced', which lets steps go, too")
        if self.keep is not None and self.keep.every is not None:
            raise UsageError(
                f"{self.keep} keeps ever more checkpoints, by their steps: say how many there are to be, with "
                "keep=Keep(last=...) or Keep(within=...); without keep all of them stay"
            )

    # -- what is added -------------------------------------------------------------------------------------------------

    @property
    def bytes_s(self) -> float:
        """Bytes of steps a second."""
        return self.steps_s * self.step_bytes

    @property
    def journals(self) -> int:
        """The number of journals that are kept."""
        return 0 if self.journal_s is None else ceil(self.ranks / self.journal_ranks)

    @property
    def tick_s(self) -> float:
        """Seconds from one tick of a journal to the next.

        A tick is due `journal_s` after the oldest addition, and made in the first quiet moment of the last quarter of
        that time. Where nothing was added, there is none.
        """
        assert self.journal_s is not None
        gap_s = self.call_steps * self.journals / self.steps_s
        if gap_s <= QUIET_S:
            return self.journal_s
        return gap_s * (floor((1 - PATIENCE) * self.journal_s / gap_s) + 1)

    @property
    def objects_s(self) -> float:
        """Objects with steps a second: of journals or, without these, shards."""
        count, every_s = (self.journals, self.tick_s) if self.journals else (self.ranks, self.checkpoint_s)
        return count / every_s * ceil(self.bytes_s / count * every_s / self._object_bytes)

    @property
    def _object_bytes(self) -> int:
        """The most bytes of steps that are one object."""
        if self.env_rows < 2:
            return SHARD_BYTES
        held = int(self.live_steps * self.step_bytes / self.ranks)
        return slab_bytes(held, self.env_rows, ceil(self.step_bytes), SHARD_BYTES)

    @property
    def segments_s(self) -> float:
        """Rows of the segments table a second: an episode is cut where an object ends."""
        cuts_s = 0.0 if self.call_steps >= self.episode_steps else self.objects_s
        return self.steps_s / self.episode_steps + cuts_s

    # -- what stays ----------------------------------------------------------------------------------------------------

    @property
    def kept_checkpoints(self) -> float | None:
        """The number of checkpoints that stay; None: ever more."""
        if self.keep is None or self.keep == Keep():
            return None
        within = 0.0 if self.keep.within is None else seconds(self.keep.within, "keep.within") / self.checkpoint_s
        best: Any = self.keep.best or ()
        count = best[2] if len(best) == 3 else 1 if best else 0
        return max(1.0, self.keep.last or 0, within) + count

    @property
    def kept_s(self) -> float | None:
        """Seconds of the run's history whose states, tables and commits' objects stay; None: all of it."""
        count = self.kept_checkpoints
        if count is None or not self.prunes_day:
            return None
        return count * self.checkpoint_s + DAY_S + DAY_S / self.prunes_day / 2  # the wait of a prune, and for a prune

    @property
    def kept_steps_s(self) -> float | None:
        """Seconds of the run's history whose steps stay; None: all of it."""
        if self.kept_s is None or self.forget != "unreferenced":
            return None
        return self.kept_s + self.live_steps / self.steps_s


def _check_number(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    least = "above 0" if name in _ABOVE_0 else "0 or more"
    if not number or value < 0 or (name in _ABOVE_0 and value == 0):
        raise UsageError(f"{name}={value!r}: give a number, {least}")
    if name in _COUNTS and value != int(value):
        raise UsageError(f"{name}={value!r}: give a whole number, {least}")
