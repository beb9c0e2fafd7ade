"""Names come from users: any string comes back as it was, or is refused before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import archive
from archive.base.errors import ArchiveError, FieldError, UnsafePathError, UsageError
from archive.base.layout import check_text, escape, escape_path, unescape, unescape_path
from tests.support.archives import fresh, identical, reopened, stored_objects
from tests.support.sampling import examples

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=12)  # lone surrogates too
AWKWARD = [
    *(
        "",
        "/",
        ".",
        "..",
        "a/b",
        "../x",
        "zarr.json",
        "c",
        "c/0",
        "__x",
        "__",
        "_x",
        "%",
        "%41",
        "%lengths",
        "%places",
        "A",
        "a",
    ),
    *(
        " ",
        "\0",
        "\n",
        "\\",
        "C:",
        "con",
        "\u202e",
        "\U0001f600",
        "é",
        "e\u0301",
        "\ud800",
        "\udfff\ud800",
        "~",
        "*",
        "?",
        "#",
        "x.zip",
    ),
]


@settings(max_examples=examples(300))
@given(ANY_TEXT)
@example("")
@example("__")
@example("\ud800")
def test_escape_is_safe_and_goes_back(name: str) -> None:
    escaped = escape(name)
    assert unescape(escaped) == name
    assert escaped.isascii()
    assert not set(escaped) & set('/\\.:*?"<>| \0')
    assert not escaped.startswith("__")
    assert escaped not in ("", ".", "..")


@settings(max_examples=examples(300))
@given(ANY_TEXT, ANY_TEXT)
def test_no_two_names_share_a_key(a: str, b: str) -> None:
    assert (escape(a) == escape(b)) == (a == b)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a.b", "%4", "%zz", "%l", "é", "a\n", "%2f"])
def test_what_escape_never_makes_is_refused(bad: str) -> None:
    with pytest.raises(UnsafePathError):
        unescape(bad)


def test_paths_go_back() -> None:
    path = ("", "a/b", "..", "\ud800", "__x")
    assert unescape_path(escape_path(path)) == path


@settings(max_examples=examples(60), deadline=None)
@given(
    st.recursive(st.just(None), lambda n: st.dictionaries(ANY_TEXT, n, min_size=1, max_size=4), max_leaves=6).filter(
        bool
    )
)
def test_fields_of_any_name_come_back(shape: dict[str, Any]) -> None:
    def filled(node: Any) -> Any:
        return {k: filled(v) for k, v in node.items()} if node else np.arange(2)

    nest = filled(shape)
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(nest)
    assert identical(reopened(arc).episodes[0].read(), nest)


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("where", ["memory", "local"])
def test_awkward_names_all_at_once(layout: str, where: str, tmp_path: Any) -> None:
    arc = archive.create(str(tmp_path / "arc"), layout=layout) if where == "local" else fresh(layout=layout)
    nest = {name: {name: np.arange(2), "tokens": [np.arange(1)] * 2} for name in AWKWARD}
    with arc.writer(session="a/../b\n") as w:
        w.add_episode(nest)
    assert identical(reopened(arc).episodes[0].read(), nest)
    for name in AWKWARD:
        got = reopened(arc).episodes[0].read([(name, name)])
        assert identical(got, {name: {name: np.arange(2)}})


def refused(arc: archive.Archive, call: Any) -> None:
    """The call raises a UsageError, and has written nothing."""
    before = stored_objects(arc)
    with pytest.raises(UsageError):
        call()
    assert stored_objects(arc) == before


@pytest.mark.parametrize(
    "path", [("x" * 241,), ("é" * 41,), ("ab",) * 300, ("x" * 200,) * 5], ids=["key", "escaped", "deep", "long"]
)
def test_names_that_are_too_long_are_refused_before_anything_is_written(path: tuple[str, ...]) -> None:
    nest: Any = np.zeros(2)
    for key in reversed(path):
        nest = {key: nest}
    arc = fresh()
    with arc.writer() as w:
        refused(arc, lambda: w.add_episode(nest))
        refused(arc, lambda: w.append(nest))
    assert arc.head.number == 1


@pytest.mark.parametrize("where", ["memory", "local"])
def test_names_of_the_greatest_length_work(where: str, tmp_path: Any) -> None:
    for layout in ("packed", "directory"):
        arc = archive.create(str(tmp_path / layout), layout=layout) if where == "local" else fresh(layout=layout)
        with arc.writer(session="s" * 180) as w:
            w.add_episode({"x" * 240: {"y" * 240: {"z" * 240: np.arange(2)}}, "text": {"q" * 230: [np.arange(3)] * 2}})
        got = reopened(arc).episodes[0].read()
        assert got["x" * 240]["y" * 240]["z" * 240].tolist() == [0, 1]
        assert len(got["text"]["q" * 230]) == 2


@pytest.mark.parametrize("name", [n for n in AWKWARD if n.isprintable() or n == "\n"])
def test_ids_of_any_kind_come_back(name: str) -> None:
    arc = fresh()
    with arc.writer(session=name or None, run=name or "main") as w:
        w.add_episode({"x": np.zeros(1)}, episode_id=name, model_weights_uuid=name, metadata={name: name})
        w.append({"x": np.zeros(1)}, episode_ids=[name + "2"])
        w.close_episodes(reason=name)
        w.buffer(name).add_episode({"x": np.zeros(1)})
    arc = reopened(arc)
    one, two = arc.episodes[name], arc.episodes[name + "2"]
    assert (one.id, one.model_weights_uuids, one.metadata, two.reason) == (name, [name], {name: name}, name)
    assert len(arc.episodes.filter(buffer=name, episode_id=[e.id for e in arc.episodes])) == 1
    assert not name or len(arc.episodes.filter(session=name)) == 3


@settings(max_examples=examples(60), deadline=None)
@given(ANY_TEXT)
@example("\ud800")
@example("\0")
def test_ids_come_back_or_are_refused(name: str) -> None:
    arc = fresh()
    with arc.writer() as w:
        calls = [
            lambda: w.add_episode({"x": np.zeros(1)}, episode_id=name, model_weights_uuid=f"u{name}"),
            lambda: w.buffer(f"b{name}").append({"x": np.zeros(1)}, episode_ids=[f"2{name}"]),
        ]
        try:
            name.encode()
        except UnicodeEncodeError:
            for call in calls:
                refused(arc, call)
            refused(arc, lambda: arc.writer(session=f"s{name}", run="other"))
            refused(arc, lambda: arc.writer(run=f"r{name}"))
            return
        for call in calls:
            call()
    got = reopened(arc).episodes
    assert sorted(e.id for e in got) == sorted([name, f"2{name}"])
    assert (got[name].model_weights_uuids, got[f"2{name}"].buffer) == ([f"u{name}"], f"b{name}")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(
        ANY_TEXT, st.recursive(ANY_TEXT | st.integers() | st.none() | st.floats(), st.lists, max_leaves=3), max_size=4
    )
)
def test_metadata_of_any_text_comes_back(metadata: dict[str, Any]) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"x": np.zeros(1)}, metadata=metadata)
    assert repr(reopened(arc).episodes[0].metadata) == repr(metadata)


@pytest.mark.parametrize("bad", [5, b"x", 1.5, ["a"], object()])
def test_names_that_are_no_strings_are_refused(bad: Any) -> None:
    arc = fresh()
    with arc.writer() as w:
        refused(arc, lambda: w.add_episode({"x": np.zeros(1)}, episode_id=bad))
        refused(arc, lambda: w.buffer(bad))
        refused(arc, lambda: arc.writer(run=bad))
        refused(arc, lambda: arc.writer(session=bad))
    with pytest.raises(FieldError, match="must be a string"):
        check_text(bad, "the thing")


def test_sessions_that_are_too_long_are_refused() -> None:
    arc = fresh()
    for bad in ("x" * 181, "é" * 31):
        refused(arc, lambda bad=bad: arc.writer(session=bad))
    refused(arc, lambda: arc.writer(run=""))


def test_errors_are_short_though_names_are_long() -> None:
    arc = fresh()
    with arc.writer() as w, pytest.raises(ArchiveError) as caught:
        w.add_episode({"x" * 5000: np.zeros(1)})
    assert len(str(caught.value)) < 600
