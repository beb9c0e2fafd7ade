"""The adapter's verbs; what they promise is written in the door of this room."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from archive.adapters import Report, Saved, common
from archive.adapters.torchrl import extras, samplers, saving, writers
from archive.adapters.torchrl.parts import Parts, held, parts_of
from archive.adapters.torchrl.places import SYSTEM, Given, ours, room_for
from archive.adapters.torchrl.restoring import restore as _restore
from archive.base import UsageError

if TYPE_CHECKING:
    from archive import Writer
    from archive.checkpoint import Checkpoint, Pending
    from archive.write import Buffer

__all__ = ["Report", "capacity", "restore", "save"]


def capacity(objects: Any, checkpoint: Checkpoint, *, num_envs: int | None = None) -> Any:
    """Steps that a buffer will hold of a checkpoint's, for `resharding.plan(capacity=)`; a dict for several by name.

    The storage's size; of a storage of two dimensions that is not in use yet, what TorchRL makes of its size when it
    is: whole rows, so with 3 columns 102 for 100.  num_envs: its columns, if other than in the checkpoint.
    """
    out: dict[str, int] = {}
    for name, parts in _parts(objects).items():
        states = {rank: checkpoint.state(rank, name) for rank in checkpoint.ranks if name in checkpoint.buffers}
        out[name] = room_for(saving.cells_of(parts), ours(states), num_envs)
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
        saving.check_keys(every.values(), traj_key=traj_key, end_key=end_key)
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
    found = saving.append(part, parts, **how)
    columns = saving.columns_of(found)
    columns |= writers.columns_of(parts, found.live) | samplers.columns_of(parts, found.live)
    state: dict[str, Any] = {
        "system": SYSTEM,
        "version": 1,
        "storage": saving.storage_state(parts, found),
        "writer": writers.state_of(parts),
        "extras": extras.state_of(parts, queue),
    }
    state |= {name: samplers.state_of(sampler, parts) for name, sampler in parts.samplers.items()}
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
