"""A round of a request for a checkpoint, through the bucket: each rank answers once, and one says for all at which call
they act.

The agreement is a create-only object. So ranks agree on one, whichever of them says it, and however many try. Ranks of
a process that ends do not wait for all answers: what they say then is an agreement in haste, and says so. Who reads it
knows that some ranks may never come, and that the others wait for nobody much longer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from logging import DEBUG, WARNING
from math import ceil

from archive.base import (
    CorruptStateError,
    Line,
    MissingObjectError,
    RanksMissingError,
    Record,
    StorageError,
    UsageError,
    at_once,
    layout,
    logger,
    ranks,
    shutdown,
    taken_in_order,
)
from archive.log import Place
from archive.store import Storage, smallfiles
from archive.store.drivers import PAGE

AGREE_TIMEOUT_S = 600.0
AGREE_POLL_S, MAX_POLL_S = 0.2, 1.0
STEP_IN_S = 1.0  # the wait before the next rank in line says what is agreed on, longer in a large world
AT_ONCE = 32
MOST_NAMES, MOST_NAME = 500, 64  # of requests in an agreement, and bytes of each: it is a small object
HASTE_STEP_S = 0.5  # where the process ends, the wait before the next rank in line


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """The call at which a rank is ready for the checkpoint of a round, and a flag if it was told to end after it.

    The other fields identify the answer.
    """

    ready: int
    session: str | None = None
    round: int | None = None
    rank: int | None = None
    told: bool = False
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Agreed(Record):
    """The agreement of a round: the call at which the ranks act, a flag if they end after it, one if it was made
    without the answers of some ranks, and the names of requests in the bucket that are answered by it."""

    at: int
    told: bool = False
    nonce: str = ""
    haste: bool = False
    requests: tuple[str, ...] = ()


class RequestRound:
    """One round of the ranks of a session, as one of them sees it; a round follows when its ranks have acted."""

    def __init__(self, storage: Storage, place: Place, number: int, answered: Set[str] = frozenset()) -> None:
        """answered: requests in the bucket that earlier rounds have answered."""
        self._storage = storage
        self._place = place
        self.number = number
        self._answered = answered

    # -- requests and answers ------------------------------------------------------------------------------------------

    @property
    def was_asked(self) -> bool:
        """True if a rank was asked; one request."""
        return self._storage.exists(layout.asked_key(self._place.session, self.number))

    def answer(self, ready: int, told: bool, nonce: str) -> Answer:
        """Answer, once, and tell the other ranks that there is something to answer. The answer that counts: the first
        one of this nonce, if an earlier call could not see what became of it."""
        said = Answer(ready, self._place.session, self.number, self._place.rank, told, nonce)
        said = put_once(self._storage, self._key(self._place.rank), said)
        if not self.was_asked:
            smallfiles.create_small(self._storage, layout.asked_key(self._place.session, self.number), said)
        return said

    def _key(self, rank: int) -> str:
        return layout.agreement_key(self._place.session, self.number, rank)

    def _answer_of(self, rank: int) -> Answer:
        """The answer of a rank; an answer of another rank in its place is an error."""
        key = self._key(rank)
        answer = smallfiles.read_small(self._storage, key, Answer, CorruptStateError)
        for name, meant in (("session", self._place.session), ("round", self.number), ("rank", rank)):
            if getattr(answer, name) not in (None, meant):
                raise CorruptStateError(
                    f"{self._storage.full_url(key)} is not the answer of rank {rank} to round {self.number}: somebody "
                    "else put it there"
                )
        return answer

    def _take(self, found: dict[int, Answer], rank: int) -> bool:
        try:
            found[rank] = self._answer_of(rank)
        except MissingObjectError:
            return False
        return True

    def _all_answered(self, found: dict[int, Answer], *, look_at_all: bool = False) -> bool:
        """Read answers that are not in `found` yet, in order, more at once each time, up to the first missing one; True
        if all are there now."""
        return taken_in_order(range(self._place.world_size), found, self._take, AT_ONCE, look_at_all=look_at_all)

    def _absent(self) -> list[int]:
        """The ranks that have not answered, by one listing: to tell people, and to see whom to ask."""
        names = set(self._storage.list(layout.agreement_folder(self._place.session, self.number)))
        return [rank for rank in range(self._place.world_size) if self._key(rank).rpartition("/")[2] not in names]

    def _present(self) -> set[int]:
        return {*range(self._place.world_size)}.difference(self._absent())

    # -- the agreement -------------------------------------------------------------------------------------------------

    @property
    def agreed(self) -> Agreed | None:
        """The agreement, by whoever said it; None so far. One request."""
        try:
            return smallfiles.read_small(self._storage, self._agreed_key, Agreed, CorruptStateError)
        except MissingObjectError:
            return None

    @property
    def _agreed_key(self) -> str:
        return layout.agreed_key(self._place.session, self.number)

    def await_agreement(self, own: Answer) -> Agreed:
        """The agreement, once all ranks have answered. It waits for missing ones, but not long if this process
        ends."""
        line = Line(self._place.rank, self._place.world_size, STEP_IN_S)
        wait, found = line.wait(AGREE_TIMEOUT_S, AGREE_POLL_S, MAX_POLL_S), {self._place.rank: own}
        looks, of_list = count(), ceil(self._place.world_size / PAGE)  # requests, as of a checkpoint that is joined
        while True:  # one look at a time
            requests = 1
            if wait.due() and line.looks_around:
                requests = of_list
                self._tell_absent(line, wait.waited_s)
            elif line.is_due(wait.waited_s) and next(looks) % 2 == 0:
                requests = of_list
                if line.steps_in(wait.waited_s, not self._absent()) and self._all_answered(found, look_at_all=True):
                    return self._agree_on(found)
            elif line.turn == 0 and next(looks) % 4 < 3:
                if self._all_answered(found):
                    return self._agree_on(found)
            elif (said := self.agreed) is not None:
                return said
            if shutdown.process.passed(shutdown.AGREE_PART):
                return self._agree_in_haste(found)
            if wait.over:
                raise RanksMissingError(
                    f"ranks {self._absent()} did not answer the request for a checkpoint within {AGREE_TIMEOUT_S:.0f} "
                    "s; check that they run, and call archive.checkpointing.requested() at every step"
                )
            for _ in range(requests):
                wait.pause()

    def _agree_in_haste(self, found: dict[int, Answer]) -> Agreed:
        """The agreement of the ranks that have answered by now: this process ends, and waits for no others. The first
        in line of them say so, and those further back after seconds."""
        line, present = Line(self._place.rank, self._place.world_size, HASTE_STEP_S), self._present()
        wait, due_s = line.wait(None, AGREE_POLL_S, MAX_POLL_S), line.in_haste_s(line.before(present))
        while wait.waited_s < due_s:
            wait.pause()
            if (said := self.agreed) is not None:
                return said
        if due_s:
            present = self._present()
        at_once(lambda rank: self._take(found, rank), sorted(present - found.keys()), AT_ONCE)
        return self._agree_on(found)

    def _agree_on(self, found: Mapping[int, Answer]) -> Agreed:
        """Say what these answers come to; another rank may have said so before."""
        haste = len(found) < self._place.world_size
        told = haste or any(answer.told for answer in found.values())
        at = max(one.ready for one in found.values())
        said = Agreed(at, told, secrets.token_hex(8), haste, () if told else self._open_requests())
        if smallfiles.create_small(self._storage, self._agreed_key, said):
            return said
        return self.agreed or said

    def _open_requests(self) -> tuple[str, ...]:
        """The newest requests that no round has answered so far; none if the store is out of reach."""
        names = set[str]()
        with suppress(StorageError):
            names = {name for name in self._storage.list(layout.REQUESTS) if len(name) <= MOST_NAME}
        return tuple(sorted(names - self._answered)[-MOST_NAMES:])

    def _tell_absent(self, line: Line, waited_s: float) -> None:
        """Log the ranks that have not answered, on the first of those that have."""
        absent = self._absent()
        speaks = line.leads({*range(self._place.world_size)}.difference(absent))
        if absent:
            logger.log(
                WARNING if speaks else DEBUG,
                "checkpoint request: waiting for %s of this job (%.0f s); check that it runs, and "
                "calls archive.checkpointing.requested() at every step",
                ranks(absent),
                waited_s,
            )


def put_once(storage: Storage, key: str, answer: Answer) -> Answer:
    """Create the answer of a rank, which is the only one there can be; the one that is there, of the same nonce."""
    if smallfiles.create_small(storage, key, answer):
        return answer
    held = smallfiles.read_small(storage, key, Answer, CorruptStateError)
    if held.nonce != answer.nonce:
        raise UsageError(f"{storage.full_url(key)} is there already: two processes have this rank of the session")
    return held
