"""Shares: what one target rank gets, streamed in bounded memory, ids renumbered, columns and state with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from archive.arrays import Ints
from archive.base import NotFoundError
from archive.checkpoint import MAIN_BUFFER, Checkpoint, resuming
from archive.fields import FieldSpec, Path
from archive.manifest import Origin, Resume
from archive.read import Episodes
from resharding.placing import Placement, Rules, Source
from resharding.sharing.sharebuffer import Layout, ShareBuffer, ShareEpisode

__all__ = ["Layout", "Share", "ShareBuffer", "ShareEpisode"]


class Dealt(Protocol):
    """A plan, as its shares need it."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def source(self) -> Source: ...

    @property
    def world_size(self) -> int: ...

    @property
    def rules(self) -> Mapping[str, Rules]: ...

    @property
    def placements(self) -> Mapping[str, Placement]: ...

    @property
    def is_identity(self) -> bool: ...

    @property
    def seen(self) -> int: ...

    @property
    def origin(self) -> Origin | None: ...

    @property
    def dropped(self) -> dict[str, dict[str, int]]: ...

    def dropped_of(self, buffer: str) -> dict[str, dict[str, int]]: ...

    def seed(self, rank: int) -> int: ...


class Share:
    """What one target rank gets of a plan."""

    def __init__(self, plan: Dealt, rank: int, *, saved: bool = False) -> None:
        """saved: see `as_saved`."""
        self.plan, self.rank, self._saved = plan, rank, saved
        self._buffers: dict[str, ShareBuffer] = {}

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def step(self) -> int:
        return self.plan.checkpoint.step

    @property
    def progress(self) -> Any:
        return self.plan.checkpoint.progress

    @property
    def unconsumed(self) -> list[Any]:
        """What was drawn but not trained on: all of it, for the data source to give again."""
        return self.plan.checkpoint.unconsumed

    @property
    def seed(self) -> int:
        """For this rank's random generators, where they can't go on as they were."""
        return self.plan.seed(self.rank)

    @property
    def buffers(self) -> list[str]:
        return list(self.plan.placements)

    def buffer(self, name: str) -> ShareBuffer:
        """The share of one buffer."""
        if name not in self.plan.placements:
            raise NotFoundError(f"the plan has no buffer {name!r}; it has: {', '.join(self.plan.placements) or 'none'}")
        if name not in self._buffers:
            self._buffers[name] = ShareBuffer(self, name, saved=self._saved)
        return self._buffers[name]

    def as_saved(self) -> Share:
        """The same as the job had it: without the fields that its steps were given after they were written.

        Adapters put this into live buffers, which go on with steps that have no such fields.
        """
        return Share(self.plan, self.rank, saved=True)

    @property
    def _main(self) -> ShareBuffer:
        return self.buffer(MAIN_BUFFER if MAIN_BUFFER in self.plan.placements else self.buffers[0])

    def __iter__(self) -> Iterator[ShareEpisode]:
        return iter(self._main)

    def __len__(self) -> int:
        return len(self._main)

    def __bool__(self) -> bool:
        """True, also where this rank gets no episode: it has a state, a progress and a place to go on from."""
        return True

    def stream(self, fields: Any = None, *, max_bytes: int = 2**28) -> Iterator[tuple[ShareEpisode, dict[str, Any]]]:
        """(episode, its steps) of the main buffer in order, in bounded memory."""
        return self._main.stream(fields, max_bytes=max_bytes)

    def read(self, fields: Any = None) -> list[dict[str, Any]]:
        return self._main.read(fields)

    @property
    def partly_late(self) -> frozenset[Path]:
        """Fields that some steps of the main buffer were given later, and others not."""
        return self._main.partly_late

    def row_specs(self) -> dict[Path, FieldSpec] | None:
        """What each field of the main buffer is, see `ShareBuffer.row_specs`."""
        return self._main.row_specs()

    def read_into(self, arrays: Mapping[Path, np.ndarray[Any, Any]], starts: Ints, places: Ints) -> None:
        """Put the steps of the main buffer into rows of arrays, see `ShareBuffer.read_into`."""
        self._main.read_into(arrays, starts, places)

    @property
    def steps(self) -> int:
        return self._main.steps

    @property
    def episodes(self) -> Episodes:
        return self._main.episodes

    @property
    def layout(self) -> Layout:
        return self._main.layout

    @property
    def next_positions(self) -> dict[int, int]:
        return self._main.next_positions

    def renumber_rows(self, batch: dict[str, Any], numbers: Ints) -> dict[str, Any]:
        """A batch of steps of the main buffer's episodes `numbers`, with env ids and episode ids renumbered."""
        return self._main.renumber_rows(batch, numbers)

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return self._main.columns

    @property
    def attributes(self) -> dict[str, dict[str, Any]]:
        return self._main.attributes

    @property
    def state(self) -> Any:
        return self._main.state

    @property
    def source_states(self) -> dict[int, Any]:
        return self._main.source_states

    def cost(self) -> dict[str, int]:
        """Requests and bytes of reading all its buffers."""
        costs = [self.buffer(name).cost() for name in self.buffers]
        return {key: sum(c[key] for c in costs) for key in ("requests", "bytes", "needed_bytes", "shard_bytes")}

    def to_resume(self, rank: int | None = None) -> Resume:
        """What a writer goes on from: `arc.writer(resume=share)`."""
        ck = self.plan.checkpoint
        buffers = {name: self.buffer(name).to_resume() for name in self.buffers}
        taken = (self.plan.seen, ck.number, self.plan.origin or ck.origin, ck.name, None, ck.world_size, self._holders)
        return Resume(self.rank, self.world_size, ck.run, buffers, *taken)

    def _holders(self) -> dict[str, int]:
        """Episode id -> the rank that gets it, the first if several get steps of it."""
        index, out = self.plan.checkpoint.index, dict[str, int]()
        for name, placement in self.plan.placements.items():
            numbers = self.plan.source.buffers[name].number[placement.parts.unit]
            out = resuming.first_ranks(index, numbers, placement.parts.target) | out
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "rank": self.rank}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["plan"], state["rank"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<Share {self.rank} of {self.world_size} of {self.plan.checkpoint.name!r}: {self.steps} steps>"
