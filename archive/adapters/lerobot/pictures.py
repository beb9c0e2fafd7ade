"""Pictures as LeRobot has them: PNG cells of Parquet files, by PyAV (extra "video"),
and what the statistics take of them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from archive.adapters import Array
from archive.adapters.video import pyav
from archive.base import FieldError, IntegrityError

MODES = {1: "gray", 3: "rgb24", 4: "rgba"}  # pixels of so many channels
MIN_SIDE = 8  # of a picture, in pixels
SAMPLED = 32  # pictures of an episode that its statistics are made of
NAMES = ["height", "width", "channels"]
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def is_picture(array: Any) -> bool:
    """Whether a field is pictures of one size, a step each."""
    sound = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 4
    return sound and array.shape[3] in MODES and min(array.shape[1:3]) >= MIN_SIDE


def check_depth(features: Mapping[str, Any], names: Sequence[str]) -> None:
    """FieldError for videos of depth, whose numbers are no 8 bits."""
    for name in names:
        about = features[name].get("info") or features[name].get("video_info") or {}
        if about.get("video.is_depth_map"):
            raise FieldError(
                f"feature {name!r} is a video of depths, which is not read; on_video='skip' leaves all out"
            )


def channels_of(feature: Mapping[str, Any]) -> int:
    """3, or what the feature's names or shape say."""
    shape, names = list(feature["shape"]), feature.get("names") or []
    place = next((i for i, n in enumerate(names) if str(n).startswith("channel")), None)
    count = shape[place] if place is not None else shape[0] if shape[0] in MODES else shape[-1]
    return count if count in MODES else 3


def stacked(pictures: Sequence[Array]) -> Array:
    """(T, height, width, channels) of single pictures; grey ones have no axis of channels."""
    if not pictures:
        return np.zeros((0, 1, 1, 3), np.uint8)
    found = np.stack(pictures)
    return found[..., None] if found.ndim == 3 else found


def as_frame(picture: Array) -> Any:
    """A frame that PyAV encodes."""
    channels = picture.shape[2]
    return pyav().VideoFrame.from_ndarray(picture if channels > 1 else picture[..., 0], format=MODES[channels])


def pictures_of(column: Any, name: str) -> Array:
    """(T, height, width, channels) of cells that hold pictures as files."""
    return stacked([_picture(cell["bytes"] if isinstance(cell, dict) else cell, name) for cell in column.to_pylist()])


def _picture(data: Any, name: str) -> Array:
    av = pyav()
    if not isinstance(data, bytes):
        raise FieldError(f"feature {name!r} has pictures in other files, which are not read; on_video='skip'")
    try:
        with av.open(io.BytesIO(data)) as file:
            frame = next(file.decode(video=0))
    except (av.FFmpegError, StopIteration) as e:
        raise IntegrityError(f"a picture of feature {name!r} cannot be decoded ({e})") from e
    parts = frame.format.components
    if any(part.bits > 8 for part in parts):
        raise FieldError(f"feature {name!r} has pictures of more than 8 bits, which are not read; on_video='skip'")
    channels = 1 if frame.format.name.startswith("gray") else 4 if any(part.is_alpha for part in parts) else 3
    picture: Array = frame.to_ndarray(format=MODES[channels])
    return picture


def cells_of(pictures: Array) -> Any:
    """A column of PNG files, as datasets have pictures."""
    return pa.array([{"bytes": _png(one), "path": None} for one in pictures], CELL)


def _png(picture: Array) -> bytes:
    context = pyav().CodecContext.create("png", "w")
    context.height, context.width, channels = picture.shape
    context.pix_fmt = MODES[channels]
    context.time_base = Fraction(1, 1)
    return b"".join(bytes(packet) for packet in [*context.encode(as_frame(picture)), *context.encode(None)])


def sampled(pictures: Array) -> Array:
    """Numbers from 0 to 1 of some pixels, channels last, for statistics."""
    some = pictures[np.unique(np.linspace(0, len(pictures) - 1, min(SAMPLED, len(pictures))).astype(np.int64))]
    apart = max(1, min(some.shape[1:3]) // 100)
    return (some[:, ::apart, ::apart].reshape(-1, some.shape[3]) / 255).astype(np.float64)
