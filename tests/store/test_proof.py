"""A store that does not refuse to replace an object is refused in words, for each client that would create there, and
before anything is."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import archive
from archive.base.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    DeadlineError,
    NotExclusiveError,
    NothingThereError,
)
from archive.store import Storage, prove, writes
from archive.testing import small_archive
from tests.support import servers
from tests.support.backends import Backend, Proxied, bucket_and_key, s3_options

clients = pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)
TRANSPORTS = {"moto": "obstore", "s3fs": "s3fs", "obstore": "obstore"}
AGENTS = {"obstore": "object_store", "s3fs": "aiobotocore"}  # a part of what the clients call themselves


def objects(proxied: Proxied) -> dict[str, bytes]:
    """All that lies there, without the proxy."""
    storage = Storage.connect(proxied.url, s3_options(proxied.name, proxied.endpoint))
    keys = [one.key for one in storage.scan("")]
    return dict(zip(keys, storage.get_all(keys), strict=True))


def creates(proxied: Proxied) -> list[str]:
    """The objects that were to be created through the proxy, and what nobody asked it for on condition."""
    root = "/{}/{}/".format(*bucket_and_key(proxied.url))
    written = [one for one in proxied.proxy.log if one.method in ("PUT", "POST") and "delete" not in one.path]
    return [one.path.removeprefix(root) if one.conditional else f"plain {one.path}" for one in written]


def opened(proxied: Proxied, **options: Any) -> archive.Archive:
    return archive.open(proxied.url, storage_options=proxied.storage_options | options, deadline_s=10)


@clients
def test_a_store_that_passes_over_the_condition_gets_no_commit(proxied: Proxied) -> None:
    """Its archive.json stays: another client may be heeded, and somebody have opened it by now."""
    proxied.proxy.add("ignore_condition", conditional=True, times=-1)
    words = (
        rf"let an existing object be created again: archive\.json was sent through {TRANSPORTS[proxied.name]} on "
        r"condition that nothing is there, and the store answered that it is done\..* use another store.*"
        r"single_writer=True.*stores\.md"
    )
    for number, make in enumerate((archive.create, lambda url, **how: archive.open(url, create=True, **how))):
        url = f"{proxied.url}/{number}"
        with pytest.raises(NotExclusiveError, match=words + rf".*Nothing but {url}/archive\.json was made"):
            make(url, storage_options=proxied.storage_options)
        with pytest.raises(NotExclusiveError, match=words):
            archive.open(url, storage_options=proxied.storage_options).writer()
    assert sorted(objects(proxied)) == ["0/archive.json", "1/archive.json"]
    alone = archive.open(url, storage_options=proxied.storage_options, single_writer=True)
    alone.writer().close()


@pytest.mark.parametrize("dropping", ["obstore", "s3fs"])
def test_a_client_that_drops_the_condition_is_refused_where_another_has_made_the_archive(
    proxied: Proxied, dropping: str
) -> None:
    other = {"obstore": "s3fs", "s3fs": "obstore"}[dropping]
    proxied.proxy.add("ignore_condition", conditional=True, agent=AGENTS[dropping], times=-1)
    how = {"storage_options": proxied.storage_options | {"transport": other}}
    small_archive(proxied.url, 2, **how)
    before = objects(proxied)
    proxied.proxy.log.clear()
    through = opened(proxied, transport=dropping)
    for change in (
        through.writer, lambda: through.label({"e0": {"x": 1}}), lambda: through.tag("t", through.head.number),
        through.check_writable,
    ):  # fmt: skip
        with pytest.raises(NotExclusiveError, match=rf"through {dropping} .*storage option transport={other}\)"):
            change()
    assert {*creates(proxied)} == {"archive.json"}
    assert objects(proxied) == before
    opened(proxied, transport=other).label({"e0": {"x": 1}})


def test_a_client_that_takes_over_is_proven_too(proxied: Proxied) -> None:
    """Such as s3fs, once the store says that the bucket is in another region."""
    arc = archive.create(proxied.url, storage_options=proxied.storage_options)
    proxied.proxy.add("ignore_condition", conditional=True, agent=AGENTS["s3fs"], times=-1)
    proxied.proxy.add("status", method="GET", status=301, code="PermanentRedirect")
    assert arc.storage.get("archive.json")
    assert arc.storage.driver.transport == "s3fs"
    with pytest.raises(NotExclusiveError, match=r"again: archive\.json was sent through s3fs "):
        arc.writer()
    assert [*objects(proxied)] == ["archive.json"]


@clients
def test_it_is_proven_once_for_each_client_and_nothing_is_left(proxied: Proxied) -> None:
    arc = archive.create(proxied.url, storage_options=proxied.storage_options)
    assert creates(proxied) == ["archive.json"] * 2
    assert [*objects(proxied)] == ["archive.json"]
    arc.writer(session="a").close()
    opened(proxied).writer(session="b").close()
    assert creates(proxied).count("archive.json") == 2
    if proxied.name != "obstore":
        other = {"moto": "s3fs", "s3fs": "obstore"}[proxied.name]
        for session in ("c", "d"):
            opened(proxied, transport=other).writer(session=session).close()
        assert creates(proxied).count("archive.json") == 3
    storage = pickle.loads(pickle.dumps(opened(proxied).storage))  # workers have it so
    assert storage.known == ("archive.json", objects(proxied)["archive.json"])


def test_whoever_only_looks_writes_nothing(proxied: Proxied) -> None:
    small_archive(proxied.url, 2, checkpoints=True, storage_options=proxied.storage_options)
    proxied.proxy.log.clear()
    arc = opened(proxied, transport="s3fs")
    assert len(arc.episodes.read()) == 2
    arc.forget(archive.Keep(last=1))
    arc.verify(deep=True)
    assert {*proxied.proxy.verbs()} <= {"GET", "HEAD"}


@clients
def test_a_store_that_knows_no_condition_is_refused_for_labels_too(proxied: Proxied) -> None:
    small_archive(proxied.url, 2, storage_options=proxied.storage_options, single_writer=True)
    before = objects(proxied)
    proxied.proxy.add("status", conditional=True, status=501, code="NotImplemented", times=-1)
    proxied.proxy.log.clear()
    with pytest.raises(NotExclusiveError, match=r"create .*archive\.json: the store has no create-only put"):
        opened(proxied).label({"e0": {"x": 1}})
    assert creates(proxied) == ["archive.json"]
    assert objects(proxied) == before


@clients
@pytest.mark.parametrize("code", ["InvalidArgument", "InvalidRequest"])
def test_a_store_that_calls_the_condition_a_bad_request_is_refused_in_words(proxied: Proxied, code: str) -> None:
    proxied.proxy.add("status", conditional=True, status=400, code=code, times=-1)
    words = rf"does not say that it can refuse to overwrite.*If-None-Match.*400 {code}.*single_writer=True"
    with pytest.raises(NotExclusiveError, match=words):
        archive.create(proxied.url, storage_options=proxied.storage_options)
    assert objects(proxied) == {}
    proxied.proxy.reset()
    archive.create(proxied.url, storage_options=proxied.storage_options, single_writer=True)
    proxied.proxy.add("status", conditional=True, status=400, code=code, times=-1)
    with pytest.raises(NotExclusiveError, match=words):
        opened(proxied).writer()


@clients
def test_a_conflict_is_asked_again(proxied: Proxied) -> None:
    arc = archive.create(proxied.url, storage_options=proxied.storage_options, single_writer=True)
    proxied.proxy.add("status", conditional=True, status=409, code="ConditionalRequestConflict", times=2)
    opened(proxied).check_writable()
    assert proxied.proxy.verbs().count("PUT") == 1 + 3
    proxied.proxy.add("status", conditional=True, status=409, code="ConditionalRequestConflict", times=-1)
    options = arc.storage.root.options
    with pytest.raises(DeadlineError, match=r"409|ConditionalRequestConflict"):
        archive.open(proxied.url, storage_options=options, deadline_s=3).check_writable()


@clients
def test_a_lost_answer_proves_nothing(proxied: Proxied) -> None:
    archive.create(proxied.url, storage_options=proxied.storage_options, single_writer=True)
    proxied.proxy.add("reset_after", conditional=True)
    opened(proxied).check_writable()
    proxied.proxy.add("status", conditional=True, status=500, times=-1)
    with pytest.raises(AmbiguousWriteError):
        archive.open(proxied.url, storage_options=proxied.storage_options, deadline_s=0.5).check_writable()


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
def test_an_archive_that_was_removed_is_told(backend: Backend) -> None:
    arc = archive.create(backend.url, storage_options=backend.storage_options)
    was = arc.storage.get("archive.json")
    arc.storage.delete(["archive.json"])
    with pytest.raises(NothingThereError, match="was gone; it is back now"):
        arc.check_writable()
    assert arc.storage.get("archive.json") == was
    arc.check_writable()


def test_a_single_writer_has_nothing_to_prove(proxied: Proxied) -> None:
    proxied.proxy.add("ignore_condition", conditional=True, times=-1)
    arc = archive.create(proxied.url, storage_options=proxied.storage_options, single_writer=True)
    prove(arc.storage)
    arc.check_writable()
    assert creates(proxied) == ["archive.json"]


# -- in parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxied", ["seaweedfs"], indirect=True)
def test_an_upload_in_parts_is_proven_by_itself(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and before the first large object."""
    arc = archive.create(proxied.url, storage_options=proxied.storage_options)
    monkeypatch.setattr(writes, "LARGEST_PUT_BYTES", 1 << 20)
    large = bytes(1 << 21)
    proxied.proxy.log.clear()
    arc.storage.create("states/1", large)
    arc.storage.create("states/2", large)
    ends = [one.path.rpartition("/")[2].partition("?")[0] for one in proxied.proxy.log if one.conditional]
    assert ends == ["archive.json", "1", "2"]
    with pytest.raises(AlreadyExistsError):
        arc.storage.create("states/1", bytes(len(large) + 1))
    assert {name: len(data) for name, data in objects(proxied).items() if "states" in name} == {
        "states/1": len(large), "states/2": len(large),
    }  # fmt: skip
    assert objects(proxied)["archive.json"] == arc.storage.known[1]  # type: ignore[index]


@pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
def test_a_store_that_passes_over_it_at_the_end_of_parts_is_refused(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ceph did for years: what one PUT takes is created there all the same."""
    proxied.proxy.add("ignore_condition", method="POST", conditional=True, times=-1)
    arc = archive.create(proxied.url, storage_options=proxied.storage_options)
    monkeypatch.setattr(writes, "LARGEST_PUT_BYTES", 1 << 20)
    arc.storage.create("states/1", bytes(1 << 20))
    with pytest.raises(NotExclusiveError, match=r"archive\.json was uploaded in parts, to be completed"):
        arc.storage.create("states/2", bytes((1 << 20) + 1))
    assert sorted(objects(proxied)) == ["archive.json", "states/1"]
    assert opened(proxied).id == arc.id
    client = servers.s3_client(proxied.endpoint)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket_and_key(proxied.url)[0])
    client.close()


def test_parts_of_a_refused_upload_are_removed(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "LARGEST_PUT_BYTES", 10)
    storage = proxied.connect()
    proxied.proxy.add("status", method="POST", conditional=True, status=412, code="PreconditionFailed")
    proxied.proxy.add("status", method="DELETE", status=403, code="AccessDenied")  # which does not hide the reason
    with pytest.raises(AlreadyExistsError):
        storage.create("x", bytes(11))
    proxied.proxy.add("status", method="POST", conditional=True, status=412, code="PreconditionFailed")
    with pytest.raises(AlreadyExistsError):
        storage.create("y", bytes(11))
    assert proxied.proxy.verbs().count("DELETE") == 2
