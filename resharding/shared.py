"""Shared plans: one rank of a job makes the plan and puts it into the bucket in groups of target ranks; each rank reads
the group that its share is in, and none of the tables that the plan was made from."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from archive.base import (
    CorruptStateError,
    Count,
    DeadlineError,
    Line,
    MissingObjectError,
    Positive,
    Record,
    UsageError,
    cached_property,
    layout,
)
from archive.checkpoint import Checkpoint
from archive.log import place
from archive.store import Storage, smallfiles
from resharding import groups
from resharding.planner import plan
from resharding.plans import Plan
from resharding.share import Share

TIMEOUT_S, POLL_S, MOST_POLL_S = 1800.0, 0.05, 1.0
STEP_IN_S = 5.0  # the wait before the next rank in line makes the plan, longer in a large world


@dataclass(frozen=True, slots=True)
class _SharedText(Record):
    """The object that makes a plan known: the name of its groups, and the first target rank of each. `asked`: the
    commit of the checkpoint that was to be planned."""

    plan: str
    asked: Count
    world_size: Positive
    firsts: tuple[Count, ...]


class SharedPlan:
    """A plan that one rank has made for all. `share(rank)` reads what that target rank needs, and no more; all else
    that a plan tells has `whole()`, which plans anew."""

    def __init__(self, checkpoint: Checkpoint, session: str, text: _SharedText, whole: Callable[[], Plan]) -> None:
        self._asked, self._session, self._text, self._whole = checkpoint, session, text, whole
        self._groups: dict[int, Plan] = {}

    def __reduce__(self) -> Any:
        return SharedPlan, (self._asked, self._session, self._text, self._whole)

    @property
    def world_size(self) -> int:
        return self._text.world_size

    @cached_property
    def _planned(self) -> Plan:
        return self._whole()

    def whole(self) -> Plan:
        """The whole plan, made anew from all tables, as each rank would have made it."""
        return self._planned

    def share(self, rank: int | None = None) -> Share:
        """The share of one target rank, which defaults to that of torch.distributed or RANK."""
        rank = place(rank, self.world_size, "main", "-").rank if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not one of the plan's {self.world_size}; ranks count from 0")
        return self.group_of(rank).share(rank)

    def group_of(self, rank: int) -> Plan:
        """The plan of the target ranks in whose group a rank is."""
        number = int(np.searchsorted(self._text.firsts, rank, side="right")) - 1
        if number not in self._groups:
            self._groups[number] = groups.read(
                self._asked, layout.plan_key(self._session, self._text.plan, number), self.whole
            )
        return self._groups[number]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it is of: that with the journal beyond the one that was asked for, if there was one."""
        return self.group_of(0).checkpoint

    def __repr__(self) -> str:
        return f"<SharedPlan {self._asked.name!r} for {self.world_size} ranks, in {len(self._text.firsts)} groups>"


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
    make = partial(plan, checkpoint, who.world_size, session=who.session, **options)
    terms = json.dumps([who.world_size, options], sort_keys=True, default=str)
    storage, key = (
        checkpoint.storage,
        layout.shared_plan_key(who.session, hashlib.sha256(terms.encode()).hexdigest()[:16]),
    )
    line = Line(who.rank, who.world_size, STEP_IN_S)
    wait = line.wait(TIMEOUT_S, POLL_S, MOST_POLL_S)
    while (text := _found(storage, key)) is None:
        if line.turn == 0 or (line.is_due(wait.waited_s) and line.steps_in(wait.waited_s, possible=True)):
            text = _published(make(), storage, who.session, key, checkpoint.number)
            break
        if wait.over:
            raise DeadlineError(
                f"rank 0 of session {who.session!r} has not made the plan of checkpoint {checkpoint.name!r} after "
                f"{wait.waited_s:.0f} s: check that it runs, and that all ranks plan with the same arguments"
            )
        wait.pause()
    if text.asked != checkpoint.number:
        raise UsageError(
            f"rank {who.rank} plans the checkpoint of commit {checkpoint.number}, and another rank of session "
            f"{who.session!r} planned that of commit {text.asked}: have all ranks take the same checkpoint, and give "
            "each start of the job a session name of its own"
        )
    return SharedPlan(checkpoint, who.session, text, make)


def _found(storage: Storage, key: str) -> _SharedText | None:
    with suppress(MissingObjectError):
        return smallfiles.read_small(storage, key, _SharedText, CorruptStateError)
    return None


def _published(made: Plan, storage: Storage, session: str, key: str, asked: int) -> _SharedText:
    """Put a plan into the bucket: its groups, and then what makes it known. Another rank's counts, if it was first."""
    name = secrets.token_hex(4)
    text = _SharedText(name, asked, made.world_size, tuple(groups.put(made, storage, session, name)))
    return text if smallfiles.create_small(storage, key, text) else _found(storage, key) or text
