"""What a recovery begins with: the newest checkpoint of the session, or the one from which it went on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from archive import tables
from archive.checkpoint import Checkpoint, checkpoint_at
from archive.journal.tails import RankTail
from archive.manifest import Commit, Later, Lineage, Mark, RunEntry
from archive.saved import UNCONSUMED, Part, StateRef
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Base:
    """The checkpoints that a recovery goes on from.

    held: the one whose live steps its ranks held when the tails began: the session's own newest that has its buffers,
    or (own is False) the one that it resumed from.  about: the newest of all these, with or without buffers, which says
    how far training had got. None: there is none.  ordinal: of the session's own newest one; 0 if it has none.
    """

    session: str
    held: Checkpoint | None
    own: bool
    about: Checkpoint | None
    resumed_from: int | None
    ordinal: int

    @classmethod
    def of(cls, storage: Storage, head: Commit, entry: RunEntry, found: Mapping[int, RankTail]) -> Self:
        """Of a run whose tails were read."""

        def at(mark: Mark) -> Checkpoint:
            return checkpoint_at(storage, head, mark.commit, mark.manifest, Later(storage, head))

        replay, newest = (
            at(mark) if mark is not None and mark.session == entry.session else None
            for mark in (entry.latest_replay, entry.latest)
        )
        if replay is not None and newest is not None and replay.number == newest.number:
            newest = replay  # what was read of it is read once
        ordinal = 0 if newest is None else newest.record.ordinal
        said = next((one.held.resumed_from for one in found.values() if one.held.resumed_from is not None), None)
        resumed = entry.resumed_from.commit if said is None and entry.resumed_from is not None else said
        if replay is not None:
            return cls(entry.session, replay, True, newest or replay, resumed, ordinal)
        origin = None if resumed is None else checkpoint_at(storage, head, resumed, None, Later(storage, head))
        held = origin if origin is not None and origin.replay_saved else None
        return cls(entry.session, held, False, newest or origin, resumed, ordinal)

    @property
    def own_newest(self) -> Checkpoint | None:
        """The session's own newest, with or without buffers; None if it has none."""
        return self.about if self.about is not None and self.about.session == self.session else None

    @property
    def name(self) -> str:
        """Of the newest one; empty if there is none."""
        return "" if self.about is None else self.about.name

    @property
    def recovered(self) -> bool:
        """Whether that one was recovered, too."""
        return self.about is not None and self.about.record.recovered is not None

    @property
    def commit(self) -> int | None:
        """Its commit."""
        return None if self.about is None else self.about.number

    @property
    def step(self) -> int:
        """The training step."""
        return 0 if self.about is None else self.about.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured by then."""
        return {} if self.about is None else self.about.record.metrics

    @property
    def lineage(self) -> Lineage:
        """Where the newest one comes from."""
        return Lineage() if self.about is None else self.about.record.lineage

    def progress(self, rank: int) -> str | None:
        """The run's counters, of the newest one."""
        file = _part(self.about, rank)
        return None if file is None else file.index.progress

    def unconsumed(self, rank: int) -> str | None:
        """What a rank had drawn and not trained on."""
        file = _part(self.about, rank)
        return file.files([UNCONSUMED])[0].decode() if file is not None and file.has(UNCONSUMED) else None

    def sequence(self, rank: int) -> int:
        """The session's rows of a rank below this number are in it."""
        return self.held.record.sequences.get(rank, 0) if self.own and self.held is not None else 0

    def committed(self, rank: int) -> int:
        """The session's rows of a rank below this number are in it, or in the newest one without buffers."""
        newest = self.own_newest
        return max(self.sequence(rank), 0 if newest is None else newest.record.sequences.get(rank, 0))

    def trained(self, rank: int) -> int:
        """Of the session's ledger rows "trained" of a rank those below this number are known to its weights."""
        about = self.own_newest
        if about is None:
            return 0
        if about.record.recovered is not None:
            return about.record.recovered.trained.get(rank, 0)
        return about.record.sequences.get(rank, 0)

    @property
    def left_out(self) -> pa.Table:
        """Rows as of the live table: what the session held beside its own newest one. Who goes on beside a recovery may
        save it again."""
        parts = [self.held.staged(rank) for rank in self.held.ranks] if self.own and self.held is not None else []
        return tables.concat("live", [part.left_out() for part in parts])

    def states(self, rank: int) -> dict[str, StateRef]:
        """A rank's states, where they lie."""
        out: dict[str, StateRef] = {}
        for file in (_part(self.held, rank), _part(self.about, rank)):
            for buffer, ref in {} if file is None else file.index.states.items():
                own = file is not None and ref.object is None
                out[buffer] = replace(ref, object=file.key, nonce=file.index.nonce) if own and file else ref
        return out


def _part(checkpoint: Checkpoint | None, rank: int) -> Part | None:
    """What a rank staged for a checkpoint, if it is in it."""
    return checkpoint.staged(rank) if checkpoint is not None and rank in checkpoint.ranks else None
