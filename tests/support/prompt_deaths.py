"""Jobs of prompts in one process, rank by thread, on a store that is gone for a rank from its k-th request on."""

from __future__ import annotations

import contextlib
import threading
import traceback
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import archive
from archive.base.errors import StorageError
from tests.support.prompt_checks import check_end, check_recovered
from tests.support.prompt_job import Fact, Job, Rank, Tell, begin

RANKS = 8
CHANGES = ("create", "put", "delete", "copy")


class KilledError(StorageError):
    """The process is gone; a thread of it that looks at the store now and then finds that out of reach."""


@dataclass(frozen=True)
class Death:
    """Of which rank, at its k-th request, from 1; after: once that is done, then only requests that change something
    count. The other ranks live on for `lag` requests each."""

    rank: int
    at: int
    after: bool = False
    lag: int = 0


@dataclass
class Fates:
    """How long the ranks of a job live."""

    death: Death | None
    left: dict[int, int] = field(default_factory=dict)  # rank -> requests until it dies
    counted: int = 0
    happened: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def ahead(self, rank: int, verb: str) -> bool:
        """Called ahead of each request; whether the rank dies once it is done."""
        with self.lock:
            self._check(rank)
            death = self.death
            if death is None or rank != death.rank or (death.after and verb not in CHANGES):
                return False
            self.counted += 1
            if self.counted != death.at:
                return False
        if not death.after:
            self.die(death)
        return True

    def die(self, death: Death) -> None:
        with self.lock:
            self.happened = True
            self.left = dict.fromkeys(range(RANKS), death.lag) | {death.rank: 0}
        self.barrier.abort()
        raise KilledError

    def end(self) -> None:
        """All are gone."""
        with self.lock:
            self.left = dict.fromkeys(range(RANKS), 0)
        self.barrier.abort()

    def _check(self, rank: int) -> None:
        if rank in self.left:
            self.left[rank] -= 1
            if self.left[rank] < 0:
                raise KilledError


def doomed(arc: archive.Archive, rank: int, fates: Fates) -> None:
    """Have all requests of this archive ask their fates."""
    real = arc.storage.request

    def request(verb: str, key: str, *more: Any, **options: Any) -> Any:
        last = fates.ahead(rank, verb)
        try:
            return real(verb, key, *more, **options)
        finally:  # what was refused has been asked for as well
            if last and fates.death is not None:
                fates.die(fates.death)

    arc.storage.request = request  # type: ignore[method-assign]


@dataclass
class Life:
    """One session of the job, and how it went: what its ranks told, and their errors."""

    url: str
    job: Job
    fates: Fates
    options: Any = None
    told: list[Fact] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    writers: list[archive.Writer] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    tell: Tell | None = None

    def run(self) -> None:
        """From its beginning to its end, and nothing is left of it."""
        self.live()
        self.bury()

    def live(self) -> None:
        """Until the ranks have nothing to do, or are dead."""
        self.fates.barrier = threading.Barrier(self.job.world_size)
        threads = [threading.Thread(target=self._live, args=(rank,)) for rank in range(self.job.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def bury(self) -> None:
        """End the threads of its writers, which write nothing more."""
        self.fates.end()
        for w in self.writers:
            with contextlib.suppress(BaseException):
                w._end()

    def _live(self, rank: int) -> None:
        arc = archive.open(self.url, storage_options=self.options)
        doomed(arc, rank, self.fates)
        try:
            w, me = begin(arc, self.job, rank, self.fates.barrier.wait)
            self.writers.append(w)
            one = Rank(w, me, self.job, self.tell or self.told.extend)
            self.ranks.append(one)
            one.run()
        except BaseException as error:
            self.errors.append(error)
            if not self.fates.happened:
                traceback.print_exc()
                self.fates.end()


def lives(jobs: Sequence[Job], deaths: Sequence[Death | None], unseen: Collection[int] = ()) -> tuple[bool, int]:
    """Sessions of a job one after the other, each but the last ended by a death (or by itself, with what was not synced
    lost), and all checks between them, but after the `unseen` ones: these are recovered by those who go on. Whether a
    death happened; and how many episodes have no seal."""
    url = f"memory://{uuid.uuid4().hex}"
    archive.create(url)
    told: list[Fact] = []
    happened = False
    for number, (job, death) in enumerate(zip(jobs, deaths, strict=True)):
        life = Life(url, job, Fates(death))
        life.run()
        happened |= life.fates.happened
        if life.errors and not life.fates.happened:
            raise life.errors[0]
        told += life.told
        if not job.finishes and number not in unseen:
            check_recovered(url, told)
    return happened, check_end(url, together=jobs[0].together)
