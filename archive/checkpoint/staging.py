"""Pure, no I/O: what a rank stages must lie where it belongs, and say of itself what leads to it."""

from __future__ import annotations

from archive.base import CorruptStateError, layout
from archive.checkpoint.stagedindex import StagedIndex
from archive.shard import indexed

_REMEDY = "resume from another checkpoint"


def load_index(data: bytes, where: str) -> StagedIndex:
    """The index of a staged object, if it matches its checksum."""
    body = indexed.parse_index(data, where)
    return StagedIndex.from_json(body, what=f"the index of {where}", error=CorruptStateError, remedy=_REMEDY)


def check_place(index: StagedIndex, key: str, nonce: str | None, where: str) -> None:
    """Refuse an object that lies where another one should: what it says of itself must be what leads to it.

    nonce: as whoever refers to it says; None where nobody did yet.
    """
    own = layout.state_key(index.session, index.name, index.rank)
    if own != key or nonce not in (None, index.nonce):
        what = f"rank {index.rank} of {index.name!r}, session {index.session!r}"
        raise CorruptStateError(
            f"{where} is not the object that was staged there: it says that it is {what}"
            f"{', staged another time' if own == key else ''}; put the right object back, or resume from another "
            "checkpoint"
        )
