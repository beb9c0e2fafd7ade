"""Packets to pictures: all of an episode, or those of some steps, from the key frame before them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters import Array
from archive.adapters.video.encoding import KEY_EVERY, pyav
from archive.arrays import Ints
from archive.base import FieldError, IntegrityError, UsageError, show
from archive.fields import Derivation, Path, Ragged, Rows, to_path

NAL_START = b"\0\0\1"
_LEAST = 5  # bytes of a packet: a start and what kind of unit it is
NAL_KIND = 31  # the bits of the byte after it that say what it is
NAL_KEY = 5


def decode(packets: Sequence[Any]) -> Array:
    """uint8 [T, height, width, 3] of the packets of steps that follow one another; the first is a key frame.

    FieldError if it is none, IntegrityError for bytes that are no video.
    """
    return np.stack([*decoded(packets)]) if len(packets) else np.zeros((0, 1, 1, 3), np.uint8)


def decoded(packets: Sequence[Any], skip: int = 0) -> Iterator[Array]:
    """The same one by one, for whoever wants no more than some; without the first `skip`, which others are built on."""
    given = [np.ascontiguousarray(packet, np.uint8).tobytes() for packet in packets]
    if not is_key(given[0]):
        raise FieldError("the first packet is no key frame; begin at one, or read with derive=video.pictures(...)")
    av = pyav()
    context, count = av.CodecContext.create("h264", "r"), 0
    try:
        for packet in (*map(av.Packet, given), None):
            for frame in context.decode(packet):
                count += 1
                if count > skip:
                    yield frame.to_ndarray(format="rgb24")
    except av.FFmpegError as e:
        raise IntegrityError(f"{len(given)} packets are no readable video ({e})") from e
    if count != len(given):
        raise IntegrityError(f"{len(given)} packets have {count} pictures: they do not belong together")


def is_packets(field: Any) -> bool:
    """Whether a ragged field holds packets of a camera: bytes, of which each step's begin as a unit of H.264 does."""
    if not isinstance(field, Ragged) or field.values.dtype != np.uint8 or field.values.ndim != 1:
        return False
    if not len(field.lengths) or field.lengths.min() < _LEAST:
        return False
    starts = np.cumsum(field.lengths) - field.lengths
    begins = field.values[starts[:, None] + np.arange(_LEAST)]
    return bool(np.all(_begin(begins, NAL_START) | _begin(begins, b"\0" + NAL_START)))


def _begin(rows: Array, with_bytes: bytes) -> Any:
    return (rows[:, : len(with_bytes)] == np.frombuffer(with_bytes, np.uint8)).all(1)


def pictures(name: str, *, every: int = KEY_EVERY, as_name: Any = None) -> Derivation:
    """The pictures of a field of packets, as "NAME_pictures", for derive= of whatever reads.

    They are uint8 [height, width, 3] a step.  every: as of encoding; up to every - 1 packets before the first step that
    is wanted are read, too.
    """
    if every < 1:
        raise UsageError(f"every={every}: it must be at least 1")
    path = to_path(name)
    own = (*path[:-1], f"{path[-1]}_pictures") if as_name is None else to_path(as_name)
    return Derivation(own, _pictures, (path,), before=every - 1)


def _pictures(values: Mapping[Path, Any], rows: Rows) -> Any:
    ((path, packets),) = values.items()
    keys = _keys(path, packets, rows)
    runs = [(np.flatnonzero(keys == key), int(key)) for key in np.unique(keys)]
    found = [decode(packets[key : int(rows.at[places].max()) + 1])[rows.at[places] - key] for places, key in runs]
    if not found:
        return decode([])
    out = np.empty((len(keys), *found[0].shape[1:]), np.uint8)
    for (places, _), part in zip(runs, found, strict=True):
        out[places] = part
    return out


def _keys(path: Path, packets: Sequence[Any], rows: Rows) -> Ints:
    """The last key frame up to each row that is wanted, among the rows that follow one another."""
    begins = [is_key(np.ascontiguousarray(packet, np.uint8).tobytes()) for packet in packets]
    newest: Ints = np.maximum.accumulate(np.where(begins, np.arange(len(packets)), -1))[rows.at]
    if np.any(newest < rows.begin):
        raise FieldError(
            f"field {show(path)!r} has no key frame at or before a step that is wanted: give every= as "
            "it was encoded with; if those steps left the buffer, read from a later one, or encode with every=1"
        )
    return newest


def is_key(packet: bytes) -> bool:
    """Whether one of the units of a packet is a picture that needs no other."""
    start = packet.find(NAL_START)
    while start >= 0 and start + 3 < len(packet):
        if packet[start + 3] & NAL_KIND == NAL_KEY:
            return True
        start = packet.find(NAL_START, start + 3)
    return False
