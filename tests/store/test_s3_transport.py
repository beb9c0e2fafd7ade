"""Which client an s3:// URL goes through, with the same credentials, and what obstore cannot say."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from archive.base.errors import AccessDeniedError, StorageError
from archive.store import Storage
from archive.store.drivers import s3transport
from archive.store.drivers.driver import Location
from archive.store.drivers.s3transport import Session, UntranslatedError, settings, understood
from tests.support import servers
from tests.support.backends import Backend, Proxied
from tests.support.places import ROOT


def place(options: dict[str, Any], bucket: str = "bucket") -> Location:
    return Location(f"s3://{bucket}/runs/1", "s3", options, "", 120.0, 32)


def translated(options: dict[str, Any], configured: dict[str, str] | None = None, bucket: str = "bucket") -> Any:
    at = place(options, bucket)
    return settings(at, understood(at), configured or {})["config"]


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


def test_the_usual_options_are_translated() -> None:
    amazon = translated({"anon": True, "client_kwargs": {"region_name": "eu-west-1"}})
    assert amazon == {
        "region": "eu-west-1",
        "skip_signature": True,
        "virtual_hosted_style_request": True,
        "disable_bulk_delete": True,
        "checksum_algorithm": "SHA256",
    }
    when_required = {"config_kwargs": {"request_checksum_calculation": "when_required"}}
    assert "checksum_algorithm" not in translated(when_required)
    assert not translated({}, {"region": "us-east-1"}, "with.dots")["virtual_hosted_style_request"]
    for options in ({"endpoint_url": "http://h:1/"}, {"client_kwargs": {"endpoint_url": "http://h:1"}}):
        other = translated(options)
        assert (other["endpoint"], other["virtual_hosted_style_request"]) == ("http://h:1", False)


def test_the_environment_and_the_configuration_name_region_and_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert translated({})["region"] == servers.REGION
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:1")
    assert translated({})["endpoint"] == "http://a:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b:1")
    assert translated({}, {"endpoint_url": "http://c:1"})["endpoint"] == "http://b:1"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert "endpoint" not in translated({})


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"session": object()},
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
        {"config_kwargs": {"proxies": {"http": "h"}}},
        {"use_ssl": False},
        {"something": "new"},
    ],
)
def test_what_obstore_has_no_equal_of_goes_through_s3fs(options: dict[str, Any]) -> None:
    with pytest.raises(UntranslatedError):
        translated(options)
    assert Storage.connect("s3://bucket/x", options | {"transport": "s3fs"}).root.options["transport"] == "s3fs"
    with pytest.raises(StorageError, match="transport='obstore' cannot be: "):
        Storage.connect("s3://bucket/x", options | {"transport": "obstore"}).exclusive()


@pytest.mark.parametrize("bucket", ["arn:aws:s3:eu-west-1:1:accesspoint/x", "fast--use1-az4--x-s3"])
def test_buckets_of_other_kinds_go_through_s3fs(bucket: str) -> None:
    with pytest.raises(UntranslatedError, match="plain bucket"):
        translated({}, bucket=bucket)


@pytest.mark.parametrize(("region", "why"), [("", "no region"), ("cn-north-1", "hosts of its own")])
def test_regions_of_other_hosts_go_through_s3fs(region: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(UntranslatedError, match=why):
        translated({}, {"region": region})


def test_certificates_of_ones_own_go_through_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/x.pem")
    assert translated({"endpoint_url": "http://h:1"})
    with pytest.raises(UntranslatedError, match="AWS_CA_BUNDLE"):
        translated({"endpoint_url": "https://h:1"})


def test_credentials_are_looked_for_where_botocore_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def signer(options: dict[str, Any]) -> Any:
        given = Session(options.get("profile")).provider(options)
        return given and tuple(given()[name] for name in ("access_key_id", "secret_access_key", "token"))

    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    assert signer({"anon": True}) is None
    assert signer({"key": "k", "secret": "s"}) == ("k", "s", None)  # not with the environment's token
    assert signer({"key": "k", "secret": "s", "token": "t"}) == ("k", "s", "t")
    assert signer({}) == (servers.KEY, servers.SECRET, "env-token")
    credentials = tmp_path / "credentials"
    credentials.write_text("[p]\naws_access_key_id = pk\naws_secret_access_key = ps\naws_session_token = pt\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    assert signer({"profile": "p"}) == ("pk", "ps", "pt")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "p")
    assert signer({}) == ("pk", "ps", "pt")
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(UntranslatedError, match="no credentials"):
        signer({})


def test_a_configuration_that_says_more_goes_through_s3fs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = eu-west-1\n[profile other]\nregion = x\ns3 =\n  use_accelerate_endpoint = true\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    assert Session(None).configured()["region"] == "eu-west-1"
    with pytest.raises(UntranslatedError, match="s3 in the AWS configuration"):
        Session("other").configured()


def test_the_transport_is_named_and_can_be_chosen(moto_endpoint: str) -> None:
    options = servers.s3fs_options(moto_endpoint)
    usual = Storage.connect("s3://bucket/x", options)
    assert repr(usual) == "Storage('s3://bucket/x')"
    assert usual.driver.transport == "obstore"
    assert repr(usual) == "Storage('s3://bucket/x', through obstore)"
    chosen = Storage.connect("s3://bucket/x", options | {"transport": "s3fs"}, single_writer=True)
    assert chosen.driver.transport == "s3fs"
    assert "transport" not in chosen.spec()[1]
    with pytest.raises(StorageError, match="give one of obstore, s3fs"):
        Storage.connect("s3://bucket/x", options | {"transport": "ftp"}).exclusive()


def test_without_obstore_it_is_s3fs(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3transport, "find_spec", lambda name: None)
    assert Storage.connect("s3://bucket/x", servers.s3fs_options(moto_endpoint)).driver.transport == "s3fs"


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect"), (400, "AuthorizationHeaderMalformed")]
)
def test_a_bucket_of_another_region_goes_on_through_s3fs(proxied: Proxied, status: int, code: str) -> None:
    storage = proxied.connect()
    storage.put("x", b"data")
    proxied.proxy.add("status", status=status, code=code)
    assert storage.driver.transport == "obstore"
    assert storage.get("x", 0, 4) == b"data"
    assert storage.driver.transport == "s3fs"
    storage.create("y", b"1")
    assert storage.list("") == ["x", "y"]


def test_a_session_token_is_not_in_errors(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of credentials that a role gave, too, which the options do not have."""
    give = s3transport._constant("role-key", "role-secret-1", "role-token-1")
    monkeypatch.setattr(Session, "_renewing", lambda self: give)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    options = {name: value for name, value in proxied.storage_options.items() if name not in ("key", "secret")}
    storage = Storage.connect(proxied.url, options)
    proxied.proxy.add(
        "status", status=403, code="AccessDenied</Code><Seen>role-token-1 role-secret-1</Seen><Code>", times=-1
    )
    with pytest.raises(AccessDeniedError) as caught:
        storage.get("x")
    chain = f"{caught.value} {caught.value.__cause__!r} {caught.value.__cause__}"
    assert "role-token-1" not in chain
    assert "role-secret-1" not in chain


IN_A_WORKER = """
import sys, warnings
import numpy as np
from torch.utils.data import DataLoader
import archive
from archive.torch import EpisodeDataset
from tests.support import servers

options = servers.s3fs_options(sys.argv[2])
with archive.create(sys.argv[1], storage_options=options).writer() as w:
    for i in range(8):
        w.add_episode({"x": np.full(4, i, np.float32)}, episode_id=f"e{i}")
arc = archive.open(sys.argv[1], storage_options=options)
assert arc.storage.driver.transport == "obstore", arc.storage
for method in ("fork", "spawn", "forkserver"):
    found = DataLoader(EpisodeDataset(arc.episodes), batch_size=None, num_workers=2, multiprocessing_context=method)
    print(method, sorted(float(one["x"][0]) for one in found))
"""


FORKED = """
import os, sys
import obstore
from obstore.store import MemoryStore
from archive.store import Storage
from tests.support import servers

obstore.put(MemoryStore(), "x", b"1")
pid = os.fork()
storage = Storage.connect(sys.argv[1], servers.s3fs_options(sys.argv[2]))
storage.put("x", b"2")
print(storage.driver.transport, storage.get("x"), flush=True)
if pid:
    os.waitpid(pid, 0)
else:
    os._exit(0)
"""


def test_a_process_forked_after_somebody_elses_use_of_obstore_does_without(backend_of_moto: Backend) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, backend_of_moto.url, backend_of_moto.endpoint]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, timeout=100
    )
    assert sorted(done.stdout.splitlines()) == ["obstore b'2'", "s3fs b'2'"], done.stderr


def test_workers_of_any_kind_read(backend_of_moto: Backend, tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text("if True:\n" + "".join(f"  {line}\n" for line in IN_A_WORKER.splitlines()))
    script.write_text(script.read_text().replace("if True:", "if __name__ == '__main__':"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(script), backend_of_moto.url, backend_of_moto.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    every = [float(i) for i in range(8)]
    assert done.stdout.splitlines() == [f"{method} {every}" for method in ("fork", "spawn", "forkserver")], done.stderr


@pytest.fixture
def backend_of_moto(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    from tests.support.backends import make_backend

    return make_backend(request, "moto", tmp_path)


def test_a_client_goes_with_its_storage(moto_endpoint: str) -> None:
    """obstore's holds on to who signs for it, in no way that Python could see: nothing there may lead back to it."""
    storage = Storage.connect("s3://bucket/gone", servers.s3fs_options(moto_endpoint))
    storage.put("x", b"1")
    driver = storage.driver
    assert isinstance(driver, s3transport.S3Transport)
    kept = weakref.ref(driver._bucket)
    del storage, driver
    gc.collect()
    assert kept() is None
