"""Names from a bucket make no file outside of the folder that an export is given, nor one that a file system or a
terminal would take for something else."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import archive
import resharding
from archive.adapters import lerobot, npz
from archive.base import ArchiveError, UsageError
from archive.cli import main

NAMES = (
    "../../outside", "/etc/outside", "..", ".", "a/../../outside", "nul\0byte", "CON", "NUL.txt", "aux", "a" * 200,
    "\x1b]52;c;ZXZpbA==\x07", "\u202egnp.exe", "\x9b2J", "two\nlines", "trailing. ", "..\\..\\outside", "C:outside",
    "Same", "same", "SAME", "=1+1", "~root", "-rf", "file://x", "{0}", "%00", "plain",
)  # fmt: skip
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}
LONGEST = 255


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    """An archive in which fields, episodes, weights, runs and checkpoints have such names."""
    made = archive.create(str(tmp_path_factory.mktemp("hostile") / "root"))
    for i, name in enumerate(NAMES):
        steps = {"obs": np.ones((3, 2)), "action": np.zeros((3, 1)), "reward": np.ones(3), "more": {name: np.arange(3)}}
        with made.writer(run=name, session=f"s{i}") as w:
            about: dict[str, Any] = {"metadata": {"task": name}, "terminated": True, "update_count": i}
            w.add_episode(steps, episode_id=name, model_weights_uuid=name, **about)
            w.checkpoint(i, name).result(60)
    return made.refresh()


def exports(arc: archive.Archive) -> dict[str, Callable[[Path, int], object]]:
    """What each export is called -> that writes what one name is the name of into a folder, or a file in it."""
    checkpoints = [next(iter(arc.checkpoints.of(name))) for name in NAMES]

    return {
        "files": lambda out, i: resharding.export(checkpoints[i].episodes, str(out)),
        "rows": lambda out, i: resharding.export(checkpoints[i].episodes, str(out), format="parquet"),
        "npz": lambda out, i: npz.export_dataset(checkpoints[i], out / "x.npz"),
        "lerobot": lambda out, i: lerobot.export_dataset(checkpoints[i], str(out), fps=10),
        "page": lambda out, i: CliRunner().invoke(
            main, ["export", arc.url, "--html", NAMES[i], "--output", str(out / "page.html")], catch_exceptions=False
        ),
    }


def misleading(name: str) -> list[str]:
    """What is wrong with the name of a file."""
    found = [unicodedata.name(c, repr(c)) for c in name if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    found += ["device"] if name.partition(".")[0].lower() in DEVICES else []
    found += ["end"] if name != name.rstrip(". ") else []
    found += ["beginning"] if name.startswith(("-", "~")) else []
    found += ["length"] if len(name.encode()) > LONGEST else []
    return found + (["sign"] if set(name) & set('\\:*?"<>|') else [])


@pytest.mark.soak
@pytest.mark.parametrize("how", ["files", "rows", "npz", "lerobot", "page"])
def test_nothing_is_written_outside(arc: archive.Archive, how: str, tmp_path: Path) -> None:
    written = 0
    for i in range(len(NAMES)):  # all in one, as each export is asked for by what was given its name
        out = tmp_path / "deep" / "down" / f"{i}"
        out.mkdir(parents=True)
        with suppress(ArchiveError):  # it may be refused
            exports(arc)[how](out, i)
        files = list(out.rglob("*"))
        written += bool(files)
        assert [(path.name, wrong) for path in files if (wrong := misleading(path.name))] == []
        alike = Counter(str(path).lower() for path in files)
        assert max(alike.values(), default=1) == 1
    assert written > len(NAMES) // 3
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["down"]
    assert sorted(path.name for path in (tmp_path / "deep/down").iterdir()) == sorted(map(str, range(len(NAMES))))
    assert not list(Path("/etc").glob("outside*"))


@pytest.mark.parametrize("name", ["..", "../../outside", "CON", "a\0b", "\x1b[2J", "/abs", "Cam"])
def test_pictures_of_cameras_that_are_called_so(name: str, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need PyAV")
    made = archive.create(f"memory://cameras-{tmp_path.name}")
    pictures = np.zeros((2, 16, 16, 3), np.uint8)
    with made.writer() as w:
        w.add_episode({"cam": pictures, "CAM": pictures, name: pictures, "reward": np.ones(2)})
    out = tmp_path / "deep" / "out"
    try:
        lerobot.export_dataset(made.refresh(), str(out), fps=10, video=True)
    except ArchiveError:
        assert not list(out.rglob("*.mp4"))
    files = list(out.rglob("*"))
    assert [(path.name, wrong) for path in files if (wrong := misleading(path.name))] == []
    assert max(Counter(str(path).lower() for path in files).values(), default=1) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"deep"}


@pytest.mark.parametrize("weights", NAMES, ids=repr)
def test_files_of_trajectories_are_named_after_weights(weights: str) -> None:
    pytest.importorskip("torch", reason="RLinf's files are torch's")
    from archive.adapters.rlinf import folders

    one: Any = SimpleNamespace(number=1, entry={"model_weights_id": weights})
    with suppress(UsageError):
        name = folders._name(one, "pt")
        assert "/" not in name
        assert set(misleading(name)) <= {"sign"}


@pytest.mark.parametrize("weights", ["../../outside", "CON", "a\0b", "\x1b[2J", "a" * 300, "plain"], ids=repr)
def test_trajectories_of_weights_that_are_called_so(weights: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="RLinf's files are torch's")
    from archive.adapters import rlinf
    from archive.adapters.rlinf.trajectory import to_steps

    made = archive.create(f"memory://trajectories-{tmp_path.name}")
    tree = {"rewards": torch.ones(3, 2), "max_episode_length": 3, "model_weights_id": weights}
    with made.writer() as w:
        to_steps(tree, 0).add(w)
        ck = w.checkpoint(1, weights, state={"system": "rlinf"}).result(60)
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    if weights in ("CON", "plain"):  # it is but a part of the name
        assert rlinf.export_checkpoint(ck, str(out)) == 1
    else:
        with pytest.raises(UsageError, match="cannot be part of a file's name"):
            rlinf.export_checkpoint(ck, str(out))
    assert [(path.name, wrong) for path in out.rglob("*") if (wrong := misleading(path.name))] == []
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
