"""Fixtures for all tests: servers are started when the first test asks for them, each test gets a root of its own."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import botocore.loaders
import pytest

sys.dont_write_bytecode = False  # rewriting all tests takes each worker longer than most rooms
pytest.register_assert_rewrite("tests.support")  # before any of it is imported

from tests.support import processes, ray_cluster, servers  # noqa: E402
from tests.support.backends import BACKENDS, BUCKET, Backend, Proxied, make_backend, s3_options  # noqa: E402
from tests.support.proxy import FaultProxy  # noqa: E402
from tests.support.roles import POLICIES, ROLES_BUCKET  # noqa: E402

# what takes longest begins first: a worker that begins with it in the end keeps everybody waiting
FIRST = (
    *ray_cluster.FIRST,
    "tests/whole/test_model.py",
    "tests/docs/test_torchrun_example.py",
    "tests/view/test_hostile.py",
    "tests/maintain/test_storm.py",
    "tests/journal/test_requests.py",
    "tests/journal/test_deaths.py",
    "tests/whole/test_load.py",
    "tests/whole/test_exits.py",
)


MEMORY, LEAST_BYTES = Path("/dev/shm"), 8 << 30


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where workers share the machine, and it has room, files of tests lie in memory until all have ended: the library
    syncs tens of thousands of them, and no test can tell whether a disk has turned. Those of stores lie on disk."""
    alone = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if alone or config.option.basetemp or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < LEAST_BYTES:
        return
    config.option.basetemp = tempfile.mkdtemp(prefix="tests-", dir=MEMORY)
    config.add_cleanup(functools.partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(name) if (name := file_of(item)) in FIRST else len(FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """The cluster of Ray is gone when the first test that needs none begins."""
    yield
    if nextitem is None or file_of(nextitem) not in ray_cluster.FIRST:
        ray_cluster.stop()


def pytest_collection_finish() -> None:
    """What was collected stays: ten thousand tests are not looked at again whenever garbage is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in (*servers.UNSET, "PYTHONDONTWRITEBYTECODE"):  # or each process of a test compiles all that it loads
            patch.delenv(name, raising=False)
        processes.load_ahead()
        # each S3 client parses botocore's models anew, which takes longer than what most tests do with it
        patch.setattr("botocore.loaders.create_loader", functools.cache(botocore.loaders.create_loader))
        yield


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of this test: without what threads say that an earlier one has left, such as a journal's of a writer
    that was abandoned."""
    left = set(threading.enumerate()) - {threading.current_thread()}

    def own(record: logging.LogRecord) -> bool:
        return all(thread.ident != record.thread for thread in left if thread.is_alive())

    caplog.handler.addFilter(own)
    yield caplog
    caplog.handler.removeFilter(own)


@pytest.fixture(scope="session")
def moto_endpoint(_environment: None) -> Iterator[str]:
    with servers.moto() as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(scope="session")
def seaweedfs_endpoint(_environment: None) -> Iterator[str]:
    with servers.seaweedfs(POLICIES) as endpoint:
        for bucket in (BUCKET, ROLES_BUCKET):
            servers.make_bucket(endpoint, bucket)
        yield endpoint


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Workers of loaders are forked, as torch has it: TorchRL makes "spawn" the default of any process that imports
    it."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh root on each kind of store in turn."""
    return make_backend(request, request.param, tmp_path)


@pytest.fixture(params=("moto", "seaweedfs"))
def s3_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh root on each S3 server in turn."""
    return make_backend(request, request.param, tmp_path)


@pytest.fixture(params=("moto",))
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """A fresh root on an S3 server behind a fault proxy; `indirect` parameters choose another."""
    direct = make_backend(request, request.param, tmp_path)
    with FaultProxy(direct.endpoint) as proxy:
        yield Proxied(direct.url, s3_options(direct.name, proxy.endpoint), direct.name, direct.endpoint, proxy)


@pytest.fixture(scope="module", autouse=True)
def _memory_of_one_module() -> Iterator[None]:
    """What tests wrote to memory:// goes with their module: each listing there looks at all that anybody wrote."""
    yield
    memory = sys.modules.get("fsspec.implementations.memory")
    if memory is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def as_a_fresh_process() -> Iterator[None]:
    """Each test begins and ends without what other libraries leave in a process that runs all of them: handlers of
    signals (Ray, tensordict), levels and switches of loggers."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("archive").disabled = False
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            requests = sys.modules.get("archive.checkpoint.requests")
            if requests is not None:
                requests._asked.previous.pop(number, None)
