"""The README's blocks run and print what it says; its tables and links are complete."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from archive import cli
from archive.base.errors import NotFoundError
from archive.cli import reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
OBVIOUS = {"fsspec", "s3fs", "zarr", "numpy", "pyarrow"}  # the user asked for these


class Block(NamedTuple):
    kind: str
    text: str
    line: int


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w[\w ]*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], README[: m.start()].count("\n") + 2) for m in found]


def run_python(block: Block, names: dict[str, Any]) -> str:
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / "README.md"), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)  # TorchRL tells of every storage on stdout
    return {}


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shape(output: str) -> list[str]:
    """Lines without what differs from run to run: numbers, random names, widths."""
    text = re.sub(r"\b(?=\w*\d)[0-9a-f]{8}\b|\d[\d.]*", "0", output)
    lines = [re.sub(r"─+", "─", " ".join(line.split())) for line in text.splitlines()]
    return [line for line in lines if line]


def test_the_session_prints_what_it_says(names: dict[str, Any]) -> None:
    ran = blocks()
    for block, following in zip(ran, [*ran[1:], Block("", "", 0)], strict=True):
        if block.kind == "python":
            printed = run_python(block, names)
            assert printed == (following.text if following.kind == "text" else ""), f"README.md line {block.line}"
    for block in ran:
        for command, output in sessions(block.text if block.kind == "console" else ""):
            program, *arguments = shlex.split(command)
            done = CliRunner().invoke(cli.main, arguments)
            assert (program, done.exit_code) == ("archive", 0), done.output
            assert shape(done.stdout) == shape(output), command


def test_the_s3_options_are_right(names: dict[str, Any], moto_endpoint: str) -> None:
    (block,) = (block for block in blocks() if block.kind == "python s3")
    text = block.text.replace("https://s3.example.org", moto_endpoint)
    assert text != block.text
    run_python(Block("python", "import archive\n" + text, block.line - 1), names)
    assert names["arc"].url == "s3://bucket/runs/42"
    assert len(names["arc"].episodes) == 0


def test_ones_own_tests_run(tmp_path: Path) -> None:
    (block,) = (block for block in blocks() if block.kind == "python test")
    (tmp_path / "test_mine.py").write_text(block.text, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_every_block_is_known() -> None:
    assert {block.kind for block in blocks()} == {"python", "python s3", "python test", "text", "console"}


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[<>=\[]", text)[0] for text in project["dependencies"]} - OBVIOUS
    listed = re.findall(r"^\| ([\w-]+) \|", README.partition("## Dependencies")[2].partition("\n## ")[0], re.MULTILINE)
    assert set(listed) - {"package"} == needed
    extras = README.partition("Extras: ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", extras)) == set(project["optional-dependencies"])


def test_every_command_is_listed() -> None:
    assert re.findall(r"^\| `archive ([\w-]+)", README, re.MULTILINE) == list(cli.COMMANDS)


def test_the_reference_of_commands_is_up_to_date() -> None:
    assert reference.put_into(README) == README, "run `make docs`"
    with pytest.raises(NotFoundError, match="no <!-- commands"):
        reference.put_into("nothing")


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "archive/ARCHITECTURE.md", "archive/FORMAT.md"])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize(
    "name", ["CONTRIBUTING.md", "archive/ARCHITECTURE.md", "archive/FORMAT.md", "archive/docs/cluster.md"]
)
def test_tests_are_named_by_where_they_are(name: str) -> None:
    for path in re.findall(r"`(tests/[\w./]+)`", (ROOT / name).read_text("utf-8")):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_what_exists() -> None:
    text = (ROOT / "archive" / "ARCHITECTURE.md").read_text("utf-8")
    for name in re.findall(r"`(?:tests/)?((?:\w+/)*(?:test_|format_)\w+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name
    listed = [
        cell
        for row in re.findall(r"^\| .*\|$", text.partition("Three habits")[0], re.MULTILINE)
        for cell in row.split("|")[3:4]
    ]
    for name in re.findall(r"`(\w+)`", " ".join(listed)):
        assert any(
            (ROOT / place / f"{name}{end}").exists() for place in ("archive", "") for end in (".py", "/__init__.py")
        ), name


def test_the_architecture_fits_on_two_pages() -> None:
    assert len((ROOT / "archive" / "ARCHITECTURE.md").read_text("utf-8").splitlines()) <= 120
