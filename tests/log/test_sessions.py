"""Who may write: one writer a rank and session, the newest session of a run, and stores that can tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import archive
from archive.base.errors import (
    ConflictError,
    CorruptStateError,
    NotExclusiveError,
    SessionInUseError,
    SupersededError,
    UsageError,
)
from archive.log import sessions
from archive.testing import steps
from tests.support.backends import Backend, make_backend
from tests.support.tampering import body, commit_files, same

VARIABLES = (
    *("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


@pytest.fixture(params=("local", "seaweedfs"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh root where it matters most."""
    return make_backend(request, request.param, tmp_path)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def opened(backend: Backend, **options: Any) -> archive.Archive:
    return archive.open(backend.url, storage_options=backend.storage_options, create=True, **options)


def ids(backend: Backend) -> list[str]:
    return sorted(opened(backend).episodes.table["episode_id"].to_pylist())


def abandon(writer: archive.Writer) -> None:
    """Ends a writer without a commit."""
    with pytest.raises(InterruptedError), writer:
        raise InterruptedError


def objects(backend: Backend, folder: str) -> list[str]:
    return backend.connect().list(folder)


def test_a_zombie_is_refused_after_a_takeover(store: Backend) -> None:
    zombie = opened(store).writer()
    zombie.add_episode(steps(3), episode_id="acknowledged")
    zombie.commit()
    zombie.add_episode(steps(4, 1), episode_id="late")
    with opened(store).writer() as successor:
        successor.add_episode(steps(5, 2), episode_id="new")
    before = len(opened(store).commits)
    for _ in range(2):  # the second call does not succeed with nothing
        with pytest.raises(SupersededError, match=rf"(?s){zombie.session}.*{successor.session}.*open a new writer"):
            zombie.commit()
    assert len(opened(store).commits) == before
    assert ids(store) == ["acknowledged", "new"]
    assert any(zombie.session in name for name in objects(store, "shards"))  # what it uploaded is still there
    assert zombie.live["episode_id"].to_pylist() == ["acknowledged", "late"]
    with pytest.raises(SupersededError):
        zombie.close()


def test_what_a_zombie_holds_can_be_written_by_a_new_writer(store: Backend) -> None:
    arc = opened(store)
    zombie = arc.writer()
    zombie.add_episode(steps(4, 1), episode_id="late")
    opened(store).writer().close()
    with pytest.raises(SupersededError):
        zombie.commit()
    abandon(zombie)
    with arc.refresh().writer() as w:
        w.add_episode(steps(4, 1), episode_id="late")
    assert ids(store) == ["late"]


def test_a_late_rank_of_a_superseded_session_is_refused(store: Backend) -> None:
    first = opened(store).writer(rank=0, world_size=2, session="one")
    late_archive = opened(store)  # opened before the takeover, used after it
    opened(store).writer(rank=0, world_size=2, session="two").close()
    first.add_episode(steps(3))
    for late in (late_archive, opened(store)):
        with pytest.raises(ConflictError) as caught:
            late.writer(rank=1, world_size=2, session="one")
        assert isinstance(caught.value, SupersededError | SessionInUseError)
    with pytest.raises(SupersededError):
        first.commit()
    abandon(first)
    assert ids(store) == []
    assert opened(store).head.runs["main"].session == "two"


def test_a_superseded_session_stays_so_after_many_others(tmp_path: Path) -> None:
    backend = Backend(str(tmp_path / "root"), name="local")
    zombie = opened(backend).writer(session="zombie")
    for i in range(5):
        opened(backend).writer(session=f"s{i}").close()
    with pytest.raises(SupersededError):
        opened(backend).writer(rank=1, world_size=2, session="zombie")
    zombie.add_episode(steps(1))
    with pytest.raises(SupersededError):
        zombie.close()


def test_a_rank_has_one_writer(store: Backend) -> None:
    with opened(store).writer(rank=1, world_size=2, session="s") as w:
        with pytest.raises(SessionInUseError, match=r"rank 1 of session 's'.*session=\.\.\."):
            opened(store).writer(rank=1, world_size=2, session="s")
        w.add_episode(steps(3), episode_id="a")
    with pytest.raises(SessionInUseError):  # closed, but its positions are used
        opened(store).writer(rank=1, world_size=2, session="s")
    opened(store).writer(rank=0, world_size=2, session="s").close()
    assert ids(store) == ["a"]


def test_ranks_of_a_session_and_two_runs_do_not_disturb_each_other(store: Backend) -> None:
    ranks = [opened(store).writer(rank=r, world_size=2, session="s") for r in range(2)]
    other = opened(store).writer(run="eval")
    for i in range(3):
        for j, w in enumerate([*ranks, other]):
            w.add_episode(steps(3, 10 * i + j), episode_id=f"{j}-{i}")
            w.commit()
    for w in (*ranks, other):
        w.close()
    arc = opened(store)
    assert ids(store) == sorted(f"{j}-{i}" for j in range(3) for i in range(3))
    assert same(arc.episodes["1-2"].read(), steps(3, 21))
    assert {run: entry.session for run, entry in arc.head.runs.items()} == {"main": "s", "eval": other.session}
    assert len(arc.episodes.filter(session="s", rank=1)) == 3


def test_a_takeover_of_one_run_leaves_the_other(tmp_path: Path) -> None:
    backend = Backend(str(tmp_path / "root"), name="local")
    other = opened(backend).writer(run="eval")
    opened(backend).writer().close()
    opened(backend).writer().close()
    other.add_episode(steps(3), episode_id="e")
    other.close()
    assert ids(backend) == ["e"]


def test_a_session_is_opened_by_a_commit_of_its_own(tmp_path: Path) -> None:
    backend = Backend(str(tmp_path / "root"), name="local")
    opened(backend).writer(session="a").close()
    opened(backend).writer(session="b").close()
    bodies = [body(path) for path in commit_files(tmp_path / "root")]
    assert [(b["kind"], b["session"]) for b in bodies] == [("session", "a"), ("session", "b")]
    assert bodies[1]["runs"]["main"]["superseded"] == ["a"]
    assert json.loads((tmp_path / "root/sessions/a/rank-00000.json").read_bytes())["rank"] == 0


def test_session_names_come_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = archive.create(str(tmp_path / "root"))
    with pytest.raises(UsageError, match="needs session="):
        arc.writer(rank=0, world_size=2)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="in a world of 2 needs session="):
        arc.writer()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with arc.writer() as w:
        assert (w.rank, w.world_size, w.session) == (1, 4, "slurm-77-0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with arc.writer() as w:
        assert w.session == "slurm-77-2"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with arc.writer() as w:
        assert w.session == "job-3"
    with pytest.raises(UsageError, match="rank 4 is not one of a world of 4"):
        arc.writer(rank=4)


class Group:
    """A process group, as its third rank sees it."""

    def get_rank(self) -> int:
        return 2

    def get_world_size(self) -> int:
        return 4

    def all_gather_object(self, out: list[str], own: str) -> None:
        out[:] = ["first", "second", own, "fourth"]


def test_a_process_group_says_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "process_group", Group)
    assert sessions.place(None, None, "main", None) == sessions.Place(2, 4, "main", "first")
    assert sessions.place(None, 8, "main", "s") == sessions.Place(2, 8, "main", "s")
    assert sessions.place(1, None, "main", "s") == sessions.Place(1, 4, "main", "s")
    assert sessions.place(0, 1, "main", "s") == sessions.Place(0, 1, "main", "s")


@pytest.mark.parametrize("run", ["a", "z"])
def test_a_session_is_of_one_run(tmp_path: Path, run: str) -> None:
    arc = archive.create(tmp_path)
    arc.writer(run="main", session="s").close()
    with pytest.raises(SessionInUseError, match=f"is one of run 'main', not of '{run}'"):
        arc.writer(run=run, session="s", rank=1, world_size=2)


def test_a_claim_lies_where_it_belongs(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    keys = [f"sessions/{name}/rank-00000.json" for name in ("a", "b")]
    for name, key in zip(("a", "b"), keys, strict=True):
        arc.writer(session=name).close()
        assert sessions.read_claim(arc.storage, key).session == name
    first, second = ((tmp_path / key).read_bytes() for key in keys)
    for key, other in zip(keys, (second, first), strict=True):
        (tmp_path / key).write_bytes(other)
        with pytest.raises(CorruptStateError, match="does not belong there"):
            sessions.read_claim(arc.storage, key)


class PlainFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store whose create is exists-then-write, as base fsspec's is."""

    protocol = "plainstore"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own way)
    pseudo_dirs = [""]  # noqa: RUF012


@pytest.fixture
def plain_url() -> Iterator[str]:
    fsspec.register_implementation("plainstore", PlainFileSystem, clobber=True)
    PlainFileSystem.store.clear()
    yield "plainstore://place/a"
    PlainFileSystem.store.clear()


def test_a_store_that_cannot_create_exclusively_is_refused(plain_url: str) -> None:
    with pytest.raises(NotExclusiveError, match="single_writer=True"):
        archive.create(plain_url)
    assert not PlainFileSystem.store
    with archive.create(plain_url, single_writer=True).writer() as w:
        w.add_episode(steps(3), episode_id="e")
    assert same(archive.open(plain_url).episodes["e"].read(), steps(3))  # readers write nothing
    with pytest.raises(NotExclusiveError):
        archive.open(plain_url).writer()
    with archive.open(plain_url, single_writer=True).writer() as w:
        w.add_episode(steps(3, 1), episode_id="f")
    assert len(archive.open(plain_url).episodes) == 2


def test_a_store_that_overwrites_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says it creates, and lets an existing object be created again."""
    from archive.store import proof
    from archive.store.drivers.local import LocalDriver

    archive.create(str(tmp_path / "root"))
    monkeypatch.setattr(proof, "_proven", set())  # as in another process
    monkeypatch.setattr(LocalDriver, "create", LocalDriver.put)
    with pytest.raises(NotExclusiveError, match="let an existing object be created again"):
        archive.open(str(tmp_path / "root")).writer()
    assert not (tmp_path / "root/sessions").exists()
