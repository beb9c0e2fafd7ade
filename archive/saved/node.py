"""Pure, no I/O: objects of a node's journal. Ticks of the node's ranks come in, as the bytes of their own objects; one
object that holds them goes out, and can be read back tick by tick: damage of one is none of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from archive.base import CorruptStateError, layout
from archive.saved.index import NodeIndex, load
from archive.saved.object import TickObject, check_end
from archive.shard import Placed, file_member, indexed

Named = tuple[int, int]  # the rank and number of a tick


def pack_node(index: NodeIndex, ticks: Mapping[Named, bytes]) -> tuple[list[Any], dict[Named, int]]:
    """The buffers of an object with the bytes of these ticks, and where each of them begins in it."""
    members = [file_member(layout.tick_name(*name), data) for name, data in ticks.items()]
    buffers, placed = indexed.pack(index, members)
    return buffers, {name: one.offset for name, one in zip(ticks, placed, strict=True)}


class NodeObject:
    """An object of a node's journal, from all its bytes; CorruptStateError if it is damaged outside of its ticks."""

    def __init__(self, data: bytes, key: str, where: str) -> None:
        start, self._base = indexed.index_span(data, where)
        self.index = load(NodeIndex, data[start : self._base], key, where)
        check_end(data, where, NodeIndex.REMEDY)
        self.key = key
        self.where = where
        self._data = data
        self.members = dict(self._named())

    def _named(self) -> Iterator[tuple[Named, Placed]]:
        for one in self.index.members:
            if (name := layout.tick_place(one.name)) is None:
                raise CorruptStateError(f"{self.where} has the member {one.name!r:.80}, which is no tick of a rank")
            yield name, replace(one, offset=self._base + one.offset)

    def tick(self, name: Named) -> TickObject:
        """The tick of a rank; CorruptStateError if it is damaged."""
        member, (rank, number) = self.members[name], name
        data = self._data[member.offset : member.offset + member.size]
        own, shard = layout.journal_key(self.index.session, rank, number), f"{self.key}/{member.name}"
        return TickObject(data, own, f"{member.name} in {self.where}", (shard, member.offset))


def ticks_of(data: bytes, key: str, where: str) -> list[TickObject]:
    """The ticks in an object of a journal, of a rank's or of a node's; CorruptStateError if one of them is damaged."""
    place = layout.journal_place(key)
    if place is None or not place[1].startswith("node-"):
        return [TickObject(data, key, where)]
    found = NodeObject(data, key, where)
    return [found.tick(name) for name in found.members]
