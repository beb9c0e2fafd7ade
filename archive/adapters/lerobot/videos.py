"""Pictures as LeRobot has them, by PyAV (extra "video"): PNG cells of Parquet files, and MP4 files, which are decoded,
kept as they were encoded, or recorded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from archive.adapters import Array
from archive.adapters.lerobot.files import VIDEOS, filled, place
from archive.adapters.video import is_key, pyav
from archive.base import FieldError, IntegrityError, UsageError
from archive.fields import Ragged
from archive.store import Storage

MODES = {1: "gray", 3: "rgb24", 4: "rgba"}  # pixels of so many channels
MIN_SIDE = 8  # of a picture, in pixels
SAMPLED = 32  # pictures of an episode that its statistics are made of
NAMES = ["height", "width", "channels"]
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
VIDEO_BYTES = 100 * 1000 * 1000  # of a file, after which another begins
LOSSLESS = "lossless"
_KNOWN_AS = {"libx264": "h264", "libx264rgb": "h264", "libx265": "hevc", "libsvtav1": "av1", "libvpx-vp9": "vp9"}


@contextmanager
def _decoding(trouble: str) -> Iterator[Any]:
    """PyAV; an IntegrityError that begins with `trouble` for its own errors."""
    av = pyav()
    try:
        yield av
    except (av.FFmpegError, IndexError, StopIteration) as e:
        raise IntegrityError(f"{trouble} ({e})") from e


# -- pictures ----------------------------------------------------------------------------------------------------------


def is_picture(array: Any) -> bool:
    """Tells if a field is pictures of one size, a step each."""
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


def pictures_of(column: Any, name: str) -> Array:
    """(T, height, width, channels) of cells that hold pictures as files."""
    return _stacked([_picture(cell["bytes"] if isinstance(cell, dict) else cell, name) for cell in column.to_pylist()])


def _picture(data: Any, name: str) -> Array:
    if not isinstance(data, bytes):
        raise FieldError(f"feature {name!r} has pictures in other files, which are not read; on_video='skip'")
    with _decoding(f"a picture of feature {name!r} cannot be decoded") as av, av.open(io.BytesIO(data)) as file:
        frame = next(file.decode(video=0))
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
    return b"".join(bytes(packet) for packet in [*context.encode(_frame(picture)), *context.encode(None)])


def _frame(picture: Array) -> Any:
    """A frame that PyAV encodes."""
    channels = picture.shape[2]
    return pyav().VideoFrame.from_ndarray(picture if channels > 1 else picture[..., 0], format=MODES[channels])


def _stacked(pictures: Sequence[Array]) -> Array:
    """(T, height, width, channels) of single pictures; grey ones have no axis of channels."""
    if not pictures:
        return np.zeros((0, 1, 1, 3), np.uint8)
    found = np.stack(pictures)
    return found[..., None] if found.ndim == 3 else found


def sampled(pictures: Array) -> Array:
    """Numbers from 0 to 1 of some pixels [n, channels, 1, 1], for statistics."""
    some = pictures[np.unique(np.linspace(0, len(pictures) - 1, min(SAMPLED, len(pictures))).astype(np.int64))]
    apart = max(1, min(some.shape[1:3]) // 100)
    return (some[:, ::apart, ::apart].reshape(-1, some.shape[3], 1, 1) / 255).astype(np.float64)


# -- an episode's own video --------------------------------------------------------------------------------------------


def frames(clip: Any) -> Array:
    """(T, height, width, 3) of a field of on_video="keep"."""
    data = io.BytesIO(np.ascontiguousarray(clip, np.uint8).tobytes())
    with _decoding(f"these {np.size(clip)} bytes are no readable video") as av, av.open(data) as file:
        return _stacked([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def filmed(packets: Ragged, fps: float) -> tuple[Array, dict[str, Any]]:
    """The bytes of an MP4 file of packets of one camera, not encoded anew, and the feature that it is."""
    out, given, rate = io.BytesIO(), [packet.tobytes() for packet in packets.split()], _rate(fps)
    if not is_key(given[0]):
        raise FieldError(
            "packets of a camera begin without a key frame, which a ring may have overwritten: leave out the field, or "
            "the episode"
        )
    with (
        _decoding(f"{len(given)} packets are no readable video") as av,
        av.open(io.BytesIO(b"".join(given)), format="h264") as raw,
        av.open(out, "w", format="mp4") as made,
    ):
        stream = raw.streams.video[0]
        copy = made.add_stream_from_template(stream)
        for step, data in enumerate(given):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.duration = copy, 1 / rate, 1
            packet.pts = packet.dts = step
            packet.is_keyframe = is_key(data)
            made.mux(packet)
        size, form = (stream.height, stream.width), stream.format.name
    feature = {"dtype": "video", "shape": [*size, 3], "names": NAMES, "info": _info(*size, 3, "h264", form, rate)}
    return np.frombuffer(out.getvalue(), np.uint8), feature


def _rate(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(10_000)


def _info(height: int, width: int, channels: int, codec: str, pixels: str, fps: Fraction) -> dict[str, Any]:
    """The facts that a dataset has of the videos of a feature."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": codec,
        "video.pix_fmt": pixels,
        "video.is_depth_map": False,
        "video.fps": float(fps),
        "video.channels": channels,
        "has_audio": False,
    }


# -- videos of many episodes -------------------------------------------------------------------------------------------


class Videos:
    """The videos of a dataset, read forwards; one file of each feature is held at a time."""

    COLUMNS = ("chunk_index", "file_index", "from_timestamp")  # that an episode has of each feature

    def __init__(self, store: Storage, info: Mapping[str, Any]) -> None:
        self._store = store
        self._info = info
        self._open: dict[str, _File] = {}

    def read(self, name: str, about: Mapping[str, Any], *, keep: bool = False) -> Array:
        """An episode's frames (T, height, width, channels); keep: the bytes of an MP4 file of these alone, as they
        were encoded."""
        known: dict[str, Any] = {n: about.get(f"videos/{name}/{n}") for n in self.COLUMNS}
        if missing := [n for n, value in known.items() if value is None]:
            raise FieldError(
                f"episode {about['episode_index']} does not say where its video is: no videos/{name}/{missing[0]}"
            )
        start_s, count = float(known.pop("from_timestamp")), int(about["length"])
        path = filled(self._info.get("video_path"), video_key=name, **known)
        if name not in self._open or self._open[name].path != path:
            channels = _channels_of(self._info["features"][name])
            self._open[name] = _File(path, self._store.get(path), float(self._info["fps"]), channels)
        file = self._open[name]
        return np.frombuffer(file.clip(start_s, count), np.uint8) if keep else file.frames(start_s, count)


def _channels_of(feature: Mapping[str, Any]) -> int:
    """3, or what the feature's names or shape say."""
    shape, names = list(feature["shape"]), feature.get("names") or []
    place = next((i for i, n in enumerate(names) if str(n).startswith("channel")), None)
    count = shape[place] if place is not None else shape[0] if shape[0] in MODES else shape[-1]
    return count if count in MODES else 3


class _File:
    """A video that is read forwards, and from a key frame again where an episode lies elsewhere."""

    def __init__(self, path: str, data: bytes, fps: float, channels: int) -> None:
        self.path = path
        self._fps = fps
        self._channels = channels
        with _decoding(f"{path} is no readable video") as av:
            self._container = av.open(io.BytesIO(data))
            self._stream = self._container.streams.video[0]
        self._stream.thread_type = "AUTO"
        self._left: Iterator[Any] = self._container.decode(self._stream)
        self._next_s = 0.0

    def frames(self, start_s: float, count: int) -> Array:
        with _decoding(f"{self.path} has frames that cannot be decoded"):
            found = self._decoded(start_s, count)
        if len(found) != count:
            raise IntegrityError(f"{self.path} has {len(found)} frames from {start_s:.3f} s, the episode {count} steps")
        self._next_s = start_s + count / self._fps
        return _stacked(found)

    def _decoded(self, start_s: float, count: int) -> list[Array]:
        half = 0.5 / self._fps
        if abs(self._next_s - start_s) > half:
            self._seek(start_s)
            self._left = self._container.decode(self._stream)
        found: list[Array] = []
        for frame in self._left if count else ():
            at_s, wanted_s = float(frame.pts * frame.time_base), start_s + len(found) / self._fps
            if at_s < start_s - half:
                continue
            if abs(at_s - wanted_s) > half:
                raise IntegrityError(
                    f"{self.path} has a frame at {at_s:.3f} s and none at {wanted_s:.3f} s, which {self._fps:g} a "
                    "second want"
                )
            found.append(frame.to_ndarray(format=MODES[self._channels]))
            if len(found) == count:
                break
        return found

    def _seek(self, start_s: float) -> None:
        self._container.seek(int(start_s / self._stream.time_base), stream=self._stream)

    def clip(self, start_s: float, count: int) -> bytes:
        """These frames as a file of their own, not encoded anew, which is then decoded to see that it is whole."""
        out = io.BytesIO()
        self._next_s = -1.0
        with _decoding(f"{self.path} cannot be read") as av:
            self._seek(start_s)
            with av.open(out, "w", format="mp4") as made:
                copy = made.add_stream_from_template(self._stream)
                for packet in self._packets(start_s, count):
                    packet.stream = copy
                    made.mux(packet)
        part = _File(f"the part of {self.path} from {start_s:.3f} s", out.getvalue(), self._fps, self._channels)
        part.frames(0.0, count)
        return out.getvalue()

    def _packets(self, start_s: float, count: int) -> Iterator[Any]:
        """The packets that encode these frames, with times that begin at 0."""
        half, base = 0.5 / self._fps, self._stream.time_base
        stop_s, offset, begun = start_s + count / self._fps, round(start_s / base), False
        for packet in self._container.demux(self._stream):
            if packet.pts is None or float(packet.dts * base) >= stop_s:
                break
            if not start_s - half <= float(packet.pts * base) < stop_s - half:
                continue
            if not begun and not packet.is_keyframe:
                raise FieldError(
                    f"{self.path} has no key frame at {start_s:.3f} s, where an episode begins, so that its frames "
                    "cannot be kept as they are: on_video='decode'"
                )
            begun = True
            packet.pts -= offset
            packet.dts -= offset
            yield packet


class Recorder:
    """Writes the frames of one feature, episode after episode, into files of a bounded size."""

    def __init__(self, store: Storage, name: str, fps: float, codec: str) -> None:
        self._store = store
        self._name = name
        self._codec = codec
        self._fps = _rate(fps)
        self._file = -1
        self._frames = 0
        self._out = io.BytesIO()
        self._container: Any = None
        self._stream: Any = None
        self.info: dict[str, Any] = {}

    def add(self, pictures: Array) -> dict[str, Any]:
        """Append an episode; the place of its frames."""
        if self._container is not None and self._out.tell() >= VIDEO_BYTES:
            self.finish()
        if self._container is None:
            self._begin(*pictures.shape[1:])
        first = self._frames
        for picture in pictures:
            frame = _frame(picture)
            frame.pts, frame.time_base = self._frames, 1 / self._fps
            if self._frames == first:
                frame.pict_type = pyav().video.frame.PictureType.I  # an episode can be read without the one before
            self._container.mux(self._stream.encode(frame))
            self._frames += 1
        return self._where(first, self._frames)

    def keep(self, clip: Array, length: int) -> dict[str, Any]:
        """Write an episode's own file as it is; the place of its frames."""
        self._file += 1
        self._put(np.ascontiguousarray(clip).tobytes())
        return self._where(0, length)

    def _where(self, start: int, stop: int) -> dict[str, Any]:
        times = {"from_timestamp": float(start / self._fps), "to_timestamp": float(stop / self._fps)}
        return {f"videos/{self._name}/{key}": value for key, value in (place(self._file) | times).items()}

    def _put(self, data: bytes) -> None:
        self._store.put(VIDEOS.format(video_key=self._name, **place(self._file)), data)

    def _begin(self, height: int, width: int, channels: int) -> None:
        av, exact = pyav(), self._codec == LOSSLESS
        codec = ("libx264rgb" if channels == 3 else "ffv1") if exact else self._codec
        pixels = {"libx264rgb": "rgb24", "ffv1": "gray" if channels == 1 else "bgra"}.get(codec, "yuv420p")
        options = {"crf": "30", "g": "2"}  # as LeRobot records
        if exact:
            options = {"qp": "0", "preset": "veryfast"} if codec == "libx264rgb" else {}
        elif height % 2 or width % 2:
            raise UsageError(
                f"pictures of {height} x {width} pixels have no video by {codec}, which wants even sides; video=True "
                "is without loss and takes them"
            )
        self._file += 1
        self._frames = 0
        self._out = io.BytesIO()
        self._container = av.open(self._out, "w", format="mp4")
        try:
            self._stream = self._container.add_stream(codec, rate=self._fps, options=options)
        except (av.FFmpegError, ValueError, TypeError) as e:
            raise UsageError(f"video={codec!r} is no codec of PyAV here ({e}); True is one without loss") from e
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, pixels
        self.info = _info(height, width, channels, _KNOWN_AS.get(codec, codec), pixels, self._fps)

    def finish(self) -> None:
        """Write what there is of the file."""
        if self._container is not None:
            self._container.mux(self._stream.encode(None))
            self._container.close()
            self._put(self._out.getvalue())
            self._container = None
