"""A plan carried out beforehand: another archive with the same checkpoint, saved by as many ranks as will resume."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from archive import Archive
from archive.base import AlreadyExistsError, UsageError
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.manifest import new_session
from resharding.planning import Plan
from resharding.sharing import Share
from resharding.transfer.destination import Destination, How
from resharding.transfer.merging import filter

if TYPE_CHECKING:
    from archive import Writer
    from archive.checkpoint import Pending


def reshard(source: Archive, plan: Plan, to: Any, **how: Unpack[How]) -> Checkpoint:
    """Save the plan's shares as a checkpoint of its world size in another archive, which is made if it is not there.

    Episodes, columns, attributes and progress are carried over. State can't be divided: where the plan moves anything,
    each rank has that of all source ranks, as {"source_states": {rank: state}}.  how: the options of `merge`.
    """
    checkpoint = plan.checkpoint
    if not checkpoint.replay_saved:
        raise UsageError(f"checkpoint {checkpoint.name!r} was saved without its buffers: there is nothing to reshard")
    present = Destination(to, **how).present()
    if present is not None and checkpoint.run in present.head.runs:
        raise AlreadyExistsError(
            f"{present.url} has a run {checkpoint.run!r} already, which this would end; give an archive of its own"
        )
    ids = checkpoint.episodes.table["episode_id"].to_pylist()
    target = filter(source, to, episode_id=ids, **how)
    session = new_session()
    with ExitStack() as stack:
        shares = [plan.share(rank) for rank in range(plan.world_size)]
        writers = [stack.enter_context(target.writer(resume=share, session=session)) for share in shares]
        pending = [_checkpoint(w, share) for w, share in zip(writers, shares, strict=True)]
        made = [p.result() for p in pending]
    return made[0]


def _checkpoint(writer: Writer, share: Share) -> Pending:
    given = {name: _carried(share, name) for name in share.buffers}
    main = given.pop(MAIN_BUFFER, {})
    checkpoint = share.plan.checkpoint
    return writer.checkpoint(
        checkpoint.step,
        checkpoint.name,
        progress=checkpoint.progress,
        metrics=checkpoint.metrics,
        buffers=given,
        **main,
    )


def _carried(share: Share, name: str) -> dict[str, Any]:
    part = share.buffer(name)
    state = part.state
    if not share.plan.is_identity:
        known = {rank: state for rank, state in part.source_states.items() if state is not None}
        state = {"source_states": known} if known else None
    return {"columns": dict(part.columns), "attributes": part.attributes, "state": state}
