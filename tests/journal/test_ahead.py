"""Objects of a journal are read a few ahead: more of them the longer it is, in bounded memory over all who read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from archive.base import MissingObjectError
from archive.journal import tails
from tests.support.processes import until


class Journal:
    """So many objects of so many bytes, and what was asked of them; it stands for the store, and for the room."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self.asked: list[int] = []
        self.rooms: list[int] = []

    def get_head(self, key: str, most: int) -> bytes:
        self.asked.append(int(key))
        if int(key) >= self.count:
            raise MissingObjectError(key)
        return bytes(self.nbytes)

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        self.rooms.append(nbytes)
        yield

    def ahead(self) -> list[int]:
        """Read to its end; after each object, how many of those that were asked for are not taken yet."""
        out = []
        with ThreadPoolExecutor(4) as pool:
            source: Any = tails._Lookahead(self, pool)  # type: ignore[arg-type]
            source._room = self
            for number, key, data in source.objects(str, 0):
                assert key == str(number)
                out.append(len(self.asked) - number - 1)
                if data is None:
                    return out
        raise AssertionError


def test_one_more_is_asked_for_after_each_hundred_and_sixteen_at_most() -> None:
    journal = Journal(2_500, 1)
    ahead = journal.ahead()
    assert len(ahead) == 2_501
    assert all(one <= number // 128 for number, one in enumerate(ahead))
    assert max(ahead) == max(ahead[2_100:]) == tails.MAX_AHEAD - 1
    assert sorted(journal.asked) == list(range(len(journal.asked)))


def test_of_large_ones_fewer_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_ROOM_BYTES", 8 * 35)
    monkeypatch.setattr(tails, "_LEAST_BYTES", 1)
    journal = Journal(2_500, 5)
    assert max(journal.ahead()) + 1 == 7, "one who reads has an eighth of the room"
    assert max(journal.rooms) == 35
    huge = Journal(300, 1_000)
    assert max(huge.ahead()) == 0
    assert set(huge.rooms[1:]) == {1_000}


def test_there_is_room_for_what_fits_and_for_one_that_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_ROOM_BYTES", 100)
    room, there, leave = tails._Room(), list[int](), threading.Event()

    def stay(nbytes: int) -> None:
        with room.of(nbytes):
            there.append(nbytes)
            assert leave.wait(60)

    threads = [threading.Thread(target=stay, args=(nbytes,), daemon=True) for nbytes in (60, 40)]
    for one in threads:
        one.start()
    until(lambda: len(there) == 2)
    threads.append(threading.Thread(target=stay, args=(1_000,), daemon=True))
    threads[-1].start()
    threads[-1].join(0.05)
    assert sorted(there) == [40, 60], "it waits until nothing is in flight"
    leave.set()
    for one in threads:
        one.join(60)
    assert there[2:] == [1_000]
