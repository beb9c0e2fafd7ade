"""The table of episodes as the browser asks for it: rows, orders, conditions, how values are spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import archive
from archive.base import NotFoundError, UsageError
from archive.view import answers
from archive.view import shown as listings
from archive.view.shown import Shown
from tests.support.shown import ask, looked_at


@pytest.fixture
def shown(archive_url: str) -> Shown:
    return Shown(looked_at(archive_url))


def test_rows_are_slices_in_the_order_that_is_asked_for(shown: Shown) -> None:
    everything = shown.arc.episodes.table.select(["episode_id", "return"]).to_pylist()
    by_return = sorted(everything, key=lambda row: row["return"])
    found = ask(answers.rows, shown, sort="return", start=1, stop=4, columns=["episode_id", "return"])
    assert found["return"] == [row["return"] for row in by_return[1:4]]
    backwards = ask(answers.rows, shown, sort="return", descending=1)
    assert backwards["return"] == sorted((row["return"] for row in everything), reverse=True)
    assert ask(answers.rows, shown, descending=1)["episode_id"] == [row["episode_id"] for row in everything][::-1]


def test_a_condition_a_run_weights_and_a_checkpoint_say_who_is_meant(shown: Shown) -> None:
    assert ask(answers.rows, shown, where="update_count >= 40", sort="return")["episode_id"] == ["e4", "e5"]
    assert ask(answers.rows, shown, weights="weights-1")["episode_id"] == ["e2", "e3"]
    assert ask(answers.rows, shown, run="second", where="metadata.seed < 5")["episode_id"] == ["e3", "e4"]
    number = shown.arc.checkpoints.of("first")[0].number
    assert ask(answers.rows, shown, checkpoint=number)["episode_id"] == ["e0", "e1", "e2"]
    assert ask(answers.check, shown, where="return > 100") == {"count": 0, "notes": []}


def test_an_older_commit_shows_what_was_there_then(shown: Shown) -> None:
    number = shown.arc.checkpoints.of("first")[0].number
    assert len(ask(answers.rows, shown, commit=number)["episode_id"]) == 3
    assert ask(answers.about, shown, commit=number)["commit"] == number


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"where": "return >"}, "condition"),
        ({"columns": ["nothing"]}, "no column"),
        ({"sort": "model_weights_uuids"}, "no order"),
        ({"start": "-1"}, "start="),
        ({"start": 0, "stop": 10**6}, "at most"),
        ({"columns": "{}"}, "JSON list"),
        ({"checkpoint": 77}, "no checkpoint"),
    ],
)
def test_what_is_asked_wrongly_is_refused_with_why(shown: Shown, given: dict[str, Any], why: str) -> None:
    with pytest.raises((UsageError, NotFoundError), match=why):
        ask(answers.rows, shown, **given)


def test_neighbours_follow_the_order_and_the_condition(shown: Shown) -> None:
    found = ask(answers.neighbours, shown, id="e4", where="update_count >= 20", sort="update_count_max", descending=1)
    beside = {"id": "e4", "before": "e5", "after": "e3", "first": "e5", "last": "e2"}
    assert found == {"place": 1, "count": 4, **beside}
    several = {"where": "update_count >= 20", "sort": "update_count_max", "descending": 1}
    assert ask(answers.neighbours, shown, ids=["e0", "e4", "e3"], **several) == found
    assert ask(answers.neighbours, shown, ids=["e0", "gone"], **several) == {"place": None, "count": 4}
    with pytest.raises(NotFoundError, match="not among"):
        ask(answers.neighbours, shown, id="e0", where="update_count >= 20")


def test_histograms_count_all_and_those_that_are_meant(shown: Shown) -> None:
    columns = ["length", "return", "run", "model_weights_uuids", "complete", "created_at"]
    found = ask(answers.histograms, shown, columns=columns, where="update_count >= 40")
    assert all(sum(one["all"]) == 6 and sum(one["counts"]) == 2 for one in found.values())
    assert found["run"]["values"] == ["first", "second"]
    assert found["run"]["counts"] == [0, 2]
    assert (found["length"]["least"], found["length"]["most"]) == (30.0, 30.0)


def test_values_that_are_missing_or_not_finite_have_no_bar(archive_url: str) -> None:
    arc = archive.create(archive_url)
    with arc.writer() as w:
        for n, reward in enumerate([1.0, np.inf, -np.inf]):
            w.add_episode({"reward": np.array([reward])}, episode_id=str(n))
        w.add_episode({"x": np.zeros(1)}, episode_id="none")
    found = ask(answers.histograms, Shown(arc), columns=["return"])["return"]
    assert (sum(found["all"]), found["none_all"]) == (1, 3)
    assert ask(answers.rows, Shown(arc), sort="return")["episode_id"] == ["2", "0", "1", "none"]


def test_conditions_are_completed(shown: Shown) -> None:
    assert {"return", "episode_id", "metadata.task", "metadata.seed"} <= set(ask(answers.names, shown))
    assert ask(answers.values, shown, name="run", text="s") == ["'second'"]
    assert ask(answers.values, shown, name="return", text="") == []
    assert ask(answers.values, shown, name="metadata.task", text="p") == ["'push'"]


def test_metadata_are_columns_and_what_a_condition_leaves_out_is_said(shown: Shown) -> None:
    names = ["episode_id", "metadata.task", "metadata.seed"]
    rows = ask(answers.rows, shown, columns=names, sort="metadata.seed", descending="1", stop=2)
    want = sorted(shown.arc.episodes, key=lambda ep: -ep.metadata["seed"])[:2]
    assert rows == {name: [ep.metadata[name[9:]] for ep in want] for name in names[1:]} | {
        "episode_id": [ep.id for ep in want]
    }
    said = ask(answers.check, shown, where="not label.stale")
    assert (said["count"], said["notes"]) == (0, ["none of 6 episodes has label.stale"])


def test_side_by_side_groups_share_their_edges(shown: Shown) -> None:
    found = ask(answers.distributions, shown, column="return", by="run")
    assert [group["name"] for group in found["groups"]] == ["first", "second"]
    assert all(sum(group["counts"]) == 3 and len(group["quartiles"]) == 5 for group in found["groups"])
    saved = ask(answers.distributions, shown, column="length", by="checkpoint")
    assert [group["count"] for group in saved["groups"]] == [3, 3]
    with pytest.raises(UsageError, match="no numbers"):
        ask(answers.distributions, shown, column="episode_id")


@pytest.mark.parametrize("seed", range(20))
def test_orders_are_those_of_arrow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 50))
    floats = pa.array([None if v > 8 else float(int(v)) for v in rng.uniform(0, 10, count)], pa.float64())
    texts = pa.array(
        ["".join(rng.choice(list("ab\x00é😀"), int(rng.integers(0, 4)))) for _ in range(count)], pa.string()
    )
    for column in (floats, floats.fill_null(3.0), texts, texts.dictionary_encode()):
        plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        found, known = listings.ascending(pa.chunked_array([column]))
        assert found.tolist() == pc.array_sort_indices(plain).to_pylist()
        assert known == count - plain.null_count


def test_of_no_episodes_nothing_is_spread(shown: Shown) -> None:
    found = ask(answers.distributions, shown, column="return", by="run", where="length > 1000")
    assert found == {"edges": [], "groups": [], "others": 0}
