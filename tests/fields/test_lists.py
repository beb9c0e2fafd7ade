"""Lists as fields: what they are stored as does not depend on what happens to be in them;
what changes often is told of."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import FieldError


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    return archive.create(tmp_path / "a")


def tokens(episode: archive.Episode) -> list[list[int]]:
    return [row.tolist() for row in episode.read()["tokens"]]


def test_nested_lists_are_ragged_whatever_their_lengths(arc: archive.Archive) -> None:
    given = [[[1, 2], [4, 5]], [[1, 2, 3], [4, 5]], [[7]], [[], [1]], [[], []], [(1, 2), [3]]]
    with arc.writer() as w:
        for i, rows in enumerate(given):
            w.add_episode({"tokens": rows, "reward": np.ones(len(rows))}, episode_id=f"e{i}")
    assert [tokens(ep) for ep in arc.episodes] == [[list(row) for row in rows] for rows in given]
    assert {ep.fields["tokens"] for ep in arc.episodes} == {"<i8[] ragged"}
    assert len(arc.shards) == 1


def test_one_step_episodes_of_any_length_are_one_shard(arc: archive.Archive, caplog: pytest.LogCaptureFixture) -> None:
    with arc.writer() as w:
        for i in range(300):
            w.add_episode({"tokens": [list(range(i % 37))], "reward": [float(i)]})
    assert len(arc.shards) == 2  # of the first, which is empty, nothing was known
    assert [len(rows[0]) for rows in map(tokens, arc.episodes)] == [i % 37 for i in range(300)]
    assert not caplog.records


def test_a_declared_axis_wins(arc: archive.Archive) -> None:
    with arc.writer(schema=archive.Schema(axes={"obs": "step"})) as w:
        w.add_episode({"obs": [[1, 2], [3, 4]]}, episode_id="dense")
        with pytest.raises(FieldError, match=r"'obs' is a list of rows of different shapes"):
            w.add_episode({"obs": [[1, 2], [3]]})
    assert arc.episodes["dense"].read()["obs"].tolist() == [[1, 2], [3, 4]]


def test_lists_of_numbers_have_one_dtype_and_rows_one_shape(arc: archive.Archive) -> None:
    with arc.writer() as w:
        w.add_episode(
            {"x": [[1, 2], [0.5]], "pairs": [[[1, 2], [3, 4]], [[5, 6]]], "words": [["a"], [], ["b", "c"]][:2]}
        )
        with pytest.raises(FieldError, match=r"'x' is ragged, and so are the rows within a step.*json"):
            w.add_episode({"x": [[[1, 2], [3]]]})
        with pytest.raises(FieldError, match=r"'x' is ragged: each step is an array"):
            w.add_episode({"x": [[1, 2], 3]})
    data = arc.episodes[0].read()
    assert [row.tolist() for row in data["x"]] == [[1.0, 2.0], [0.5]]
    assert [row.shape for row in data["pairs"]] == [(2, 2), (1, 2)]
    assert [row.tolist() for row in data["words"]] == [["a"], []]


def test_empty_lists_are_of_the_kind_that_their_field_has(arc: archive.Archive) -> None:
    with arc.writer() as w:
        for rows in ([[1]], [[]], [], [[2, 3]], [[]]):
            w.append({"tokens": rows, "reward": np.ones(len(rows))}, env_ids=0)
        w.close_episodes()
    assert len(arc.shards) == 1
    assert tokens(arc.episodes[0]) == [[1], [], [2, 3], []]


def test_an_episode_may_begin_with_empty_lists(arc: archive.Archive) -> None:
    with arc.writer() as w:
        w.append({"tokens": [[], []]}, env_ids=[0, 1])
        w.append({"tokens": [[], [1, 2]]}, env_ids=[0, 1])
        w.append({"tokens": [[3], []]}, env_ids=[0, 1], last=True)
    assert {ep.env_id: tokens(ep) for ep in arc.episodes} == {0: [[], [], [3]], 1: [[], [1, 2], []]}
    assert arc.episodes[0].read()["tokens"][2].dtype == np.int64
    assert len(arc.shards) == 2


def test_a_field_that_changes_within_an_episode_is_named(arc: archive.Archive) -> None:
    w = arc.writer()
    w.append({"obs": np.zeros((1, 2)), "tokens": [[1]]}, env_ids=0)
    with pytest.raises(FieldError, match=r"env 0 .*'tokens': <f8\[\] ragged, earlier <i8\[\] ragged"):
        w.append({"obs": np.zeros((1, 2)), "tokens": [[0.5]]}, env_ids=0)
    with pytest.raises(FieldError, match=r"'extra': <f8\[\] step, earlier absent"):
        w.append({"obs": np.zeros((1, 2)), "tokens": [[1]], "extra": [1.0]}, env_ids=0)
    w.append({"obs": np.zeros((1, 2)), "tokens": [[2]]}, env_ids=0)
    w.close()
    assert tokens(arc.episodes[0]) == [[1], [2]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([np.zeros((1, n)) for n in range(2, 9)], r"'x'.*<f8\[3\] step, after <f8\[2\] step.*axes=.*'x': 'ragged'"),
        ([np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)], "one dtype"),
        ([[1, 0], [0.5, 1], [1, 1]], "lists of numbers have that of what is in them"),
        ([np.array(["a"]), np.array(["abc"])], "strings as a list of str"),
        ([np.zeros((1, 2)), [[1.0, 2.0]]], r"Declare what it is.*'x': 'ragged'"),
    ],
)
def test_a_field_that_changes_is_told_of_once(
    arc: archive.Archive, caplog: pytest.LogCaptureFixture, given: list[Any], told: str
) -> None:
    with arc.writer() as w:
        for steps in given:
            w.add_episode({"x": steps})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    caplog.clear()
    assert len(arc.episodes.read()) == len(given)
    assert re.search(told, record.getMessage()), record.getMessage()


def test_the_remedy_for_arrays_of_many_widths_works(arc: archive.Archive, caplog: pytest.LogCaptureFixture) -> None:
    with arc.writer(schema=archive.Schema(axes={"x": "ragged"})) as w:
        for n in range(1, 9):
            w.add_episode({"x": np.arange(n)[None]})
    assert (len(arc.shards), caplog.records) == (1, [])


def test_fields_that_come_and_go_are_told_of_once(arc: archive.Archive, caplog: pytest.LogCaptureFixture) -> None:
    with arc.writer() as w:
        for i in range(20):
            w.add_episode({"obs": np.zeros(1), f"extra{i}": np.zeros(1)})
            assert len(caplog.records) == int(i >= 7)
    assert "8 combinations" in caplog.text
    assert "extra0, extra1" in caplog.text


def test_a_later_field_and_a_second_task_pass_in_silence(
    arc: archive.Archive, caplog: pytest.LogCaptureFixture
) -> None:
    with arc.writer() as w:
        for i in range(6):
            w.add_episode({"a": np.zeros(1)} | ({"b": np.zeros(1)} if i > 2 else {}))
    assert not caplog.records
