"""LeRobot datasets with videos and images: frames become fields, and fields become videos and images again."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
from archive.adapters import lerobot, video
from archive.adapters.lerobot import videos as videos
from archive.adapters.lerobot.files import EPISODES, VIDEOS
from archive.base.errors import FieldError, IntegrityError, MissingPackageError, UsageError
from archive.store import Storage
from tests.support.archives import fresh
from tests.support.dataset_files import same

av = pytest.importorskip("av", reason="videos need PyAV")
LENGTHS = (5, 1, 7)
EXACT = ["exact", "grey"]


def scene(length: int, number: int, *, height: int = 48, width: int = 64) -> Any:
    """A bright block that moves over a dark ground, which every codec keeps roughly."""
    out = np.full((length, height, width, 3), 30, np.uint8)
    for t in range(length):
        out[t, 8:24, 4 * t : 4 * t + 16] = (200, 60 + 40 * number, 60)
    return out


@pytest.fixture(scope="module")
def robots() -> archive.Archive:
    out, rng = fresh(), np.random.default_rng(0)
    with out.writer() as w:
        for i, n in enumerate(LENGTHS):
            images = {
                "top": scene(n, i), "exact": rng.integers(0, 255, (n, 17, 23, 3), np.uint8),
                "grey": rng.integers(0, 255, (n, 16, 16, 1), np.uint8),
            }  # fmt: skip
            steps = {"observation": {"images": images, "state": np.full((n, 2), i, np.float32)}, "action": np.ones(n)}
            w.add_episode(steps, metadata={"task": "push"}, truncated=True)
    return out.refresh()


def pictures(episode: archive.Episode) -> dict[str, Any]:
    found: dict[str, Any] = episode.read(["observation/images"])["observation"]["images"]
    return found


@pytest.mark.parametrize(("video", "dtype"), [(True, "video"), (False, "image")])
def test_pictures_there_and_back_bit_for_bit(robots: archive.Archive, tmp_path: Path, video: bool, dtype: str) -> None:
    lerobot.export_dataset(robots, tmp_path / "d", fps=30, video=video)
    info = json.loads((tmp_path / "d/meta/info.json").read_text())
    feature = info["features"]["observation.images.top"]
    assert (feature["dtype"], feature["shape"], feature["names"]) == (
        dtype,
        [48, 64, 3],
        ["height", "width", "channels"],
    )
    assert (info["video_path"] == VIDEOS) is video
    stats = json.loads((tmp_path / "d/meta/stats.json").read_text())["observation.images.top"]
    assert np.shape(stats["mean"]) == (3, 1, 1)
    assert 0 <= np.min(stats["min"]) <= np.max(stats["max"]) <= 1
    ck = lerobot.import_dataset(tmp_path / "d", fresh(), on_video="decode")
    assert ck.progress["lerobot"]["left_out"] == []
    for old, new in zip(robots.episodes, ck.episodes, strict=True):
        same(pictures(old), pictures(new))
        assert new.metadata["task"] == "push"
    lerobot.export_dataset(ck, tmp_path / "again")  # as they were, with the fps that the import noted
    again = json.loads((tmp_path / "again/meta/info.json").read_text())
    assert again["features"] == info["features"]
    assert again["fps"] == 30
    lerobot.export_dataset(ck.episodes[:1], tmp_path / "some", video=video)  # with the fps of its timestamps
    assert json.loads((tmp_path / "some/meta/info.json").read_text())["fps"] == 30
    same(
        pictures(lerobot.import_dataset(tmp_path / "some", fresh(), on_video="decode").episodes[0]),
        pictures(ck.episodes[0]),
    )


def test_a_codec_with_loss_is_taken_by_its_name(robots: archive.Archive, tmp_path: Path) -> None:
    top = robots.episodes
    arc = fresh()
    with arc.writer() as w:
        for i, n in enumerate(LENGTHS):
            w.add_episode({"observation": {"images": {"top": scene(n, i)}}, "action": np.ones(n)}, truncated=True)
    lerobot.export_dataset(arc.refresh(), tmp_path / "d", fps=10, video="libx264")
    info = json.loads((tmp_path / "d/meta/info.json").read_text())["features"]["observation.images.top"]["info"]
    assert (info["video.codec"], info["video.pix_fmt"], info["video.fps"]) == ("h264", "yuv420p", 10)
    for i, episode in enumerate(lerobot.import_dataset(tmp_path / "d", fresh(), on_video="decode").episodes):
        apart = np.abs(pictures(episode)["top"].astype(int) - scene(LENGTHS[i], i))
        assert 0 < apart.mean() < 8
    with pytest.raises(UsageError, match="wants even sides"):
        lerobot.export_dataset(top, tmp_path / "odd", fps=10, video="libx264")
    with pytest.raises(UsageError, match="no codec of PyAV"):
        lerobot.export_dataset(arc.refresh(), tmp_path / "none", fps=10, video="mpeg99")


def test_files_of_bounded_size(robots: archive.Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "VIDEO_BYTES", 10)
    lerobot.export_dataset(robots, tmp_path / "d", fps=30, video=True)
    assert (
        len(list((tmp_path / "d/videos/observation.images.top").rglob("*.mp4"))) > 1
    )  # the codec holds some frames back
    ck = lerobot.import_dataset(tmp_path / "d", fresh(), on_video="decode")
    for old, new in zip(robots.episodes, ck.episodes, strict=True):
        same(pictures(old), pictures(new))


def by_hand(root: Path, *, rate: int = 10, drop: int | None = None, gop: int = 12) -> Path:
    """A dataset as another recorder makes it: B-frames, a key frame now and then, two cameras' episodes in one file."""
    arc = fresh()
    with arc.writer() as w:
        for n in (20, 15):
            w.add_episode({"observation": {"images": {"top": scene(n, 0)}}, "action": np.ones(n)}, truncated=True)
    lerobot.export_dataset(arc.refresh(), root, fps=10, video=True)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=rate, options={"bf": "2", "g": str(gop), "crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for t in range(35):
            if t == drop:
                continue
            picture = np.full((48, 64, 3), 7 * t, np.uint8)  # which says its number
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = t, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    (path,) = (root / "videos").rglob("*.mp4")
    path.write_bytes(out.getvalue())
    return root


def test_each_step_has_the_frame_of_its_time(tmp_path: Path) -> None:
    root = by_hand(tmp_path / "d")
    first, second = lerobot.import_dataset(root, fresh(), on_video="decode").episodes
    for episode, numbers in ((first, range(20)), (second, range(20, 35))):
        seen = pictures(episode)["top"].mean((1, 2, 3)) / 7
        assert np.abs(seen - np.array(numbers)).max() < 0.4
    store = Storage.connect(str(root), {})
    info = json.loads((root / "meta/info.json").read_text())
    about = pq.read_table(root / EPISODES.format(chunk_index=0, file_index=0)).to_pylist()
    backwards = videos.Videos(store, info)
    for i in (1, 0, 1):
        same(backwards.read("observation.images.top", about[i]), pictures([first, second][i])["top"])


def test_videos_that_do_not_fit_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with pytest.raises(IntegrityError, match=r"has a frame at 0.600 s and none at 0.500 s"):
        lerobot.import_dataset(by_hand(tmp_path / "gap", drop=5), arc, on_video="decode")
    with pytest.raises(IntegrityError, match=r"14 frames from 2\.000 s, the episode 15 steps"):
        lerobot.import_dataset(by_hand(tmp_path / "short", drop=34), arc, on_video="decode")
    with pytest.raises(IntegrityError, match="which 10 a second want"):
        lerobot.import_dataset(by_hand(tmp_path / "fast", rate=30), arc, on_video="decode")
    (path,) = (tmp_path / "fast/videos").rglob("*.mp4")
    path.write_bytes(b"no video")
    with pytest.raises(IntegrityError, match="is no readable video"):
        lerobot.import_dataset(tmp_path / "fast", arc, on_video="decode")
    info = json.loads((tmp_path / "gap/meta/info.json").read_text())
    info["features"]["observation.images.top"]["info"]["video.is_depth_map"] = True
    (tmp_path / "gap/meta/info.json").write_text(json.dumps(info))
    with pytest.raises(FieldError, match="video of depths"):
        lerobot.import_dataset(tmp_path / "gap", arc, on_video="decode")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingPackageError, match=r"trajectory-archive\[video\]"):
        lerobot.import_dataset(tmp_path / "short", arc, on_video="decode")
    with pytest.raises(UsageError, match="on_video='decode' makes fields"):
        lerobot.import_dataset(tmp_path / "short", arc)
    assert len(arc.refresh().episodes) == 0


def test_pictures_of_another_origin_stay_numbers_unless_asked(robots: archive.Archive, tmp_path: Path) -> None:
    lerobot.export_dataset(robots, tmp_path / "d", fps=30)
    info = json.loads((tmp_path / "d/meta/info.json").read_text())
    assert (info["features"]["observation.images.top"]["dtype"], info["video_path"]) == ("uint8", None)
    with pytest.raises(UsageError, match="Give fps="):
        lerobot.export_dataset(robots, tmp_path / "e")


def test_packets_of_a_camera_are_videos(tmp_path: Path) -> None:
    arc = fresh()
    with arc.writer() as w:
        for i, n in enumerate(LENGTHS):
            w.add_episode({"top": video.encode(scene(n, i), every=3), "action": np.ones(n)}, truncated=True)
    arc.refresh()
    lerobot.export_dataset(arc, tmp_path / "d", fps=10)
    feature = json.loads((tmp_path / "d/meta/info.json").read_text())["features"]["top"]
    assert (feature["dtype"], feature["shape"], feature["info"]["video.codec"]) == ("video", [48, 64, 3], "h264")
    stats = json.loads((tmp_path / "d/meta/stats.json").read_text())["top"]
    assert 0.1 < stats["mean"][0][0][0] < 0.5
    encoded = sum(sum(map(len, episode.read(["top"])["top"])) for episode in arc.episodes)
    files = sum(file.stat().st_size for file in (tmp_path / "d").rglob("*.mp4"))
    assert encoded * 0.8 < files < encoded + 2000 * len(LENGTHS)  # as they were encoded
    for how, codec in (("d", None), ("images", False), ("again", "libx264")):
        if codec is not None:
            lerobot.export_dataset(arc, tmp_path / how, fps=10, video=codec)
        back = lerobot.import_dataset(tmp_path / how, fresh(), on_video="decode")
        for i, (episode, n) in enumerate(zip(back.episodes, LENGTHS, strict=True)):
            found = episode.read(["top"])["top"]
            assert np.abs(found.astype(int) - scene(n, i)).mean() < (5 if codec == "libx264" else 1e-9)
    with arc.writer(session="cut") as w:  # as a ring that has overwritten the key frame leaves it
        w.add_episode({"top": video.encode(scene(4, 0), every=3)[1:], "action": np.ones(3)}, truncated=True)
    with pytest.raises(FieldError, match="begin without a key frame"):
        lerobot.export_dataset(arc.refresh().episodes[3:], tmp_path / "cut", fps=10)


def test_videos_are_kept_as_they_were(tmp_path: Path) -> None:
    arc = fresh()
    with arc.writer() as w:
        for i, n in enumerate(LENGTHS):
            w.add_episode({"observation": {"images": {"top": scene(n, i)}}, "action": np.ones(n)}, truncated=True)
    lerobot.export_dataset(arc.refresh(), tmp_path / "d", fps=10, video="libx264")
    decoded = lerobot.import_dataset(tmp_path / "d", fresh(), on_video="decode")
    kept = lerobot.import_dataset(tmp_path / "d", fresh(), on_video="keep")
    assert kept.episodes.fields["observation/images/top"].endswith("free")
    for old, new in zip(decoded.episodes, kept.episodes, strict=True):
        clip = pictures(new)["top"]
        assert (clip.dtype, clip.ndim) == (np.uint8, 1)
        same(lerobot.frames(clip), pictures(old)["top"])
    lerobot.export_dataset(kept, tmp_path / "again")
    info = [json.loads((tmp_path / name / "meta/info.json").read_text()) for name in ("d", "again")]
    assert info[0]["features"] == info[1]["features"]
    again = lerobot.import_dataset(tmp_path / "again", fresh(), on_video="decode")
    for old, new in zip(decoded.episodes, again.episodes, strict=True):
        same(pictures(old), pictures(new))
    whole = by_hand(tmp_path / "keys", gop=20)  # with B-frames, and a key frame where an episode begins
    decoded, kept = (lerobot.import_dataset(whole, fresh(), on_video=how) for how in ("decode", "keep"))
    for old, new in zip(decoded.episodes, kept.episodes, strict=True):
        same(lerobot.frames(pictures(new)["top"]), pictures(old)["top"])
    with pytest.raises(FieldError, match=r"no key frame at 2\.000 s.*on_video='decode'"):
        lerobot.import_dataset(by_hand(tmp_path / "other"), fresh(), on_video="keep")
    with pytest.raises(IntegrityError, match="are no readable video"):
        lerobot.frames(np.zeros(10, np.uint8))
