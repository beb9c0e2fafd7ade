"""Pictures of a camera as H.264, a packet a step, without loss unless asked otherwise; needs the extra `video`.
Pictures come in, a ragged field of bytes goes out, and back.

```python
w.add_episode({"camera": video.encode(pictures), "action": actions})  # crf=23 for a small one with loss
part = ep.read(["action"], start=40, stop=50, derive=video.pictures("camera"))
part["camera_pictures"]  # uint8 [10, height, width, 3]
```

A field of packets is cut, evicted, filtered, moved and merged as any other; only its readers know that it is a video.
A key frame can be decoded by itself, any other packet after those since the last key frame. Packets end to end are a
stream that other players open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from archive.adapters import Array, system
from archive.arrays import Ints, ascending
from archive.base import FieldError, IntegrityError, UsageError, show
from archive.fields import Derivation, Path, Ragged, Rows, to_path

__all__ = [
    "Encoder",
    "decode",
    "decoded",
    "encode",
    "is_key",
    "is_packets",
    "pictures",
    "pyav",
]

KEY_EVERY = 8
NAL_START = b"\0\0\1"
_LEAST = 5  # bytes of a packet: a start and what kind of unit it is
NAL_KIND = 31  # the bits of the byte after it that say what it is
NAL_KEY = 5


def pyav() -> Any:
    """PyAV, or what to install."""
    return system("av", "'trajectory-archive[video]'")


def encode(pictures: Iterable[Any], *, every: int = KEY_EVERY, crf: float | None = None) -> list[Array]:
    """A packet for each picture of an episode; arguments are those of `Encoder`."""
    encoder = Encoder(every=every, crf=crf)
    return [encoder.add(picture) for picture in pictures]


class Encoder:
    """Makes packets of one camera's pictures as they come, for `append`; one env row, one encoder.

    every: steps from one key frame to the next, which is how many packets a single step may take to decode; 1 makes
    each step its own.  crf: None is without loss; else H.264's measure of loss, from 1 (hardly any) to 51; 23 is usual.
    """

    def __init__(self, *, every: int = KEY_EVERY, crf: float | None = None) -> None:
        _check_every(every)
        if crf is not None and not 1 <= crf <= 51:
            raise UsageError(f"crf={crf}: give a number from 1 to 51, or None for no loss")
        self._every = every
        self._crf = crf
        self._since_key = 0
        self._count = 0
        self._shape: tuple[int, ...] = ()
        self._context: Any = None

    def add(self, picture: Any, *, first: bool = False) -> Array:
        """The packet of the next picture, uint8 [height, width, 3]; give first=True where an episode begins."""
        av, given = pyav(), np.ascontiguousarray(picture)
        self._check(given)
        if self._context is None:
            self._context = self._opened(*given.shape[:2])
            self._shape = given.shape
        frame = av.VideoFrame.from_ndarray(given, format="rgb24")
        frame.pts = self._count
        if first or self._since_key == self._every:
            self._since_key = 0
        if self._since_key == 0:
            frame.pict_type = av.video.frame.PictureType.I
        (packet,) = self._context.encode(frame)  # tuned to hold none back
        self._count += 1
        self._since_key += 1
        return np.frombuffer(bytes(packet), np.uint8)

    def _check(self, picture: Array) -> None:
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise FieldError(
                f"a picture is {picture.dtype}{list(picture.shape)}, and has to be uint8 [height, width, 3]"
            )
        if self._shape and picture.shape != self._shape:
            raise FieldError(
                f"a picture is {list(picture.shape)} after others of {list(self._shape)}; each size needs an encoder"
            )

    def _opened(self, height: int, width: int) -> Any:
        exact = self._crf is None
        context = pyav().CodecContext.create("libx264rgb" if exact else "libx264", "w")
        context.height = height
        context.width = width
        context.pix_fmt = "rgb24" if exact else "yuv444p" if height % 2 or width % 2 else "yuv420p"
        context.time_base = Fraction(1, 30)  # no time is kept; steps have their own
        context.gop_size = self._every
        loss = {"qp": "0"} if exact else {"crf": str(self._crf)}
        context.options = {"tune": "zerolatency", "preset": "veryfast", "forced-idr": "1", "sc_threshold": "0", **loss}
        return context


def _check_every(every: int) -> None:
    if every < 1:
        raise UsageError(f"every={every}: it must be at least 1")


def decode(packets: Sequence[Any]) -> Array:
    """uint8 [T, height, width, 3] of the packets of steps that follow one another; the first is a key frame.

    FieldError if it is none, IntegrityError for bytes that are no video.
    """
    return np.stack([*decoded(packets)]) if len(packets) else np.zeros((0, 1, 1, 3), np.uint8)


def decoded(packets: Sequence[Any], skip: int = 0) -> Iterator[Array]:
    """The same one by one, without the first `skip`, which others are built on; a caller may stop early."""
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
    """Tells if a ragged field holds packets of a camera: bytes, of which each step's begin as a unit of H.264 does."""
    if not isinstance(field, Ragged) or field.values.dtype != np.uint8 or field.values.ndim != 1:
        return False
    if not len(field.lengths) or field.lengths.min() < _LEAST:
        return False
    starts = np.cumsum(field.lengths) - field.lengths
    begins = field.values[starts[:, None] + np.arange(_LEAST)]
    return bool(np.all(_begin(begins, NAL_START) | _begin(begins, b"\0" + NAL_START)))


def _begin(rows: Array, with_bytes: bytes) -> Any:
    return (rows[:, : len(with_bytes)] == np.frombuffer(with_bytes, np.uint8)).all(1)


def is_key(packet: bytes) -> bool:
    """Tells if one of the units of a packet is a picture that needs no other."""
    start = packet.find(NAL_START)
    while start >= 0 and start + 3 < len(packet):
        if packet[start + 3] & NAL_KIND == NAL_KEY:
            return True
        start = packet.find(NAL_START, start + 3)
    return False


def pictures(name: str, *, every: int = KEY_EVERY, as_name: Any = None) -> Derivation:
    """The pictures of a field of packets, as "NAME_pictures", for derive= of any read.

    They are uint8 [height, width, 3] a step.  every: as of encoding; up to every - 1 packets before the first step that
    is wanted are read, too.
    """
    _check_every(every)
    path = to_path(name)
    own = (*path[:-1], f"{path[-1]}_pictures") if as_name is None else to_path(as_name)
    return Derivation(own, _pictures, (path,), before=every - 1)


def _pictures(values: Mapping[Path, Any], rows: Rows) -> Any:
    ((path, packets),) = values.items()
    keys = _keys(path, packets, rows)
    runs = [(np.flatnonzero(keys == key), int(key)) for key in ascending(keys)]
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
