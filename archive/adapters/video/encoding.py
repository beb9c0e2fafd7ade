"""Pictures to packets. A key frame can be decoded by itself, any other packet after those since the last key frame."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from archive.adapters import Array, system
from archive.base import FieldError, UsageError

KEY_EVERY = 8
NO_LOSS = {"qp": "0"}


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
        if every < 1:
            raise UsageError(f"every={every}: it must be at least 1")
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
        loss = NO_LOSS if exact else {"crf": str(self._crf)}
        context.options = {"tune": "zerolatency", "preset": "veryfast", "forced-idr": "1", "sc_threshold": "0", **loss}
        return context
