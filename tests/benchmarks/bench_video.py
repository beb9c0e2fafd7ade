"""Pictures of a camera stored as they are, and as video: bytes, and seconds of the processor to write and read them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archive
from archive.adapters import video

STEPS, HEIGHT, WIDTH = 60, 240, 320


def scene(sensor_noise: float) -> Any:
    """A block that moves over a smooth ground, as rendered or as a camera sees it."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    ground = np.stack([(np.sin(x / 9) + 1) * 90, (np.cos(y / 7) + 1) * 90, (x + y) / (HEIGHT + WIDTH) * 200], -1)
    out, rng = np.repeat(ground[None], STEPS, 0), np.random.default_rng(0)
    for t in range(STEPS):
        out[t, 20:44, 2 * t : 2 * t + 24] = (200, 60, 60)
    return np.clip(out + rng.normal(0, sensor_noise, out.shape), 0, 255).astype(np.uint8)


WAYS: dict[str, Callable[[Any], Any]] = {
    "as they are, zstd:1": lambda pictures: pictures,
    "lossless, every=1": lambda pictures: video.encode(pictures, every=1),
    "lossless, every=8": video.encode,
    "crf=23, every=1": lambda pictures: video.encode(pictures, every=1, crf=23),
    "crf=23, every=8": lambda pictures: video.encode(pictures, crf=23),
}


def measured(pictures: Any, way: Callable[[Any], Any]) -> tuple[float, float, float, float]:
    """How many times smaller, pictures a second written and read (of processor time), and the mean error."""
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    started = time.process_time()
    with arc.writer() as w:
        w.add_episode({"camera": way(pictures)})
    written = time.process_time()
    back = arc.episodes[0].read()["camera"]
    back = back if isinstance(back, np.ndarray) else video.decode(back)
    read = time.process_time()
    stored = sum(len(arc.storage.get(key)) for key in arc.shards)
    error = float(np.abs(back.astype(int) - pictures).mean())
    return pictures.nbytes / stored, STEPS / (written - started), STEPS / (read - written), error


@pytest.mark.bench
@pytest.mark.parametrize("sensor_noise", [0, 2])
def test_pictures(sensor_noise: int) -> None:
    pictures = scene(sensor_noise)
    measured(pictures, video.encode)  # imports
    for name, way in WAYS.items():
        smaller, written, read, error = measured(pictures, way)
        rates = f"{written:6.0f} and {read:6.0f} a second"
        print(f"noise {sensor_noise} {name:22} {smaller:6.1f} times smaller, {rates}, error {error:.2f}")
