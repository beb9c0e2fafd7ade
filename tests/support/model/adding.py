"""Rules of what ranks add to their buffers, and of what leaves these."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tests.support.model.perfect import KIND_OF, KINDS, MAIN, NO_ENV, Buffer, Known, Rank, Session, fields_of
from tests.support.model.world import World

ENVS = 3


def chosen(world: World, rng: random.Random) -> tuple[Session, Rank] | None:
    """A rank that is alive; None if none is."""
    every = [(session, rank) for session in world.active.values() for rank in session.alive]
    return rng.choice(every) if every else None


def place(world: World, rng: random.Random) -> tuple[Any, Rank, Buffer, str] | None:
    """A buffer of a rank that is alive."""
    found = chosen(world, rng)
    if found is None:
        return None
    name = MAIN if rng.random() < 0.8 else "demo"
    given, buffer = world.buffer(*found, name)
    return given, found[1], buffer, name


def append(world: World, rng: random.Random) -> None:
    """Steps of one env row, or of several at once."""
    if (at := place(world, rng)) is None:
        return
    envs = [rng.randrange(ENVS)] * rng.randint(1, 4) if rng.random() < 0.6 else rng.sample(range(ENVS), ENVS)
    if rng.random() < 0.3:
        envs += rng.sample(envs, len(envs))
    masked = rng.random() < 0.3
    first = [masked and rng.random() < 0.4 for _ in envs]
    last = [rng.random() < 0.3 for _ in envs]
    ended = rng.choice(["no", "terminated", "truncated"])
    _append(world, rng, at, envs, first if masked else None, last, ended)


def _append(
    world: World, rng: random.Random, at: tuple[Any, Rank, Buffer, str], envs: list[int], first: list[bool] | None,
    last: list[bool], ended: str,
) -> None:  # fmt: skip
    given, rank, buffer, name = at
    serials = world.take_some(len(envs))
    by = rng.choice([(None, None), (serials[0], "w1"), (serials[0], f"w{serials[0] % 5}")])
    rows = _rows(world, rng, buffer, envs, first, last)
    names = [row.name for row in rows]
    positions = [row.position for row in rows]
    got = given.append(
        fields_of(KIND_OF[name], serials), env_ids=np.array(envs), first=None if first is None else np.array(first),
        last=np.array(last), episode_ids=names if any(names) else None, metadata={"n": serials[0]},
        terminated=np.array(last) if ended == "terminated" else None,
        truncated=np.array(last) if ended == "truncated" else None, update_count=by[0], model_weights_uuid=by[1],
        positions=positions if any(row.told for row in rows) else None,
    )  # fmt: skip
    assert got.tolist() == positions, (got, positions)
    missing = [i for i, row in enumerate(rows) if row.begins and names[i] is None]
    if missing:
        for i, found in zip(missing, named(given, [(envs[i], positions[i]) for i in missing]), strict=True):
            names[i] = found
    for i, (env, row) in enumerate(zip(envs, rows, strict=True)):
        if row.begins:
            before = buffer.open.pop(env, None)
            if before is not None:
                rank.known[before] = replace(rank.known[before], reason="gap" if row.jumps else "interrupted")
            whole = first[i] if first is not None else not row.jumps
            rank.known[str(names[i])] = Known(name, KIND_OF[name], whole, metadata=serials[0])
            buffer.open[env] = str(names[i])
        _add(world, rank, buffer, env, row.position, buffer.open[env], [serials[i]], by)
        if last[i]:
            _ended(rank, buffer, env, ended)


class Row(NamedTuple):
    """Where an appended row stands. told: its position is not the next one; jumps: the same, after other steps."""

    position: int
    begins: bool
    told: bool
    jumps: bool
    name: str | None


def _rows(
    world: World, rng: random.Random, buffer: Buffer, envs: list[int], first: list[bool] | None, last: list[bool]
) -> list[Row]:  # fmt: skip
    """What is to become of rows of these env rows. Some begin an episode by its name alone, some after a gap."""
    opened, following = set(buffer.open), dict(buffer.next)
    gaps, named, renames = (rng.random() < share for share in (0.15, 0.5, 0.1))
    out = []
    for i, env in enumerate(envs):
        gap = rng.choice([0, 0, 2]) if gaps else 0
        new = renames and rng.random() < 0.5
        begins = env not in opened or bool(first and first[i]) or bool(gap and env in following) or new
        own = world.new_name("a") if begins and (named or new) else None
        position = following.get(env, 0) + gap
        out.append(Row(position, begins, bool(gap), bool(gap and env in following), own))
        following[env] = position + 1
        opened.add(env)
        if last[i]:
            opened.discard(env)
    return out


def named(given: Any, at: list[tuple[int, int]]) -> list[str]:
    """The ids of the episodes at these places, as the library has made them."""
    rows = given.live.to_pylist()
    out = []
    for env, position in at:
        (name,) = [
            r["episode_id"]
            for r in rows
            if r["env_id"] == env and r["position"] <= position < r["position"] + r["length"]
        ]
        out.append(name)
    return out


def _add(
    world: World, rank: Rank, buffer: Buffer, env: int, position: int, name: str, serials: list[int], by: Any
) -> None:  # fmt: skip
    buffer.put(env, position, serials, name)
    world.owner.update(dict.fromkeys(serials, name))
    rank.known[name] = rank.known[name].with_steps(serials, *(rank.weights if by == (None, None) else by))


def _ended(rank: Rank, buffer: Buffer, env: int, ended: str) -> None:
    name = buffer.open.pop(env)
    how = {} if ended == "no" else {ended: True}
    rank.known[name] = replace(rank.known[name], last=True, **how)


def add_episode(world: World, rng: random.Random) -> None:
    """A whole episode, or the beginning, middle or end of one, also without any step."""
    if (at := place(world, rng)) is None:
        return
    given, rank, buffer, name = at
    env = rng.choice([NO_ENV, NO_ENV, 0, 1])
    if env in buffer.open:
        return
    count, first, last = rng.randint(0, 4), rng.random() < 0.8, rng.random() < 0.8
    kind = KIND_OF[name] if not last else rng.choice(KINDS)
    kind = "plain" if not count and last else kind
    own = world.new_name("e")
    serials = world.take(count, own)
    got = given.add_episode(
        fields_of(kind, serials), env_id=None if env == NO_ENV else env, first=first, last=last,
        episode_id=own, metadata={"n": env}, terminated=True if last and first else None,
    )  # fmt: skip
    assert got == own
    rank.known[own] = Known(name, kind, first, last, terminated=True if last and first else None, metadata=env)
    _add(world, rank, buffer, env, buffer.next.get(env, 0), own, serials, (None, None))
    if not last and env != NO_ENV:
        buffer.open[env] = own


def revise(world: World, rng: random.Random) -> None:
    """A new revision of an episode that this rank has written, in the same buffer."""
    if (at := place(world, rng)) is None:
        return
    given, rank, buffer, name = at
    names = [n for n, k in rank.known.items() if k.buffer == name and n not in buffer.open.values()]
    if not names:
        return
    own = rng.choice(names)
    serials = world.take(rng.randint(1, 3), own)
    kind = rng.choice(KINDS)
    given.add_episode(fields_of(kind, serials), episode_id=own, replace=True)
    buffer.remove(own, {**world.owner, **dict.fromkeys(serials, own)})
    rank.known[own] = Known(name, kind, True, True)
    _add(world, rank, buffer, NO_ENV, buffer.next.get(NO_ENV, 0), own, serials, (None, None))


def evict_oldest(world: World, rng: random.Random) -> None:
    if (at := place(world, rng)) is None:
        return
    given, _, buffer, _ = at
    env = rng.choice([*range(ENVS), NO_ENV])
    before = rng.randint(0, buffer.next.get(env, 0))
    given.evict(None if env == NO_ENV else env, before=before)
    buffer.drop(env, set(range(before)))


def evict_some(world: World, rng: random.Random) -> None:
    """Of a list of positions, or of a range."""
    if (at := place(world, rng)) is None:
        return
    given, _, buffer, _ = at
    env = rng.choice([*range(ENVS), NO_ENV])
    limit = buffer.next.get(env, 0)
    if not limit:
        return
    gone = {rng.randrange(limit) for _ in range(rng.randint(1, 4))}
    if rng.random() < 0.5:
        positions: Any = sorted(gone, reverse=True)
    else:
        positions = (min(gone), max(gone) + 1)
        gone = set(range(*positions))
    given.evict(None if env == NO_ENV else env, positions=positions)
    buffer.drop(env, gone)


def remove(world: World, rng: random.Random) -> None:
    if (at := place(world, rng)) is None:
        return
    given, _, buffer, _ = at
    names = [name for name, _ in buffer.episodes(world.owner)]
    if not names:
        return
    name = rng.choice(names)
    assert given.remove(name) == buffer.remove(name, world.owner)


def clear(world: World, rng: random.Random) -> None:
    if rng.random() < 0.5 or (at := place(world, rng)) is None:
        return
    given, _, buffer, _ = at
    given.clear()
    buffer.live, buffer.empty = {}, {}


def close_episodes(world: World, rng: random.Random) -> None:
    if (at := place(world, rng)) is None:
        return
    given, rank, buffer, _ = at
    envs = None if rng.random() < 0.2 else [rng.randrange(ENVS)]
    terminated, reason = rng.choice([None, True, False]), rng.choice([None, "closed"])
    names = [buffer.open.pop(env) for env in sorted(buffer.open) if envs is None or env in envs]
    assert given.close_episodes(envs, terminated=terminated, reason=reason) == names
    for name in names:
        told = {"terminated": terminated, "truncated": True, "reason": reason}
        rank.known[name] = replace(rank.known[name], last=True, **told)


def weights(world: World, rng: random.Random) -> None:
    """What made the steps that follow, where they do not say it themselves."""
    if (at := chosen(world, rng)) is None:
        return
    uuid, count = rng.choice([(None, None), ("w1", 10), ("w2", 20)])
    world.writer(*at).weights(uuid, count)
    at[1].weights = (count, uuid)
