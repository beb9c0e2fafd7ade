"""Ragged data out to other systems: chosen fields of any adapter, from the library and the command line;
lists in LeRobot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import archive
from archive import cli
from archive.adapters import lerobot, npz
from archive.base.errors import FieldError


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    made = archive.create(tmp_path / "a")
    with made.writer(schema=archive.Schema(axes={"goal": "free"})) as w:
        for i in range(2):
            w.add_episode(
                {
                    "observations": np.full((3, 2), i, np.float32), "actions": np.ones((3, 1)), "rewards": np.ones(3),
                    "tokens": [[1] * t for t in range(3)], "words": [["a"], [], ["b", "c"]], "goal": np.zeros(5),
                    "boxes": [np.zeros((t, 4)) for t in range(3)],
                },
                terminated=True,
            )  # fmt: skip
    return made


FLAT = ["observations", "actions", "rewards", "tokens", "words"]


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(arguments))
    return done.exit_code, done.output


def test_lerobot_has_lists_of_any_length(arc: archive.Archive, tmp_path: Path) -> None:
    lerobot.export_dataset(arc, tmp_path / "l", fields=FLAT, fps=10)
    info = json.loads((tmp_path / "l/meta/info.json").read_text())
    assert info["features"]["tokens"] == {"dtype": "int64", "shape": [-1], "names": None}
    (file,) = (tmp_path / "l/data").rglob("*.parquet")
    assert pq.read_table(file)["tokens"].to_pylist() == [[], [1], [1, 1]] * 2
    again = lerobot.import_dataset(tmp_path / "l", archive.create(tmp_path / "b")).episodes[1].read()
    assert [row.tolist() for row in again["tokens"]] == [[], [1], [1, 1]]
    assert [row.tolist() for row in again["words"]] == [["a"], [], ["b", "c"]]
    assert again["tokens"][0].dtype == np.int64


@pytest.mark.parametrize(("field", "why"), [("boxes", "rows of several values"), ("goal", "not one row a step")])
def test_what_lerobot_has_no_word_for_says_how_to_leave_it_out(
    arc: archive.Archive, tmp_path: Path, field: str, why: str
) -> None:
    with pytest.raises(FieldError, match=rf"'{field}'.*{why}.*fields= \(--field\)"):
        lerobot.export_dataset(arc, tmp_path / "l", fields=[*FLAT, field], fps=10)


def test_the_command_line_chooses_fields_for_every_format_of_episodes(arc: archive.Archive, tmp_path: Path) -> None:
    chosen = [part for name in FLAT for part in ("--field", name)]
    refused = call("export", arc.url, str(tmp_path / "x"), "-f", "lerobot", "--set", "fps=10")
    assert refused[0] == 2
    assert "--field" in refused[1]
    assert call("export", arc.url, str(tmp_path / "l"), "-f", "lerobot", "--set", "fps=10", *chosen)[0] == 0
    assert call("export", arc.url, str(tmp_path / "x.npz"), "-f", "d3rlpy", *chosen)[0] == 0
    assert call("export", arc.url, str(tmp_path / "p"), "-f", "parquet", "--field", "tokens", "--field", "goal")[0] == 0
    table = pq.read_table(tmp_path / "p/part-000000.parquet")
    assert sorted(table.column_names) == ["episode_id", "goal", "step", "tokens"]
    assert table["goal"].to_pylist() == [[0.0] * 5, None, None] * 2
    code, told = call("export", arc.url, str(tmp_path / "r"), "-f", "rlinf", "--field", "tokens")
    assert (code, "whole" in told) == (2, True)
    code, told = call("export", arc.url, str(tmp_path / "y"), "-f", "lerobot", "--set", "fields=tokens")
    assert (code, "--set fields" in told) == (2, True)


def test_fields_that_are_not_chosen_are_not_read(arc: archive.Archive, tmp_path: Path) -> None:
    npz.export_dataset(arc, tmp_path / "x.npz", fields=["observations", "actions", "rewards"])
    with np.load(tmp_path / "x.npz") as file:
        assert file["rewards"].shape == (6,)
    with pytest.raises(FieldError, match="rewards"):
        npz.export_dataset(arc, tmp_path / "y.npz", fields=["observations", "actions"])
