"""What must be true of an archive at the end of a history, by what its parties were told. DESIGN's "what must never
happen", as far as interleavings can bring it about."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np

import archive
from archive.log import tablefiles
from tests.support.simulation.archivists import ARCHIVIST_PARTIES, ARCHIVIST_RULES
from tests.support.simulation.histories import KINDS, Kind
from tests.support.simulation.jobs import JOB_PARTIES, JOB_RULES, add, checkpoint, close, go_on
from tests.support.simulation.scheduler import DiedError
from tests.support.simulation.store import OTHER
from tests.support.simulation.world import Job, Rank, Session, State, World, read

MOST_LOST = 16  # races in a row


def check(world: World) -> None:
    """Hold the end against all that was told."""
    starving = {name: times for name, times in world.store.lost.items() if times > MOST_LOST}
    assert not starving, f"forgettings that others kept from being committed: {starving}"
    bodies = _commits(world)
    arc = archive.open(world.url)
    assert arc.head.number == len(bodies)
    points = {one.number: one for one in arc.checkpoints}
    held = {number: read(one.episodes) for number, one in points.items() if one.replay_saved}
    _check_grows(bodies)
    _check_saved(world, points, held)
    _check_durable(world, bodies, held)
    there = set(arc.episodes.table["episode_id"].to_pylist())
    lost = world.committed - there - world.forgotten
    assert not lost or world.let_go or world.expiring, f"episodes that were committed are not there: {sorted(lost)}"
    for name, number in world.tagged.items():
        read(archive.open(world.url, commit=name).checkpoints.at_commit(number).episodes)
    for number, names in world.merged.items():
        found = read(archive.open(OTHER, commit=number, allow_bases=[world.url]).episodes)
        assert names <= found, f"commit {number} of the archive that refers to this one lacks {sorted(names - found)}"
    _check_redacted(world, arc)
    _check_goes_on(world, arc)
    report = archive.open(world.url).verify()
    assert report.sound, f"verify has findings: {report.findings}"


def _commits(world: World) -> list[dict[str, Any]]:
    keys = sorted(key for key in world.store.objects if key.startswith("commits/"))
    return [json.loads(world.store.objects[key].data.partition(b"\n")[0]) for key in keys]


def _landed(world: World) -> dict[int, int]:
    """Commit -> the time at which it came to be."""
    out: dict[int, int] = {}
    for time, one in enumerate(world.store.seen):
        if one.kind == "create" and one.what.startswith("commits/") and not one.digest.endswith("Error"):
            out.setdefault(int(one.what.rpartition("/")[2][:9]), time)
    return out


def _check_grows(bodies: list[dict[str, Any]]) -> None:
    """Of one session no number goes back."""
    for before, body in pairwise(bodies):
        for run, entry in body["runs"].items():
            old = before["runs"].get(run, {})
            if old.get("session") == entry["session"]:
                for name in ("sequences", "journal"):
                    new = entry.get(name) or {}
                    back = [rank for rank, number in (old.get(name) or {}).items() if new.get(rank, 0) < number]
                    assert not back, f"{name} of run {run} go back in commit {body['number']}"


def _check_saved(world: World, points: dict[int, Any], held: dict[int, frozenset[str]]) -> None:
    """Each acknowledged checkpoint is there with what was saved, or was let go of."""
    for session in world.sessions.values():
        for number, saved in session.saved.items():
            if number not in points:
                assert number in world.let_go or session.run in world.expiring, f"checkpoint {number} is gone"
                continue
            point, live = (
                points[number],
                {rank: session.ranks[rank].states[at].live for rank, at in saved.states.items()},
            )
            for rank, own in live.items():
                assert point.state(rank) == saved.own, f"checkpoint {number} has another state"
                if saved.replay and own:
                    assert np.all(point.column("p", rank) == saved.value), f"checkpoint {number} has another column"
            if saved.replay:
                assert held[number] == frozenset().union(*live.values()), f"checkpoint {number} has other episodes"


def _check_redacted(world: World, arc: Any) -> None:
    """No retained commit leads to a table that names what was redacted."""
    retained = [arc, *(archive.open(world.url, commit=name) for name in world.tagged)]
    for one in retained if world.redacted else ():
        files = one.head.files("segments")
        names = {*tablefiles.load(one.storage, "segments", files, ["episode_id"])["episode_id"].to_pylist()}
        assert not names & world.redacted, f"commit {one.head.number} names {sorted(names & world.redacted)}"


def _check_durable(world: World, bodies: list[dict[str, Any]], held: dict[int, frozenset[str]]) -> None:
    """What was told to be durable is in what its session's successor went on from, unless it was told after that had
    been chosen; and nobody is told so after the successor was opened."""
    landed, newest = _landed(world), dict[str, str]()
    for body in bodies:
        run, name = body["run"], body["session"]
        if body["kind"] == "session" and newest.get(run) != name:
            old, new = world.sessions.get(newest.get(run, "")), world.sessions.get(name)
            if old is not None and new is not None and old.ranks:
                began = next(one["number"] for one in bodies if one["session"] == old.name)
                chosen = new.planned if landed[began] < new.looked else landed[body["number"]]
                origin = (body["runs"][run].get("resumed_from") or {}).get("commit")
                _check_successor(old, new, chosen, held.get(origin) if origin else None, began_anew=origin is None)
                _check_zombie(world, old, landed[body["number"]], [*held.values()])
            newest[run] = name


def _check_successor(
    old: Session, new: Session, chosen: int, origin: frozenset[str] | None, *, began_anew: bool
) -> None:
    """A session takes over all that the one before was told is durable before it looked."""
    whole = bool(new.ranks) and len(new.ranks) == new.size  # it did not die while it opened its writers
    if whole and not began_anew:
        origin = frozenset().union(*(rank.states[0].live for rank in new.ranks))
    trained = {
        key
        for saved in old.saved.values()
        if saved.told < chosen and saved.whole
        for rank, at in saved.states.items()
        for key in old.ranks[rank].states[at].trained
    }
    assert not trained & ((new.to_train or frozenset()) | new.to_reissue), f"{new.name} trains twice {sorted(trained)}"
    for rank in old.ranks:
        told = max(_told(old, rank, chosen), default=0)
        if told == 0:
            continue
        assert not began_anew, f"session {new.name} left behind what {old.name} was told is durable"
        if origin is None:
            continue
        able = _reached(rank, origin, told)
        assert able, f"the origin of {new.name} lacks what {old.name} was told is durable"
        if new.to_train is not None:
            assert any(one.sealed <= new.to_train for one in able), f"{new.name} skips prompts that {old.name} sealed"


def _told(session: Session, rank: Rank, before: int) -> list[int]:
    """The states that a rank was told are durable before a time."""
    number = session.ranks.index(rank)
    saved = [one.states[number] for one in session.saved.values() if one.told < before and one.replay and one.whole]
    return [*saved, *(state for state, _, ended in rank.durable if ended < before)]


def _reached(rank: Rank, live: frozenset[str], state: int) -> list[State]:
    """The states, this one or later ones, in which a rank held just this."""
    own = live & rank.ever
    return [one for one in rank.states[state:] if one.live == own]


def _check_zombie(world: World, old: Session, opened: int, held: list[frozenset[str]]) -> None:
    """Who was replaced is told durable of what was journaled before, at the most."""
    for rank in old.ranks:
        for state, began, _ in rank.durable:
            if began <= opened or state == 0 or any(_reached(rank, live, state) for live in held):
                continue
            seen = world.store.seen[rank.states[state].at : opened]
            assert any(one.kind == "create" and one.what.startswith(f"journal/{old.name}/") for one in seen), (
                f"session {old.name} was told that it is durable after another had taken its place"
            )


def _check_goes_on(world: World, arc: Any) -> None:
    """Each run can be opened again and saved, with what was told to be durable."""
    for run in sorted(arc.head.runs):
        old, me = world.sessions.get(arc.head.runs[run].session), Job(world, "last")
        goes_on = go_on(me, run, 1, {})
        if old is not None:
            _check_successor(old, me.session, me.session.planned, None, began_anew=not goes_on)
        add(me, random.Random(0))
        checkpoint(me, random.Random(0))
        close(me, random.Random(0))


REFUSALS = (
    archive.SupersededError,
    archive.SessionInUseError,
    archive.ExpiredError,
    archive.CheckpointError,
    archive.ConflictError,
    archive.NotDurableError,
    archive.DeadlineError,
    archive.AmbiguousWriteError,
    archive.ClosedError,
    DiedError,
)
JOBS = KINDS["jobs"] = Kind(
    "jobs",
    World.created,
    {rule.__name__: rule for rule in (*JOB_RULES, *ARCHIVIST_RULES)},
    (*JOB_PARTIES, *ARCHIVIST_PARTIES),
    check,
    length=8,
    lead=JOB_PARTIES,
    points=400,
    refusals=REFUSALS,
    sizes=(1, 2, 2, 3),
)
