"""What is given as a URL is opened as one: nothing makes a folder called "memory:" or "s3:" where it happens to run."""

from __future__ import annotations

import io
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli
from archive.base.errors import UsageError
from archive.read.chunks.diskcache import DiskCache
from archive.store import file_exists, read_file, write_file
from archive.store.root import local_path, parse_root, split_file


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh root in memory; the test runs in an empty folder, which must stay so."""
    monkeypatch.chdir(tmp_path)
    return f"memory://paths-{uuid.uuid4().hex[:8]}"


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, list(arguments))
    assert done.exit_code == 0, (arguments, done.output)
    return done.stdout


def an_archive(url: str) -> archive.Archive:
    arc = archive.create(url)
    with arc.writer() as w:
        for i in range(2):
            steps = {name: np.ones((3, 2), np.float32) for name in ("observations", "actions")}
            w.add_episode({**steps, "rewards": np.arange(3.0)}, episode_id=f"e{i}", terminated=True)
        w.checkpoint(1, wait=True)
    return arc


@pytest.mark.parametrize(
    ("command", "made"),
    [
        (("export", "{a}", "{r}/npz"), "npz/part-000000.npz"),
        (("export", "{a}", "{r}/parquet", "-f", "parquet"), "parquet/part-000000.parquet"),
        (("export", "{a}", "{r}.npz", "-f", "d3rlpy"), None),
        (("export", "{a}", "{r}/deep/x.npz", "-f", "d3rlpy"), "deep/x.npz"),
        (("export", "{a}", "{r}/lerobot", "-f", "lerobot", "--set", "fps=10"), "lerobot/meta/info.json"),
        (("export", "{a}", "--html", "best", "-o", "{r}/best.html"), "best.html"),
        (("export", "{a}", "{r}/latest.html", "--html", "latest"), "latest.html"),
        (("filter", "{a}", "--where", "length > 1", "--to", "{r}/some"), "some/archive.json"),
        (("merge", "{a}", "--to", "{r}/both", "--copy"), "both/archive.json"),
        (("split", "{a}", "1", "--to", "{r}/one"), "one/archive.json"),
        (("reshard", "{a}", "2", "--to", "{r}/two"), "two/archive.json"),
    ],
    ids=lambda value: "-".join(value[:1] + value[3:5]) if isinstance(value, tuple) else None,
)
def test_no_command_makes_a_folder_named_like_a_scheme(root: str, command: tuple[str, ...], made: str | None) -> None:
    arc = an_archive(f"{root}/a")
    arguments = [text.format(a=arc.url, r=root) for text in command]
    call(*arguments)
    assert list(Path.cwd().iterdir()) == []
    assert file_exists(f"{root}/{made}" if made else f"{root}.npz")


def test_a_page_at_a_url_is_not_replaced_unasked(root: str) -> None:
    arc = an_archive(f"{root}/a")
    write_file(f"{root}/x.html", b"mine")
    arguments = ["export", arc.url, "--html", "e0", "-o", f"{root}/x.html"]
    done = CliRunner().invoke(cli.main, arguments)
    assert (done.exit_code, read_file(f"{root}/x.html")) == (2, b"mine")
    call(*arguments, "--yes")
    assert read_file(f"{root}/x.html").startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    "url", ["memory:/x", "s3:/bucket/x", "gs:/x", "memory:", "S3:/bucket", Path("s3://bucket/x"), Path("memory://x")]
)
def test_a_url_that_lost_a_slash_is_refused(root: str, url: Any) -> None:
    with pytest.raises(UsageError, match=r"neither a URL nor a usual path.*://"):
        archive.open(url, create=True)
    assert list(Path.cwd().iterdir()) == []


def test_local_paths_may_still_have_colons(root: str) -> None:
    for path in ("a:b", "./memory:/x", "run:2/x", Path.cwd() / "s3:" / "x", "file:x", "C:/x"):
        if path == "run:2/x":
            assert parse_root(path, None).protocol == "file"
        else:
            archive.create(path)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("memory://x.npz", ("memory://", "x.npz")),
        ("s3://bucket/x.npz", ("s3://bucket", "x.npz")),
        ("s3://bucket/a/x.npz", ("s3://bucket/a", "x.npz")),
        ("x.npz", (".", "x.npz")),
        ("/x.npz", ("/", "x.npz")),
        ("a/x.npz", ("a", "x.npz")),
    ],
)
def test_files_have_a_folder_and_a_name(url: str, parts: tuple[str, str]) -> None:
    assert split_file(url) == parts


@pytest.mark.parametrize("url", ["s3://bucket/", "memory://", "a/", "zip::s3://bucket/x.zip"])
def test_what_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no file"):
        split_file(url)


def test_a_bucket_is_no_file() -> None:
    with pytest.raises(UsageError, match="names no bucket"):
        write_file("s3://x.npz", b"")


def test_npz_files_come_and_go_at_the_top_of_a_filesystem(root: str) -> None:
    from archive.adapters import npz

    url = f"{root}.npz"
    npz.export_dataset(an_archive(f"{root}/a"), url)
    assert np.load(io.BytesIO(fsspec.filesystem("memory").cat(url)))["rewards"].shape == (6,)
    assert len(npz.import_dataset(url, archive.create(f"{root}/b")).episodes) == 2
    assert list(Path.cwd().iterdir()) == []


def test_a_disk_cache_is_a_folder_of_this_machine(root: str) -> None:
    with pytest.raises(UsageError, match=r"disk cache .* is a URL"):
        DiskCache("s3://bucket/cache")
    with pytest.raises(UsageError, match="neither"):
        DiskCache(Path("s3://bucket/cache"))
    assert list(Path.cwd().iterdir()) == []
    assert DiskCache(f"file://{Path.cwd()}/cache").folder == Path.cwd() / "cache"
    assert local_path("~/x", "it").is_absolute()
