"""Pictures of cameras as a packet a step: what comes out of episodes, parts, batches, and buffers that were cut."""

from __future__ import annotations

import io
import itertools
import uuid
from typing import Any

import numpy as np
import pytest
import torch

import archive
import resharding
from archive.adapters import video
from archive.base.errors import FieldError, IntegrityError, MissingPackageError, UsageError
from archive.torch import StepDataset, WindowDataset, loader
from tests.support.archives import fresh

av = pytest.importorskip("av", reason="videos need PyAV")
LENGTHS = (19, 1, 8)


def noise(length: int, seed: int = 0, *, height: int = 24, width: int = 32) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (length, height, width, 3), np.uint8)


def smooth(length: int, *, height: int = 64, width: int = 96) -> Any:
    """A block that moves over a slope, which a codec with loss keeps roughly."""
    out = np.zeros((length, height, width, 3), np.uint8)
    out[:] = np.linspace(20, 120, width, dtype=np.uint8)[:, None]
    for t in range(length):
        out[t, 16:40, 2 * t : 2 * t + 24] = (200, 60, 60)
    return out


SCENES = [noise(n, seed) for seed, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def arc() -> archive.Archive:
    made = fresh()
    with made.writer() as w:
        for scene in SCENES:
            w.add_episode({"cam": {"top": video.encode(scene)}, "reward": np.arange(len(scene)) / 10})
    return made


@pytest.mark.parametrize("every", [1, 3, 8, 100])
@pytest.mark.parametrize("size", [(24, 32), (31, 17), (2, 2)])
def test_pictures_come_back_bit_for_bit(every: int, size: tuple[int, int]) -> None:
    scene = noise(10, height=size[0], width=size[1])
    packets = video.encode(scene, every=every)
    np.testing.assert_array_equal(video.decode(packets), scene)
    np.testing.assert_array_equal(video.decode(packets[:4]), scene[:4])


def test_loss_is_only_there_where_it_is_asked_for() -> None:
    scene = smooth(20)
    exact, small = video.encode(scene), video.encode(scene, crf=30)
    assert sum(map(len, small)) < 0.5 * sum(map(len, exact))
    difference = np.abs(video.decode(small).astype(int) - scene)
    assert 0 < difference.mean() < 8
    odd = scene[:, :33, :55]
    assert video.decode(video.encode(odd, crf=20)).shape == odd.shape


def test_an_archive_has_them_as_any_ragged_field(arc: archive.Archive) -> None:
    for ep, scene in zip(arc.episodes, SCENES, strict=True):
        np.testing.assert_array_equal(video.decode(ep.read()["cam"]["top"]), scene)
    moved = resharding.merge([arc.url], to=f"memory://{uuid.uuid4().hex}", copy=True)
    np.testing.assert_array_equal(video.decode(moved.episodes[0].read()["cam"]["top"]), SCENES[0])


def test_any_part_is_read_from_the_key_frame_before_it(arc: archive.Archive) -> None:
    derive = video.pictures("cam/top")
    for start, stop in itertools.combinations(range(20), 2):
        part = arc.episodes[0].read(["reward"], start=start, stop=stop, derive=derive)
        np.testing.assert_array_equal(part["cam"]["top_pictures"], SCENES[0][start:stop])
    whole = arc.episodes.read(["reward"], derive=video.pictures("cam/top", as_name="seen"))
    for data, scene in zip(whole, SCENES, strict=True):
        np.testing.assert_array_equal(data["seen"], scene)


def test_batches_have_pictures(arc: archive.Archive) -> None:
    derive, all_steps = video.pictures("cam/top", as_name="seen"), np.concatenate(SCENES)
    steps = StepDataset(arc.episodes, fields=["reward"], derive=derive)
    order = torch.randperm(len(steps)).tolist()
    np.testing.assert_array_equal(np.stack([steps[i]["seen"].numpy() for i in order]), all_steps[order])
    windows = WindowDataset(arc.episodes.filter(where="length > 1"), length=4, fields=["reward"], derive=derive)
    (batch,) = loader(windows, batch_size=100)
    expected = [scene[i : i + 4] for scene in (SCENES[0], SCENES[2]) for i in range(len(scene) - 3)]
    np.testing.assert_array_equal(batch["seen"].numpy(), np.stack(expected))


def test_rings_of_pictures() -> None:
    """Two env rows step by step; episodes end, and the oldest steps leave in the middle of a group of packets."""
    arc, cameras = fresh(), [video.Encoder(every=4) for _ in range(2)]
    seen = np.stack([noise(20, seed) for seed in range(2)])
    with arc.writer() as w:
        for t in range(20):
            first = [t % 10 == 0] * 2
            pictures = [c.add(seen[env, t], first=first[env]) for env, c in enumerate(cameras)]
            w.append({"cam": pictures}, env_ids=[0, 1], first=first, last=[t % 10 == 9] * 2)
        for env in range(2):
            w.evict(env_id=env, before=3)
        ck = w.checkpoint(20).result()
    found = [video.decode(ep.read()["cam"]) for ep in sorted(arc.episodes, key=lambda ep: (ep.env_id, ep.id))]
    np.testing.assert_array_equal(np.concatenate(found), seen.reshape(-1, *seen.shape[2:]))
    cut, derive = ck.episodes[0], video.pictures("cam", every=4)
    assert cut.length == 7
    np.testing.assert_array_equal(cut.read([], start=1, derive=derive)["cam_pictures"], seen[0, 4:10])
    with pytest.raises(FieldError, match="every=1"):
        cut.read([], derive=derive)


def test_too_small_a_reach_is_said(arc: archive.Archive) -> None:
    with pytest.raises(FieldError, match=r"'cam/top' has no key frame.*every="):
        arc.episodes[0].read([], start=7, derive=video.pictures("cam/top", every=2))


def test_other_players_open_them() -> None:
    stream = b"".join(packet.tobytes() for packet in video.encode(smooth(9)))
    with av.open(io.BytesIO(stream), format="h264") as file:
        assert len(list(file.decode(video=0))) == 9


def test_what_is_no_video_is_told() -> None:
    packets = video.encode(smooth(9))
    with pytest.raises(FieldError, match="key frame"):
        video.decode(packets[1:])
    with pytest.raises((IntegrityError, FieldError)):
        video.decode([np.zeros(100, np.uint8)])
    with pytest.raises(IntegrityError):
        video.decode([packets[0], np.frombuffer(b"nonsense", np.uint8)])
    assert len(video.decode([])) == len(video.encode([])) == 0


@pytest.mark.parametrize(
    "picture", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros(3, np.uint8)]
)
def test_what_is_no_picture_is_refused(picture: Any) -> None:
    with pytest.raises(FieldError, match=r"uint8 \[height, width, 3\]"):
        video.encode([picture])


def test_one_size_an_encoder() -> None:
    encoder = video.Encoder()
    encoder.add(noise(1)[0])
    with pytest.raises(FieldError, match="each size needs an encoder"):
        encoder.add(noise(1, height=26)[0])


@pytest.mark.parametrize("options", [{"every": 0}, {"crf": 0}, {"crf": 52}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        video.encode([], **options)


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingPackageError, match="video"):
        video.encode(noise(1))
