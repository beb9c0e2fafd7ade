"""Packets to pictures: all of an episode, or those of some steps, from the key frame before them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.adapters import Array
from archive.adapters.video.encoding import KEY_EVERY, pyav
from archive.arrays import Ints
from archive.base import FieldError, IntegrityError, UsageError, show
from archive.fields import Derivation, Path, Rows, to_path

NAL_START = b"\0\0\1"
NAL_KIND = 31  # the bits of the byte after it that say what it is
NAL_KEY = 5


def decode(packets: Sequence[Any]) -> Array:
    """uint8 [T, height, width, 3] of the packets of steps that follow one another; the first is a key frame.

    FieldError if it is none, IntegrityError for bytes that are no video.
    """
    given = [np.ascontiguousarray(packet, np.uint8).tobytes() for packet in packets]
    if not given:
        return np.zeros((0, 1, 1, 3), np.uint8)
    if not _is_key(given[0]):
        raise FieldError("the first packet is no key frame; begin at one, or read with derive=video.pictures(...)")
    av = pyav()
    context = av.CodecContext.create("h264", "r")
    try:
        frames = [frame for data in given for frame in context.decode(av.Packet(data))] + context.decode(None)
    except av.FFmpegError as e:
        raise IntegrityError(f"{len(given)} packets are no readable video ({e})") from e
    if len(frames) != len(given):
        raise IntegrityError(f"{len(given)} packets have {len(frames)} pictures: they do not belong together")
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def pictures(name: str, *, every: int = KEY_EVERY, as_name: Any = None) -> Derivation:
    """The pictures of a field of packets, as "NAME_pictures", for derive= of whatever reads.

    They are uint8 [height, width, 3] a step.  every: as of encoding; up to every - 1 packets before the first step that
    is wanted are read, too.
    """
    if every < 1:
        raise UsageError(f"every={every}: it must be at least 1")
    path = to_path(name)
    own = (*path[:-1], f"{path[-1]}_pictures") if as_name is None else to_path(as_name)
    return _Pictures(own, (path,), before=every - 1)


@dataclass(frozen=True)
class _Pictures(Derivation):
    def compute(self, values: Mapping[Path, Any], rows: Rows) -> Any:
        (packets,) = values.values()
        keys = self._keys(packets, rows)
        runs = [(np.flatnonzero(keys == key), int(key)) for key in np.unique(keys)]
        found = [decode(packets[key : int(rows.at[places].max()) + 1])[rows.at[places] - key] for places, key in runs]
        if not found:
            return decode([])
        out = np.empty((len(keys), *found[0].shape[1:]), np.uint8)
        for (places, _), part in zip(runs, found, strict=True):
            out[places] = part
        return out

    def _keys(self, packets: Sequence[Any], rows: Rows) -> Ints:
        """Of each row that is wanted the last key frame up to it, among the rows that follow one another."""
        is_key = [_is_key(np.ascontiguousarray(packet, np.uint8).tobytes()) for packet in packets]
        newest: Ints = np.maximum.accumulate(np.where(is_key, np.arange(len(packets)), -1))[rows.at]
        if np.any(newest < rows.begin):
            raise FieldError(
                f"field {show(self.fields[0])!r} has no key frame at or before a step that is wanted: give every= as "
                "it was encoded with; if those steps left the buffer, read from a later one, or encode with every=1"
            )
        return newest


def _is_key(packet: bytes) -> bool:
    """Whether one of the units of a packet is a picture that needs no other."""
    start = packet.find(NAL_START)
    while start >= 0 and start + 3 < len(packet):
        if packet[start + 3] & NAL_KIND == NAL_KEY:
            return True
        start = packet.find(NAL_START, start + 3)
    return False
