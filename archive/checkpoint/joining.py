"""Joining what the ranks staged into one commit: all of them or nothing. Any rank may do it; it is done once.

Rank 0 looks at once and often; the others first look whether it has been committed, and step in after a pause in
proportion to their rank. Whether all have staged is asked by name, never by a listing. No rank is declared missing by
a clock: the wait ends with an error that names those that have not staged, and may be taken up again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from archive.base import CheckpointError, MissingObjectError, RanksMissingError, Wait, at_once, layout
from archive.checkpoint.drafting import Joint, change_of
from archive.manifest import Commit, CommitLog, Recovered
from archive.saved import Part
from archive.store import Storage

FIRST_POLL_S = 0.02
MAX_POLL_S = 1.0
MAX_CONCURRENT = 16
PARTIAL_STEP_IN_S, MAX_PARTIAL_STEPS = 0.5, 6  # the same where the process ends, and there is little time
STEP_IN_S = 1.0  # what each higher rank waits longer before it completes a checkpoint itself


def join(
    log: CommitLog, joint: Joint, staged: dict[int, Part], *, timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
    ending: Callable[[float], bool] = lambda grace_s: False,
    absent: Callable[[Sequence[int], float], None] = lambda ranks, waited_s: None,
) -> Commit:  # fmt: skip
    """The commit of this checkpoint, once all ranks have staged it. `given_up` ends the wait early.

    staged: the parts that are known, this rank's own for one; others that are found are added.

    `ending(grace_s)` says that the process ends, and that its time for waiting was over so long ago: what is there by
    then is committed as partial.  `absent` is called, after seconds and then now and then,
    with the ranks that have not staged.
    """
    wait = Wait(timeout_s, FIRST_POLL_S, MAX_POLL_S)
    last_grace_s = PARTIAL_STEP_IN_S * min(joint.place.rank, MAX_PARTIAL_STEPS)
    while True:
        if found := _committed(log, joint):
            return found
        if wait.waited_s >= STEP_IN_S * joint.place.rank and all_staged(log.storage, joint, staged):
            return commit(log, joint, staged)
        if ending(last_grace_s):
            return commit_present(log, joint, staged)
        if wait.over or given_up():
            if not all_staged(log.storage, joint, staged, look_at_all=True):
                raise _missing(joint, staged, wait.waited_s)
            return commit(log, joint, staged)
        if wait.due():
            absent(_absent(log.storage, joint), wait.waited_s)
        wait.pause()


def commit_present(log: CommitLog, joint: Joint, staged: dict[int, Part]) -> Commit:
    """Commit with the ranks that have staged by now, as partial if that is not all; another rank's such commit serves
    as well, if this rank is in it."""
    whole = all_staged(log.storage, joint, staged, look_at_all=True)
    if not whole:
        log.catch_up()
        for rank in range(joint.place.rank):
            made = log.find(f"{joint.transaction}/partial-{rank}")
            if made and made.checkpoint and joint.place.rank in [part.rank for part in made.checkpoint.ranks]:
                return made
    return commit(log, joint, staged, partial=not whole)


def _absent(storage: Storage, joint: Joint) -> list[int]:
    """Who has not staged, by one listing: good enough to tell people, not to decide by."""
    place = joint.place
    keys = [layout.state_key(place.session, joint.name, rank) for rank in range(place.world_size)]
    folder = keys[0].rpartition("/")[0]
    names = set(storage.list(folder))
    return [rank for rank, key in enumerate(keys) if key.rpartition("/")[2] not in names]


def _committed(log: CommitLog, joint: Joint) -> Commit | None:
    if joint.place.world_size == 1:
        return None
    joint.place.newest(log.catch_up())
    return log.find(joint.transaction)


def all_staged(storage: Storage, joint: Joint, staged: dict[int, Part], *, look_at_all: bool = False) -> bool:
    """Look for those that are not in `staged` yet; whether all ranks are now.

    The first that is absent ends the look, unless all are to be looked at: so waiting costs a request a look.
    """

    def look(rank: int) -> None:
        file = Part(storage, layout.state_key(joint.place.session, joint.name, rank))
        with suppress(MissingObjectError):
            file.index  # noqa: B018  # read it: whether it is there
            staged[rank] = file

    absent = [rank for rank in range(joint.place.world_size) if rank not in staged]
    if absent and not look_at_all:
        look(absent[0])
        if absent.pop(0) not in staged:
            return False
    at_once(look, absent, MAX_CONCURRENT)
    return len(staged) == joint.place.world_size


def _missing(joint: Joint, staged: Mapping[int, Part], waited_s: float) -> RanksMissingError:
    absent = [r for r in range(joint.place.world_size) if r not in staged]
    return RanksMissingError(
        f"checkpoint {joint.name!r} of session {joint.place.session!r} is not whole after {waited_s:.0f} s: rank "
        f"{', '.join(map(str, absent))} of {joint.place.world_size} has not staged; nothing was committed and nothing "
        "is lost. See to these ranks, or call result() again to wait longer"
    )


def commit(log: CommitLog, joint: Joint, staged: Mapping[int, Part], *, partial: bool = False) -> Commit:
    """Commit what these ranks staged."""
    parts = [staged[r] for r in sorted(staged)]
    _check_agree(joint, parts)
    if len(parts) > 1:
        at_once(lambda part: part.rows_held, parts, MAX_CONCURRENT)
    key = joint.transaction + (f"/partial-{joint.place.rank}" if partial else "")
    joint = replace(joint, ordinal=min(f.index.ordinal for f in parts))  # ranks may have counted apart
    return log.commit(key, change_of(joint, parts, [], partial=partial))


def commit_recovered(
    log: CommitLog, joint: Joint, parts: Sequence[Part], recovered: Recovered, check: Callable[[Commit], None]
) -> Commit:  # fmt: skip
    """Commit, once, a checkpoint that was made of tails of journals on behalf of these ranks. `check(parent)` raises if
    it no longer holds."""
    taken = sorted((rank, tail.next) for rank, tail in recovered.tails.items())
    about = hashlib.sha256(json.dumps([recovered.base, taken]).encode()).hexdigest()[:16]
    change = change_of(joint, parts, [check], recovered=recovered)
    return log.commit(f"{joint.place.session}/recover/{about}", change)


def _check_agree(joint: Joint, parts: Sequence[Part]) -> None:
    """All ranks must mean the same checkpoint."""
    for key in ("step", "world_size", "run", "replay_saved"):
        values = {f.index.rank: getattr(f.index, key) for f in parts}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"the ranks do not agree on the {key} of checkpoint {joint.name!r}: {values}; nothing was committed"
            )
    went_on = {f.index.rank: f.index.resumed_from for f in parts if f.index.resumed_from is not None}
    if len(set(went_on.values())) > 1:
        raise CheckpointError(
            f"the ranks went on from different checkpoints (rank: commit): {went_on}, so checkpoint {joint.name!r} "
            "would lose what others had, or have it twice; nothing was committed: load the same checkpoint on all ranks"
        )
