"""What the archive shows, held against the model."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import archive
from archive.maintain import verify
from archive.tables import KEYS, of_segments
from tests.support.archives import identical
from tests.support.model.perfect import Episodes, Known, Saved, Session, fields_of, priority
from tests.support.model.world import World

LATE = ("late0", "late1")


def told(known: Known) -> tuple[Any, ...]:
    """What its row of the table must say."""
    updates = (min(known.updates), max(known.updates)) if known.updates else (None, None)
    ends = (known.terminated, known.truncated, known.reason)
    metadata = {} if known.metadata is None else {"n": known.metadata}
    owner = (known.rank, known.run, known.buffer)
    return *ends, sum(known.serials) / 2, metadata, *updates, list(known.weights), *owner


def found(row: dict[str, Any]) -> tuple[Any, ...]:
    ends = (row["terminated"], row["truncated"], row["reason"])
    updates = (row["update_count_min"], row["update_count_max"])
    owner = (row["rank"], row["run"], row["buffer"])
    metadata = json.loads(row["metadata"] or "{}")
    return *ends, row["return"], metadata, *updates, list(row["model_weights_uuids"]), *owner


def check_rows(world: World, rows: list[dict[str, Any]], want: Episodes, steps: dict[str, int]) -> None:
    """Rows of the table. steps: how many an episode has there."""
    for row in rows:
        name = row["episode_id"]
        known = want[name]
        whole = known.first and known.last and steps[name] == len(known.serials)
        assert (row["length"], row["complete"]) == (steps[name], whole), (row, known)
        assert found(row) == told(known), f"{name}\n{found(row)}\n{told(known)}"


def check_labels(world: World, rows: list[dict[str, Any]], want: Episodes) -> None:
    for row in rows:
        said = {key.removeprefix("label."): value for key, value in row.items() if key.startswith("label.")}
        said = {key: value for key, value in said.items() if value is not None}
        expected = world.labels_of(row["episode_id"], want[row["episode_id"]])
        assert said == expected, (row["episode_id"], said, expected)


def check_said(episodes: Any) -> None:
    """Nothing is said of segments, or added to steps, that are not there any more."""
    rows = episodes.episode_index.snapshot
    where = rows.columns(KEYS)
    assert of_segments("labels", rows.annotations.labels, where).all()
    assert of_segments("late", rows.annotations.late, where).all()


def check_data(
    world: World, episodes: Any, want: Iterable[tuple[Known, list[int]]], *, past: bool = False
) -> None:  # fmt: skip
    """Each field of each step, to the bit; and that those which came later are there, if not dropped since."""
    pairs = list(want)
    if not pairs:
        return
    for data, (known, serials) in zip(episodes.read(missing="skip"), pairs, strict=True):
        late = {name for name in LATE if data.pop(name, None) is not None}
        if serials and not past:
            assert late == {n for n, values in world.late.items() if values.keys() >= {*serials}}, (late, known)
        assert data["serial"].tolist() == serials, (data["serial"].tolist(), serials, known)
        expected = fields_of(known.kind, serials)
        assert identical(data, expected), (data, expected)


def check_part(episodes: Any, want: Episodes) -> None:
    """The middle of one of the longest episodes."""
    name = max(want, key=lambda n: len(want[n].serials), default="")
    if name and len(want[name].serials) > 2:
        serials = want[name].serials[1:-1]
        data = episodes[name].read(start=1, stop=1 + len(serials), missing="skip")
        for late in LATE:
            data.pop(late, None)
        assert identical(data, fields_of(want[name].kind, serials)), (name, data)


def check_late(world: World, episodes: Any, pairs: list[tuple[Known, list[int]]]) -> None:
    known = {serial for _, serials in pairs for serial in serials}
    names = [name for name, values in world.late.items() if not known.isdisjoint(values)]
    for data, (_, serials) in zip(episodes.read(names, missing=-1.0) if names else (), pairs, strict=bool(names)):
        for name in names:
            values = [world.late[name].get(serial, -1.0) for serial in serials]
            assert data[name].tolist() == values, (name, data, serials)


def check_view(world: World, episodes: Any, want: Episodes, *, past: bool = False, data: bool = True) -> None:
    """All episodes of an archive, with or without their steps; past: before what was said and added since."""
    rows = episodes.table.to_pylist()
    ids = [row["episode_id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(want), f"too many: {set(ids) - set(want)}; missing: {set(want) - set(ids)}"
    check_rows(world, rows, want, {name: len(known.serials) for name, known in want.items()})
    pairs = [(want[name], list(want[name].serials)) for name in ids]
    if data:
        check_data(world, episodes, pairs, past=past)
        check_part(episodes, want)
    if not past:
        check_labels(world, rows, want)
        check_said(episodes)
    if data and not past:
        check_late(world, episodes, pairs)


def check_saved(world: World, ck: Any, saved: Saved) -> None:
    """Everything of a checkpoint."""
    about = (ck.name, ck.run, ck.session, ck.step, ck.world_size, ck.whole, ck.replay_saved)
    assert about == (saved.name, saved.run, saved.session, saved.step, saved.world, saved.whole, saved.replay)
    assert ck.ranks == sorted(saved.buffers)
    assert saved.recovered or ck.progress == ({"at": saved.step} if 0 in saved.buffers else None)
    assert saved.recovered or ck.discarded == saved.discarded, (ck.discarded, saved.discarded)
    if not saved.replay:
        assert len(ck.episodes) == 0
        return
    want = live_of(world, ck, saved)
    rows = ck.episodes.table.to_pylist()
    got = [(row["episode_id"], row["length"]) for row in rows]
    assert got == [(episode, len(serials)) for _, _, episode, serials in want], (got, want)
    for row, (_, _, episode, serials) in zip(rows, want, strict=True):
        check_rows(world, [row], saved.seen, {episode: len(serials)})
    check_labels(world, rows, saved.seen)
    pairs = [(saved.seen[episode], serials) for _, _, episode, serials in want]
    check_data(world, ck.episodes, pairs)
    check_late(world, ck.episodes, pairs)
    for rank, buffers in saved.buffers.items():
        check_columns(ck, saved, rank, buffers)


def live_of(world: World, ck: Any, saved: Saved) -> list[tuple[int, str, str, list[int]]]:
    """What is live in it, in live order; which buffer of a rank comes first is the library's choice."""
    parts = dict.fromkeys(zip(*(ck.live[name].to_pylist() for name in ("rank", "buffer")), strict=True))
    assert [rank for rank, _ in parts] == sorted(rank for rank, _ in parts)
    want = {
        (rank, name): [(rank, name, *one) for one in buffer.episodes(world.owner)]
        for rank, buffers in saved.buffers.items()
        for name, buffer in buffers.items()
    }
    assert {part for part, found in want.items() if found} == parts.keys()
    return [one for part in parts for one in want[part]]


def check_columns(ck: Any, saved: Saved, rank: int, buffers: Any) -> None:
    """Columns, attributes, state and counts of one rank."""
    for name, buffer in buffers.items():
        serials = buffer.serials()
        for column, factor in saved.columns.items():
            if saved.recovered and column not in ck.staged(rank).index.columns.get(name, {}):
                continue
            values = ck.column(column, rank, name)
            want = priority(serials) * factor
            told_of = ~np.isnan(values) if saved.recovered else np.ones(len(values), bool)
            assert len(values) == len(want)
            assert (values[told_of] == want[told_of]).all(), (column, values, want)
    if not saved.recovered:
        assert ck.state(rank) == {"at": saved.step, "rank": rank, "array": [rank, saved.step]}
        assert ck.attributes(rank).get("staleness", {}) == saved.attributes[rank]


def check_live(world: World, session: Session) -> None:
    """What the writers say is live."""
    for rank in session.alive:
        for name, buffer in rank.buffers.items():
            given, _ = world.buffer(session, rank, name)
            rows = given.live.to_pylist()
            live = [[r["episode_id"], r["length"]] for r in rows]
            joined: list[list[Any]] = []
            for one in live:
                if joined and joined[-1][0] == one[0]:
                    joined[-1][1] += one[1]
                else:
                    joined.append(one)
            assert joined == [[n, len(s)] for n, s in buffer.episodes(world.owner)], (name, rank.number)
            places = {
                (-1 if r["env_id"] is None else r["env_id"], r["position"] + i)
                for r in rows
                for i in range(r["length"])
            }
            assert places == {(env, position) for env, row in buffer.live.items() for position in row}
            assert all(given.next_position(env) == p for env, p in buffer.next.items() if env >= 0)


@contextlib.contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    """What is done within must be refused by one of these."""
    try:
        yield
    except errors:
        return
    raise AssertionError(f"none of {errors} was raised")


def look(world: World, rng: random.Random, newest: int = 1) -> None:
    """Nothing is under way: the archive is as it must be, now and then to the last step, and the newest checkpoints."""
    with world.looked_at() as arc:
        check_view(world, arc.episodes, world.view(), data=rng.random() < 0.3)
        check_checkpoints(world, arc, newest=newest)


def check_all(world: World) -> None:
    """Everything."""
    world.settle()
    arc = world.reopened()
    for session in world.active.values():
        check_live(world, session)
    check_view(world, arc.episodes, world.view())
    check_checkpoints(world, arc)
    check_others(world, arc)


def check_checkpoints(world: World, arc: Any, newest: int | None = None) -> None:
    """All checkpoints, or as many of the newest."""
    points = list(arc.checkpoints)
    standing = world.standing
    assert [c.name for c in points] == [s.name for s in standing]
    chosen = list(zip(points, standing, strict=True))
    for ck, saved in chosen if newest is None else chosen[-newest:]:
        check_saved(world, ck, saved)


def contents(arc: Any) -> dict[str, list[int]]:
    """Each episode that an archive shows, and its steps."""
    episodes = arc.episodes
    ids = episodes.table["episode_id"].to_pylist()
    return {name: data["serial"].tolist() for name, data in zip(ids, episodes.read(["serial"]), strict=True)}


def check_tags(world: World, arc: Any) -> None:
    """Each tag opens the archive as it was."""
    assert set(arc.tags) == set(world.tags)
    for name, (saved, shown) in world.tags.items():
        past = archive.open(world.url, commit=name, storage_options=world.storage_options)
        assert saved.name in [ck.name for ck in past.checkpoints]
        assert contents(past) == shown


def check_others(world: World, arc: Any) -> None:
    """Tags, time travel, and that each byte is as it was written."""
    check_tags(world, arc)
    for url, view in world.merged:
        check_view(world, archive.open(url, allow_bases=True).episodes, view, past=True)
    for reader, view in world.readers:
        check_view(world, reader.episodes, view, past=True)
    findings = verify(arc, deep=True).findings
    assert findings == [], findings
