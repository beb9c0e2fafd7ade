"""What must hold of a job of prompts after a crash, and at its end; every number is counted, none is estimated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import archive
import resharding
from tests.support.prompt_job import (
    KEYS,
    NAME,
    PARTS,
    SIBLINGS,
    Fact,
    expected,
    found_in,
    key_of,
    reader_of,
    weights_of,
)


def by_kind(told: Iterable[Fact]) -> dict[str, list[Fact]]:
    out: dict[str, list[Fact]] = {}
    for kind, *rest in told:
        out.setdefault(kind, []).append(rest)
    return out


def sealed_rows(view: Any) -> list[tuple[str, int, str]]:
    """(key, sibling, episode) of each seal that counts."""
    rows = view.rows.to_pylist()
    return [(json.loads(r["key"]), r["sibling"], r["episode_id"]) for r in rows if r["state"] == "sealed"]


def in_state(view: Any, state: str) -> list[str]:
    """Keys of the rows of a state that count."""
    return [json.loads(row["key"]) for row in view.rows.to_pylist() if row["state"] == state]


def check_recovered(url: str, told: Sequence[Fact], options: Any = None) -> Any:
    """Recover the run, as a session that resumes does; all that was told is there, and nothing has come apart.
    The checkpoint that it goes on from; None if nothing was."""
    arc = archive.open(url, storage_options=options)
    found = found_in(arc)
    facts = by_kind(told)
    if found is None:
        assert set(facts) <= {"begins", "leaves"}, "nothing was recovered, and something was told"
        return None
    ck = resharding.plan(found, world_size=3).checkpoint
    view = ck.ledger(NAME)
    check_told(ck, view, facts)
    check_apart(arc.refresh(), ck, view)
    return ck


def check_told(ck: Any, view: Any, facts: dict[str, list[Fact]]) -> None:
    """0 acknowledged lost."""
    live = set(ck.episodes.table["episode_id"].to_pylist())
    leaves = {name for (name,) in facts.get("leaves", [])}
    lost = {name for (name,) in facts.get("episode", [])} - live - leaves
    assert not lost, f"episodes that were durable: {lost}"
    waiting = {name for group in view.to_train() for name in group.episodes}
    assert waiting <= live, f"to be trained on, and not in the buffer: {waiting - live}"
    back = (gone(facts) & live) - waiting
    assert not back, f"episodes that had left the buffer: {back}"
    lost_seals = {tuple(fact) for fact in facts.get("sealed", [])} - set(sealed_rows(view))
    assert not lost_seals, f"seals that were durable: {lost_seals}"
    lost_draws = {key for (key,) in facts.get("drawn", [])} - set(in_state(view, "drawn"))
    assert not lost_draws, f"draws that were durable: {lost_draws}"
    reader = reader_of(view)
    behind = [fact for fact in facts.get("read", []) if reader[fact[0]] < fact[1]]
    assert not behind, f"the data set's cursor went back behind {behind}"
    known = {key for keys in weights_of(ck).values() for key in keys}
    for number, rank, weights in facts.get("checkpoint", []):
        assert ck.number >= number
        assert known.issuperset(weights), f"rank {rank} was told that commit {number} has its weights"


def gone(facts: dict[str, list[Fact]]) -> set[str]:
    """Episodes that had left, less those that came back to a later session, which found them to be trained on again."""
    sessions = list(dict.fromkeys(session for (session,) in facts.get("begins", [])))
    left = {name: sessions.index(session) for name, session in facts.get("gone", [])}
    returned = [(name, sessions.index(session)) for name, session in facts.get("returns", [])]
    return {*left} - {name for name, at in returned if at > left.get(name, at)}


def check_apart(arc: archive.Archive, ck: Any, view: Any) -> None:
    """A seal and its episode, the cursor and what was drawn, the weights and what counts as trained: one each."""
    for key, sibling, name in sealed_rows(view):
        check_episode(arc.episodes[name], key, sibling)
    drawn = in_state(view, "drawn")
    assert len(drawn) == len(set(drawn)), "a key was drawn twice"
    reader = reader_of(view)
    assert set(drawn) == {key_of(part, at) for part in range(PARTS) for at in range(reader[part])}
    trained = Counter(in_state(view, "trained"))
    known = Counter(key for keys in weights_of(ck).values() for key in keys)
    assert trained == known, f"weights know {known}, the ledger says {trained}"
    assert max(trained.values(), default=1) == 1, f"trained twice: {trained}"
    check_open(view, set(drawn), set(trained))


def check_open(view: Any, drawn: set[str], trained: set[str]) -> None:
    """What was drawn is trained, or is to be trained or made; never two of them."""
    seals = {(key, sibling) for key, sibling, _ in sealed_rows(view)}
    again = {tuple(rollout) for rollout in view.to_reissue()}
    assert not again & seals, "what is sealed would be made again"
    every = {(key, sibling) for key in drawn - trained for sibling in range(SIBLINGS)}
    assert again == every - seals, "what was drawn and not sealed would be skipped"
    ready = {group.key for group in view.to_train()}
    assert ready == {key for key in drawn - trained if {(key, s) for s in range(SIBLINGS)} <= seals}


def check_episode(episode: Any, key: str, sibling: int) -> None:
    assert episode.metadata == {"key": key, "sibling": sibling}
    data, want = episode.read(), expected(key, sibling)
    assert data.keys() == want.keys()
    assert all(np.array_equal(data[name], want[name]) for name in want)


def check_end(url: str, *, together: bool, options: Any = None) -> int:
    """The data set is finished: 0 skipped, 0 trained twice, 0 doubled; how many episodes have no seal."""
    arc = archive.open(url, storage_options=options)
    ck, view = arc.checkpoints.latest, arc.ledger(NAME)
    assert ck is not None
    assert Counter(key for keys in weights_of(ck).values() for key in keys) == Counter(KEYS), "of the weights"
    assert Counter(in_state(view, "trained")) == Counter(KEYS), "of the ledger"
    assert view.counts["trained"] == len(KEYS)
    assert not view.to_reissue()
    assert not view.to_train()
    seals = sealed_rows(view)
    assert Counter((key, sibling) for key, sibling, _ in seals) == Counter(
        (key, sibling) for key in KEYS for sibling in range(SIBLINGS)
    )
    check_apart(arc, ck, view)
    return check_doubles(arc, ck, {name for *_, name in seals}, together=together)


def check_doubles(arc: archive.Archive, ck: Any, sealed: set[str], *, together: bool) -> int:
    """Each rollout has one episode; those without a seal are there only where they were not added together with it."""
    ids = arc.episodes.table["episode_id"].to_pylist()
    assert len(ids) == len(set(ids))
    assert sealed <= set(ids)
    orphans = set(ids) - sealed
    assert not (together and orphans), f"episodes without a seal: {orphans}"
    live = ck.episodes.table["episode_id"].to_pylist()
    assert len(live) == len(set(live))
    told = [(one.metadata["key"], one.metadata["sibling"]) for one in ck.episodes if one.id not in orphans]
    assert len(told) == len(set(told)), "a rollout is live twice"
    return len(orphans)
