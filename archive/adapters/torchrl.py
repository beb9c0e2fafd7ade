"""TorchRL's replay buffers: saved as trajectories, restored exactly where nothing moved, dealt out anew where it did.

    def train(url, rb, batches):
        arc, share = archive.open(url, create=True), None
        if ck := arc.checkpoints.of("main").latest:  # the run's own: an archive may hold several
            share = resharding.plan(ck, capacity=torchrl.capacity(rb, ck)).share()
            print(torchrl.restore(rb, share))  # or {"replay": rb, "demo": demo}; here and below
        with arc.writer(resume=share) as w:
            for step, batch in enumerate(batches, start=ck.step + 1 if ck else 0):
                rb.extend(batch)
                learn(rb.sample())
                torchrl.save(rb, w, step=step)  # in the background; errors surface at the next call

| of the buffer | saved as | back, nothing moved | other ranks or capacities |
|---|---|---|---|
| items of tensor storages and of lists | steps, ragged where they differ | as they were | oldest first |
| trajectories (1) | episodes, a stream a column | as they were | ids renumbered; what stops is ended: truncated, done |
| slot of each step | column `slot` | as it was | anew, "index" with it |
| write cursor, write count, generations | state | as they were | behind the newest step |
| heap of the best items | columns `heap_rank`, `heap_place` | as it was | heap of the ranks |
| priorities | column `priority`: float64 leaves | trees rebuilt | trees rebuilt, the maximum of the sources |
| remaining permutation | column `remaining` | as it was | used items stay used, the sources take turns |
| times an item was drawn (consuming) | column `uses` | as it was | as it was |
| random generator, batch size | state | as they were | seeded by commit, world size and rank |
| transforms | state | as they were | those of the first rank |
| prefetched batches | state | as they were | dropped, counted |

(1) Told apart by `traj_key`, else the collector's ids, else `end_key`; without either, steps stand on their own.
Steps that fill no whole row of a 2-d storage are dropped and counted.
Not saved: hooks, collate functions, the process's own random generators (give the buffer a generator).
Only what changed since the last save is written: a tracker on the storage is told of each write; where
something else wrote (another process, `rb[i] = x`, `empty()`), digests tell which rows differ. What is changed behind
the storage's back (in place, through a view) is found with `verify=True`; so is what samplers set on the items of a
LazyStackStorage, whose samples are its items.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from archive.adapters import _torchrl_extras, _torchrl_samplers, _torchrl_saving, _torchrl_writers, common
from archive.adapters._torchrl_dumps import ArchiveCheckpointer
from archive.adapters._torchrl_parts import Parts, held, parts_of
from archive.adapters._torchrl_places import SYSTEM, Given, ours, room_for
from archive.adapters._torchrl_restoring import restore as _restore
from archive.adapters.common import Report, Saved
from archive.errors import UsageError

if TYPE_CHECKING:
    from archive.buffer import Buffer
    from archive.checkpoints import Checkpoint
    from archive.pending import Pending
    from archive.writer import Writer

__all__ = ["ArchiveCheckpointer", "Report", "capacity", "restore", "save"]


def capacity(objects: Any, checkpoint: Checkpoint, *, num_envs: int | None = None) -> Any:
    """Steps that a buffer will hold of a checkpoint's, for `resharding.plan(capacity=)`; a dict for several by name.

    The storage's size; of a storage of two dimensions that is not in use yet, what TorchRL makes of its size when it
    is: whole rows, so with 3 columns 102 for 100.  num_envs: its columns, if other than in the checkpoint.
    """
    out: dict[str, int] = {}
    for name, parts in _parts(objects).items():
        states = {rank: checkpoint.state(rank, name) for rank in checkpoint.ranks if name in checkpoint.buffers}
        out[name] = room_for(_torchrl_saving.cells_of(parts), ours(states), num_envs)
    return out if isinstance(objects, dict) else next(iter(out.values()))


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
    every = _parts(objects)
    wait = bool(options.pop("wait", False))
    with ExitStack() as still:
        queues = {name: still.enter_context(held(parts.rb)) for name, parts in every.items()}
        _torchrl_saving.check_keys(every.values(), traj_key=traj_key, end_key=end_key)
        saved: dict[str, Saved] = {}
        if options.get("save_replay", True):
            for name, parts in every.items():
                part = common.part_of(writer, name)
                saved[name] = _saved(part, parts, queues[name], verify=verify, traj_key=traj_key, end_key=end_key)
        pending = common.checkpoint(writer, step, saved, **options)
    if wait:
        pending.result()
    return pending


def _parts(objects: Any) -> dict[str, Parts]:
    every = {name: parts_of(rb, name) for name, rb in common.several(objects).items()}
    if len({id(parts.storage) for parts in every.values()}) < len(every):
        raise UsageError("two of the buffers share one storage; give it under one name")
    return every


def _saved(part: Buffer, parts: Parts, queue: Any, **how: Any) -> Saved:
    found = _torchrl_saving.append(part, parts, **how)
    columns = _torchrl_saving.columns_of(found)
    columns |= _torchrl_writers.columns_of(parts, found.live) | _torchrl_samplers.columns_of(parts, found.live)
    state: dict[str, Any] = {
        "system": SYSTEM,
        "version": 1,
        "storage": _torchrl_saving.storage_state(parts, found),
        "writer": _torchrl_writers.state_of(parts),
        "extras": _torchrl_extras.state_of(parts, queue),
    }
    state |= {name: _torchrl_samplers.state_of(sampler, parts) for name, sampler in parts.samplers.items()}
    return Saved(columns, {"trajectory": found.ids} if found.ids else {}, state)


def restore(
    objects: Any,
    source: Any,
    *,
    rank: int | None = None,
    existing: str = "error",
    unfinished: str | None = None,
) -> Any:
    """Fill a replay buffer, or several by name, from a share or (`rank=`) from a checkpoint; the Report, by name if several.

    existing: "replace" empties a buffer that holds something; "error" refuses. A buffer whose steps can't be read or don't
    fit is left empty, never with a part of them.
    unfinished: "continue" leaves open trajectories to be gone on with, "close" ends them in the buffer (truncated, done).
    Default: as the share was planned, which is "continue" where nothing moves and "close" elsewhere.
    """
    share = common.share_of(source, rank)
    common.check_option("existing", existing, common.EXISTING)
    if unfinished is not None:
        common.check_option("unfinished", unfinished, common.UNFINISHED)
    reports: dict[str, Report] = {}
    every = _parts(objects)
    shares = {name: common.share_buffer(share, name) for name in every}
    for name, parts in every.items():
        common.check_room(existing, len(parts.storage), f"buffer {name!r}")
    for name, parts in every.items():
        how = unfinished or share.plan.rules[name].unfinished
        given = Given(share, shares[name], how, share.rank)
        if unfinished == "drop" and given.layout.open.any():
            raise UsageError(
                f"buffer {name!r} has unfinished trajectories, and only a plan drops: resharding.plan(..., unfinished='drop')"
            )
        reports[name] = _restore(parts, given, existing)
    return reports if isinstance(objects, dict) else next(iter(reports.values()))
