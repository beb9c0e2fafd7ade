"""A tail ends before what is torn, damaged, or not what should lie there; what comes before it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import archive
from archive import tables
from archive.base import CorruptStateError, layout
from archive.saved import TickColumn, TickIndex, TickObject, pack
from archive.shard import Member, inflate
from archive.testing import faults
from tests.support.archives import fresh
from tests.support.journals import Job, check, copy_of, die, expected, job
from tests.support.ticks import NEVER_S


def history(seed: int) -> tuple[archive.Archive, Job, int]:
    """An archive, the rank that wrote it, and the first number of its tail."""
    arc = fresh()
    one = job(arc, seed)
    one.act(6)
    one.checkpoint(5).result(30)
    one.tick()
    one.act(8)
    one.tick()
    die(one.w)
    return arc, one, arc.refresh().head.runs["main"].journal[0]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    out[int(rng.integers(0, len(out)))] ^= int(rng.integers(1, 256))
    return bytes(out)


DAMAGES: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "flipped": flipped,
    "torn": lambda data, rng: data[: int(rng.integers(0, len(data)))],
    "empty": lambda data, rng: b"",
    "longer": lambda data, rng: data + b"\0" * 7,
    "zeros": lambda data, rng: bytes(len(data)),
    "noise": lambda data, rng: rng.bytes(len(data)),
    "a huge index": lambda data, rng: data[:22] + b"\xff\xff\xff\x0f" + data[26:],
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("seed", range(2))
def test_damage_at_every_object(seed: int, kind: str) -> None:
    arc, one, first = history(seed)
    rng = np.random.default_rng(seed)
    for number in range(first, one.w._pipeline.number):
        left = copy_of(arc)
        key = layout.journal_key(one.w.session, 0, number)
        left.storage.put(key, DAMAGES[kind](left.storage.get(key), rng))
        (tail,) = left.tails().ranks
        if kind == "flipped" and tail.ended == "missing":  # in the ZIP's own directory, which has nothing of its own
            assert tail.next == one.w._pipeline.number
            check(left.recover(), 0, one.held, one.progress)
            continue
        assert tail.ended == "damaged"
        assert tail.next <= number
        check(left.recover(), 0, *expected(one, number))


@pytest.mark.parametrize("what", ["truncate", "corrupt"])
def test_an_answer_that_comes_wrong_once_ends_no_tail(what: str) -> None:
    arc, one, _ = history(0)
    with faults.at(arc, op="get", key="journal/", what=what) as fault:
        found = arc.recover()
    assert fault.hits
    check(found, 0, one.held, one.progress)


def test_answers_that_are_wrong_otherwise_each_time_end_no_tail() -> None:
    arc, one, _ = history(0)
    rng, real = np.random.default_rng(0), arc.storage.get_head
    arc.storage.get_head = lambda key, size: flipped(real(key, size), rng)  # type: ignore[method-assign]
    with pytest.raises(CorruptStateError, match="it differed at each read"):
        arc.recover()
    del arc.storage.get_head
    check(arc.recover(), 0, one.held, one.progress)


Changed = tuple[TickIndex, dict[str, Any], list[Member]]


def rewritten(data: bytes, key: str, change: Callable[[TickIndex, dict[str, Any]], TickIndex]) -> bytes:
    """The object with another index, and maybe other rows; each checksum is right again."""
    found = TickObject(data, key, key)
    rows = {kind: found.table(kind) for kind in ("segments", "ledger", "live") if found.index.rows.get(kind)}
    members = [
        Member(
            one.name,
            inflate(raw) if one.name.endswith("zarr.json") else raw,
            one.array,
            one.chunk,
            one.rows,
            one.crc32c,
        )
        for one in found.index.members
        if not one.name.endswith(".parquet")
        for raw in found.files([one.name])
    ]
    index = change(found.index, rows)
    return b"".join(bytes(part) for part in pack(replace(index, members=()), rows, members)[0])


def with_rows(**columns: Any) -> Callable[[TickIndex, dict[str, Any]], TickIndex]:
    """Columns of the segments table that say something else in every row."""

    def change(index: TickIndex, rows: dict[str, Any]) -> TickIndex:
        for name, value in columns.items():
            rows["segments"] = tables.set_column(rows["segments"], name, value)
        return index

    return change


HOSTILE: dict[str, Callable[[TickIndex, dict[str, Any]], TickIndex]] = {
    "another run": lambda index, rows: replace(index, run="other"),
    "another session": lambda index, rows: replace(index, session="other"),
    "another rank": lambda index, rows: replace(index, rank=7),
    "another number": lambda index, rows: replace(index, number=index.number + 1),
    "a session that leads outside": lambda index, rows: replace(index, session="../../../etc"),
    "rows that came before": lambda index, rows: replace(index, sequence=0),
    "rows of before": with_rows(sequence=0),
    "rows of another session": with_rows(session="other"),
    "rows of another rank": with_rows(rank=3),
    "rows without a position": with_rows(position=None),
    "rows before all": with_rows(position=-5),
    "rows of no length": with_rows(length=-1),
    "a shard elsewhere": with_rows(shard="shards/00000000-x-00000.zip"),
    "a shard outside": with_rows(shard="../../secret.zip"),
    "more rows than there are": lambda index, rows: replace(index, rows={**index.rows, "segments": 99}),
    "rows that are not there": lambda index, rows: replace(index, rows={**index.rows, "ledger": 2}),
    "steps backwards": lambda index, rows: replace(index, gone={"replay": (("s", 0, 0, 9, 3),)}),
    "a column of nothing": lambda index, rows: replace(
        index, columns={"replay": {"p": TickColumn("%columns/replay/none", "<f8", (("s", 0, 0, 0, 3),))}}
    ),
    "an attribute of nothing": lambda index, rows: replace(index, attributes={"replay": {"q": "[1]"}}),
    "an attribute that is no JSON": lambda index, rows: replace(index, attributes={"replay": {"q": "{"}}),
    "a deep attribute": lambda index, rows: replace(index, attributes={"replay": {"q": "[" * 100_000}}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_objects_that_somebody_made_up_end_the_tail(kind: str) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for name in ("a", "b", "c"):
        w.add_episode({"obs": np.arange(3)}, episode_id=name)
        w.sync()
    die(w)
    key = layout.journal_key(w.session, 0, 1)
    arc.storage.put(key, rewritten(arc.storage.get(key), key, HOSTILE[kind]))
    (tail,) = arc.refresh().tails().ranks
    assert (tail.ended, tail.next) == ("damaged", 1)
    assert arc.recover().episodes.table["episode_id"].to_pylist() == ["a"]


def test_what_is_rewritten_as_it_was_is_taken() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode({"obs": np.arange(3)}, episode_id="a")
    w.sync()
    die(w)
    key = layout.journal_key(w.session, 0, 0)
    arc.storage.put(key, rewritten(arc.storage.get(key), key, lambda index, rows: index))
    assert arc.refresh().recover().episodes[0].read()["obs"].tolist() == [0, 1, 2]


def test_another_ranks_object_is_not_taken() -> None:
    arc = fresh()
    ranks = [archive.open(arc.url).writer(r, 2, session="s", journal_s=NEVER_S) for r in range(2)]
    for w in ranks:
        w.add_episode({"obs": np.arange(3)}, episode_id=f"of-{w.rank}")
        w.sync()
    die(*ranks)
    arc.storage.put(layout.journal_key("s", 1, 0), arc.storage.get(layout.journal_key("s", 0, 0)))
    tails = arc.refresh().tails()
    assert [one.rank for one in tails.damaged] == [1]
    assert arc.recover().episodes.table["episode_id"].to_pylist() == ["of-0"]


def test_a_gap_ends_the_tail() -> None:
    arc, one, first = history(3)
    arc.storage.delete([layout.journal_key(one.w.session, 0, first)])
    base = arc.checkpoints.latest
    assert not arc.refresh().tails()
    assert arc.recover().number == base.number


def test_what_acts_on_a_terminal_is_shown_as_text() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S, run="r\x1b[31m", session="s\x1b]0;x\x07")
    w.add_episode({"obs": np.arange(3)})
    w.sync()
    die(w)
    arc.storage.put(layout.journal_key(w.session, 0, 1), b"\x1b[2J")
    tails = arc.refresh().tails("r\x1b[31m")
    assert "\x1b" not in str(tails)
    assert "\x07" not in str(tails)
    assert json.loads(json.dumps(tails.to_json()))["ranks"][0]["ended"] == "damaged"
