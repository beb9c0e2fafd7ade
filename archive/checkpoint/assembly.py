"""Assembly of the ranks' staged parts into one commit: all of them or nothing. Any rank may do it; it is done once.

One rank looks whether all have staged, and commits: rank 0 or, where that has died, the next one in line
(`archive.base.Line`). All others ask for the commit alone, once a second at most in a large world. So a checkpoint of N
ranks takes requests in proportion to N, however long it waits for a rank. Parts are taken by name; a listing only
shows whom to ask, and tells people who is missing. No rank is declared missing by a clock: the wait ends with an error
that names those that have not staged, and may be taken up again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil

from archive.base import (
    CheckpointError,
    Line,
    MissingObjectError,
    RanksMissingError,
    at_once,
    layout,
    taken_in_order,
)
from archive.checkpoint.joint import Joint, change_of
from archive.log import Commit, CommitLog, Recovered
from archive.saved import Part
from archive.store import Storage
from archive.store.drivers import PAGE

FIRST_POLL_S, MAX_POLL_S = 0.02, 1.0
MAX_CONCURRENT = 32
STEP_IN_S = 1.0  # the wait before the next rank in line completes a checkpoint, longer in a large world
PARTIAL_STEP_IN_S = 0.5  # the same when the process ends, and time is short
SAME = ("step", "world_size", "run", "replay_saved")  # in the parts of one checkpoint


def join(
    log: CommitLog,
    joint: Joint,
    staged: dict[int, Part],
    *,
    timeout_s: float,
    given_up: Callable[[], bool],
    ending: Callable[[], bool],
    absent: Callable[[Sequence[int], float, bool], None],
    otherwise: Callable[[], bool],
) -> Commit:
    """The commit of this checkpoint, once all ranks have staged it. `given_up` ends the wait early.

    staged: the parts that are known, this rank's own for one; others that are found are added.

    `ending()` is true if the process ends, and its time for waiting is over: the staged parts are then committed as
    partial.  `absent` is called, after seconds and then now and then, with the ranks that have not staged, and True on
    the one rank that is to say so for all. `otherwise()` looks at something else, if it is time; True if it did: the
    next look is put off then, in a large world by a second, as a rank asks for one thing a second.
    """
    line = Line(joint.place.rank, joint.place.world_size, STEP_IN_S)
    wait, looks = line.wait(timeout_s, FIRST_POLL_S, MAX_POLL_S), count()
    of_list = ceil(joint.place.world_size / PAGE)  # requests, each of which is followed by a pause
    while True:  # one look at a time
        requests = 1
        if wait.due() and line.looks_around:
            missing, requests = _absent(log.storage, joint), of_list
            absent(missing, wait.waited_s, line.leads({*range(joint.place.world_size)}.difference(missing)))
        elif line.is_due(wait.waited_s) and next(looks) % 2 == 0:
            steps_in, requests = line.steps_in(wait.waited_s, all_listed(log.storage, joint)), of_list
            if steps_in and not ending() and all_staged(log.storage, joint, staged, look_at_all=True):
                return commit(log, joint, staged)
        elif line.turn == 0 and next(looks) % 4 < 3:
            if all_staged(log.storage, joint, staged):
                return commit(log, joint, staged)
        elif found := _committed(log, joint):
            return found
        if ending():
            return commit_present(log, joint, staged, hurried=True)
        if wait.over or given_up():
            return _at_last(log, joint, staged, line, wait.waited_s)
        for _ in range(requests):
            wait.pause()
            if otherwise():
                wait.put_off()


def _at_last(log: CommitLog, joint: Joint, staged: dict[int, Part], line: Line, waited_s: float) -> Commit:
    """The commit of this checkpoint, if nothing else is missing when the time is over; else the error that names the
    ranks that have not staged. Of very many ranks only the first in line commit it then."""
    missing = [rank for rank in _absent(log.storage, joint) if rank not in staged]
    if missing and not _take(log.storage, joint, staged, missing[0]):
        raise _missing(joint, missing, waited_s)
    if not line.looks_around:
        raise RanksMissingError(
            f"checkpoint {joint.name!r} of session {joint.place.session!r} is not committed after {waited_s:.0f} s, "
            "though all ranks have staged: those that commit it may have died. Nothing is lost: see to the first ranks "
            "of the job, or call result() again to wait longer"
        )
    if not all_staged(log.storage, joint, staged, look_at_all=True):
        raise _missing(joint, [rank for rank in range(joint.place.world_size) if rank not in staged], waited_s)
    return commit(log, joint, staged)


def commit_present(log: CommitLog, joint: Joint, staged: dict[int, Part], *, hurried: bool = False) -> Commit:
    """Commit with the ranks that have staged by now, as partial if some are missing; the commit of another rank serves
    as well, if this rank is in it. Parts that describe another checkpoint than this rank's are left to their ranks.

    Of ranks that are there at once each gives those before it in line the time to do it, but for those that are in a
    partial commit already, as they have ended. hurried: little time is left.
    """
    place = joint.place
    line = Line(place.rank, place.world_size, PARTIAL_STEP_IN_S if hurried else STEP_IN_S)
    wait, present = line.wait(None, FIRST_POLL_S, MAX_POLL_S), {*staged, *_others_staged(log.storage, joint)}
    partials: dict[int, Commit] = {}
    for looks in count():  # noqa: B007
        if found := _committed(log, joint) or _partial_with(log, joint, present, partials):
            return found
        before = line.before(present - {rank for made in partials.values() for rank in _ranks_of(made)})
        due_s = line.in_haste_s(before) if hurried else before * line.step_of(len(present))
        if wait.waited_s >= due_s:
            break
        wait.pause()
    if looks:
        present |= _others_staged(log.storage, joint)
    at_once(lambda rank: _take(log.storage, joint, staged, rank), sorted(present - staged.keys()), MAX_CONCURRENT)
    agreeing = _agreeing(staged, place.rank)
    if len(agreeing) == place.world_size:
        return commit(log, joint, agreeing)
    if found := _committed(log, joint) or _partial_with(log, joint, present, partials):
        return found
    try:
        return commit(log, joint, agreeing, partial=True)
    except CheckpointError:
        if found := _committed(log, joint):  # another rank has made it whole meanwhile, with this rank's part
            return found
        raise


def _partial_with(log: CommitLog, joint: Joint, ranks: Collection[int], known: dict[int, Commit]) -> Commit | None:
    """A partial commit, by one of these ranks, that has this rank's part. Those of all of them are added to `known`."""
    for rank in sorted(set(ranks) - known.keys()):
        if made := log.find(f"{joint.transaction}/partial-{rank}"):
            known[rank] = made
    return next((made for made in known.values() if joint.place.rank in _ranks_of(made)), None)


def _ranks_of(made: Commit) -> set[int]:
    """The ranks whose parts are in this commit of a checkpoint."""
    return set() if made.checkpoint is None else {part.rank for part in made.checkpoint.ranks}


def _others_staged(storage: Storage, joint: Joint) -> set[int]:
    """The ranks that have staged, by one listing: good enough to tell people, and to see whom to ask, not to decide."""
    place = joint.place
    keys = [layout.state_key(place.session, joint.name, rank) for rank in range(place.world_size)]
    names = set(storage.list(keys[0].rpartition("/")[0]))
    return {rank for rank, key in enumerate(keys) if key.rpartition("/")[2] in names}


def _absent(storage: Storage, joint: Joint) -> list[int]:
    """The ranks that have not staged, likewise."""
    return sorted(set(range(joint.place.world_size)) - _others_staged(storage, joint))


def all_listed(storage: Storage, joint: Joint) -> bool:
    """True if a listing has the parts of all ranks."""
    return not _absent(storage, joint)


def _committed(log: CommitLog, joint: Joint) -> Commit | None:
    if joint.place.world_size == 1:
        return None
    found = log.look_for(joint.transaction)
    joint.place.newest(log.head)
    return found


def all_staged(storage: Storage, joint: Joint, staged: dict[int, Part], *, look_at_all: bool = False) -> bool:
    """Look for parts that are not in `staged` yet; True if all ranks are there now. A missing part ends the look,
    unless all are to be looked at: so waiting costs few requests for each look."""
    world, take = range(joint.place.world_size), partial(_take, storage, joint)
    return taken_in_order(world, staged, take, MAX_CONCURRENT, look_at_all=look_at_all)


def _take(storage: Storage, joint: Joint, staged: dict[int, Part], rank: int) -> bool:
    """Take a rank's part into `staged`; False if it is not there."""
    file = Part(storage, layout.state_key(joint.place.session, joint.name, rank))
    try:
        file.index  # noqa: B018  # read it: whether it is there
    except MissingObjectError:
        return False
    staged[rank] = file
    return True


def _missing(joint: Joint, absent: Sequence[int], waited_s: float) -> RanksMissingError:
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
) -> Commit:
    """Commit, once, a checkpoint that was made of journals' tails on behalf of these ranks. `check(parent)` raises if
    it no longer holds."""
    taken = sorted((rank, tail.next) for rank, tail in recovered.tails.items())
    about = hashlib.sha256(json.dumps([recovered.base, taken]).encode()).hexdigest()[:16]
    change = change_of(joint, parts, [check], recovered=recovered)
    return log.commit(f"{joint.place.session}/recover/{about}", change)


def _agreeing(staged: Mapping[int, Part], own: int) -> dict[int, Part]:
    """The parts that describe the same checkpoint as that of this rank: where ranks crash within a second, one name may
    be that of several."""
    indexes = {rank: staged[rank].index for rank in (own, *sorted(staged))}
    origin = next((one.resumed_from for one in indexes.values() if one.resumed_from is not None), None)
    return {
        rank: staged[rank]
        for rank, one in sorted(indexes.items())
        if all(getattr(one, key) == getattr(indexes[own], key) for key in SAME) and one.resumed_from in (None, origin)
    }


def _check_agree(joint: Joint, parts: Sequence[Part]) -> None:
    """Refuse parts of ranks that describe different checkpoints."""
    for key in SAME:
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
