"""MP4 files, by PyAV (extra "video"): their frames decoded, or as they were encoded; and pictures recorded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from archive.adapters import Array
from archive.adapters.lerobot.layout import VIDEOS, filled, place
from archive.adapters.lerobot.pictures import MODES, NAMES, as_frame, channels_of, stacked
from archive.adapters.video import is_key, pyav
from archive.base import FieldError, IntegrityError, UsageError
from archive.fields import Ragged
from archive.store import Storage

VIDEO_BYTES = 100 * 1000 * 1000  # of a file, after which another begins
LOSSLESS = "lossless"
_KNOWN_AS = {"libx264": "h264", "libx264rgb": "h264", "libx265": "hevc", "libsvtav1": "av1", "libvpx-vp9": "vp9"}


def frames(clip: Any) -> Array:
    """(T, height, width, 3) of a field of on_video="keep"."""
    av = pyav()
    try:
        with av.open(io.BytesIO(np.ascontiguousarray(clip, np.uint8).tobytes())) as file:
            return stacked([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    except (av.FFmpegError, IndexError) as e:
        raise IntegrityError(f"these {np.size(clip)} bytes are no readable video ({e})") from e


def filmed(packets: Ragged, fps: float) -> tuple[Array, dict[str, Any]]:
    """The bytes of an MP4 file of packets of one camera, not encoded anew, and the feature that it is."""
    av, out = pyav(), io.BytesIO()
    if not is_key(packets.split()[0].tobytes()):
        raise FieldError(
            "packets of a camera begin without a key frame, which a ring may have overwritten: leave out the field, or "
            "the episode"
        )
    try:
        with (
            av.open(io.BytesIO(packets.values.tobytes()), format="h264") as raw,
            av.open(out, "w", format="mp4") as made,
        ):
            stream, rate = raw.streams.video[0], Fraction(fps).limit_denominator(10_000)
            copy = made.add_stream_from_template(stream)
            for step, data in enumerate(packets.split()):
                packet = av.Packet(data.tobytes())
                packet.stream, packet.time_base, packet.duration = copy, 1 / rate, 1
                packet.pts = packet.dts = step
                packet.is_keyframe = is_key(data.tobytes())
                made.mux(packet)
            size, form = (stream.height, stream.width), stream.format.name
    except (av.FFmpegError, IndexError) as e:
        raise IntegrityError(f"{len(packets.lengths)} packets are no readable video ({e})") from e
    feature = {"dtype": "video", "shape": [*size, 3], "names": NAMES, "info": _info(*size, 3, "h264", form, rate)}
    return np.frombuffer(out.getvalue(), np.uint8), feature


def _info(height: int, width: int, channels: int, codec: str, pixels: str, fps: Fraction) -> dict[str, Any]:
    """What a dataset says of the videos of a feature."""
    return {
        "video.height": height, "video.width": width, "video.codec": codec, "video.pix_fmt": pixels,
        "video.is_depth_map": False, "video.fps": float(fps), "video.channels": channels, "has_audio": False,
    }  # fmt: skip


class Videos:
    """Frames of the videos of a dataset, forwards; one file of each feature is held at a time."""

    def __init__(self, store: Storage, info: Mapping[str, Any]) -> None:
        self._store = store
        self._info = info
        self._open: dict[str, _File] = {}

    def frames(self, name: str, about: Mapping[str, Any]) -> Array:
        """(T, height, width, channels) of an episode, from what is known of it."""
        return self._file(name, about).frames(*_extent(name, about))

    def clip(self, name: str, about: Mapping[str, Any]) -> Array:
        """The bytes of an MP4 file of this episode's frames alone, as they were encoded."""
        return np.frombuffer(self._file(name, about).clip(*_extent(name, about)), np.uint8)

    def _file(self, name: str, about: Mapping[str, Any]) -> _File:
        if missing := [n for n in self.columns([name]) if about.get(n) is None]:
            raise FieldError(f"episode {about['episode_index']} does not say where its video is: no {missing[0]}")
        place = {n: about[f"videos/{name}/{n}"] for n in ("chunk_index", "file_index")}
        path = filled(self._info.get("video_path"), video_key=name, **place)
        if name not in self._open or self._open[name].path != path:
            channels = channels_of(self._info["features"][name])
            self._open[name] = _File(path, self._store.get(path), float(self._info["fps"]), channels)
        return self._open[name]

    @staticmethod
    def columns(names: Sequence[str]) -> list[str]:
        """What has to be known of an episode to find its frames."""
        return [f"videos/{name}/{n}" for name in names for n in ("chunk_index", "file_index", "from_timestamp")]


def _extent(name: str, about: Mapping[str, Any]) -> tuple[float, int]:
    return float(about[f"videos/{name}/from_timestamp"]), int(about["length"])


class _File:
    """A video that is read forwards, and from a key frame again where an episode lies elsewhere."""

    def __init__(self, path: str, data: bytes, fps: float, channels: int) -> None:
        av = pyav()
        self.path = path
        self._fps = fps
        self._channels = channels
        try:
            self._container = av.open(io.BytesIO(data))
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, IndexError) as e:
            raise IntegrityError(f"{path} is no readable video ({e})") from e
        self._stream.thread_type = "AUTO"
        self._left: Iterator[Any] = self._container.decode(self._stream)
        self._next_s = 0.0

    def frames(self, start_s: float, count: int) -> Array:
        av = pyav()
        try:
            found = self._decoded(start_s, count)
        except av.FFmpegError as e:
            raise IntegrityError(f"{self.path} has frames that cannot be decoded ({e})") from e
        if len(found) != count:
            raise IntegrityError(f"{self.path} has {len(found)} frames from {start_s:.3f} s, the episode {count} steps")
        self._next_s = start_s + count / self._fps
        return stacked(found)

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
        av, out = pyav(), io.BytesIO()
        self._next_s = -1.0
        try:
            self._seek(start_s)
            with av.open(out, "w", format="mp4") as made:
                copy = made.add_stream_from_template(self._stream)
                for packet in self._packets(start_s, count):
                    packet.stream = copy
                    made.mux(packet)
        except av.FFmpegError as e:
            raise IntegrityError(f"{self.path} cannot be read ({e})") from e
        part = _File(f"the part of {self.path} from {start_s:.3f} s", out.getvalue(), self._fps, self._channels)
        part.frames(0.0, count)
        return out.getvalue()

    def _packets(self, start_s: float, count: int) -> Iterator[Any]:
        """What encodes these frames, with times that begin at 0."""
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
        self._fps = Fraction(fps).limit_denominator(10_000)
        self._file = -1
        self._frames = 0
        self._out = io.BytesIO()
        self._container: Any = None
        self._stream: Any = None
        self.info: dict[str, Any] = {}

    def add(self, pictures: Array) -> dict[str, Any]:
        """Append an episode; where its frames are."""
        if self._container is not None and self._out.tell() >= VIDEO_BYTES:
            self.finish()
        if self._container is None:
            self._begin(*pictures.shape[1:])
        first = self._frames
        for picture in pictures:
            frame = as_frame(picture)
            frame.pts, frame.time_base = self._frames, 1 / self._fps
            if self._frames == first:
                frame.pict_type = pyav().video.frame.PictureType.I  # an episode can be read without the one before
            self._container.mux(self._stream.encode(frame))
            self._frames += 1
        return self._where(first, self._frames)

    def keep(self, clip: Array, length: int) -> dict[str, Any]:
        """Write an episode's own file as it is; where its frames are."""
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
        if not exact and (height % 2 or width % 2):
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
