"""Replay: the rollouts of a run, in the order in which its trainer took them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from archive.base import NotFoundError, UsageError
from archive.facade import Archive
from archive.ledger import Key, LedgerView, TrainedBatch
from archive.log import DEFAULT_RUN
from archive.opening import open
from archive.read import Episodes

if TYPE_CHECKING:
    from archive.checkpoint import Run


class Replayed(NamedTuple):
    """The rollouts that the trainer took at one step: its time, the keys of the ledger, and their episodes."""

    step: int
    at: datetime
    keys: Sequence[Key]
    episodes: Episodes


class Replay:
    """The steps of a run, in order: `len()`, slices, and iteration."""

    def __init__(self, found: Sequence[TrainedBatch], every: Episodes) -> None:
        self._batches = found
        self._every = every

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, key: int | slice) -> Replayed | Replay:
        if isinstance(key, slice):
            return Replay(self._batches[key], self._every)
        return self._replayed(self._batches[key])

    def __iter__(self) -> Iterator[Replayed]:
        return map(self._replayed, self._batches)

    def _replayed(self, batch: TrainedBatch) -> Replayed:
        """The rollouts of one step; NotFoundError if one of their episodes is gone."""
        import pyarrow as pa
        import pyarrow.compute as pc

        every = self._every.table["episode_id"].combine_chunks()
        found = pc.index_in(pa.array(batch.episodes, pa.string()), value_set=every)
        if found.null_count:
            lost = batch.episodes[found.to_pylist().index(None)]
            raise NotFoundError(
                f"episode {lost!r}, which was trained on, is no longer in the archive: it was forgotten"
            )
        return Replayed(batch.step, batch.at, batch.keys, self._every[found.to_numpy().astype(np.int64)])

    def __repr__(self) -> str:
        steps = f", steps {self._batches[0].step} to {self._batches[-1].step}" if self._batches else ""
        return f"<Replay of {len(self)} batches{steps}>"


def replay(run: Archive | Run | str, *, from_step: int | None = None, ledger: str | None = None) -> Replay:
    """The rollouts of a run, in the order in which its trainer took them: to debug training without generation.

        for step, at, keys, episodes in archive.replay(arc.runs["main"], from_step=100):
            loss = train(episodes.read())

    run: a run of `arc.runs`, an Archive or its URL (then its run "main"). from_step: leave out what came before that
    update count; rollouts of several ranks with the same one are one step. ledger: its name, needed if there
    are several. Training after a checkpoint to which the run went back is not part of it. NotFoundError
    without a ledger: nothing else records what was trained on.
    """
    if isinstance(run, str):
        run = open(run)
    found = run.runs[DEFAULT_RUN] if isinstance(run, Archive) else run
    every = _only(found, ledger).batches
    return Replay([one for one in every if from_step is None or one.step >= from_step], found.archived)


def _only(run: Run, name: str | None) -> LedgerView:
    """The only ledger, or the named one."""
    names = run.ledgers
    if name is None and len(names) > 1:
        raise UsageError(f"run {run.name!r} has several ledgers: give one, as ledger={names[0]!r}; all: {names}")
    if not names or name not in (None, *names):
        raise NotFoundError(
            f"run {run.name!r} has no ledger{'' if name is None else f' {name!r}'} that says what was trained on; "
            f"there is: {', '.join(names) or 'none'}. Keep one with w.ledger('prompts')"
        )
    return run.ledger(names[0] if name is None else name)
