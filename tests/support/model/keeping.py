"""Rules of what is said of episodes later, of what is let go of, and of what is moved."""

from __future__ import annotations

import random
import uuid

import numpy as np

import archive
import resharding
from tests.support.model.checking import LATE, check_tags, check_view, contents, look, refused
from tests.support.model.perfect import Known, Letting, Saved
from tests.support.model.world import Label, World


def label(world: World, rng: random.Random) -> None:
    view = world.view()
    if not view:
        return
    names = rng.sample(sorted(view), min(len(view), rng.randint(1, 3)))
    key, value = rng.choice(["good", "score"]), rng.choice([None, 1, 2, 3])
    with world.looked_at() as arc:
        arc.label({name: {key: value} for name in names}, by="somebody")
        world.labels += [Label(name, view[name].stamps[-1], key, value) for name in names]
        if rng.random() < 0.3:
            look(world, rng)


def add_fields(world: World, rng: random.Random) -> None:
    field = rng.choice(LATE)
    with world.looked_at() as arc:
        if rng.random() < 0.4 and field in world.late:
            _drop_field(world, arc, field)
        else:
            _add_field(world, rng, arc, field)
    if rng.random() < 0.3:
        look(world, rng)


def _drop_field(world: World, arc: archive.Archive, field: str) -> None:
    """Refused only where no episode that is seen has it: with those that were forgotten it may come back."""
    try:
        arc.drop_fields([field])
    except archive.FieldError:
        assert not any(world.late[field].keys() & {*known.serials} for known in world.view().values())
        return
    del world.late[field]


def _add_field(world: World, rng: random.Random, arc: archive.Archive, field: str) -> None:
    view = {name: known for name, known in world.view().items() if known.serials}
    if not view:
        return
    names = rng.sample(sorted(view), min(len(view), rng.randint(1, 3)))
    values = {s: float(rng.randint(0, 99)) for name in names for s in view[name].serials}
    arc.add_fields({field: {n: np.array([values[s] for s in view[n].serials]) for n in names}})
    world.late.setdefault(field, {}).update(values)


def tag(world: World, rng: random.Random) -> None:
    if len(world.tags) >= 2 or not world.standing:
        return
    world.settle()
    saved = rng.choice(world.standing)
    with world.looked_at() as arc:
        name = world.new_name("t")
        arc.tag(name, list(arc.checkpoints)[world.standing.index(saved)])
    past = archive.open(world.url, commit=name, storage_options=world.storage_options)
    world.tags[name] = (saved, contents(past))


def reader(world: World, rng: random.Random) -> None:
    """Somebody opens the archive, and goes on looking at what it was then."""
    if len(world.readers) >= 2:
        world.readers.pop(0)
    world.settle()
    number = world.reopened().head.number
    if number:
        arc = archive.open(world.url, commit=number, storage_options=world.storage_options)
        world.readers.append((arc, world.view()))


# -- letting go --------------------------------------------------------------------------------------------------------


def protected(world: World) -> set[str]:
    """Episodes that must not go: live in checkpoints that stay, or written since by a session that goes on."""
    out = {name for saved in world.standing for name in saved.live_ids(world.owner)}
    out |= {name for _, view in world.merged for name in view}
    for session in world.active.values():
        own = [s for s in world.saved if s.session == session.name and s.replay and s.whole]
        saved, seen = own[-1].seen if own else session.base, session.seen()
        for rank in session.ranks:
            out |= {n for n, k in rank.committed.items() if n not in saved or saved[n].stamps != k.stamps}
            for buffer in rank.buffers.values() if not rank.dead else ():
                live = {n for n, serials in buffer.episodes(world.owner) if n in seen and _is_of(serials, seen[n])}
                out |= live | (set(buffer.open.values()) & seen.keys())
    return out


def _is_of(live: list[int], known: Known) -> bool:
    """Whether live steps are of the revision that is known: a later one, which nobody has committed, needs none of
    it."""
    return not live or not {*live}.isdisjoint(known.serials)


def may_stay(world: World) -> set[str]:
    """Episodes that may be kept: those that have not ended as far as sessions that go on have committed, and those that
    their newest checkpoint left out, whether they still hold them or not."""
    seen = [item for session in world.active.values() for item in session.seen().items()]
    left_out = [rank.left_ids for session in world.active.values() for rank in session.ranks]
    return {name for name, known in seen if not known.last and known.reason is None}.union(*left_out)


def must_stay(world: World) -> set[int]:
    """Places of checkpoints that no forgetting may take."""
    out = set()
    for run in {s.run for s in world.standing}:
        of = [s for s in world.standing if s.run == run and s.whole]
        out |= {id(s) for s in [*of[-1:], *[s for s in of if s.replay][-1:]]}
    for session in world.active.values():
        own = [s for s in world.saved if s.session == session.name and s.replay and s.whole]
        if session.origin is not None and not own:
            out.add(id(session.origin))
    return out | {id(saved) for saved, _ in world.tags.values()}


def forget(world: World, rng: random.Random) -> None:
    """Let go of checkpoints, and maybe of episodes."""
    world.settle()
    if not world.standing:
        return
    view = world.view()
    how = rng.choice(["checkpoints", "unreferenced", "superseded", "ids"])
    keep = archive.Keep(last=rng.randint(1, 3)) if how != "ids" or rng.random() < 0.5 else None
    episodes = how if how in ("unreferenced", "superseded") else None
    ids = rng.sample(sorted(view), min(len(view), 3)) if how == "ids" else None
    if how == "ids" and not ids:
        return
    before, standing = world.arc.refresh().head.number, world.standing
    if keep is not None and not any(saved.whole for saved in standing):
        with refused(archive.UsageError):
            world.arc.forget(keep=keep, episodes=episodes, ids=ids)
        return
    with world.looked_at() as arc:
        plan = arc.forget(keep=keep, episodes=episodes, ids=ids)
        stays = [one.stays for one in plan.checkpoints]
        plan = plan.commit()
        arc.refresh()
        shown = set(arc.episodes.table["episode_id"].to_pylist())
    assert len(stays) == len(standing)
    gone = [saved for saved, kept in zip(standing, stays, strict=True) if not kept]
    bound = must_stay(world)
    assert not [saved.name for saved in gone if id(saved) in bound]
    _check_policy(keep, standing, gone)
    for saved in gone:
        saved.forgotten = True
    went = set(view) - shown
    assert shown <= set(view)
    held = protected(world) | {
        name
        for saved in world.standing
        for buffers in (saved.buffers if saved.replay else {}).values()
        for one in buffers.values()
        for name in one.open.values()  # a resume goes on with these, though no step may be live
    }
    tagged = {name for _, shown in world.tags.values() for name in shown}
    assert not went & held, ("needed, and gone", went & held)
    if how in ("checkpoints", "superseded"):
        assert not went
    if ids is not None:
        assert went <= set(ids)
        needed = held | tagged | may_stay(world) | (set(ids) if world.merged else set())
        assert set(ids) - needed <= went, ("not needed, asked for, and still there", set(ids) - held - went)
    if world.arc.head.number > before:
        world.lettings.append(Letting(world.gone, gone))
        world.gone = world.gone | {name: view[name].stamps[-1] for name in went}
    look(world, rng)


def _check_policy(keep: archive.Keep | None, standing: list[Saved], gone: list[Saved]) -> None:
    """Nothing goes that the policy wants."""
    if keep is None or keep.last is None:
        assert not gone or keep is not None
        return
    for run in {s.run for s in standing}:
        wanted = [s for s in standing if s.run == run and s.whole][-keep.last :]
        assert not [s.name for s in wanted if any(s is g for g in gone)]


def undo(world: World, rng: random.Random) -> None:
    """What went last is there again, if nothing stands in the way."""
    world.settle()
    arc = world.arc.refresh()
    if not world.lettings:
        with refused(archive.UsageError, archive.ConflictError):
            arc.undo()
        return
    last = world.lettings[-1]
    try:
        arc.undo()
    except archive.ConflictError:
        assert last.sealed
        return
    assert not last.sealed or last.sealed == "maybe"
    world.lettings.pop()
    world.gone = last.before
    for saved in last.checkpoints:
        saved.forgotten = False
    look(world, rng)


def prune(world: World, rng: random.Random) -> None:
    """What nothing needs is deleted, and nothing else: sessions, checkpoints and readers of now go on."""
    world.settle()
    arc = world.arc.refresh()
    plan = arc.prune("0s", dry_run=False, force=True)
    if plan.objects:
        world.readers.clear()
        for letting in world.lettings:
            letting.sealed = "maybe"
    again = world.arc.refresh().prune("0s", force=True)
    assert again.objects == 0, str(again)
    look(world, rng)


def compact(world: World, rng: random.Random) -> None:
    world.settle()
    made = resharding.compact(world.arc.refresh(), min_alive=rng.choice([0.5, 0.95]))
    if made.commit is not None:
        for letting in world.lettings:
            letting.sealed = True
    look(world, rng)


def merge(world: World, rng: random.Random) -> None:
    """All that is seen is seen in another archive, too; with steps of its own, or with those of this one."""
    world.settle()
    view = world.view()
    url, copy = f"memory://merged-{uuid.uuid4().hex}", rng.random() < 0.7
    if not view or not world.url.startswith("memory"):
        return
    resharding.merge([world.reopened()], to=url, copy=copy)
    check_view(world, archive.open(url, allow_bases=True).episodes, view, past=True)
    if not copy:
        world.merged.append((url, view))


def end(world: World, rng: random.Random) -> None:
    """Late fields are dropped, added to other episodes, and dropped again: nothing of before comes back, not even when
    something is forgotten then. And what tags name stays whatever a prune deletes."""
    with world.looked_at() as arc:
        for field in list(world.late):
            _drop_field(world, arc, field)
            _add_field(world, rng, arc, field)
            check_view(world, arc.episodes, world.view())
            if field in world.late:
                _drop_field(world, arc, field)
    tag(world, rng)
    forget(world, rng)
    prune(world, rng)
    arc = world.reopened()
    check_view(world, arc.episodes, world.view())
    check_tags(world, arc)
