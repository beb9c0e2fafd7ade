"""Code blocks of a document: found, run one after the other, and compared with what the document says that they print.

Alone, in a process of its own: `python -m tests.support.documents PAGE.md`, in an empty folder.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from archive import cli
from tests.support.places import ROOT


def install_entry_points(folder: Path) -> Path:
    """The folder, which is for PYTHONPATH, once it says what pyproject.toml does of pytest's plug-ins."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["pytest11"]
    info = folder / "trajectory_archive_tested-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trajectory-archive-tested\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return folder


README = ROOT / "README.md"
DOCS = ROOT / "archive" / "docs"
PAGES = tuple(page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts)
DECISIONS = tuple(sorted((DOCS / "decisions").glob("*.md")))
DOCUMENTS = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "archive" / "ARCHITECTURE.md",
    ROOT / "archive" / "FORMAT.md",
    *PAGES,
    *DECISIONS,
)
KINDS = {"python", "python s3", "python test", "python file", "json", "text", "console"}


class Block(NamedTuple):
    """A fenced block: what stands after the fence, its text, and the line that it begins at."""

    kind: str
    text: str
    line: int


def named(path: Path) -> str:
    """A document as people call it: where it lies in the sources."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """All fenced blocks that say what they are."""
    text = path.read_text("utf-8")
    found = re.finditer(r"^```(\w[\w ]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in found]


def only_block(path: Path, kind: str) -> Block:
    """The one block of a kind."""
    (block,) = (block for block in blocks(path) if block.kind == kind)
    return block


def run_python(path: Path, block: Block, names: dict[str, Any]) -> str:
    """Run a block among the names of those before it; what it prints."""
    code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def run_alone(path: Path, folder: Path) -> None:
    """Run a page in a process of its own: what it does to signals stays there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.documents", str(path)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def run_page(path: Path, names: dict[str, Any]) -> None:
    """Run the Python blocks, then the commands; each has to print the text block behind it, or nothing."""
    found = blocks(path)
    for block, following in itertools.pairwise([*found, Block("", "", 0)]):
        if block.kind == "python":
            printed = run_python(path, block, names)
            expected = following.text if following.kind == "text" else ""
            assert printed == expected, f"{named(path)} line {block.line} prints\n{printed}"
    for block in found:
        if block.kind == "console":
            _run_commands(path, block)


def _run_commands(path: Path, block: Block) -> None:
    for command, output in _sessions(block.text):
        program, *arguments = shlex.split(command, comments=True)
        done = CliRunner().invoke(cli.main, arguments)
        assert (program, done.exit_code) == ("archive", 0), done.output
        assert shape(done.stdout) == shape(output), f"{named(path)}: {command} prints\n{done.stdout}"


def _sessions(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) of a console block; lines without a prompt before them are not run."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shape(output: str) -> list[str]:
    """Lines without what differs from run to run: folders, numbers, random names, widths."""
    output = re.sub(r"file:///\S*/", "", output)
    text = re.sub(r"\b\d{8}-\d{6}-[0-9a-f]{6}\b|\b(?=\w*\d)[0-9a-f]{8}\b|\d[\d.]*", "0", output)
    lines = [re.sub(r"─+", "─", " ".join(line.split())) for line in text.splitlines()]
    return [line for line in lines if line]


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), {"__name__": "__main__"})
