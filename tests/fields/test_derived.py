"""Derived fields against plain loops: whole episodes, windows, chains of segments, holes in a buffer;
what they read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import archive
from archive import Schema
from archive.base.errors import FieldError, UsageError
from archive.fields import derived
from archive.read import derivations
from archive.read.selection import Selection

GAMMA = 0.9


def _all(n: int = 3, k: int = 4) -> list[Any]:
    return [
        "next_obs",
        derived.next_of("obs/x", n, as_name="later"),
        "has_next",
        derived.n_step_return(GAMMA, n),
        derived.n_step_discount(GAMMA, n),
        derived.discounted_return(GAMMA),
        derived.frame_stack("obs/x", k),
        "terminated",
        "truncated",
        "done",
    ]


def plain(data: dict[str, Any], runs: list[tuple[int, int]], how: str, ended: bool, n: int = 3, k: int = 4) -> Any:
    """The same, step by step."""
    x, reward = data["obs"]["x"], data["reward"]
    out: dict[str, list[Any]] = {}

    def add(name: str, value: Any) -> None:
        out.setdefault(name, []).append(value)

    for begin, stop in runs:
        for t in range(begin, stop):
            over = ended and stop == runs[-1][1]
            add("next_obs", x[min(t + 1, stop - 1)])
            add("later", x[min(t + n, stop - 1)])
            add("has_next", t + 1 < stop)
            add("n_step_return", sum(GAMMA**j * reward[t + j] for j in range(n) if t + j < stop))
            dead = over and how == "terminated" and t + n >= stop
            add("n_step_discount", 0.0 if dead else GAMMA ** min(n, stop - t))
            add("discounted_return", sum(GAMMA ** (j - t) * reward[j] for j in range(t, stop)))
            add("stack", np.stack([x[max(t - j, begin)] for j in range(k - 1, -1, -1)]))
            last = over and t == stop - 1
            add("terminated", last and how == "terminated")
            add("truncated", last and how == "truncated")
            add("done", last and how != "open")
    return {name: np.array(values) for name, values in out.items()}


def same(found: dict[str, Any], wanted: dict[str, Any], part: slice = slice(None)) -> None:
    flat = {**found, "next_obs": found["next_obs"]["x"], "stack": found["obs"]["x_stack"]}
    for name, value in wanted.items():
        assert flat[name].shape == value[part].shape, name
        if value.dtype == bool:
            assert flat[name].tolist() == value[part].tolist(), name
        else:
            np.testing.assert_allclose(flat[name], value[part], rtol=1e-5, err_msg=name)


def apply(data: dict[str, Any], episode: Any, derive: Any) -> dict[str, Any]:
    """The data of a whole episode with derived fields beside its own."""
    out = data
    for derivation in derived.parse(derive):
        out = derived.put(out, derivation, derivation.of(data, whole_rows(episode)))
    return out


def whole_rows(episode: Any) -> derived.Rows:
    """All steps of an episode: anything with length, terminated and truncated, and `bounds` if it may have holes."""
    steps, bounds = int(episode.length), getattr(episode, "bounds", None)
    starts = np.zeros(min(1, steps), np.int64) if bounds is None else bounds.run_starts
    stops = np.append(starts[1:], steps)[: len(starts)]
    begin, stop = (np.repeat(edges, stops - starts) for edges in (starts, stops))
    ends = (stop == steps) & (bounds is None or bool(bounds.ended[0]))
    flags = (np.full(steps, bool(getattr(episode, name, False))) for name in ("terminated", "truncated"))
    return derived.Rows(np.arange(steps), begin, stop, ends, *flags)


def steps_of(length: int, start: int = 0) -> dict[str, Any]:
    t = np.arange(start, start + length)
    return {"obs": {"x": np.stack([t, -t], 1)}, "reward": np.sin(t).astype(np.float32)}


@pytest.mark.parametrize("how", ["terminated", "truncated", "open"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_whole_episode_in_memory(length: int, how: str) -> None:
    data = steps_of(length)
    episode = SimpleNamespace(length=length, terminated=how == "terminated", truncated=how == "truncated")
    found = apply(data, episode, _all())
    same(found, plain(data, [(0, length)], how, how != "open"))
    assert found["n_step_return"].dtype == np.float32
    assert found["obs"]["x"] is data["obs"]["x"]


def fill(w: Any) -> None:
    """Episodes of three segments each, in two env rows, and one added at once."""
    for start, stop in ((0, 4), (4, 9), (9, 13)):
        for env in range(2):
            ends = True if stop == 13 and env == 0 else None
            w.append(steps_of(stop - start, start), env_ids=env, first=start == 0 or None, terminated=ends)
        w.commit()
    w.add_episode(steps_of(6), env_id=7, truncated=True)


HOW = ("terminated", "open", "truncated")  # of env rows 0 and 1, and of the one added at once
LENGTHS = (13, 13, 6)


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    made = archive.create(tmp_path / "a")
    with made.writer() as w:
        fill(w)
    return archive.open(tmp_path / "a")


def by_env(episodes: archive.Episodes) -> list[int]:
    """Numbers of the episodes of env rows 0, 1 and 7."""
    envs = episodes.table["env_id"].to_pylist()
    return [envs.index(e) for e in (0, 1, 7)]


def windows(episodes: archive.Episodes, places: list[tuple[int, int, int]], fields: Any = None) -> list[dict[str, Any]]:
    numbers, starts, stops = np.array(places, np.int64).T
    return derivations.read(episodes, numbers, starts, stops, Selection(fields), derived.parse(_all()))


def test_windows_are_cut_from_what_whole_episodes_give(arc: archive.Archive) -> None:
    episodes = arc.episodes
    places, wanted = [], []
    for number, how, length in zip(by_env(episodes), HOW, LENGTHS, strict=True):
        whole = plain(steps_of(length), [(0, length)], how, how != "open")
        for start in range(length):
            for stop in (start + 1, min(start + 3, length), length):
                places.append((number, start, stop))
                wanted.append((whole, slice(start, stop)))
    for found, (whole, part) in zip(windows(episodes, places), wanted, strict=True):
        same(found, whole, part)


def test_nothing_is_derived_across_a_hole_in_the_buffer(tmp_path: Path) -> None:
    with archive.create(tmp_path / "a").writer() as w:
        fill(w)
        w.evict(env_id=0, before=2)
        w.evict(env_id=0, positions=np.array([6]))
        w.evict(env_id=1, positions=np.array([12]))
        w.checkpoint(step=1).result()
    ck = archive.open(tmp_path / "a").checkpoints.latest
    assert ck is not None
    episodes = ck.episodes
    kept = [np.r_[2:6, 7:13], np.r_[0:12], np.r_[0:6]]
    runs = [[(0, 4), (4, 10)], [(0, 12)], [(0, 6)]]
    for number, how, steps, run in zip(by_env(episodes), HOW, kept, runs, strict=True):
        data = {"obs": {"x": steps_of(13)["obs"]["x"][steps]}, "reward": steps_of(13)["reward"][steps]}
        whole = plain(data, run, how, ended=how != "open")
        (found,) = windows(episodes, [(number, 0, len(steps))])
        same(found, whole)
        (found,) = windows(episodes, [(number, 2, 5)])
        same(found, whole, slice(2, 5))
        same(apply(episodes[number].read(), episodes[number], _all()), whole)
        same(episodes[number].read(derive=_all()), whole)
        same(episodes[number].read(["obs"], 2, 5, derive=_all()), whole, slice(2, 5))
        same(episodes.read(["reward", "obs"], derive=_all())[number], whole)


def test_a_terminated_episode_whose_last_step_left_the_buffer_has_no_done(tmp_path: Path) -> None:
    with archive.create(tmp_path / "a").writer() as w:
        w.add_episode(steps_of(5), env_id=0, terminated=True)
        w.evict(env_id=0, positions=np.array([4]))
        w.checkpoint(step=1).result()
    ck = archive.open(tmp_path / "a").checkpoints.latest
    assert ck is not None
    (found,) = windows(ck.episodes, [(0, 0, 4)])
    assert not found["done"].any()
    assert (found["n_step_discount"] > 0).all()


def test_the_final_observation_is_next_of_the_last_step_where_it_was_stored(tmp_path: Path) -> None:
    x = np.arange(6)
    with archive.create(tmp_path / "a").writer(schema=Schema(axes={"obs": "offset"})) as w:
        w.add_episode({"obs": x, "reward": np.ones(5)}, truncated=True)
    episodes = archive.open(tmp_path / "a").episodes
    for start, stop in ((0, 5), (1, 3), (4, 5)):
        places = (np.zeros(1, np.int64), np.array([start]), np.array([stop]))
        (found,) = derivations.read(episodes, *places, Selection(["reward"]), derived.parse("next_obs"))
        assert found["next_obs"].tolist() == x[start + 1 : stop + 1].tolist()
    found = apply(episodes[0].read(), episodes[0], "next_obs")
    assert found["next_obs"].tolist() == x[1:].tolist()


def test_only_what_a_derivation_needs_is_read(tmp_path: Path) -> None:
    big = np.random.default_rng(0).integers(0, 256, (2000, 4096), np.uint8)
    with archive.create(tmp_path / "a").writer() as w:
        w.add_episode({"frame": big, "reward": np.ones(2000)}, terminated=True)
    arc = archive.open(tmp_path / "a")
    arc.episodes[0].read(["reward"], 0, 1)
    before = arc.io_stats()
    places = (np.zeros(1, np.int64), np.array([1000]), np.array([1001]))
    specs = derived.parse([derived.frame_stack("frame", 4), derived.discounted_return(0.5)])
    (found,) = derivations.read(arc.episodes, *places, Selection(["frame"]), specs)
    used = arc.io_stats() - before
    assert np.array_equal(found["frame_stack"], big[None, 997:1001])
    assert found["discounted_return"] == pytest.approx([2.0])
    assert "reward" not in found
    assert used.bytes_in < big.nbytes / 20 + 16_000


def test_tensors_and_empty_parts_and_episodes_without_steps(arc: archive.Archive) -> None:
    ep = arc.episodes[by_env(arc.episodes)[0]]
    assert ep.to_torch(["reward"], derive="done")["done"].tolist() == [False] * 12 + [True]
    assert ep.read(["reward"], 3, 3, derive=["done", "next_obs"])["next_obs"]["x"].shape == (0, 2)
    none = SimpleNamespace(length=0, terminated=True, truncated=False)
    found = apply({"x": np.zeros(0), "reward": np.zeros(0)}, none, ["next_x", "done", derived.discounted_return(1)])
    assert [len(found[name]) for name in ("next_x", "done", "discounted_return")] == [0, 0, 0]


def test_lists_have_a_next_too_and_frames_must_be_arrays() -> None:
    episode = SimpleNamespace(length=3, terminated=True, truncated=False)
    data = {"words": ["a", "b", "c"], "reward": np.array([1, 2, 3])}
    assert apply(data, episode, "next_words")["next_words"] == ["b", "c", "c"]
    assert apply(data, episode, derived.n_step_return(1, 2))["n_step_return"].tolist() == [3, 5, 3]
    with pytest.raises(FieldError, match="words"):
        apply(data, episode, derived.frame_stack("words", 2))
    with pytest.raises(FieldError, match="words"):
        apply(data, episode, derived.discounted_return(0.9, reward="words"))


def test_names() -> None:
    episode = SimpleNamespace(length=2, terminated=False, truncated=True)
    data = {"x": np.arange(2), "done": np.zeros(2, bool)}
    with pytest.raises(FieldError, match="as_name"):
        apply(data, episode, "done")
    assert apply(data, episode, derived.done(as_name="info/done"))["info"]["done"].tolist() == [False, True]
    replaced = apply(data, episode, derived.frame_stack("x", 2, as_name="x"))
    assert replaced["x"].tolist() == [[0, 0], [0, 1]]
    with pytest.raises(UsageError, match="same name"):
        derived.parse(["next_x", derived.next_of("x", 2)])
    with pytest.raises(UsageError, match="no derivation"):
        derived.parse("nonsense")
    with pytest.raises(FieldError, match="no field 'y'"):
        apply(data, episode, "next_y")
    for wrong in (
        lambda: derived.next_of("x", 0),
        lambda: derived.n_step_return(1, 0),
        lambda: derived.frame_stack("x", 0),
    ):
        with pytest.raises(UsageError, match="at least 1"):
            wrong()
