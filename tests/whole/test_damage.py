"""Every byte of every object of an archive with everything in it: flipped, cut off, gone, or another object's in its
place. Whatever is asked then is answered truly, or by an error of the library, soon and in little memory."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import archive
from archive.base import CorruptCommitError, layout
from archive.maintain import verify
from tests.support.damaging import KEPT, MOST_S, Damage, Sweep, cuts, flips, strangers, with_everything
from tests.support.sampling import one_in, sampled

MOST_MB = 256

Damages = Callable[[dict[str, bytes]], Iterator[Damage]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return Sweep(with_everything(tmp_path_factory.mktemp("damage") / "root"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each damaged tail is logged, thousands of times."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def removed(objects: dict[str, bytes]) -> Iterator[Damage]:
    """Each object but the newest commit, without which the archive is as of the one before."""
    newest = max(key for key in objects if key.startswith("commits/"))
    yield from (Damage("removed", key, None) for key in objects if key != newest)


IN_A_SOAK = 16  # one in so many bytes as a soak: all of them take hours


def some(count: int) -> list[Any]:
    """One in `count` bytes by default, and as many as a soak has time for."""
    return [pytest.param(count, id=f"one in {count}"), pytest.param(IN_A_SOAK, marks=pytest.mark.soak, id="many")]


SWEEPS = [
    *((flips, one) for one in some(6000)),
    *((cuts, one) for one in some(6000)),
    *((strangers, one) for one in one_in(20)),
    *((removed, one) for one in one_in(4)),
]


@pytest.mark.parametrize(
    ("damages", "count"),
    [pytest.param(kind, *one.values, marks=one.marks, id=f"{kind.__name__}, {one.id}") for kind, one in SWEEPS],
)
def test_damage_is_an_error_or_harmless(sweep: Sweep, damages: Damages, count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [text for one in sampled(damages(sweep.objects), count) for text in sweep.wrong(one)] == []
    assert sweep.slowest_s < MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MB * 1024
    assert {one.key for one in sweep.arc.storage.scan("")} == set(sweep.keys), "as it was"


def test_each_object_matters_to_something(sweep: Sweep) -> None:
    """So that the sweep is one of all objects. Claims are read where nothing else says the run."""
    idle = {key.partition("/")[0] for key, names in sweep.concerned.items() if not names}
    assert idle <= {"sessions"}
    assert len(sweep.truth) > 40


def test_the_newest_commit_removed_is_noticed_where_its_ranks_wrote_on(sweep: Sweep) -> None:
    number = sweep.arc.head.number
    key = layout.commit_key(number)
    sweep.arc.storage.delete([key])
    try:
        arc = archive.open(sweep.arc.url)
        for go_on in (lambda: arc.recover(KEPT), lambda: arc.tails(KEPT), lambda: arc.writer(run=KEPT)):
            with pytest.raises(CorruptCommitError, match=f"commit {number} is missing"):
                go_on()
        assert key in [one.object for one in verify(arc).findings]
    finally:
        sweep.arc.storage.put(key, sweep.objects[key])
    assert verify(archive.open(sweep.arc.url)).sound


def test_what_is_whole_is_answered_alike_each_time(sweep: Sweep) -> None:
    """Else the sweep would find nothing wrong, or too much."""
    assert sweep.answers(sweep.truth) == []
