"""Rules of archivists and readers: they forget, redact, undo, prune, compact, tag and label what is there, refer to it
from another archive, and read it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import archive
import resharding
from archive.base import layout
from archive.index import Walk
from archive.log import tablefiles
from tests.support.simulation.jobs import RUNS, checkpoint, pause, remove
from tests.support.simulation.scheduler import here
from tests.support.simulation.store import OTHER
from tests.support.simulation.world import Job, World, read

PRUNE, PRUNE_S = "1h", 3_700.0  # longer than that
CROWD = 40  # commits of others


def once_saved(rule: Callable[..., None]) -> Callable[..., None]:
    """A rule that lets some minutes pass until there is a whole checkpoint with episodes; without one it does nothing.
    It does not come at once after that: perhaps there are more by then."""

    @wraps(rule)
    def made(me: Job, rng: random.Random, **how: Any) -> None:
        for number in range(9):
            arc = me.open()
            if len(arc.episodes) and any(one.whole for one in arc.checkpoints):
                here().block("more", here().running.party.rng.choice([0.0, 40.0, 90.0]))
                return rule(me, rng, **how)
            here().block("a checkpoint", 2.0**number)
        return None

    return made


def recover(me: Job, rng: random.Random) -> None:
    me.open().recover(rng.choice(RUNS))


@once_saved
def forget(me: Job, rng: random.Random, most: int = 2) -> None:
    arc = me.open()
    plan = arc.forget(keep=archive.Keep(last=rng.randint(1, most)), episodes=rng.choice([None, "unreferenced"]))
    me.world.let_go |= {one.commit for one in plan.checkpoints if not one.stays}
    _forgotten(me, arc, plan)


@once_saved
def redact(me: Job, rng: random.Random) -> None:
    """Nothing that is kept names an episode any more, if nothing stands in the way."""
    if able := sorted(me.open().episodes.table["episode_id"].to_pylist()):
        _redact(me, rng.choice(able))


def expunge(me: Job, rng: random.Random) -> None:
    """A job removes an episode, saves without it, and has it redacted."""
    if (name := remove(me, rng)) is not None:
        checkpoint(me, rng)
        _redact(me, name)


def _redact(me: Job, name: str) -> None:
    arc = me.open()
    with contextlib.suppress(archive.NotFoundError):  # it was never saved, or is forgotten already
        keep = archive.Keep(last=1) if any(one.whole for one in arc.checkpoints) else None
        plan = arc.forget(ids=[name], keep=keep, redact=True)
        if not plan.obstacles:
            me.world.let_go |= {one.commit for one in plan.checkpoints if not one.stays}
            _forgotten(me, arc, plan)
            me.world.redacted.add(name)


def _forgotten(me: Job, arc: Any, plan: Any) -> None:
    known = set(arc.episodes.table["episode_id"].to_pylist())
    plan.commit()
    left = set(me.open().episodes.table["episode_id"].to_pylist())
    me.world.forgotten |= known - left


def undo(me: Job, rng: random.Random) -> None:
    """What the newest forgetting let go of is back, and can be read."""
    arc = me.open()
    if not arc.head.let_go:
        return
    me.world.redacted.clear()
    try:
        arc.undo()
    except archive.UsageError:  # somebody else was quicker
        return
    done = next(one for one in reversed(arc.commits[:]) if one.kind == "undo")
    before = archive.open(me.world.url, commit=done.undoes - 1)
    names = {(one.number, one.name) for one in before.checkpoints}
    assert names <= {(one.number, one.name) for one in arc.at(done.number).checkpoints}, "undo did not bring all back"


def prune(me: Job, rng: random.Random) -> None:
    """Nothing is deleted but what was printed."""
    plan = me.open().prune(PRUNE)
    if rng.random() < 0.3:
        pause(me, rng)
    before, printed, needed = me.world.now(), {one.key for one in plan.going}, _needed(me.world, plan)
    try:
        plan.commit()
    finally:
        own = [one for one in me.world.store.seen[before:] if one.party == me.name and one.kind == "delete"]
        deleted = {key for one in own for key in one.what.split(",")}
        assert deleted <= printed, f"the plan of the prune did not have {sorted(deleted - printed)}"
        assert not deleted & needed, f"what was the newest within the wait needs {sorted(deleted & needed)}"


def _needed(world: World, plan: Any) -> set[str]:
    """The objects of commits that can still be opened: of all since the newest forgetting that is older than the wait
    and not undone, but for what was let go of longer ago."""
    arc, since = archive.open(world.url), (plan.clock - timedelta(hours=1)).timestamp()
    every = arc.commits[:]
    old = {one.number for one in every if world.store.objects[layout.commit_key(one.number)].made_s <= since}
    undone = {one.undoes for one in every if one.kind == "undo"}
    first = max((one.number for one in every if one.kind == "forget" and one.number in old - undone), default=0)
    walk, rows = Walk(arc.storage), tablefiles.load(arc.storage, "forgotten", arc.head.files("forgotten"))
    times = zip(rows["key"].to_pylist(), rows["commit"].to_pylist(), strict=True)
    needed: set[str] = set()
    for one in every:
        if one.number >= first:
            with contextlib.suppress(archive.MissingObjectError):  # of what an undone forgetting named, let go of since
                needed |= walk.reach(one).keys
    return needed - {key for key, number in times if number in old}


@once_saved
def expire(me: Job, rng: random.Random) -> None:
    """All that an archivist does in a day."""
    for run in sorted(me.open().head.runs):
        me.arc.recover(run)
    forget(me, rng, most=1)
    here().block("the wait of a prune", PRUNE_S)
    prune(me, rng)


@once_saved
def waver(me: Job, rng: random.Random) -> None:
    """What was let go of for longer than the wait is brought back, and let go of again."""
    forget(me, rng)
    here().block("the wait of a prune", PRUNE_S)
    undo(me, rng)
    forget(me, rng)


@once_saved
def crowd(me: Job, rng: random.Random) -> None:
    """A forgetting, and before each of its tries somebody else commits a label."""
    arc, left = archive.open(me.world.url), iter(range(CROWD))

    def label_one() -> None:
        if len(arc.episodes) and next(left, None) is not None:
            arc.label({arc.episodes[0].id: {"good": True}})

    with me.world.store.rival(me.name, label_one):
        forget(me, rng)


@once_saved
def compact(me: Job, rng: random.Random) -> None:
    resharding.compact(me.open(), min_alive=rng.choice([0.5, 0.95]))


@once_saved
def tag(me: Job, rng: random.Random) -> None:
    arc = me.open()
    point, name = rng.choice(list(arc.checkpoints)), me.world.new_name("tag")
    arc.tag(name, point)
    me.world.tagged[name] = point.number


@once_saved
def merge(me: Job, rng: random.Random) -> None:
    """Another archive refers to the shards of this one, which are pinned."""
    arc = me.open()
    if rng.random() < 0.3:
        pause(me, rng)
    if names := frozenset(arc.episodes.table["episode_id"].to_pylist()):
        other = resharding.merge([arc], to=OTHER, allow_bases=[me.world.url])
        me.world.merged[other.head.number] = names


def look(me: Job, rng: random.Random) -> None:
    """Whoever reads the newest checkpoints finds what was saved, unless it takes longer than a prune waits."""
    began, arc = here().now, archive.open(me.world.url)
    points = list(arc.checkpoints)[-2:]
    if rng.random() < 0.5:
        here().block("a long look", rng.uniform(0.0, 3_000.0))
    try:
        for one in points:
            read(one.episodes)
    except (archive.MissingObjectError, archive.NotFoundError):
        assert here().now > began + 3_500.0, "a reader lacked what it had found a moment before"


def label(me: Job, rng: random.Random) -> None:
    """Several labels, one commit after the other."""
    arc = me.open()
    for _ in range(rng.choice([1, 1, 30])):
        if ids := arc.episodes.table["episode_id"].to_pylist():
            arc.label({rng.choice(ids): {"good": True}}, by=me.name)


ARCHIVIST_RULES = (
    recover,
    forget,
    redact,
    expunge,
    undo,
    prune,
    expire,
    waver,
    crowd,
    compact,
    tag,
    merge,
    look,
    label,
)
ARCHIVIST_PARTIES = (
    {
        "forget": 3,
        "redact": 1,
        "undo": 1.5,
        "prune": 3,
        "pause": 3,
        "tag": 0.5,
        "merge": 0.7,
        "recover": 0.5,
        "expire": 0.5,
        "waver": 0.5,
        "compact": 0.7,
    },
    {"look": 2, "recover": 1, "label": 1, "merge": 0.5, "pause": 1, "tag": 0.5},
)
