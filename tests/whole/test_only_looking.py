"""Whatever only reads leaves an archive as it is: not an object, nor a file for a moment, comes or goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.view import Settings, routes
from archive.view.shown import Shown
from archive.view.wire import Query
from tests.support.commands import call, document, printed
from tests.support.journals import die
from tests.support.ticks import NEVER_S

Look = Callable[[archive.Archive], Any]
KEEP = Keep(last=1, within="1s")

QUESTIONS: dict[str, dict[str, str]] = {
    "neighbours": {"id": "e1", "where": "length > 1"},
    "histograms": {"columns": '["length"]'},
    "values": {"name": "run", "text": "m"},
    "check": {"where": "length > 1"},
    "strip": {"ids": '["e1"]'},
    "distributions": {"column": "length", "by": "run"},
    "episode": {"id": "e1"},
    "pictures": {"id": "e1", "field": "image"},
    "curves": {"id": "e1"},
    "steps": {"id": "e1"},
    "field-rows": {"id": "e1", "field": "reward"},
    "rollout": {"id": "e1"},
    "group": {"id": "e1"},
    "page": {"what": "archive"},
    "trend": {"column": "return"},
    "checkpoint": {"number": "NEWEST"},
    "tails": {"run": "main"},
    "column": {"number": "NEWEST", "name": "priority", "buffer": "replay"},
    "plan": {"number": "NEWEST", "ranks": "3"},
    "forgetting": {"within": "1s", "last": "1", "unreferenced": "1"},
    "unlabelled": {"id": "e1", "key": "good"},
    "said": {"id": "e1"},
}
COMMANDS: list[tuple[object, ...]] = [
    ("info",), ("ls",), ("episodes",), ("episodes", "--where", "length > 1"), ("show", "e1"),
    ("log",), ("checkpoints",), ("diff", "1", "2"), ("plan", "3"), ("plan", "3", "--json"), ("tails",), ("labels",),
    ("tags",), ("sample",),
    ("recover", "--dry-run"), ("forget", "--keep-last", "1", "--keep-within", "1s", "--episodes", "unreferenced"),
    ("undo",), ("restore", "--commit", "1"), ("prune", "--older-than", "0s", "--force"), ("compact",),
    ("forget", "--id", "e1", "--redact"), ("verify",), ("verify", "--deep"),
]  # fmt: skip
LOOKS: dict[str, Look] = {
    "usage": lambda arc: arc.usage,
    "info": lambda arc: (str(arc.info), arc.about, arc.runs, arc.tags, arc.labels),
    "kept": lambda arc: arc.checkpoints.kept(),
    "plan": lambda arc: resharding.plan(arc.checkpoints.latest, 3, tails="ignore").share(0).read(),
    "tails": lambda arc: arc.tails(),
    "forget": lambda arc: arc.forget(KEEP, "unreferenced"),
    "prune": lambda arc: arc.prune(older_than="0s", force=True),
    "html": lambda arc: arc.to_html(),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with all that there may be: checkpoints that age, labels, tags, what was forgotten, and a journal."""
    root = tmp_path_factory.mktemp("looking") / "arc"
    arc = archive.create(root)
    w = arc.writer(journal_s=NEVER_S, keep=KEEP)
    for n in range(3):
        picture = np.random.default_rng(n).integers(0, 256, (4, 8, 8, 3), np.uint8)
        w.add_episode({"image": picture, "reward": np.ones(4)}, episode_id=f"e{n}", metadata={"group": 1})
        w.checkpoint(n, columns={"priority": np.arange(4.0 * (n + 1))}).result()
    w.add_episode({"image": picture, "reward": np.ones(4)}, episode_id="later")
    w.sync()
    die(w)
    arc.refresh().label({"e1": {"good": True}})
    arc.tag("first", 1)
    arc.forget(Keep(last=2), dry_run=False)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "arc")


def _there(root: Path) -> dict[str, tuple[int, int]]:
    """All files, and the folders: these tell whether a file was there for a moment."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]}


def test_no_question_to_a_viewer_that_is_read_only_writes(root: Path) -> None:
    arc = archive.open(root)
    shown = Shown(arc, Settings(read_only=True))
    newest, before = str(arc.checkpoints.latest.number), _there(root)
    assert set(QUESTIONS) <= set(routes.QUESTIONS)
    for name, answer in routes.QUESTIONS.items():
        given = {key: value.replace("NEWEST", newest) for key, value in QUESTIONS.get(name, {}).items()}
        assert answer(shown, Query(given)).status == 200
        assert _there(root) == before, name


@pytest.mark.parametrize("name", LOOKS)
def test_no_look_writes(root: Path, name: str) -> None:
    before = _there(root)
    LOOKS[name](archive.open(root))
    assert _there(root) == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command)))
def test_no_command_that_only_says_writes(root: Path, command: tuple[object, ...]) -> None:
    before = _there(root)
    name, *rest = command
    result = call(name, root, *rest)
    assert result.exit_code == 0, result.output
    assert _there(root) == before


def test_a_plan_says_what_a_job_would_take_in_beside_it(root: Path, tmp_path: Path) -> None:
    before = _there(root)
    assert "4 steps of 1 episodes are journaled beyond it" in printed("plan", root, 2)
    assert document("plan", root, 2)["tails"]["total"]["steps"] == 4
    assert document("plan", root, 2, "--commit", archive.open(root).head.number)["tails"] is None
    assert call("export", root, tmp_path / "page.html", "--html", "latest", "--world-size", 2).exit_code == 0
    assert _there(root) == before
