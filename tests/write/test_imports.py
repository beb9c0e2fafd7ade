"""The first checkpoint waits for no import: a writer has them made in the background,
and forks do not get in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

START = """
import os, sys
import numpy as np
import archive
from archive.write import imports

w = archive.create(sys.argv[1]).writer()
"""
CHECKPOINT = """
imports.wait()
there = set(sys.modules)
w.add_episode({"x": np.zeros(3)})
w.checkpoint(1, columns={"p": np.zeros(3)}, state={"a": np.zeros(2)}, progress={"n": 1}).result()
w.close()
late = {name.partition(".")[0] for name in set(sys.modules) - there} & {"pandas", "zarr", "numcodecs", "pyarrow"}
print("late:", sorted(late))
"""
FORK = """
child = os.fork()  # the imports are under way
if not child:
    import zarr
    arc = archive.create(sys.argv[1] + "-child")
    with arc.writer() as own:
        own.add_episode({"x": np.zeros(3)})
    os._exit(len(arc.episodes) - 1)
print("child:", os.waitpid(child, 0)[1])
w.close()
"""


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + code, str(folder / "a")],
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_checkpoint_finds_all_imported(tmp_path: Path) -> None:
    assert run(CHECKPOINT, tmp_path) == "late: []\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_importing_leaves_no_lock_behind(tmp_path: Path) -> None:
    assert run(FORK, tmp_path) == "child: 0\n"


def test_a_process_that_ends_at_once_ends_in_peace(tmp_path: Path) -> None:
    assert run("", tmp_path) == ""
