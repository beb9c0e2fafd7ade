"""Stores without a create-only put: refused in clear words, and used all the same by whoever promises to be alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import AlreadyExistsError, NotExclusiveError, SessionInUseError
from archive.maintain import verify
from archive.store import proof
from archive.store.storage import Storage
from tests.support.backends import Backend, Proxied

everywhere = pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)


def without_condition(proxied: Proxied) -> None:
    """From now on the server answers 501 to conditional puts, as is reported of Backblaze B2 and Alibaba OSS."""
    proxied.proxy.add("status", method="PUT", conditional=True, status=501, code="NotImplemented", times=-1)


def passing_over(proxied: Proxied) -> None:
    """From now on the server does as if there were no condition."""
    proxied.proxy.add("ignore_condition", method="PUT", conditional=True, times=-1)


@everywhere
def test_without_the_promise_the_error_says_what_to_do(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    without_condition(proxied)
    words = (
        r"(?s)create s3a?://.*archive\.json: the store has no create-only put .*"
        r"(?:injected|NotImpl).*single_writer=True"
    )
    for make in (archive.create, lambda *a, **how: archive.open(*a, create=True, **how)):
        with pytest.raises(NotExclusiveError, match=words):
            make(proxied.url, storage_options=proxied.storage_options)
    proxied.proxy.reset()
    archive.create(proxied.url, storage_options=proxied.storage_options)
    without_condition(proxied)
    monkeypatch.setattr(proof, "_proven", set())  # as in another process
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    with pytest.raises(NotExclusiveError, match=words):
        arc.writer()


@everywhere
def test_with_the_promise_everything_works(proxied: Proxied) -> None:
    without_condition(proxied)
    how: dict[str, Any] = {"storage_options": proxied.storage_options, "single_writer": True}
    arc = archive.create(proxied.url, **how)
    with pytest.raises(AlreadyExistsError):
        archive.create(proxied.url, **how)
    with arc.writer(session="one") as w:
        w.append({"x": np.arange(5)}, env_ids=0, first=True)
        w.commit()
        w.checkpoint(1, columns={"p": np.arange(5.0)}, state={"a": 1}).result(60)
    with pytest.raises(SessionInUseError):
        arc.writer(session="one")
    again = archive.open(proxied.url, create=True, **how)
    with again.writer(resume=again.checkpoints.latest) as w:
        w.append({"x": np.arange(5, 8)}, env_ids=0)
        w.checkpoint(2).result(60)
    plan = resharding.plan(archive.open(proxied.url, **how).checkpoints.latest, world_size=2)
    made = resharding.reshard(archive.open(proxied.url, **how), plan, proxied.url + "-2", copy=True, **how)
    assert made.world_size == 2
    other = resharding.merge([again.refresh()], proxied.url + "-3", **how)
    assert len(other.episodes) == 1
    found = archive.open(proxied.url, storage_options=proxied.storage_options)
    assert found.episodes.read()[0]["x"].tolist() == list(range(8))
    assert verify(found, deep=True).sound
    assert {seen.action for seen in proxied.proxy.log if seen.method == "PUT"} == {"pass", "status"}


def test_a_promise_is_no_proof_for_whoever_opens_it_later(proxied: Proxied) -> None:
    without_condition(proxied)
    archive.create(proxied.url, storage_options=proxied.storage_options, single_writer=True).writer().close()
    with pytest.raises(NotExclusiveError):
        archive.open(proxied.url, storage_options=proxied.storage_options).writer()


@everywhere
def test_a_store_that_passes_over_the_condition(proxied: Proxied) -> None:
    passing_over(proxied)
    how: dict[str, Any] = {"storage_options": proxied.storage_options}
    first = archive.create(proxied.url, single_writer=True, **how)
    for single_writer in (True, False):
        with pytest.raises(AlreadyExistsError):
            archive.create(proxied.url, single_writer=single_writer, **how)
    assert archive.open(proxied.url, **how).id == first.id
    with pytest.raises(NotExclusiveError, match="let an existing object be created again"):
        archive.open(proxied.url, **how).writer()
    with first.writer(session="s") as w:
        w.add_episode({"x": np.arange(3)})
    with pytest.raises(SessionInUseError):
        first.writer(session="s")
    assert len(archive.open(proxied.url, **how).episodes) == 1


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
def test_threads_of_the_process_that_is_alone_take_turns(backend: Backend) -> None:
    made = []
    storages = [Storage.connect(backend.url, backend.storage_options, single_writer=True) for _ in range(4)]

    def create(number: int) -> None:
        try:
            storages[number].create("x", b"%d" % number)
            made.append(number)
        except AlreadyExistsError:
            pass

    threads = [threading.Thread(target=create, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert storages[0].get("x") == b"%d" % made[0]
