"""Save and restore of TorchRL's replay buffers."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import UNFINISHED, Report, Saved, common
from archive.adapters.torchrl import extras, saving, writers
from archive.adapters.torchrl.episodes import Keys
from archive.adapters.torchrl.parts import Parts, held, parts_of
from archive.adapters.torchrl.places import SYSTEM, Given, room_for
from archive.adapters.torchrl.restoring import restore as _restore
from archive.adapters.torchrl.samplers import saved_samplers
from archive.base import UsageError
from archive.checkpoint import Checkpoint, Pending
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer


def capacity(objects: Any, checkpoint: Checkpoint, *, num_envs: int | None = None) -> Any:
    """Steps that a buffer will hold of a checkpoint's, for `resharding.plan(capacity=)`; a dict for several by name.

    The storage's size; of a storage of two dimensions that is not in use yet, what TorchRL makes of its size when it
    is: whole rows, so with 3 columns 102 for 100.  num_envs: its columns, if other than in the checkpoint.
    """
    out: dict[str, int] = {}
    for name, parts in _parts(objects).items():
        states = {rank: checkpoint.state(rank, name) for rank in checkpoint.ranks if name in checkpoint.buffers}
        out[name] = room_for(saving.cells_of(parts), common.saved_by(SYSTEM, states), num_envs)
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
    every, asked = _parts(objects), Keys.asked(traj_key, end_key)
    wait = bool(options.pop("wait", False))
    with ExitStack() as still:
        queues = {name: still.enter_context(held(parts.rb)) for name, parts in every.items()}
        saving.check_keys(every.values(), asked)
        saved: dict[str, Saved] = {}
        for name, parts in every.items() if options.get("save_replay", True) else ():
            saved[name] = common.appended(writer, name, partial(_appended, parts, asked, queues[name], verify))
        pending = common.checkpoint(writer, step, saved, **options)
    if wait:
        pending.result()
    return pending


def _appended(parts: Parts, asked: Keys, queue: Any, verify: bool, part: Buffer) -> Saved:
    return _saved(parts, saving.append(part, parts, asked, verify=verify), queue)


def _parts(objects: Any) -> dict[str, Parts]:
    every = {name: parts_of(rb, name) for name, rb in common.several(objects).items()}
    if len({id(parts.storage) for parts in every.values()}) < len(every):
        raise UsageError("two of the buffers share one storage; give it under one name")
    return every


def _saved(parts: Parts, found: saving.Appended, queue: Any) -> Saved:
    columns = saving.columns_of(found) | writers.columns_of(parts, found.live)
    state: dict[str, Any] = {
        "system": SYSTEM,
        "version": 1,
        "storage": saving.storage_state(parts, found),
        "writer": writers.state_of(parts),
        "extras": extras.state_of(parts, queue),
    }
    for name, sampler in saved_samplers(parts).items():
        columns |= sampler.columns(found.live)
        state[name] = sampler.state()
    return Saved(columns, {"trajectory": found.ids} if found.ids else {}, state)


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
    share, every = common.exact_share(source, rank), _parts(objects)
    if unfinished is not None:
        common.check_option("unfinished", unfinished, UNFINISHED)
    shares = {name: common.share_buffer(share, name) for name in every}
    for name, parts in every.items():
        common.check_room(existing, len(parts.storage), f"buffer {name!r}")
    reports: dict[str, Report] = {}
    for name, parts in every.items():
        given = Given(share, shares[name], unfinished or shares[name].rules.unfinished)
        if unfinished == "drop" and given.layout.open.any():
            raise UsageError(
                f"buffer {name!r} has unfinished trajectories, and only a plan drops: resharding.plan(..., "
                "unfinished='drop')"
            )
        reports[name] = _restore(parts, given)
    return common.as_given(objects, reports)
