"""What stands in the way of a redaction: who would still lead to something of the episodes, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import CorruptManifestError, one_line
from archive.maintain import Draft, drafting, forgetting, read_pins, read_tags, standing
from archive.maintain.redaction.journals import beyond
from archive.maintain.redaction.mentions import Mentions
from archive.manifest import Commit, Snapshot, checkpoint_places, held_rows, read_of
from archive.store import Storage, split_key
from archive.tables import among

MAX_NAMED = 10  # checkpoints that a sentence names
_RESAVE = "save another checkpoint, with other columns if it borrows these, and let go of those named by keep="
_REMOVE = f"remove the episodes from the buffer, {_RESAVE}"
_COPY = "copy the other episodes to another archive by resharding.filter(..., copy=True), and delete this one"
_END = "save a checkpoint without them, or open another writer of their run, which ends that session"


def hindrances(
    storage: Storage, found: forgetting.Found, made: Draft | None, ids: Set[str], shards: Set[str]
) -> Iterator[str]:  # fmt: skip
    """A sentence for each kind of thing that would still lead to these episodes or shards."""
    mentions = Mentions(storage, ids, shards)
    yield from _held(found, ids)
    if standing.RUNNING in found.standing.protected:
        yield f"some of the episodes are {standing.RUNNING}: {_END}"
    if beyond(storage, found.decided.parent, ids):
        yield f"what a running session has journaled since its newest checkpoint names some of them: {_END}"
    yield from _elsewhere(storage, found, ids, shards)
    tags = [tag["name"] for tag in read_tags(storage, found.decided.parent) if _in_tag(storage, found, tag, mentions)]
    if tags:
        yield f"tags lead to them, and a tag stays: {_listed(tags)}; {_COPY}"
    if made is not None:
        yield from _in_checkpoints(storage, found, made, mentions)


def _held(found: forgetting.Found, ids: Set[str]) -> Iterator[str]:
    """Checkpoints that stay in which they are live."""
    snapshot = found.decided.snapshot
    mine = _rows_of(snapshot, ids)
    held = [number for number, commit in found.known.items() if _holds(snapshot, commit, mine)]
    if held:
        yield f"some of the episodes are live in checkpoints: {_checkpoints(found.known, held)}; {_REMOVE}"


def _rows_of(snapshot: Snapshot, ids: Set[str]) -> Ints:
    return np.flatnonzero(among(snapshot.columns(["episode_id"])["episode_id"], ids))


def _holds(snapshot: Snapshot, commit: Commit, rows: Ints) -> bool:
    if commit.live is None:
        return False
    try:
        return bool(np.isin(rows, held_rows(snapshot, commit)).any())
    except CorruptManifestError:  # it is read with the tables of an earlier commit, which are looked at
        return False


def _elsewhere(storage: Storage, found: forgetting.Found, ids: Set[str], shards: Set[str]) -> Iterator[str]:
    """Archives that refer to their steps, or in which these lie."""
    snapshot = found.decided.snapshot
    rows = snapshot.take(_rows_of(snapshot, ids), ["shard", "chunks"])
    mine = {*shards}.union(*(rows[name].cast("string").drop_null().to_pylist() for name in ("shard", "chunks")))
    pins = read_pins(storage)
    if urls := {pins[key] for key in mine & pins.keys()}:
        yield f"other archives refer to shards that must go: {_listed(sorted(urls))}; copy them, and delete these"
    bases = {split_key(key)[0] for key in mine} - {None}
    if urls := {found.decided.parent.base_urls.get(str(base), str(base)) for base in bases}:
        yield f"their steps lie in other archives: {_listed(sorted(urls))}; {_COPY}"


def _in_tag(storage: Storage, found: forgetting.Found, tag: Mapping[str, Any], mentions: Mentions) -> bool:
    """Whether what a tag retains leads to them."""
    head = found.decided.parent
    target = read_of(storage, tag["target"], head)
    if mentions.in_tables(target):
        return True
    places = checkpoint_places(storage, target)
    commits = _commits(storage, head, {number for place in places for number in place if number is not None})
    return any(
        mentions.in_staged(commits[number]) or mentions.in_tables(commits[manifest or number])
        for number, manifest in places
    )


def _in_checkpoints(
    storage: Storage, found: forgetting.Found, made: Draft, mentions: Mentions
) -> Iterator[str]:  # fmt: skip
    """Checkpoints that stay whose staged objects name them, or which only tables of before serve, where those do."""
    number = made.commit.number
    earlier = {commit: manifest or commit for commit, manifest in made.places if manifest != number}
    serving = _commits(storage, found.decided.parent, {*earlier.values()})
    named = sorted(commit for commit, _ in made.places if mentions.in_staged(found.known[commit]))
    if named:
        yield f"objects of checkpoints name some of them: {_checkpoints(found.known, named)}; {_RESAVE}"
    old = sorted(commit for commit, manifest in earlier.items() if mentions.in_tables(serving[manifest]))
    if old:
        yield f"checkpoints can be read with tables of before alone: {_checkpoints(found.known, old)}; {_RESAVE}"


def _commits(storage: Storage, head: Commit, numbers: Set[int]) -> dict[int, Commit]:
    found = dict(drafting.read_commits(storage, head, sorted(numbers - {head.number})))
    return found | {head.number: head}


def _checkpoints(known: Mapping[int, Commit], numbers: Iterable[int]) -> str:
    """Their names and commits; a compaction publishes one again, under another number."""
    records = {number: known[number].checkpoint for number in numbers}
    return _listed([f"{'' if one is None else one.name} (commit {number})" for number, one in records.items()])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(map(one_line, names[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")
