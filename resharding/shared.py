"""Shared plans: one rank of a job makes the plan and puts it into the bucket in groups of target ranks; each rank reads
the group that its share is in, and none of the tables that the plan was made from."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from archive.base import (
    ArchiveError,
    CorruptStateError,
    Count,
    DeadlineError,
    Line,
    MisshapenError,
    MissingObjectError,
    Positive,
    Record,
    UsageError,
    cached_property,
    layout,
    logger,
)
from archive.checkpoint import Checkpoint
from archive.log import Place, place
from archive.store import Storage, smallfiles
from resharding import groupplans, groups, terms
from resharding.planner import IGNORE, is_recovered, plan
from resharding.plans import Plan, target_rank
from resharding.share import Share

TIMEOUT_S, POLL_S, MOST_POLL_S = 1800.0, 0.05, 1.0
STEP_IN_S = 5.0  # the wait before the next rank in line makes the plan, longer in a large world


@dataclass(frozen=True, slots=True)
class _SharedText(Record):
    """The object that makes a plan known: the name of its groups, and the first target rank of each. `asked`: the
    commit of the checkpoint that was to be planned; `commit`: of that which was, with the journal beyond it."""

    plan: str
    asked: Count
    commit: Count
    world_size: Positive
    firsts: tuple[Count, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{8}", self.plan):
            raise MisshapenError(f"its plan is {self.plan!r:.40}, not 8 hexadecimal digits")
        edges = (*self.firsts, self.world_size)
        if edges[0] != 0 or any(one >= other for one, other in pairwise(edges)):
            raise MisshapenError("its firsts are not ascending ranks from 0 on")


class SharedPlan:
    """A plan that one rank has made for all. `share(rank)` reads what that target rank needs, and no more; all else
    that a plan tells has `whole()`, which plans anew.

    text: what another rank, or this one, has put into the bucket (None: it is damaged).  make: plans a checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, session: str, world_size: int, text: _SharedText | None, make: Callable[..., Plan]
    ) -> None:
        self.world_size = world_size
        self._asked, self._session, self._text, self._make = checkpoint, session, text, make
        self._groups: dict[int, Plan] = {}

    def __reduce__(self) -> Any:
        return SharedPlan, (self._asked, self._session, self.world_size, self._text, self._make)

    @cached_property
    def _own(self) -> Plan:
        """The plan of this rank alone, where what was shared is gone or damaged."""
        return self._make(self._asked)

    @cached_property
    def _planned(self) -> Plan:
        known = [*self._groups.values(), *([] if self._groups else [self.group_of(0)])]
        group = next((one for one in known if isinstance(one, groupplans.GroupPlan)), None)
        if group is None:
            return self._own
        made = self._make(group.planned, tails=IGNORE)  # the run may have gone on since
        return replace(made, seen=group.seen, origin=group.origin, takes_all=group.takes_all)

    def whole(self) -> Plan:
        """The whole plan, made anew from all tables of the checkpoint that was planned."""
        return self._planned

    def share(self, rank: int | None = None) -> Share:
        """The share of one target rank, which defaults to that of torch.distributed or RANK."""
        rank = target_rank(rank, self.world_size)
        return self.group_of(rank).share(rank)

    def group_of(self, rank: int) -> Plan:
        """The plan of the target ranks in whose group a rank is; the whole plan, if the group is gone or damaged."""
        if self._text is None:
            return self._own
        number = int(np.searchsorted(self._text.firsts, rank, side="right")) - 1
        if number not in self._groups:
            self._groups[number] = self._group(self._text, number)
        return self._groups[number]

    def _group(self, text: _SharedText, number: int) -> Plan:
        first, stop = (*text.firsts, self.world_size)[number : number + 2]
        try:
            return groupplans.read(
                self._asked, layout.plan_key(self._session, text.plan, number), range(first, stop), self
            )
        except (MissingObjectError, CorruptStateError) as e:
            if "_own" not in self.__dict__:
                _warn(e)
            return self._own

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it is of: that with the journal beyond the one that was asked for, if there was one."""
        return self.group_of(0).checkpoint

    def __repr__(self) -> str:
        count = len(self._text.firsts) if self._text else 0
        return f"<SharedPlan {self._asked.name!r} for {self.world_size} ranks, in {count} groups>"


def _warn(damage: ArchiveError) -> None:
    logger.warning("this rank plans by itself, as the plan that it was to share cannot be read: %s", damage)


def shared_plan(
    checkpoint: Checkpoint,
    world_size: int | None = None,
    *,
    rank: int | None = None,
    session: str | None = None,
    **options: Any,
) -> SharedPlan:
    """The plan that `resharding.plan` makes, made once for all ranks of this job, which call this alike.

    One rank plans, and puts what each needs into the bucket; the others wait, and read their part of it. So a rank of a
    job of thousands reads megabytes of tables, and not all of them. It is the same plan that each would have made.
    rank, world_size: default to those of torch.distributed, or of RANK and WORLD_SIZE.  session: the one that will
    go on from it, as its writers are told; needed where neither a process group nor torchrun or Slurm names it.
    options: those of `resharding.plan`.
    """
    if checkpoint is None:
        raise UsageError("there is no checkpoint to plan: arc.checkpoints.latest is None until a job has made one")
    who = place(rank, world_size, checkpoint.run, session)
    make = partial(plan, world_size=who.world_size, session=who.session, **options)
    key = layout.shared_plan_key(who.session, terms.digest_of(who.world_size, options))
    try:
        text = _awaited(checkpoint, who, key, make)
    except CorruptStateError as e:
        _warn(e)
        return SharedPlan(checkpoint, who.session, who.world_size, None, make)
    if text.asked != checkpoint.number and not is_recovered(text.commit, checkpoint):
        raise UsageError(
            f"rank {who.rank} plans the checkpoint of commit {checkpoint.number}, and another rank of session "
            f"{who.session!r} planned that of commit {text.asked}: have all ranks take the same checkpoint, and give "
            "each start of the job a session name of its own"
        )
    return SharedPlan(checkpoint, who.session, who.world_size, text, make)


def _awaited(checkpoint: Checkpoint, who: Place, key: str, make: Callable[..., Plan]) -> _SharedText:
    """The text at `key`, which another rank puts there, or this one when its turn has come."""
    storage, line = checkpoint.storage, Line(who.rank, who.world_size, STEP_IN_S)
    wait = line.wait(TIMEOUT_S, POLL_S, MOST_POLL_S)
    while (text := _found(storage, key, who.world_size)) is None:
        if line.turn == 0 or (line.is_due(wait.waited_s) and line.steps_in(wait.waited_s, possible=True)):
            return _published(make(checkpoint), storage, who.session, key, checkpoint.number)
        if wait.over:
            raise DeadlineError(
                f"rank 0 of session {who.session!r} has not made the plan of checkpoint {checkpoint.name!r} after "
                f"{wait.waited_s:.0f} s: check that it runs, and that all ranks plan with the same arguments"
            )
        wait.pause()
    return text


def _found(storage: Storage, key: str, world_size: int) -> _SharedText | None:
    with suppress(MissingObjectError):
        text = smallfiles.read_small(storage, key, _SharedText, CorruptStateError)
        if text.world_size != world_size:
            raise CorruptStateError(f"{storage.full_url(key)} is for {text.world_size} ranks, not {world_size}")
        return text
    return None


def _published(made: Plan, storage: Storage, session: str, key: str, asked: int) -> _SharedText:
    """Put a plan into the bucket: its groups, and then what makes it known. Another rank's counts, if it was first."""
    name = secrets.token_hex(4)
    firsts = tuple(groups.put(made, storage, session, name))
    text = _SharedText(name, asked, made.checkpoint.number, made.world_size, firsts)
    return text if smallfiles.create_small(storage, key, text) else _found(storage, key, made.world_size) or text
