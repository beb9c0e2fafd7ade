"""Operations on an archive that tests interrupt anywhere: what lies there before, what is done, what must be true
afterwards. Each can be done again after an interruption, to its full result.

for operation in OPERATIONS:
    operation.prepare(root)
    operation.act(root, said := Said(path))       # interrupted anywhere, by one of the library's errors or a kill
    operation.check(root, said)                   # AssertionError if what was acknowledged lacks, or anything is wrong
    operation.act(root, said)                     # not interrupted: says all of `done`
    operation.check(root, said)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import archive
import resharding
from archive.base import NotFoundError
from archive.testing import assert_whole, small_archive, steps
from tests.support import operated_batches as batches
from tests.support import operated_jobs as jobs
from tests.support import operated_rings as rings
from tests.support.backends import Backend
from tests.support.said import Said
from tests.support.tampering import same
from tests.support.transfers import Place, holds

GROUPS = (("a0", "a1", "a2"), ("b0", "b1"))
FIRST, SECOND = range(3), range(3, 7)


@dataclass(frozen=True)
class Operation:
    """One of them. `done`: all that its act has said once it ends by itself."""

    name: str
    prepare: Callable[[Backend], None]
    act: Callable[[Backend, Said], None]
    check: Callable[[Backend, Said], None]
    done: frozenset[str]

    def __str__(self) -> str:
        return self.name


def _nothing(root: Backend) -> None:
    """Nothing lies there."""


def _create(root: Backend, said: Said) -> None:
    """Whoever comes again may find that it is there."""
    if "begun" in said:
        root.open(create=True)
    else:
        said("begun")
        root.create()
    said("created")


def _check_created(root: Backend, said: Said) -> None:
    try:
        arc = root.open()
    except NotFoundError:
        assert "created" not in said
        return
    assert_whole(arc)
    assert len(arc.episodes) == arc.head.number == 0


def _some(root: Backend) -> None:
    small_archive(root.url, 2, storage_options=root.storage_options)


def _steps(name: str) -> dict[str, Any]:
    return steps(3 + int(name[1]), ord(name[0]))


def _append(root: Backend, said: Said) -> None:
    """A commit for each group: one episode whole, the others step by step."""
    arc = root.open()
    there = {str(name) for name in arc.episodes.table["episode_id"].to_pylist()}
    with arc.writer() as w:
        for group in GROUPS:
            if not there.issuperset(group):
                _append_group(w, group)
                w.commit()
            said(group[0])


def _append_group(w: archive.Writer, group: tuple[str, ...]) -> None:
    w.add_episode(_steps(group[0]), episode_id=group[0])
    for name in group[1:]:
        data = _steps(name)
        last = [i == len(data["reward"]) - 1 for i in range(len(data["reward"]))]
        w.append(data, env_ids=0, last=last, episode_ids=[name] * len(last))


def _check_appended(root: Backend, said: Said) -> None:
    arc = root.open()
    assert_whole(arc)
    found = {episode.id: episode.read() for episode in arc.episodes}
    visible = next(n for n in range(len(GROUPS) + 1) if set(found) == {"e0", "e1", *sum(GROUPS[:n], ())})
    assert visible >= len(set(said.words))
    for name, data in found.items():
        assert same(data, steps(4 + int(name[1]), int(name[1])) if name[0] == "e" else _steps(name)), name


def _sources(root: Backend) -> None:
    place = Place(root)
    place.source("first", FIRST.start, len(FIRST))
    place.source("second", SECOND.start, len(SECOND))


def _merge(root: Backend, said: Said, *, copy: bool) -> None:
    place = Place(root)
    resharding.merge([place.url("first"), place.url("second")], place.url("both"), copy=copy, **place.options)
    said("merged")


def _check_merged(root: Backend, said: Said) -> None:
    """The sources are as they were; the target has what was merged, if that was said, and nothing wrong."""
    place = Place(root)
    for name, numbers in (("first", FIRST), ("second", SECOND)):
        assert_whole(place.open(name))
        assert holds(place.open(name), numbers)
    try:
        both = place.open("both", allow_bases=True)
    except NotFoundError:
        assert "merged" not in said
        return
    assert_whole(both)
    found = [int(name[1:]) for name in both.episodes.table["episode_id"].to_pylist()]
    assert holds(both, found)
    assert "merged" not in said or sorted(found) == [*FIRST, *SECOND]


def _made(name: str, prepare: Any, act: Any, check: Any, *done: str) -> Operation:
    return Operation(name, prepare, act, check, frozenset(done))


OPERATIONS = (
    _made("create", _nothing, _create, _check_created, "created"),
    _made("append and commit", _some, _append, _check_appended, *(group[0] for group in GROUPS)),
    _made("checkpoint", jobs.begin, jobs.save, jobs.check_job, "saved-1"),
    _made("resume", jobs.save_first, jobs.resume, jobs.check_job, "saved-2"),
    _made("reshard", jobs.save_first, jobs.reshard, jobs.check_job, "saved-2"),
    _made("journal", jobs.begin, jobs.tick, jobs.check_ticks, "saved", *(f"tick-{i}" for i in range(jobs.TICKS))),
    _made("recover", jobs.crash, jobs.recover, jobs.check_recovered, "recovered"),
    _made("merge", _sources, partial(_merge, copy=True), _check_merged, "merged"),
    _made("merge by reference", _sources, partial(_merge, copy=False), _check_merged, "merged"),
    _made("compact", rings.scatter, rings.compact, rings.check_compacted, "compacted"),
    _made("repair", rings.damage, rings.repair, rings.check_repaired, "repaired"),
    _made("forget", rings.ring, rings.forget, rings.check_forgotten, "forgotten"),
    _made("prune", rings.leave_behind, rings.prune, rings.check_pruned, "pruned"),
    _made("label", rings.ring, rings.label, rings.check_labelled, "good", "worth"),
    _made("add fields", rings.ring, rings.add_fields, rings.check_added, "added"),
)
OF_BATCHES = (
    _made("redact", batches.ended, batches.redact, batches.check_redacted, "redacted"),
    _made("map", batches.ended, batches.score, batches.check_scored, "scored"),
)
