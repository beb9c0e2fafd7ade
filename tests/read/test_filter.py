"""Finding episodes: every argument of filter(), against a naive oracle; nothing that is read on the way."""

from __future__ import annotations

import math
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
from archive.base.errors import IntegrityError, NotFoundError, UsageError
from archive.fields import Objects, jsoncolumns
from tests.support.archives import fresh, reopened
from tests.support.sampling import examples

UUIDS = [str(uuid.UUID(int=i)) for i in range(4)]


@pytest.fixture(scope="module")
def many() -> archive.Archive:
    """20 episodes of several segments, with some of everything."""
    arc = fresh()
    for session in ("one", "two"):
        with arc.writer(session=session, rank=0, world_size=1) as w:
            buffers = [w if i % 3 else w.buffer("demo") for i in range(10)]
            for i, buffer in enumerate(buffers):
                kind = {"model_weights_uuid": UUIDS[i % 4], "update_count": 10 * i} if i != 3 else {}
                buffer.append({"t": np.arange(2), "reward": np.full(2, float(i))}, env_ids=i,
                              episode_ids=f"{session}-{i}",
                              metadata={"i": i, "task": "push" if i % 2 else "pull"}, **kind)  # fmt: skip
            w.commit()
            w.weights(UUIDS[0], 95)
            for i, buffer in enumerate(buffers):
                buffer.append({"t": np.zeros(1, int), "reward": np.zeros(1)}, env_ids=i, last=i < 5)
            w.close_episodes([7], terminated=True, reason="why")
    return reopened(arc)


def ids(episodes: archive.Episodes) -> list[str]:
    return sorted(e.id for e in episodes)


def wanted(arc: archive.Archive, keep: Any) -> list[str]:
    return sorted(row["episode_id"] for row in arc.episodes.table.to_pylist() if keep(row))


@pytest.mark.parametrize(
    ("conditions", "keep"),
    [
        ({"episode_id": "one-3"}, lambda r: r["episode_id"] == "one-3"),
        ({"episode_id": ["one-3", "two-4", "nobody"]}, lambda r: r["episode_id"] in ("one-3", "two-4")),
        ({"episode_id": []}, lambda r: False),
        ({"session": "two"}, lambda r: r["session"] == "two"),
        ({"buffer": "demo"}, lambda r: r["buffer"] == "demo"),
        ({"buffer": {"demo", "replay"}}, lambda r: True),
        ({"rank": 0}, lambda r: True),
        ({"rank": np.int32(1)}, lambda r: False),
        ({"env_id": [1, 2]}, lambda r: r["env_id"] in (1, 2)),
        ({"env_id": range(3)}, lambda r: r["env_id"] < 3),
        ({"env_id": np.array([1, 2])}, lambda r: r["env_id"] in (1, 2)),
        ({"complete": True}, lambda r: r["complete"]),
        ({"complete": False}, lambda r: not r["complete"]),
        ({"complete": None}, lambda r: True),
        ({"model_weights_uuid": UUIDS[1]}, lambda r: UUIDS[1] in r["model_weights_uuids"]),
        ({"model_weights_uuid": uuid.UUID(UUIDS[1])}, lambda r: UUIDS[1] in r["model_weights_uuids"]),
        ({"model_weights_uuid": UUIDS[1:3]}, lambda r: set(UUIDS[1:3]) & set(r["model_weights_uuids"])),
        ({"model_weights_uuid": "none"}, lambda r: False),
        (
            {"where": "length = 3", "session": "one", "complete": True},
            lambda r: r["session"] == "one" and r["complete"],
        ),
        ({"where": "reason = 'why' and terminated"}, lambda r: r["reason"] == "why"),
        (
            {"where": "metadata.task = 'push' and metadata.i > 4"},
            lambda r: '"push"' in r["metadata"] and r["return"] > 8.5,
        ),
        ({"where": pc.field("return") > 10}, lambda r: r["return"] > 10),
    ],
)
def test_each_condition(many: archive.Archive, conditions: dict[str, Any], keep: Any) -> None:
    assert ids(many.episodes.filter(**conditions)) == wanted(many, keep)


def spans(session_and_number: str) -> list[tuple[int, int]]:
    """(least, greatest) update count of each segment of an episode of the fixture."""
    i = int(session_and_number[4:])
    return [*([(10 * i, 10 * i)] if i != 3 else []), (95, 95)]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(-5, 120), st.integers(-5, 120))
def test_update_counts_are_half_open_and_match_any_segment(many: archive.Archive, low: int, high: int) -> None:
    want = wanted(many, lambda r: any(low <= least < high for least, _ in spans(r["episode_id"])))
    assert ids(many.episodes.filter(update_count=(low, high))) == want
    assert ids(many.episodes.filter(update_count=range(low, high))) == want
    exact = wanted(many, lambda r: any(least == low for least, _ in spans(r["episode_id"])))
    assert ids(many.episodes.filter(update_count=low)) == ids(many.episodes.filter(update_count=np.int64(low))) == exact


def test_open_ended_update_counts(many: archive.Archive) -> None:
    assert len(many.episodes.filter(update_count=(None, 30))) == 6
    assert len(many.episodes.filter(update_count=(90, None))) == len(many.episodes) == 20
    assert len(many.episodes.filter(update_count=slice(None, None))) == 20
    assert len(many.episodes.filter(update_count=(0, 2**70))) == 20


def test_unknown_update_counts_match_no_range() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"t": np.zeros(1)})
        w.add_episode({"t": np.zeros(3)}, update_count=[5, 2, 9])
    assert [len(arc.episodes.filter(update_count=r)) for r in [(None, None), (0, 3), (9, 10), (10, 11)]] == [1, 1, 1, 0]
    assert arc.episodes.table["update_count_min"].to_pylist() == [None, 2]


def test_filters_narrow_what_was_filtered(many: archive.Archive) -> None:
    some = many.episodes.filter(session="one")[2:8]
    again = some.filter(complete=True, where="env_id < 100").filter(buffer="replay")
    kept = [e.id for e in some if e.complete and e.buffer == "replay"]
    assert [e.id for e in again] == kept
    assert len(again) == len(again.table) == len(again.to_pandas()) == len(kept) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"rank": "x"},
            {"rank": 1.5},
            {"rank": object()},
            {"rank": 2**40},
            {"rank": True},
            {"env_id": 2**70},
            {"episode_id": 5},
        ),
        *(
            {"episode_id": [b"x", 1]},
            {"model_weights_uuid": 5},
            {"model_weights_uuid": [5]},
            {"buffer": 3},
            {"session": [None, 3]},
        ),
        *({"update_count": "a"}, {"update_count": (1, 2, 3)}, {"update_count": ("a", 1)}, {"update_count": 1.5}),
        *(
            {"update_count": (float("nan"), 3)},
            {"where": 5},
            {"where": ["a"]},
            {"where": object()},
            {"where": pc.field("nope") > 1},
        ),
    ],
)
def test_wrong_values_are_errors_that_say_so(many: archive.Archive, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"give|condition"):
        many.episodes.filter(**wrong)


def test_unknown_arguments_are_refused(many: archive.Archive) -> None:
    with pytest.raises(TypeError):
        many.episodes.filter(weights="x")  # type: ignore[call-arg]


def test_filtering_reads_no_data(many: archive.Archive) -> None:
    arc = reopened(many)
    len(arc.episodes.filter(complete=True))
    before = arc.io_stats()
    found = arc.episodes.filter(model_weights_uuid=UUIDS[1], update_count=(0, 50), where="return > 1")
    assert len(found) > 0
    assert found.table.num_rows == len(found)
    assert arc.io_stats() - before == before - before


def test_looking_up_by_id_and_place(many: archive.Archive) -> None:
    episodes = many.episodes
    assert episodes["two-7"].id == "two-7"
    assert [e.id for e in episodes][3] == episodes[3].id == episodes[np.int64(3)].id == episodes[-17].id
    assert [e.id for e in episodes[[5, 1]]] == [episodes[5].id, episodes[1].id]
    assert len(episodes[np.arange(20) % 2 == 0]) == 10
    assert [e.id for e in episodes[::-1]] == [e.id for e in episodes][::-1]
    assert [e.id for e in episodes[18:40]] == [episodes[18].id, episodes[19].id]
    with pytest.raises(IndexError):
        episodes[20]
    with pytest.raises(NotFoundError, match="no episode 'nobody' among these 20"):
        episodes["nobody"]
    with pytest.raises(NotFoundError, match="among these 1"):
        episodes[:1]["two-7"]


def with_metadata(*each: dict[str, Any] | None) -> archive.Archive:
    arc = fresh()
    with arc.writer() as w:
        for i, metadata in enumerate(each):
            w.add_episode({"reward": np.full(2, i)}, episode_id=f"e{i}", metadata=metadata)
    return reopened(arc)


def test_metadata_are_typed_columns_of_tables_and_conditions() -> None:
    arc = with_metadata(
        {"task": "push", "tools": {"calls": 2, "names": ["a"]}, "score": 1, "ok": True, "a.b": 1},
        {"task": "pull", "tools": {"calls": 0, "names": []}, "score": 0.5, "ok": False, "tools.calls": 7},
        None,
        {"task": None, "tools": {}, "score": 2**70, "mixed": 1, "odd": float("nan"), "text": "\ud800"},
        {"mixed": "x", "tools": {"calls": None, "deep": {"er": {"k": -1}}}, "when": "2024-01-01", "n": (1, 2)},
    )
    table = arc.episodes.table
    found = {name.removeprefix("metadata."): table[name] for name in table.column_names if name.startswith("metadata.")}
    kinds = {name: (str(column.type), column.to_pylist()) for name, column in found.items()}
    assert math.isnan(kinds.pop("odd")[1][3])
    assert kinds == {
        "a.b": ("int64", [1, None, None, None, None]),
        "mixed": ("string", [None, None, None, "1", '"x"']),
        "n": ("string", [None] * 4 + ['{"$tuple":[1,2]}']),
        "ok": ("bool", [True, False, None, None, None]),
        "score": ("double", [1.0, 0.5, None, 2.0**70, None]),
        "task": ("string", ["push", "pull", None, None, None]),
        "text": ("string", [None, None, None, '{"$str":"eda080"}', None]),
        "tools": ("string", [None, None, None, "{}", None]),
        "tools.calls": ("int64", [2, 7, None, None, None]),
        "tools.deep.er.k": ("int64", [None] * 4 + [-1]),
        "tools.names": ("string", ['["a"]', "[]", None, None, None]),
        "when": ("string", [None] * 4 + ["2024-01-01"]),
    }
    for where, want in {
        "metadata.tools.calls >= 1": ["e0", "e1"],
        "metadata.tools.deep.er.k = -1": ["e4"],
        "metadata.tools.deep is not null": ["e4"],
        "metadata.score > 0.5 or metadata.when = '2024-01-01'": ["e0", "e3", "e4"],
        "metadata.tools.names = '[]'": ["e1"],
    }.items():
        assert ids(arc.episodes.filter(where=where)) == want, where
    assert ids(arc.episodes.filter(where=pc.field("metadata.tools.calls") == 7)) == ["e1"]
    assert arc.episodes[:2].to_pandas()["metadata.tools.calls"].tolist() == [2, 7]
    for where in ("metadata.mixed = 1", "metadata.tools = 1"):
        with pytest.raises(UsageError, match="cannot be compared"):
            arc.episodes.filter(where=where)


def test_a_table_has_the_hundred_names_that_most_have_and_a_condition_any() -> None:
    arc = with_metadata(*({f"k{n}": n for n in range(i, 150)} for i in range(60)))
    names = [name for name in arc.episodes.table.column_names if name.startswith("metadata.")]
    assert sorted(names) == sorted(f"metadata.k{n}" for n in range(50, 150))
    assert len(arc.episodes.filter(where="metadata.k3 = 3")) == 4


def test_conditions_say_what_they_leave_out(caplog: pytest.LogCaptureFixture) -> None:
    arc = with_metadata({"k": 1}, {"k": 2}, {})
    arc.label({"e0": {"stale": True}})
    for where, want, told in (
        ("not label.stale", [], "2 of 3 episodes that have no label.stale"),
        ("metadata.k != 1", ["e1"], "1 of 3 episodes that have no metadata.k"),
        ("metadata.nothing = 1", [], "none of 3 episodes has metadata.nothing"),
        ("label.nothing", [], "none of 3 episodes has label.nothing"),
        (~pc.field("label.stale"), [], "2 of 3 episodes that have no label.stale"),
    ):
        caplog.clear()
        found = arc.episodes.filter(where=where)
        assert ids(found) == want
        assert any(told in note for note in found.notes)
        assert told in caplog.text
    caplog.clear()
    for where, want in (
        ("not label.stale or label.stale is null", ["e1", "e2"]),
        ("metadata.k is null", ["e2"]),
        ("not (metadata.k is null or metadata.k = 1)", ["e1"]),
        ("return >= 0 and not complete = false", ["e0", "e1", "e2"]),
        ("metadata.k = 1 or return >= 0", ["e0", "e1", "e2"]),
    ):
        assert ids(arc.episodes.filter(where=where)) == want
        assert arc.episodes.filter(where=where).notes == ()
    assert not caplog.text
    positive = arc.episodes.filter(where="metadata.k = 1")
    assert "is null` takes them in" in positive.notes[0]
    assert not caplog.text


def test_metadata_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = with_metadata({"k": 1, "task": "push"}, {"k": 2})
    parsed, parse = [], jsoncolumns._parsed

    def counted(text: str, what: str) -> dict[str, Any]:
        parsed.append(text)
        return parse(text, what)

    monkeypatch.setattr(jsoncolumns, "_parsed", counted)
    assert len(arc.episodes.filter(where="metadata.k > 1")) == 1
    assert len(arc.episodes.filter(where="metadata.task = 'push'").table) == 1
    arc.label({"e0": {"good": True}})
    assert len(arc.episodes.filter(where="metadata.k = 1 and label.good")) == 1
    assert len(parsed) == 2


@pytest.mark.parametrize("text", ['{"k":1', "[1]", '{"k":NaN}', '{"k":1} {"k":2}', '{"k":' * 5000])
def test_metadata_that_are_damaged_are_an_error(text: str) -> None:
    with pytest.raises(IntegrityError, match="metadata of an episode"):
        Objects(pa.chunked_array([pa.array(['{"k":1}', text])]), "metadata of an episode").column("k")
