"""A replay buffer of TorchRL: saved, followed and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from archive.adapters import UNFINISHED, LiveBuffer, Report, Saved, common, live
from archive.adapters.torchrl import restored, states, tracker
from archive.adapters.torchrl.lists import Cells, cells_of
from archive.adapters.torchrl.parts import held, parts_of
from archive.adapters.torchrl.placement import Placement, room_for
from archive.adapters.torchrl.tracker import Keys
from archive.base import UsageError
from archive.checkpoint import Checkpoint, Pending
from archive.fields import trees
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Share, ShareBuffer


SYSTEM = "torchrl"
_TICK_BYTES = 1024 * 1024  # of one value of the state


class TorchBuffer(LiveBuffer):
    """A replay buffer of TorchRL. Its steps are the cells of its storage, in streams of the storage's columns."""

    system = SYSTEM

    def __init__(
        self, rb: Any, name: str, *, asked: Keys | None = None, verify: bool = False, unfinished: str | None = None
    ) -> None:
        """asked: the keys that tell trajectories apart, as given.  verify: compare digests of all cells.
        unfinished: what becomes of open trajectories, if not as planned."""
        super().__init__(name)
        self.parts = parts_of(rb, name)
        self.asked = asked or Keys()
        self.verify = verify
        self.unfinished = unfinished
        self._queue: Sequence[Any] = ()  # the batches that were drawn ahead

    @contextmanager
    def still(self) -> Iterator[None]:
        with held(self.parts.rb) as self._queue:
            yield

    @property
    def held(self) -> int:
        return len(self.parts.storage)

    def append(self, part: Buffer) -> Saved:
        parts, found = self.parts, tracker.append(part, self.parts, self.asked, verify=self.verify)
        columns = found.columns | states.writer_columns(parts, found.live)
        tick: dict[str, Any] = {
            "system": SYSTEM,
            "version": 1,
            "storage": found.state,
            "writer": states.writer_state(parts),
            "extras": states.rest_of(parts, (), len(self._queue)),
        }
        for name, sampler in states.saved_samplers(parts).items():
            columns |= sampler.columns(found.live)
            tick[name] = sampler.state()
        state = tick | {"extras": states.rest_of(parts, self._queue)}
        return Saved(columns, {"trajectory": found.ids} if found.ids else {}, state, _lean(tick))

    def prepared(self, share: Share, part: ShareBuffer, states: Mapping[int, Any]) -> tuple[Cells, Placement]:
        cells = cells_of(self.parts)
        if self.unfinished == "drop" and part.layout.open.any():
            raise UsageError(
                f"buffer {self.name!r} has unfinished trajectories, and only a plan drops: resharding.plan(..., "
                "unfinished='drop')"
            )
        placed = Placement(cells, share, part, self.unfinished or part.rules.unfinished, states)
        cells.check_room(placed.rows, placed.inner)
        return cells, placed

    def put(self, ready: tuple[Cells, Placement]) -> Report:
        return restored.restore(self.parts, *ready)


def _lean(state: dict[str, Any]) -> dict[str, Any]:
    """The state without what is too large to be journaled at each tick; a restore makes it of the columns, or anew."""
    parts = {name: part for name, part in state.items() if isinstance(part, dict)}
    return state | {
        name: {key: v for key, v in part.items() if _nbytes(v) <= _TICK_BYTES} for name, part in parts.items()
    }


def _nbytes(value: Any) -> int:
    return sum(array.nbytes for array in trees.flatten(value, copy=False)[1].values())


def _buffers(objects: Any, **options: Any) -> dict[str, TorchBuffer]:
    every = {name: TorchBuffer(rb, name, **options) for name, rb in common.several(objects).items()}
    if len({id(one.parts.storage) for one in every.values()}) < len(every):
        raise UsageError("two of the buffers share one storage; give it under one name")
    return every


def capacity(objects: Any, checkpoint: Checkpoint, *, num_envs: int | None = None) -> Any:
    """Steps that a buffer will hold of a checkpoint's, for `resharding.plan(capacity=)`; a dict for several by name.

    The storage's size; of a storage of two dimensions that is not in use yet, what TorchRL makes of its size when it
    is: whole rows, so with 3 columns 102 for 100.  num_envs: its columns, if other than in the checkpoint.
    """
    out: dict[str, int] = {}
    for name, one in _buffers(objects).items():
        states = {rank: checkpoint.state(rank, name) for rank in checkpoint.ranks if name in checkpoint.buffers}
        out[name] = room_for(cells_of(one.parts), common.saved_by(SYSTEM, states), num_envs)
    return common.as_given(objects, out)


def save(
    objects: Any,
    writer: Writer,
    *,
    step: int,
    verify: bool = False,
    traj_key: Any = None,
    end_key: Any = None,
    **options: Any,
) -> Pending:
    """Checkpoint a replay buffer, or several by name: what the writer has not seen is uploaded in the background.

    The buffers are held still until all is copied, so storages, samplers, writers and queues are of one moment.
    verify: compare digests of everything with those of the last save, rather than trust the storage's revision.
    traj_key, end_key: nested keys that tell trajectories apart.  options: those of `Writer.checkpoint`.
    """
    asked = Keys.asked(traj_key, end_key)
    every = _buffers(objects, asked=asked, verify=verify)
    tracker.check_keys((one.parts for one in every.values()), asked)
    return live.save(every, writer, step, **options)


def follow(objects: Any, writer: Writer, *, traj_key: Any = None, end_key: Any = None) -> None:
    """Have the journal of a writer (`journal_s=`) keep a replay buffer, or several by name, between saves.

    At each tick it takes in the steps that are new, those that were overwritten, priorities and all other values of
    single steps, and the state: cursors, counters, random generators. After a crash the checkpoint that is recovered
    is restored as any other. Call it after `restore`, with the writer that resumes, once.
    traj_key, end_key: as for `save`.
    """
    asked = Keys.asked(traj_key, end_key)
    live.follow(lambda: _buffers(objects, asked=asked), writer)


def restore(
    objects: Any,
    source: Any,
    *,
    rank: int | None = None,
    existing: str = "error",
    unfinished: str | None = None,
) -> Any:
    """Fill a replay buffer, or several by name, from a share or (`rank=`) from a checkpoint; the Report,
    by name if several.

    existing: "replace" empties a buffer that holds something; "error" refuses. A buffer whose steps can't be read or
    don't fit is left empty, never with a part of them.
    unfinished: "continue" leaves open trajectories to be gone on with,
    "close" ends them in the buffer (truncated, done).
    Default: as the share was planned, which is "continue" where nothing moves and "close" elsewhere.
    """
    if unfinished is not None:
        common.check_option("unfinished", unfinished, UNFINISHED)
    return common.as_given(objects, live.restore(_buffers(objects, unfinished=unfinished), source, rank, existing))
