"""Credentials that expire while a job runs, and whoever renews them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from archive.base import AccessDeniedError
from archive.store import Storage
from tests.support import servers
from tests.support.backends import Proxied
from tests.support.proxy import Fault

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
DATA = b"0123456789"
Become = Callable[[str], None]
clients = pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)


def sourced(proxied: Proxied, **settings: Any) -> Storage:
    """A storage whose options hold no credentials; moto takes any."""
    proxied.plant("x", DATA)
    options = {name: value for name, value in proxied.storage_options.items() if name not in ("key", "secret")}
    return Storage.connect(proxied.url, options, **settings)


def expire(proxied: Proxied, key: str) -> Fault:
    """From now on, whatever that key has signed is refused as AWS refuses it."""
    return proxied.proxy.add("status", status=400, code="ExpiredToken", signed_by=key, times=-1)


def signers(proxied: Proxied) -> list[str]:
    return [seen.signed_by for seen in proxied.proxy.log]


@pytest.fixture(params=["environment", "file", "process"])
def become(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Become:
    """Has the source of credentials give those of the name that it is called with."""
    if request.param == "environment":
        return lambda key: [monkeypatch.setenv(name, key) for name in KEYS] and None
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    secrets = tmp_path / "credentials"
    if request.param == "file":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
        return lambda key: _replace(secrets, "[default]\n" + "".join(f"{one.lower()} = {key}\n" for one in KEYS))
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} -S -c 'print(open(\"{secrets}\").read())'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    answer = '{"Version": 1, "AccessKeyId": "%s", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "%s"}'
    return lambda key: _replace(secrets, answer % (key, "2036-01-01T00:00:00Z"))


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@clients
def test_a_job_survives_credentials_that_expire_and_are_renewed(proxied: Proxied, become: Become) -> None:
    become("old")
    storage = sourced(proxied)
    storage.create("a", DATA)
    become("new")
    assert storage.get("x") == DATA
    assert set(signers(proxied)) == {"old"}  # nobody asks the source without need
    expire(proxied, "old")
    proxied.proxy.log.clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(storage.get, ["x"] * 8)) == [DATA] * 8
    storage.create("b", DATA)
    assert storage.list("") == ["a", "b", "x"]
    assert storage.exists("b")
    storage.delete_many(["b"])
    assert signers(proxied).count("old") <= 8
    assert storage.stats.retries <= 8
    assert storage.stats.errors == 0


@clients
def test_a_role_that_is_assumed_is_assumed_again(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / "token"
    token.write_text("who I am")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", proxied.endpoint)
    storage = sourced(proxied)
    assert storage.get("x") == DATA
    old = signers(proxied)[-1]
    expire(proxied, old)  # before its time, as where the role was revoked or a clock is wrong
    assert storage.get("x") == DATA
    assert signers(proxied)[-2] == old
    assert signers(proxied)[-1] not in (old, servers.KEY)


@clients
def test_a_source_that_is_away_is_asked_again(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    script, tries = tmp_path / "source.py", tmp_path / "tries"
    script.write_text(
        f"import sys; tries = open({str(tries)!r}, 'a+'); tries.write('x'); tries.seek(0)\n"
        'print(\'{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s"}\')\n'
        "sys.exit(len(tries.read()) < 3)\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} -S {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    storage = sourced(proxied, deadline_s=20)
    assert storage.get("x") == DATA


@clients
def test_it_waits_for_who_renews(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = sourced(proxied, deadline_s=20)
    assert storage.get("x") == DATA
    expire(proxied, servers.KEY)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(storage.get, "x")
        while len(proxied.proxy.log) < 4:
            time.sleep(0.01)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        assert found.result(20) == DATA
    assert signers(proxied)[-1] == "new"


@clients
def test_an_answer_without_a_body_is_explained(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = sourced(proxied)
    assert storage.exists("x")
    expire(proxied, servers.KEY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    proxied.proxy.log.clear()
    assert storage.exists("x")
    assert proxied.proxy.verbs()[-2:] == ["GET", "HEAD"]  # botocore asks by another HEAD, whether it is the region


@clients
def test_nobody_renews(proxied: Proxied) -> None:
    assert sourced(proxied).get("x") == DATA  # connected: on a busy machine that takes longer than the deadline below
    storage = sourced(proxied, deadline_s=1.0)
    expire(proxied, servers.KEY)
    started = time.monotonic()
    with pytest.raises(AccessDeniedError, match="the credentials have expired and nothing has renewed them") as caught:
        storage.get("x")
    assert time.monotonic() - started < 3
    assert caught.value.__cause__ is not None
    assert len(proxied.proxy.log) > 2


@pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)
def test_credentials_that_are_options_can_only_expire(proxied: Proxied) -> None:
    proxied.plant("x", DATA)
    storage = proxied.connect()
    expire(proxied, servers.KEY)
    with pytest.raises(AccessDeniedError, match="leave them out of storage_options"):
        storage.get("x")
    assert len(proxied.proxy.log) == 1


@clients
def test_what_is_refused_for_good_is_told_at_once(proxied: Proxied) -> None:
    storage = sourced(proxied)
    proxied.proxy.add("status", status=403, code="AccessDenied", times=-1)
    for call in (lambda: storage.get("x"), lambda: storage.create("y", b"")):
        proxied.proxy.log.clear()
        with pytest.raises(AccessDeniedError, match="check the credentials and what they permit"):
            call()
        assert len(proxied.proxy.log) == 1
