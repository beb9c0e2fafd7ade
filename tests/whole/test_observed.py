"""Observations written by hand against the guards of archive/docs/spec; those of histories are in tests/simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import specification
from tests.support.observations import Event

pytestmark = pytest.mark.skipif(bool(specification.missing()), reason=specification.missing() or "TLC runs")


def commit(number: int, kind: str, leads: set[int], **says: Any) -> Event:
    run = "" if kind in ("forget", "undo", "prune", "tag") else "main"
    base: Event = {"event": "commit", "number": number, "intent": f"t{number}", "kind": kind, "run": run, "by": "s1"}
    tables = {"leads": leads, "borrowed": set(), "letgo": 0, "forgot": set(), "pruned": set(), "tags": set()}
    more = {"upto": {}, "adds": set(), "order": 0, "seen": 0, "takes": True, "forks": False, "ends": set()}
    return base | tables | more | {"cutoff": 0, "time": number} | says


def put(number: int, event: str = "put", journal: str = "", at: int = 0) -> Event:
    return {"event": event, "object": number, "by": "s1", "time": 0, "journal": journal, "number": at}


GOOD = [
    commit(1, "open", set()), put(1), commit(2, "save", {1}, order=1), {"event": "told", "number": 2, "intent": "t2"},
    put(9, "tick", "s1/0"), {"event": "durable", "journal": "s1/0", "number": 1}, put(2),
    commit(3, "save", {1, 2}, order=2, upto={"s1/0": 1}), commit(4, "forget", {2}, letgo=4, forgot={(1, 4)}),
    commit(5, "prune", {2}, letgo=4, pruned={1}, cutoff=4), {"event": "delete", "object": 1},
]  # fmt: skip
BAD = [  # what is refused, where, why
    ([*GOOD[:9], GOOD[10]], 9, {"listed"}),
    ([*GOOD[:9], GOOD[9] | {"cutoff": 3}], 9, {"listed"}),
    ([*GOOD[:9], commit(5, "prune", {2}, letgo=4, pruned={2}, cutoff=4)], 9, {"listed"}),
    ([*GOOD, commit(6, "save", {1, 2}, borrowed={1}, letgo=4)], 11, {"names", "written"}),
    ([*GOOD[:3], commit(4, "save", {1})], 3, {"create"}),
    ([*GOOD[:3], commit(3, "save", {1}, intent="t2")], 3, {"intent"}),
    ([*GOOD[:3], commit(3, "open", {1}, by="s2", seen=0)], 3, {"opens"}),
    ([*GOOD[:3], commit(3, "open", {1}, by="s2", seen=2, ends={"s1/0"})], 3, {"ended"}),
    ([*GOOD[:3], commit(3, "save", {1}, by="s2")], 3, {"fence"}),
    ([*GOOD[:8], commit(4, "save", {1, 2}, upto={"s1/0": 0})], 8, {"grows"}),
    ([*GOOD[:5], put(10, "tick", "s1/0", 2)], 5, {"gap"}),
    ([*GOOD[:5], put(10, "end", "s1/0", 1), put(10, "tick", "s1/0", 1)], 6, {"slot"}),
    ([*GOOD[:4], {"event": "durable", "journal": "s1/0", "number": 1}], 4, {"there"}),
    ([*GOOD[:2], GOOD[3]], 2, {"there"}),
    ([*GOOD, commit(6, "undo", {1, 2}, letgo=0)], 11, {"names", "undone", "written"}),
    ([*GOOD, commit(6, "tag", {2}, letgo=4, tags={2})], 11, {"tagged"}),
]


def test_what_the_guards_allow_is_allowed_and_what_they_do_not_is_refused_where_it_happens(tmp_path: Path) -> None:
    found = specification.check_traces(tmp_path, [GOOD, *(events for events, *_ in BAD)])
    assert found == [None, *((at, why) for _, at, why in BAD)]
