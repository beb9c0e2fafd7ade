"""Credentials are in nothing that is written, printed or raised: canaries in all places that hold some, looked for in
all that comes out of a use of an archive, and of each way in which it fails."""

from __future__ import annotations

import gc
import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

import archive
import resharding
from archive import cli
from archive.base.errors import ArchiveError
from archive.store.storage import Storage
from archive.testing import steps, trace
from tests.support import servers
from tests.support.backends import Backend, Proxied
from tests.support.sampling import few_of

CANARIES = {
    "key": "AKIACANARYKEY00001", "secret": "cAnArYsEcReT/00+1", "token": "cAnArYtOkEn=/00002",
}  # fmt: skip
NESTED: dict[str, Any] = {
    "headers": {"Authorization": "Basic canary-00003", "Cookie": "canary-00004", "X-Api": "canary-00005"},
    "client_kwargs": {"aws_secret_access_key": "canary-00006", "auth": ("me", "canary-00007")},
    "config_kwargs": {"proxies": {"https": "http://me:canary-00008@127.0.0.1:9"}},
    "connection_string": "AccountKey=canary-00009;", "sas_token": b"canary-00010", "password": ["canary-00011"],
    "endpoint_url": "https://me:canary-00012@127.0.0.1:9", "account_key": {"deep": {"deeper": "canary-00013"}},
}  # fmt: skip
URLS = [
    "http://me:canary-00014@127.0.0.1:9/x", "https://canary-00015@127.0.0.1:9/x",
    "https://127.0.0.1:9/x?X-Amz-Credential=canary-00016%2F2026&X-Amz-Signature=canary-00017",
    "sftp://me:canary-00018@127.0.0.1:9/x", "simplecache::https://127.0.0.1:9/x?sig=canary-00019",
    "https://127.0.0.1:9/x?canary-00020", "s3://me:canary-00021@bucket/x",
]  # fmt: skip


def leaks(text: str) -> list[str]:
    """The canaries in a text, as they are or as URLs write them."""
    known = [*CANARIES.values(), *(quote(one, safe="") for one in CANARIES.values())]
    found = [one for one in known if one in text]
    return found + (["canary-"] if "canary-0" in text else [])


@dataclass
class Seen:
    """All that came out, each with where it did."""

    texts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, *values: Any) -> None:
        for value in values:
            self.texts.append((what, value if isinstance(value, str) else repr(value)))

    def raised(self, error: BaseException) -> None:
        """An error as Python, a logger and a debugger show it, with all that it came from."""
        self.add("traceback", "".join(traceback.format_exception(error)))
        todo: list[BaseException | None] = [error]
        known: set[int] = set()
        while todo:
            one = todo.pop()
            if one is None or id(one) in known:
                continue
            known.add(id(one))
            self.add(f"error {type(one).__name__}", str(one), one, one.args, getattr(one, "__notes__", []))
            todo += [one.__cause__, one.__context__]

    def leaking(self) -> list[tuple[str, list[str], str]]:
        return [(what, leaks(text), text[:600]) for what, text in self.texts if leaks(text)]


@contextmanager
def everything(caplog: pytest.LogCaptureFixture) -> Iterator[Seen]:
    """Log lines of all levels, warnings, what is printed, metrics."""
    seen, printed = Seen(), io.StringIO()
    with (
        caplog.at_level(logging.INFO), caplog.at_level(logging.DEBUG, "archive"), redirect_stdout(printed),
        redirect_stderr(printed), warnings.catch_warnings(record=True) as warned,
    ):  # fmt: skip
        warnings.simplefilter("always")
        yield seen
        gc.collect()
    seen.add("log", caplog.text, *(record.getMessage() for record in caplog.records))
    seen.add("log arguments", *(record.args for record in caplog.records))
    seen.add("printed", printed.getvalue())
    seen.add("warnings", *(str(one.message) for one in warned))
    seen.add("metrics", archive.metrics())


def use(url: str, options: dict[str, Any], seen: Seen) -> archive.Archive:
    """Writes, reads, redistributes and shows an archive; what of it can be shown or printed is."""
    arc = archive.open(url, create=True, storage_options=options)
    with trace(arc) as traced:
        with arc.writer(journal_s=60.0) as w:
            w.add_episode(steps(3, 0), episode_id="e0")
            w.sync()
            w.checkpoint(1, state={"n": 1}, wait=True)
            seen.add("writer", w)
        plan = resharding.plan(arc.refresh().checkpoints.latest, world_size=2)
        share = plan.share(0)
        share.read()
        shown = (arc, arc.storage, arc.episodes, arc.checkpoints, arc.checkpoints.latest, plan, share, arc.io_stats())
    seen.add("shown", *shown, *(str(one) for one in shown))
    seen.add("page", *(one._repr_html_() for one in shown if hasattr(one, "_repr_html_")))
    seen.add("trace", traced, traced.to_pandas().to_csv())
    seen.add("attributes", vars(arc), arc.episodes.table.to_pydict())
    return arc


def objects(storage: Storage) -> Iterator[str]:
    """What lies in the bucket, names too."""
    for found in storage.scan(""):
        yield found.key
        yield storage.get_head(found.key, 10**7).decode("latin-1")


COMMANDS = (["info", "{url}"], ["verify", "{url}"], ["plan", "{url}", "2"])


def by_command(url: str, options: dict[str, Any], seen: Seen, retry_for_s: float = 1.0) -> None:
    """The same on the command line, with --debug too, on which errors are shown as Python shows them."""
    pairs = [f"--storage-option={name}={_told(value)}" for name, value in options.items()]
    for command in COMMANDS:
        for more in ([], ["--debug"]):
            done = CliRunner().invoke(
                cli.main, [*(part.format(url=url) for part in command), *pairs, "--retry-for", f"{retry_for_s}", *more]
            )
            seen.add(f"archive {command[0]}", done.output, done.stderr, done.stdout)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                seen.raised(done.exception)


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def failing(call: Callable[[], Any], seen: Seen) -> None:
    with pytest.raises(ArchiveError) as raised:
        call()
    seen.raised(raised.value)
    try:
        raise RuntimeError("a bug of the job's") from raised.value
    except RuntimeError as error:
        seen.raised(error)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What OpenTelemetry would send."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace as telemetry
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "get_tracer_provider", lambda: provider)
    yield lambda: [span.to_json() for span in exporter.get_finished_spans()]
    provider.shutdown()


def with_canaries(options: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The options of a store, signed by canaries; moto lets everybody in."""
    return {name: CANARIES[names[name]] if name in names else value for name, value in options.items()}


SIGNED = {"key": "key", "secret": "secret", "aws_access_key_id": "key", "aws_secret_access_key": "secret"}


def signed(backend: Backend) -> dict[str, Any]:
    if not backend.is_s3:
        return {"secret": CANARIES["secret"], "key": CANARIES["key"]} if backend.name == "memory" else {}
    token = {"aws_session_token" if backend.name == "obstore" else "token": CANARIES["token"]}
    return with_canaries(backend.storage_options, SIGNED) | token


@pytest.mark.parametrize(
    "backend",
    ["moto", *(pytest.param(name, marks=pytest.mark.soak) for name in ("memory", "local", "s3fs", "obstore"))],
    indirect=True,
)
def test_a_use_of_an_archive_shows_none(
    backend: Backend, caplog: pytest.LogCaptureFixture, spans: Callable[[], list[str]]
) -> None:
    options = signed(backend)
    if backend.name == "memory":
        options = {}
    with everything(caplog) as seen:
        arc = use(backend.url, options, seen)
        if backend.name != "obstore":
            by_command(backend.url, options, seen)
        seen.add("objects", *objects(arc.storage))
        seen.add("spans", *spans())
    assert len(seen.texts) > 50
    assert seen.leaking() == []


@pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)
@pytest.mark.parametrize("failure", few_of(["echoed", "refused", "denied", "slow", "broken"], 1))
def test_a_failure_shows_none(
    proxied: Proxied, failure: str, caplog: pytest.LogCaptureFixture, spans: Callable[[], list[str]]
) -> None:
    """Even where the server says again what it was sent."""
    options = signed(proxied)
    archive.create(proxied.url, storage_options=options)
    echo = "".join(f"<Seen>{one} {quote(one, safe='')}</Seen>" for one in CANARIES.values())
    if failure == "refused":
        name = "endpoint" if "endpoint" in options else "endpoint_url"
        options[name] = f"http://127.0.0.1:{servers.free_ports(1)[0]}"
    elif failure == "denied":
        proxied.proxy.add("status", status=403, code="SignatureDoesNotMatch", times=-1)
    elif failure == "echoed":
        proxied.proxy.add("status", status=403, code=f"InvalidToken</Code>{echo}<Code>", times=-1)
    elif failure == "slow":
        proxied.proxy.add("status", status=503, code=f"SlowDown</Code>{echo}<Code>", times=-1)
    else:
        proxied.proxy.add("reset", times=-1)
    with everything(caplog) as seen:
        failing(lambda: archive.open(proxied.url, storage_options=options, deadline_s=1.0).episodes.read(), seen)
        failing(lambda: Storage.connect(proxied.url, options, deadline_s=1.0).get("x"), seen)
        failing(lambda: Storage.connect(proxied.url, options, deadline_s=1.0).create("x", b""), seen)
        seen.add("spans", *spans())
    assert len(seen.texts) > 20
    assert seen.leaking() == []


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["s3fs", "obstore"])
def test_a_wrong_secret_is_said_without_it(
    seaweedfs_endpoint: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By a server that looks at signatures, and says which key was unknown to it."""
    for wrong in ({"secret": CANARIES["secret"]}, {"key": CANARIES["key"]}, CANARIES):
        options = servers.s3fs_options(seaweedfs_endpoint) | wrong | {"transport": transport}
        with everything(caplog) as seen:
            failing(lambda options=options: archive.open("s3://bucket/creds", storage_options=options), seen)  # type: ignore[misc]
            by_command("s3://bucket/creds", options, seen)
        assert seen.leaking() == []


@pytest.mark.parametrize("where", few_of(["file", "variables"], 1))
@pytest.mark.parametrize("transport", ["s3fs", "obstore"])
@pytest.mark.parametrize("proxied", ["moto"], indirect=True)
def test_credentials_of_the_machine_are_shown_as_little(
    proxied: Proxied, where: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Those of the environment, and of a profile, which nobody gave as options."""
    names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
    for what, name in names.items():
        monkeypatch.setenv(name, CANARIES[what]) if where == "variables" else monkeypatch.delenv(name, raising=False)
    lines = "".join(f"{name.lower()} = {CANARIES[what]}\n" for what, name in names.items())
    (tmp_path / "credentials").write_text(f"[default]\n{lines}")
    if where == "file":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    options = {n: v for n, v in proxied.storage_options.items() if n not in ("key", "secret")}
    options |= {"transport": transport}
    echo = "".join(f"<Seen>{one}</Seen>" for one in CANARIES.values())
    with everything(caplog) as seen:
        arc = use(proxied.url, options, seen)
        seen.add("objects", *objects(arc.storage))
        proxied.proxy.add("status", status=403, code=f"InvalidToken</Code>{echo}<Code>", times=-1)
        failing(lambda: archive.open(proxied.url, storage_options=options, deadline_s=1.0), seen)
    assert seen.leaking() == []


@pytest.mark.parametrize("name", few_of(list(NESTED), 3))
def test_options_of_any_store_are_not_shown(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever in them a credential is; of a store whose package is missing, and of one that raises all it knows."""

    def tell(*arguments: Any, **options: Any) -> Any:
        raise OSError(f"cannot connect with {options!r} {arguments!r}, {json.dumps(options, default=str)}")

    import fsspec

    class Telling(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "telling"
        __init__ = tell

    fsspec.register_implementation("telling", Telling, clobber=True)
    with everything(caplog) as seen:
        for url in ("telling://bucket/x", "nosuch://bucket/x"):
            storage = Storage.connect(url, {name: NESTED[name]}, deadline_s=1.0)
            seen.add("shown", storage, vars(storage), storage.root)
            failing(lambda storage=storage: storage.get("x"), seen)  # type: ignore[misc]
            failing(lambda url=url: archive.open(url, storage_options={name: NESTED[name]}, deadline_s=1.0), seen)  # type: ignore[misc]
            by_command(url, {name: NESTED[name]} if not isinstance(NESTED[name], bytes) else {}, seen)
    assert seen.leaking() == []


@pytest.mark.parametrize("url", few_of(URLS, 1))
def test_urls_are_shown_without_what_signs_them(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with everything(caplog) as seen:
        try:
            storage = Storage.connect(url, deadline_s=0.2)
            seen.add("shown", storage, storage.url, vars(storage), storage.full_url("x"), storage.root)
            storage.get("x")
        except ArchiveError as error:
            seen.raised(error)
        try:
            archive.open(url, deadline_s=0.2)
        except ArchiveError as error:
            seen.raised(error)
        by_command(url, {}, seen, retry_for_s=0.2)
    assert seen.leaking() == []


def test_a_canary_would_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    with everything(caplog) as seen:
        logging.getLogger("archive").debug("signed by %s", CANARIES["token"])
        print(CANARIES["key"])
        error = ValueError(quote(CANARIES["secret"], safe=""))
        error.add_note("canary-00001")
        seen.raised(error)
    assert {what for what, _, _ in seen.leaking()} >= {
        "log",
        "printed",
        "traceback",
        "error ValueError",
    }
