"""The command line: its options, how fast it starts, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import archive
from archive import cli
from archive.base import size
from archive.cli import options
from archive.cli.commands import GROUPS
from tests.support.commands import printed
from tests.support.places import ROOT

MAX_HELP_S = 0.3
MAX_LS_S = 0.5


def test_storage_options_are_read() -> None:
    found = options.storage_options(
        ["anon=true", "client_kwargs.region_name=eu", "client_kwargs.verify=false"], "http://x", "p"
    )
    wanted = {
        "anon": True,
        "client_kwargs": {"region_name": "eu", "verify": False},
        "endpoint_url": "http://x",
        "profile": "p",
    }
    assert found == wanted
    with pytest.raises(click.UsageError, match="has a value already"):
        options.storage_options(["a=1", "a.b=2"], None, None)


def test_targets_keep_credentials_to_themselves() -> None:
    assert "testsecret" not in repr(options.Target("s3://b", {"secret": "testsecret"}))


def test_sizes_are_for_people() -> None:
    found = [size(n) for n in (0, 999, 1000, 1_550_000, 2 * 10**12)]
    assert found == ["0 B", "999 B", "1.0 kB", "1.6 MB", "2.0 TB"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_takes_the_common_options(name: str) -> None:
    text = printed(name, "--help")
    for option in ("--json", "--storage-option", "--endpoint-url", "--profile", "--retry-for", "--debug"):
        assert option in text
    (group,) = (title for title, names in GROUPS.items() if name in names)
    section = printed("--help").partition(f"\n{group}:")[2].partition("\n\n")[0]
    assert f"\n  {name} " in section


def test_help_cuts_no_sentence() -> None:
    assert "..." not in printed("--help").partition("Look:")[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "archive.cli", *arguments], cwd=ROOT, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def best_s(cache: Path, *arguments: str) -> float:
    """Processor seconds: other processes on the machine do not lengthen them. Byte code is compiled once, as by an
    installation, whatever the environment says of writing it; that run is not measured."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)

    def spent_s() -> float:
        times = os.times()
        return times.children_user + times.children_system

    def once_s() -> float:
        before = spent_s()
        subprocess.run(
            [sys.executable, "-m", "archive.cli", *arguments],
            cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL, check=True, env=environment,
        )  # fmt: skip
        return spent_s() - before

    once_s()
    return min(once_s() for _ in range(3))


def test_help_and_ls_are_quick(url: str, tmp_path: Path) -> None:
    assert best_s(tmp_path, "--help") < MAX_HELP_S
    assert best_s(tmp_path, "ls", url) < MAX_LS_S


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from archive.cli import main; main(['--help'], standalone_mode=False);"
        "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "zarr", "pyarrow", "numpy", "fsspec", "s3fs", "rich"} & set(done.stderr.split())


def test_the_process_ends_with_the_exit_code(tmp_path: Path) -> None:
    failed = run("info", str(tmp_path / "nowhere"))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert run("--version").stdout == f"archive, version {archive.__version__}\n"


def test_looking_imports_no_pandas(url: str) -> None:
    code = (
        "import sys; from archive.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "ls", url], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "zarr", "pandas", "s3fs"} & set(done.stderr.split())
