"""Adapters: the pictures of LeRobot datasets: frames of MP4 files and PNG cells, by PyAV (extra "video")."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from archive.adapters import Array, system
from archive.base import FieldError, IntegrityError, UsageError
from archive.store import Storage

INSTALL = "'trajectory-archive[video]'"
PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
VIDEO_BYTES = 100 * 1000 * 1000  # of a file, after which another begins
LOSSLESS = "lossless"
MODES = {1: "gray", 3: "rgb24", 4: "rgba"}  # pixels of so many channels
MIN_SIDE = 8  # of a picture, in pixels
SAMPLED = 32  # pictures of an episode that its statistics are made of
NAMES = ["height", "width", "channels"]
KNOWN_AS = {"libx264": "h264", "libx264rgb": "h264", "libx265": "hevc", "libsvtav1": "av1", "libvpx-vp9": "vp9"}
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def is_picture(array: Any) -> bool:
    """Whether a field is pictures of one size, a step each."""
    sound = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 4
    return sound and array.shape[3] in MODES and min(array.shape[1:3]) >= MIN_SIDE


class Videos:
    """Frames of the videos of a dataset, forwards; one file of each feature is held at a time."""

    def __init__(self, store: Storage, info: Mapping[str, Any], names: list[str]) -> None:
        self._store, self._info, self._names = store, info, names
        self._open: dict[str, _File] = {}

    def frames(self, name: str, about: Mapping[str, Any]) -> Array:
        """(T, height, width, channels) of an episode, from what is known of it."""
        return self._file(name, about).frames(*self._extent(name, about))

    def clip(self, name: str, about: Mapping[str, Any]) -> Array:
        """The bytes of an MP4 file of this episode's frames alone, as they were encoded."""
        return np.frombuffer(self._file(name, about).clip(*self._extent(name, about)), np.uint8)

    def _extent(self, name: str, about: Mapping[str, Any]) -> tuple[float, int]:
        return float(about[f"videos/{name}/from_timestamp"]), int(about["length"])

    def _file(self, name: str, about: Mapping[str, Any]) -> _File:
        if missing := [n for n in self.columns([name]) if about.get(n) is None]:
            raise FieldError(f"episode {about['episode_index']} does not say where its video is: no {missing[0]}")
        place = {n: about[f"videos/{name}/{n}"] for n in ("chunk_index", "file_index")}
        path = self._info["video_path"].format(video_key=name, **place)
        if name not in self._open or self._open[name].path != path:
            channels = _channels(self._info["features"][name])
            self._open[name] = _File(path, self._store.get(path), float(self._info["fps"]), channels)
        return self._open[name]

    @staticmethod
    def columns(names: list[str]) -> list[str]:
        """What has to be known of an episode to find its frames."""
        return [f"videos/{name}/{n}" for name in names for n in ("chunk_index", "file_index", "from_timestamp")]


def check_depth(features: Mapping[str, Any], names: list[str]) -> None:
    """FieldError for videos of depth, whose numbers are no 8 bits."""
    for name in names:
        about = features[name].get("info") or features[name].get("video_info") or {}
        if about.get("video.is_depth_map"):
            raise FieldError(
                f"feature {name!r} is a video of depths, which is not read; on_video='skip' leaves all out"
            )


def _channels(feature: Mapping[str, Any]) -> int:
    """3, or what the feature's names or shape say."""
    shape, names = list(feature["shape"]), feature.get("names") or []
    place = next((i for i, n in enumerate(names) if str(n).startswith("channel")), None)
    count = shape[place] if place is not None else shape[0] if shape[0] in MODES else shape[-1]
    return count if count in MODES else 3


class _File:
    """A video that is read forwards, and from a key frame again where an episode lies elsewhere."""

    def __init__(self, path: str, data: bytes, fps: float, channels: int) -> None:
        av = system("av", INSTALL)
        self.path, self._fps, self._channels, self._mode = path, fps, channels, MODES[channels]
        try:
            self._container = av.open(io.BytesIO(data))
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, IndexError) as e:
            raise IntegrityError(f"{path} is no readable video ({e})") from e
        self._stream.thread_type = "AUTO"
        self._left: Iterator[Any] = self._container.decode(self._stream)
        self._next_s = 0.0

    def frames(self, start_s: float, count: int) -> Array:
        av, half = system("av", INSTALL), 0.5 / self._fps
        try:
            if abs(self._next_s - start_s) > half:
                self._container.seek(int(start_s / self._stream.time_base), stream=self._stream)
                self._left = self._container.decode(self._stream)
            found: list[Array] = []
            for frame in self._left if count else ():
                at_s = float(frame.pts * frame.time_base)
                if at_s < start_s - half:
                    continue
                self._check(at_s, start_s + len(found) / self._fps, half)
                found.append(frame.to_ndarray(format=self._mode))
                if len(found) == count:
                    break
        except av.FFmpegError as e:
            raise IntegrityError(f"{self.path} has frames that cannot be decoded ({e})") from e
        if len(found) != count:
            raise IntegrityError(f"{self.path} has {len(found)} frames from {start_s:.3f} s, the episode {count} steps")
        self._next_s = start_s + count / self._fps
        pictures = np.stack(found) if found else np.zeros((0, 1, 1, 3), np.uint8)
        return pictures[..., None] if pictures.ndim == 3 else pictures

    def clip(self, start_s: float, count: int) -> bytes:
        """These frames as a file of their own, not encoded anew, which is then decoded to see that it is whole."""
        av, out = system("av", INSTALL), io.BytesIO()
        half, base = 0.5 / self._fps, self._stream.time_base
        stop_s, offset, taken = start_s + count / self._fps, round(start_s / base), 0
        self._next_s = -1.0
        try:
            self._container.seek(int(start_s / base), stream=self._stream)
            with av.open(out, "w", format="mp4") as made:
                copy = made.add_stream_from_template(self._stream)
                for packet in self._container.demux(self._stream):
                    if packet.pts is None or float(packet.dts * base) >= stop_s:
                        break
                    if not start_s - half <= float(packet.pts * base) < stop_s - half:
                        continue
                    if not taken and not packet.is_keyframe:
                        raise FieldError(
                            f"{self.path} has no key frame at {start_s:.3f} s, where an episode begins, so that its frames "
                            "cannot be kept as they are: on_video='decode'"
                        )
                    packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, copy
                    made.mux(packet)
                    taken += 1
        except av.FFmpegError as e:
            raise IntegrityError(f"{self.path} cannot be read ({e})") from e
        _File(f"the part of {self.path} from {start_s:.3f} s", out.getvalue(), self._fps, self._channels).frames(
            0.0, count
        )
        return out.getvalue()

    def _check(self, at_s: float, wanted_s: float, half: float) -> None:
        if abs(at_s - wanted_s) > half:
            raise IntegrityError(
                f"{self.path} has a frame at {at_s:.3f} s and none at {wanted_s:.3f} s, which {self._fps:g} a second want"
            )


def pictures_of(column: Any, name: str) -> Array:
    """(T, height, width, channels) of cells that hold pictures as files."""
    av = system("av", INSTALL)
    found = []
    for cell in column.to_pylist():
        data = cell["bytes"] if isinstance(cell, dict) else cell
        if not isinstance(data, bytes):
            raise FieldError(f"feature {name!r} has pictures in other files, which are not read; on_video='skip'")
        try:
            with av.open(io.BytesIO(data)) as file:
                frame = next(file.decode(video=0))
        except (av.FFmpegError, StopIteration) as e:
            raise IntegrityError(f"a picture of feature {name!r} cannot be decoded ({e})") from e
        if any(component.bits > 8 for component in frame.format.components):
            raise FieldError(f"feature {name!r} has pictures of more than 8 bits, which are not read; on_video='skip'")
        grey = frame.format.name.startswith("gray")
        alpha = any(component.is_alpha for component in frame.format.components)
        picture = frame.to_ndarray(format=MODES[1 if grey else 4 if alpha else 3])
        found.append(picture[..., None] if picture.ndim == 2 else picture)
    return np.stack(found) if found else np.zeros((0, 1, 1, 3), np.uint8)


def cells_of(pictures: Array) -> Any:
    """A column of PNG files, as datasets have pictures."""
    return pa.array([{"bytes": _png(one), "path": None} for one in pictures], CELL)


def _png(picture: Array) -> bytes:
    av = system("av", INSTALL)
    mode = MODES[picture.shape[2]]
    context = av.CodecContext.create("png", "w")
    context.height, context.width, context.pix_fmt = picture.shape[0], picture.shape[1], mode
    context.time_base = Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(picture if picture.shape[2] > 1 else picture[..., 0], format=mode)
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


class Recorder:
    """Writes the frames of one feature, episode after episode, into files of a bounded size."""

    def __init__(self, store: Storage, name: str, fps: float, codec: str) -> None:
        self._store, self._name, self._codec = store, name, codec
        self.fps = Fraction(fps).limit_denominator(10_000)
        self._file, self._frames, self._out = -1, 0, io.BytesIO()
        self._container: Any = None
        self._stream: Any = None
        self.info: dict[str, Any] = {}

    def add(self, pictures: Array) -> dict[str, Any]:
        """Append an episode; where its frames are."""
        if self._container is not None and self._out.tell() >= VIDEO_BYTES:
            self.finish()
        if self._container is None:
            self._begin(pictures.shape)
        av, first = system("av", INSTALL), self._frames
        mode = MODES[pictures.shape[3]]
        for i, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture if mode != "gray" else picture[..., 0], format=mode)
            frame.pts, frame.time_base = self._frames, 1 / self.fps
            if i == 0:
                frame.pict_type = av.video.frame.PictureType.I  # an episode can be read without the one before
            self._container.mux(self._stream.encode(frame))
            self._frames += 1
        start, stop = float(first / self.fps), float(self._frames / self.fps)
        place: dict[str, Any] = {"chunk_index": self._file // 1000, "file_index": self._file % 1000}
        place |= {"from_timestamp": start, "to_timestamp": stop}
        return {f"videos/{self._name}/{key}": value for key, value in place.items()}

    def keep(self, clip: Array, length: int) -> dict[str, Any]:
        """Write an episode's own file as it is; where its frames are."""
        self._file += 1
        place: dict[str, Any] = {"chunk_index": self._file // 1000, "file_index": self._file % 1000}
        self._store.put(PATH.format(video_key=self._name, **place), np.ascontiguousarray(clip).tobytes())
        place |= {"from_timestamp": 0.0, "to_timestamp": float(length / self.fps)}
        return {f"videos/{self._name}/{key}": value for key, value in place.items()}

    def _begin(self, shape: tuple[int, ...]) -> None:
        av = system("av", INSTALL)
        exact = self._codec == LOSSLESS
        codec = ("libx264rgb" if shape[3] == 3 else "ffv1") if exact else self._codec
        pixels = {"libx264rgb": "rgb24", "ffv1": "gray" if shape[3] == 1 else "bgra"}.get(codec, "yuv420p")
        options = {"qp": "0", "preset": "veryfast"} if exact and codec == "libx264rgb" else {}
        options = options if exact else {"crf": "30", "g": "2"}  # as LeRobot records
        if not exact and (shape[1] % 2 or shape[2] % 2):
            raise UsageError(
                f"pictures of {shape[1]} x {shape[2]} pixels have no video by {codec}, which wants even sides; "
                "video=True is without loss and takes them"
            )
        self._file, self._frames, self._out = self._file + 1, 0, io.BytesIO()
        self._container = av.open(self._out, "w", format="mp4")
        try:
            self._stream = self._container.add_stream(codec, rate=self.fps, options=options)
        except (av.FFmpegError, ValueError, TypeError) as e:
            raise UsageError(f"video={codec!r} is no codec of PyAV here ({e}); True is one without loss") from e
        self._stream.height, self._stream.width, self._stream.pix_fmt = shape[1], shape[2], pixels
        self.info = {
            "video.height": shape[1], "video.width": shape[2], "video.codec": KNOWN_AS.get(codec, codec),
            "video.pix_fmt": pixels, "video.is_depth_map": False, "video.fps": float(self.fps),
            "video.channels": shape[3], "has_audio": False,
        }  # fmt: skip

    def finish(self) -> None:
        """Write what there is of the file."""
        if self._container is None:
            return
        self._container.mux(self._stream.encode(None))
        self._container.close()
        key = PATH.format(video_key=self._name, chunk_index=self._file // 1000, file_index=self._file % 1000)
        self._store.put(key, self._out.getvalue())
        self._container = None


def frames_of(clip: Any) -> Array:
    """(T, height, width, 3) of the bytes of a video."""
    av = system("av", INSTALL)
    try:
        with av.open(io.BytesIO(np.ascontiguousarray(clip, np.uint8).tobytes())) as file:
            found = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    except (av.FFmpegError, IndexError) as e:
        raise IntegrityError(f"these {np.size(clip)} bytes are no readable video ({e})") from e
    return np.stack(found) if found else np.zeros((0, 1, 1, 3), np.uint8)


def sampled(pictures: Array) -> Array:
    """Numbers from 0 to 1 of some pixels, channels last, for statistics."""
    some = pictures[np.unique(np.linspace(0, len(pictures) - 1, min(SAMPLED, len(pictures))).astype(np.int64))]
    apart = max(1, min(some.shape[1:3]) // 100)
    return (some[:, ::apart, ::apart].reshape(-1, some.shape[3]) / 255).astype(np.float64)
