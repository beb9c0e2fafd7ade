"""Commits: made once whatever happens to the answer, never lost, never half there;
failures in the background surface."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.base import layout
from archive.base.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AmbiguousWriteError,
    CommitUnknownError,
    CorruptCommitError,
    NotFoundError,
    StorageError,
    StorageFullError,
    UsageError,
)
from archive.checkpoint import requests, rounds
from archive.log import Addition, Attempt, Change, CommitLog, commits
from archive.log.commit import Commit
from archive.maintain import repair
from archive.store import Storage
from archive.testing import steps
from archive.write import slabs
from tests.support.archives import by_hand
from tests.support.backends import Proxied
from tests.support.processes import until
from tests.support.tampering import body, commit_files, same, seal, write_some

servers = pytest.mark.parametrize("proxied", ["moto", "seaweedfs"], indirect=True)
clients = pytest.mark.parametrize("proxied", ["moto", "seaweedfs", "s3fs", "obstore"], indirect=True)


def impatient(proxied: Proxied, deadline_s: float = 1.0) -> archive.Archive:
    """A new archive behind the proxy, whose requests are given up early."""
    arc = archive.create(proxied.url, storage_options=proxied.storage_options)
    arc.storage.deadline_s = deadline_s
    return arc


def direct(proxied: Proxied) -> archive.Archive:
    """The same archive past the proxy's faults."""
    proxied.proxy.faults.clear()
    return archive.open(proxied.url, storage_options=proxied.storage_options)


def kinds(arc: archive.Archive) -> list[str]:
    return [commit.kind for commit in arc.commits]


@clients
def test_a_commit_whose_answer_is_lost_is_made_once(proxied: Proxied) -> None:
    with impatient(proxied, 20.0).writer() as w:
        for lost in range(3):
            w.add_episode(steps(3, lost), episode_id=f"e{lost}")
            proxied.proxy.add("reset_after", method="PUT", path="/commits/", times=1 + lost)
            made = w.commit()
            assert made.number == 2 + lost
    arc = direct(proxied)
    assert kinds(arc) == ["session", "commit", "commit", "commit"]
    assert arc.episodes.table["episode_id"].to_pylist() == ["e0", "e1", "e2"]
    assert len({commit.transaction for commit in arc.commits}) == 4


@clients
def test_a_commit_that_did_not_happen_and_has_no_answer_is_made_once(proxied: Proxied) -> None:
    with impatient(proxied, 20.0).writer() as w:
        w.add_episode(steps(3), episode_id="e")
        proxied.proxy.add("reset", method="PUT", path="/commits/", times=2)
        assert w.commit().number == 2
    assert kinds(direct(proxied)) == ["session", "commit"]


@servers
def test_every_create_survives_a_lost_answer(proxied: Proxied) -> None:
    """The archive itself, the claim of a rank, the commit that opens the session."""
    for path in ("archive.json", "/sessions/", "/commits/"):
        proxied.proxy.add("reset_after", method="PUT", path=path)
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer() as w:
        w.add_episode(steps(3), episode_id="e")
    assert not [fault for fault in proxied.proxy.faults if fault.times]
    arc = direct(proxied)
    assert kinds(arc) == ["session", "commit"]
    assert same(arc.episodes["e"].read(), steps(3))


@pytest.mark.parametrize("late", [False, True])
def test_every_create_survives_a_request_that_is_lost_or_comes_late(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Late: it arrives when its maker has looked, found nothing, and sent the same again."""
    real, lost = Storage.create, set()

    def create(self: Storage, key: str, data: Any) -> None:
        if (self.url, key) not in lost:
            lost.add((self.url, key))
            raise AmbiguousWriteError("no answer")
        real(self, key, data)
        if late and (self.url, key, "late") not in lost:
            lost.add((self.url, key, "late"))
            raise AlreadyExistsError("it has come")

    monkeypatch.setattr(Storage, "create", create)
    urls = [f"memory://{uuid.uuid4().hex}" for _ in range(2)]
    with archive.open(urls[0], create=True).writer(session="s", journal_s=3600) as w:
        w.add_episode(steps(3), episode_id="e")
        w.sync()
        w.checkpoint(1, wait=True)
    archive.create(urls[1])
    resharding.merge([urls[0]], to=urls[1])
    requests.post(Storage.connect(urls[0]))
    rounds.put_once(Storage.connect(urls[0]), layout.agreement_key("s", 0, 1), rounds.Answer(3, nonce="n"))
    kinds_of = [key.partition("/")[0] for url, key, *_ in lost if url == urls[0]]
    assert {"archive.json", "sessions", "commits", "journal", "states", "requests"} <= set(kinds_of)
    merged = archive.open(urls[1], allow_bases=True)
    assert same(merged.episodes["e"].read(), steps(3))
    assert merged.storage.exists(layout.rank_key("s", 0)), "or a later writer numbers its rows like those"
    archive.open(urls[0]).writer(session="t").close()
    assert kinds(archive.open(urls[0])) == ["session", "checkpoint", "session"]
    Storage.connect(urls[0]).delete([layout.commit_key(2), layout.commit_key(3)])
    lost.clear()
    assert repair(Storage.connect(urls[0])).commit == 2


@servers
@pytest.mark.parametrize("happened", [True, False])
def test_no_answer_until_the_deadline(proxied: Proxied, happened: bool) -> None:
    w = impatient(proxied).writer()
    w.add_episode(steps(3), episode_id="e")
    w.flush()
    if happened:
        proxied.proxy.add("reset_after", method="PUT", path="/commits/")
    proxied.proxy.add("reset", method="PUT", path="/commits/", times=-1)
    first = proxied.proxy.add("reset", method="GET", path="/commits/", times=-1, skip=1)  # the look before the put
    with pytest.raises(CommitUnknownError, match=r"(?s)commit 2 .*call commit\(\) again"):
        w.commit()
    assert first.skip == 0
    assert kinds(direct(proxied)) == (["session", "commit"] if happened else ["session"])
    w.add_episode(steps(4, 1), episode_id="f")
    w.commit()
    w.close()
    arc = direct(proxied)
    assert kinds(arc) == ["session", "commit", *(["commit"] if happened else [])]
    assert arc.episodes.table["episode_id"].to_pylist() == ["e", "f"]
    assert sum(commit.added.get("segments", 0) for commit in arc.commits) == 2
    assert same(arc.episodes["e"].read(), steps(3))


@servers
def test_others_commit_while_the_answer_is_unknown(proxied: Proxied) -> None:
    """The unknown commit happened, and others went on from there: it is found again, not made again."""
    w = impatient(proxied).writer()
    w.add_episode(steps(3), episode_id="mine")
    w.flush()
    proxied.proxy.add("reset_after", method="PUT", path="/commits/")
    proxied.proxy.add("reset", method="PUT", path="/commits/", times=-1)
    proxied.proxy.add("reset", method="GET", path="/commits/", times=-1, skip=1)
    with pytest.raises(CommitUnknownError):
        w.commit()
    with direct(proxied).writer(run="other") as other:
        for i in range(3):
            other.add_episode(steps(2, i), episode_id=f"o{i}")
            other.commit()
    assert w.commit().number == 2
    w.close()
    assert kinds(direct(proxied)) == ["session", "commit", "session", "commit", "commit", "commit"]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is sent off at once."""
    monkeypatch.setattr(slabs, "SHARD_BYTES", 64)


@servers
@pytest.mark.usefixtures("small_shards")
def test_a_failure_in_the_background_surfaces_and_loses_nothing(proxied: Proxied) -> None:
    w = impatient(proxied).writer()
    proxied.proxy.add("status", method="PUT", path="/shards/", status=403, code="AccessDenied", times=-1)
    for i in range(3):
        w.add_episode(steps(1, i), episode_id=f"e{i}")
    until(lambda: any(p.failure() is not None for p in _pipelines(w)), 5.0)
    for _ in range(2):
        with pytest.raises(AccessDeniedError, match=r"shards/.*check the credentials"):
            w.add_episode(steps(1, 9), episode_id="refused")
    for verb in (w.flush, w.commit):
        with pytest.raises(AccessDeniedError):
            verb()
    assert kinds(archive.open(proxied.url, storage_options=proxied.storage_options)) == ["session"]
    proxied.proxy.faults.clear()
    w.commit()
    w.add_episode(steps(2, 9), episode_id="refused")
    w.close()
    arc = direct(proxied)
    assert sorted(arc.episodes.table["episode_id"].to_pylist()) == ["e0", "e1", "e2", "refused"]
    assert all(same(arc.episodes[f"e{i}"].read(), steps(1, i)) for i in range(3))


def _pipelines(w: Any) -> list[Any]:
    return list(w._pipelines) if hasattr(w, "_pipelines") else [w._pipeline]


@servers
def test_a_full_store_loses_nothing(proxied: Proxied) -> None:
    w = impatient(proxied).writer()
    w.add_episode(steps(5), episode_id="e")
    for path in ("/shards/", "chunks.parquet", "segments.parquet", "/commits/"):
        proxied.proxy.add("status", method="PUT", path=path, status=507, code="InsufficientStorage", times=-1)
        with pytest.raises(StorageFullError, match="free some"):
            w.commit()
        proxied.proxy.faults.clear()
    w.commit()
    w.close()
    arc = direct(proxied)
    assert kinds(arc) == ["session", "commit"]
    assert same(arc.episodes["e"].read(), steps(5))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    real, full = os.fsync, False

    def fsync(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    def switch(value: bool) -> None:
        nonlocal full
        full = value

    monkeypatch.setattr(os, "fsync", fsync)
    yield switch
    switch(False)


def test_a_full_disk_loses_nothing(tmp_path: Path, full_disk: Callable[[bool], None]) -> None:
    w = archive.create(str(tmp_path / "root")).writer()
    w.add_episode(steps(5), episode_id="e")
    full_disk(True)
    with pytest.raises(StorageFullError, match="no space left"):
        w.commit()
    full_disk(False)
    assert not list((tmp_path / "root").rglob("*.tmp"))
    w.commit()
    w.close()
    assert same(archive.open(str(tmp_path / "root")).episodes["e"].read(), steps(5))


def test_an_exception_in_the_block_commits_nothing(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))

    def failing() -> None:
        with arc.writer() as w:
            w.add_episode(steps(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert len(archive.open(str(tmp_path / "root")).episodes) == 0


def test_what_is_not_committed_is_not_seen(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    w = archive.create(root).writer()
    w.add_episode(steps(3), episode_id="a")
    w.flush()
    assert len(archive.open(root).episodes) == 0
    w.commit("with a message")
    assert archive.open(root).head.message == "with a message"
    head = w.commit()
    assert head.number == 2  # nothing new, no commit
    w.close()


def test_time_travel_and_a_commit_that_is_not_there(tmp_path: Path) -> None:
    write_some(tmp_path / "root", episodes=4, commits=4)
    root = str(tmp_path / "root")
    for number in range(1, 6):
        then = archive.open(root, commit=number)
        assert then.episodes.table["episode_id"].to_pylist() == [f"e{i}" for i in range(number - 1)]
        with pytest.raises(UsageError, match="read only"):
            then.writer()
    with pytest.raises(NotFoundError, match="no commit 6"):
        archive.open(root, commit=6)


def test_several_commits_are_read_once_and_in_order_with_the_one_that_stands_for_none(tmp_path: Path) -> None:
    write_some(tmp_path / "root", episodes=4, commits=4)
    arc = archive.open(tmp_path / "root")
    found = list(commits.read_all(arc.storage, [3, 0, arc.head.number, 3, 1], arc.head))
    assert [one.number for one in found] == [0, 1, 3, arc.head.number]
    assert found[0] == commits.EMPTY
    assert found[-1] is arc.head


def test_a_log_of_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder that is empty, as a dying writer leaves it, and names that are no commits, hide nothing."""
    monkeypatch.setattr(layout, "COMMITS_PER_FOLDER", 3)
    root = tmp_path / "root"
    write_some(root, episodes=7, commits=7)
    assert [path.parent.name for path in commit_files(root)] == ["000000"] * 2 + ["000001"] * 3 + ["000002"] * 3
    for extra in ("commits/000003", "commits/zzz"):
        (root / extra).mkdir()
    (root / "commits/000003/.0123456789abcdef.tmp").write_bytes(b"half a com")
    (root / "commits/000002/zzz.json").write_bytes(b"?")
    (root / "commits/000002/note.txt").write_bytes(b"?")
    arc = archive.open(str(root))
    assert arc.head.number == 8
    with arc.writer() as w:
        w.add_episode(steps(3, 8), episode_id="after")
    assert len(archive.open(str(root)).episodes) == 8
    assert arc.refresh().head.number == 10


def test_a_refresh_after_many_commits_reads_the_newest_alone() -> None:
    root = "memory://commits-refresh"
    archive.create(root)
    arc = archive.open(root)
    with arc.writer() as w:
        for n in range(3):
            w.add_episode(steps(3, n), episode_id=f"e{n}")
            w.commit()
    reader = archive.open(root, commit=None)
    with archive.open(root).writer() as w:
        for n in range(3, 60):
            w.add_episode(steps(3, n), episode_id=f"e{n}")
            w.commit()
    before = reader.io_stats()
    assert reader.refresh().head.number == archive.open(root).head.number > 60
    assert (reader.io_stats() - before).requests <= 15
    assert len(reader.episodes) == 60
    assert len(arc.refresh().episodes) == 60


def lists_of(storage: Storage, work: Callable[[], Any]) -> tuple[Any, int]:
    """What this gives, and how many LISTs it takes."""
    before = storage.stats.snapshot()
    return work(), (storage.stats - before).list


def test_the_newest_commit_is_found_by_one_list_or_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "COMMITS_PER_FOLDER", 4)
    arc = archive.create(tmp_path)
    log = CommitLog(arc.storage, arc.id, arc.head)
    for number, most in enumerate([1, 1, 3, 3, 3, 3, 3], 1):
        log.commit(str(number), by_hand("x"))
        head, lists = lists_of(arc.storage, lambda: commits.newest(arc.storage))
        assert (head.number, lists) == (number, most)


def test_one_list_finds_what_is_newer_and_one_more_where_a_folder_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "COMMITS_PER_FOLDER", 4)
    arc = archive.create(tmp_path)
    log = CommitLog(arc.storage, arc.id, arc.head)
    found = []
    for number in range(1, 8):
        log.commit(str(number), by_hand("x"))
        found.append([lists_of(arc.storage, lambda k=known: commits.newest_number(arc.storage, k)) for known in (0, 3)])
    assert found[:2] == [[(1, 1), (3, 1)], [(2, 1), (3, 1)]]
    assert found[2:] == [[(3, 2), (3, 1)], *([(n, 2), (n, 1)] for n in (4, 5, 6)), [(7, 3), (7, 2)]]


@pytest.mark.parametrize(("others", "lists"), [(1, 0), (8, 0), (9, 1), (40, 1)])
def test_a_few_commits_are_read_one_by_one_and_of_many_the_newest(tmp_path: Path, others: int, lists: int) -> None:
    arc = archive.create(tmp_path)
    log = CommitLog(arc.storage, arc.id, arc.head)
    for number in range(others):
        log.commit(str(number), by_hand("x"))
    reader = archive.open(tmp_path, commit=None)
    before = reader.io_stats()
    assert commits.newest_after(reader.storage, arc.head).number == arc.head.number + others
    done = reader.io_stats() - before
    assert (done.list, done.get <= 12) == (lists, True)


def test_a_refresh_does_not_go_over_to_another_archive(tmp_path: Path) -> None:
    for name, commits_made in (("a", 1), ("b", 30)):
        write_some(tmp_path / name, episodes=commits_made, commits=commits_made)
    arc = archive.open(str(tmp_path / "a"))
    for file in commit_files(tmp_path / "b")[-1:]:
        (tmp_path / "a" / file.relative_to(tmp_path / "b")).write_bytes(file.read_bytes())
    log = CommitLog(arc.storage, arc.id, arc.head)
    for number in range(arc.head.number + 1, 30):  # as many that follow as are read one by one
        log.commit(str(number), by_hand("x"))
    with pytest.raises(CorruptCommitError, match="belongs to archive"):
        arc.refresh()


def test_a_transaction_is_committed_once_by_whoever_is_first(tmp_path: Path) -> None:
    storage = archive.create(str(tmp_path / "root")).storage
    logs = [CommitLog(storage, "id", commits.EMPTY) for _ in range(3)]
    made = [log.commit("the same", by_hand("x")) for log in logs]
    assert [commit.digest for commit in made] == [made[0].digest] * 3
    assert len(commit_files(tmp_path / "root")) == 1


def test_what_the_builder_raises_commits_nothing(tmp_path: Path) -> None:
    log = CommitLog(archive.create(str(tmp_path / "root")).storage, "id", commits.EMPTY)

    def refuse(parent: Commit, attempt: Attempt) -> Addition:
        raise StorageError(f"not on top of {parent.number}")

    with pytest.raises(StorageError, match="not on top of 0"):
        log.commit("a", Change("x", refuse))
    with pytest.raises(UsageError, match="over 1000000, most of them in 'kind'"):
        log.commit("b", by_hand("x" * 2_000_000))
    assert commit_files(tmp_path / "root") == []


def test_commits_chain(tmp_path: Path) -> None:
    write_some(tmp_path / "root", episodes=5, commits=5)
    files = commit_files(tmp_path / "root")
    parents = [None, *(path.read_bytes().split(b"\n")[1].decode() for path in files[:-1])]
    assert [body(path)["parent"] for path in files] == parents
    changed = body(files[2]) | {"message": "not what was there"}
    seal(files[2], changed)  # a whole commit, but not the one that its successor names
    with pytest.raises(CorruptCommitError, match="does not follow"):
        list(commits.following(archive.open(str(tmp_path / "root")).storage, commits.EMPTY))
