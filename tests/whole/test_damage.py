"""Every byte of every object of an archive with everything in it: flipped, cut off, gone, or another object's in its
place. Whatever is asked then is answered truly, or by an error of the library, soon and in little memory."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import archive
import resharding
from archive.base import ArchiveError, CorruptCommitError, layout
from archive.checkpoint.retention import Keep
from archive.maintain import verify
from archive.testing import trace
from tests.support.journals import die
from tests.support.nonsense import filled
from tests.support.sampling import one_in, sampled
from tests.support.ticks import NEVER_S

Answer = Any
Question = Callable[[archive.Archive], Answer]
RANKS = 3
MOST_S = 5.0  # of the processor, for one question
KEPT = "kept"  # the run with a journal and a ledger


def with_everything(folder: Path) -> archive.Archive:
    """As `filled`, and a run with a ledger and a journal that goes beyond its checkpoint."""
    from archive.store import Storage

    local = Storage.connect(str(filled(folder)))
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    keys = [one.key for one in local.scan("")]
    arc.storage.put_many(zip(keys, local.get_all(keys), strict=True))
    arc = archive.open(arc.url)
    w = arc.writer(run=KEPT, session="fifth", journal_s=NEVER_S)
    ledger = w.ledger("prompts")
    ledger.draw(["a", "b", "c"], siblings=2, cursor={"at": 3})
    for number, key in enumerate("abc"):
        ledger.start(key)
        ledger.seal(key, sibling=0, episode_id=w.add_episode({"x": np.arange(3) + 10 * number}, episode_id=f"k{key}"))
        w.sync()
        if key == "a":
            w.checkpoint(1, columns={"p": np.arange(3.0)}, progress={"n": 1}).result()
    die(w)
    return archive.open(arc.url)


# -- what can be asked ------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value that compares: arrays to the bit, NaN like itself."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), list(value.shape), value.tolist() if value.dtype.kind in "OU" else value.tobytes()]
    return repr(value.to_pylist()) if isinstance(value, pa.Table) else repr(value)


def questions(arc: archive.Archive) -> dict[str, Question]:
    """Name -> what reads something of such an archive; all together they read every object that any commit names."""
    out: dict[str, Question] = {
        "commits": lambda arc: [commit.to_json() for commit in arc.commits],
        "runs": lambda arc: [arc.runs.about, arc.checkpoints.kept(), arc.checkpoints.table],
        "episodes": lambda arc: [arc.episodes.table, arc.episodes.read()],
        "labels": lambda arc: [arc.labels, arc.episodes["e"].labels, arc.episodes["e"].label_history],
        "late": lambda arc: [repr(arc.late_fields), repr(arc.tags)],
        "ledger": lambda arc: [arc.ledgers, _looked_at(arc.ledger("prompts", KEPT))],
        "to let go": lambda arc: _forget(arc),
        "to prune": lambda arc: _prune(arc),
        "tails": lambda arc: arc.tails(KEPT),
    }
    for number in range(1, arc.head.number):
        out[f"as of {number}"] = lambda arc, n=number: _as_of(arc, n)  # type: ignore[misc]
    for ck in arc.checkpoints:
        out |= _of_checkpoint(ck)
    return out


def _forget(arc: archive.Archive) -> Any:
    """Without how much room would be free: the store says that of what is there, and what is gone takes none."""
    told = arc.forget(Keep(last=1), episodes="unreferenced").to_json()
    return told | {"goes": {key: value for key, value in told["goes"].items() if key != "bytes"}}


def _prune(arc: archive.Archive) -> Any:
    """Without what the clock says."""
    told = arc.prune(older_than="0s", force=True).to_json()
    return {key: value for key, value in told.items() if key not in ("clock", "cutoff")}


def _as_of(arc: archive.Archive, number: int) -> Any:
    old = archive.open(arc.url, commit=number)
    return [old.episodes.table, old.episodes.read(), old.checkpoints.table]


def _looked_at(view: Any) -> Any:
    return [view.to_reissue(), view.sealed("a"), view.cursors, view.state("b")]


def _of_checkpoint(ck: archive.Checkpoint) -> dict[str, Question]:
    number = ck.number

    def of(ask: Callable[[archive.Checkpoint], Any]) -> Question:
        return lambda arc: ask(arc.checkpoints.at_commit(number))

    name = f"checkpoint {number}"
    out = {
        name: of(lambda ck: [ck.about, ck.lineage, ck.missing, ck.buffers, ck.discarded, ck.metrics, ck.origin]),
        f"{name} live": of(lambda ck: [ck.episodes.table, ck.episodes.read(), ck.steps_per_rank]),
        f"{name} progress": of(lambda ck: [ck.progress, ck.unconsumed, ck.values]),
    }
    for rank in ck.ranks:
        columns = sorted(ck.staged(rank).index.columns.get("replay", {}))
        out[f"{name} state of {rank}"] = of(lambda ck, r=rank: [ck.state(r), ck.attributes(r)])  # type: ignore[misc]
        out[f"{name} columns of {rank}"] = of(lambda ck, r=rank, c=columns: [ck.column(n, r) for n in c])  # type: ignore[misc]
        if ck.whole:
            out[f"{name} resume of {rank}"] = of(lambda ck, r=rank: repr(ck.to_resume(r)))  # type: ignore[misc]
    if ck.whole:
        for rank in range(RANKS):
            out[f"{name} share {rank}"] = of(lambda ck, r=rank: _share(ck, r))  # type: ignore[misc]
    return out


def _share(ck: archive.Checkpoint, rank: int) -> Any:
    share = resharding.plan(ck, world_size=RANKS, tails="ignore").share(rank)
    return [share.read(), dict(share.columns), share.state]


# -- what can happen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """What became of an object. data: what lies there now; None: nothing."""

    what: str
    key: str
    data: bytes | None


def flips(objects: dict[str, bytes]) -> Iterator[Damage]:
    """Each byte, once in one bit and once in all."""
    for key, data in objects.items():
        for at in range(len(data)):
            for mask in (1 << (at * 5 % 8), 255):
                yield Damage(f"byte {at} ^ {mask}", key, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])


def cuts(objects: dict[str, bytes]) -> Iterator[Damage]:
    """At each length, and nothing at all."""
    for key, data in objects.items():
        yield from (Damage(f"cut to {length}", key, data[:length]) for length in range(len(data)))
        yield Damage("longer", key, data + bytes(7))


def strangers(objects: dict[str, bytes]) -> Iterator[Damage]:
    """Any other object of its folder in its place: its neighbours, and those of other runs."""
    for key, data in objects.items():
        for other, theirs in objects.items():
            if key != other and kind_of(key) == kind_of(other) and data != theirs:
                yield Damage(f"{other} in its place", key, theirs)


def kind_of(key: str) -> str:
    """The folder and, of a table, which one."""
    return key.partition("/")[0] + (key.split(".")[-2] if key.endswith(".parquet") else "")


class Sweep:
    """The archive, what is true of it, and which questions an object matters to."""

    def __init__(self, arc: archive.Archive) -> None:
        self.arc = arc
        self.keys = [one.key for one in arc.storage.scan("")]
        self.objects = dict(zip(self.keys, arc.storage.get_all(self.keys), strict=True))
        self.questions = questions(arc)
        self.truth: dict[str, Answer] = {}
        self.concerned: dict[str, list[str]] = {key: [] for key in self.keys}
        self.slowest_s = 0.0
        for name, ask in self.questions.items():
            with trace(arc) as seen, contextlib.suppress(ArchiveError):  # of what was pruned
                self.truth[name] = _answer(ask(archive.open(arc.url)))
            if name not in self.truth:
                continue
            for key in {row.key for row in seen.rows} & self.concerned.keys():
                self.concerned[key].append(name)
        self.recovered = self._recover()

    def wrong(self, damage: Damage) -> list[str]:
        """What is then neither true nor an error of the library; the object is put back."""
        self._put(damage.key, damage.data)
        try:
            names = self.concerned[damage.key]
            found = self.answers(names)
            found += self._looked_after() if not names or not zlib.crc32(damage.what.encode()) % 97 else []
            if damage.key.startswith("journal/"):
                found += self._recovery()
            return [f"{damage.key} {damage.what}: {text}" for text in found]
        finally:
            self._put(damage.key, self.objects[damage.key])

    def _put(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.arc.storage.delete([key])
        else:
            self.arc.storage.put(key, data)

    def answers(self, names: Iterable[str]) -> list[str]:
        """How the answers to these questions are wrong, asked of one who opens it now; none where all are true, or
        refused."""
        try:
            arc = archive.open(self.arc.url)
        except ArchiveError:
            return []
        return [text for name in names if (text := self._asked(arc, name))]

    def _asked(self, arc: archive.Archive, name: str) -> str:
        began = time.process_time()
        try:
            got = _answer(self.questions[name](arc))
        except ArchiveError as error:
            return "" if str(error) else f"{name}: an error without a message"
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
        finally:
            self.slowest_s = max(self.slowest_s, time.process_time() - began)
        return "" if as_true(got, self.truth[name]) else f"{name}: other values"

    def _looked_after(self) -> list[str]:
        try:
            verify(archive.open(self.arc.url), deep=True)
        except ArchiveError:
            pass
        except Exception as error:
            return [f"verify: {type(error).__name__}: {error}"]
        return []

    def _recover(self) -> dict[str, list[int]]:
        """What is recovered from the journal; what that wrote is removed."""
        try:
            made = archive.open(self.arc.url).recover(KEPT)
            assert made is not None
            return {one.id: one.read()["x"].tolist() for one in made.episodes}
        finally:
            new = {one.key for one in self.arc.storage.scan("")} - self.objects.keys()
            self.arc.storage.delete(sorted(new))

    def _recovery(self) -> list[str]:
        try:
            found = self._recover()
        except ArchiveError:
            return []
        except Exception as error:
            return [f"recover: {type(error).__name__}: {error}"]
        return [f"recover: episode {name}" for name, x in found.items() if self.recovered.get(name) != x]


def _answer(value: Any) -> Any:
    return value if hasattr(value, "ranks") else plain(value)


def as_true(got: Any, true: Any) -> bool:
    """Whether an answer is the true one; a tail may end before what is damaged or gone."""
    if not hasattr(true, "ranks"):
        return bool(got == true)
    pairs = list(zip(got.ranks, true.ranks, strict=True))
    return all(one.to_json() == other.to_json() or (one.next < other.next and one.why) for one, other in pairs)


def number_of(key: str) -> int:
    """Of a commit."""
    return int(key.rpartition("/")[2].removesuffix(".json"))


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
