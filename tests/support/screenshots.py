"""Tool: the pictures of the documents, by `make screenshots`: the viewer, looking at archives that this makes.

They are the same each time, up to what a browser draws text with and names that are drawn at random, and go to
archive/docs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import archive
import resharding
from archive.cli import demo
from archive.view import Settings, serve
from tests.support.browser import Page, chromium, visit
from tests.support.places import ROOT

FOLDER = ROOT / "archive" / "docs"
SIDE = 200
STEPS = 80
Picture = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Shot:
    """A picture of the viewer: its file, how the archive is made, where to look, and what is there once it is drawn."""

    name: str
    make: Callable[[str], archive.Archive]
    at: str
    theme: str
    there: str
    settings: dict[str, Any] = field(default_factory=dict)


# a robot arm, seen by two cameras, that pushes a block to where it belongs


def robots(url: str) -> archive.Archive:
    """Films of 24 episodes, better with each update of the weights."""
    arc = archive.create(url)
    with arc.writer(run="push-block") as w:
        for n in range(24):
            w.add_episode(
                pushing(n), episode_id=f"push-{n:03}", update_count=100 * (n // 4), env_id=n % 4,
                model_weights_uuid=f"policy-{n // 8}", terminated=True,
                metadata={"task": "push the block to the ring", "seed": n},
            )  # fmt: skip
    arc.refresh().label({f"push-{n:03}": {"success": n % 3 > 0, "quality": "good"} for n in range(15)}, by="anna")
    return arc


def pushing(n: int) -> dict[str, Any]:
    """The steps of an episode: pictures, where things are, actions and rewards."""
    rng = np.random.default_rng(n)
    at = np.linspace(0, 1, STEPS)
    block, goal = rng.uniform(0.25, 0.4, 2), rng.uniform(0.6, 0.8, 2)
    pushed = np.clip((at - 0.3) / (0.75 - n / 100), 0, 1)[:, None] ** 1.5
    blocks = block + pushed * (goal - block) * (0.75 + n / 100)
    hands = np.where(at[:, None] < 0.3, 0.1 + at[:, None] / 0.3 * (block - 0.16), blocks - 0.06)
    hands = hands + np.cumsum(rng.normal(0, 0.002, (STEPS, 2)), 0)
    distance = np.hypot(*(goal - blocks).T)
    front = np.stack([from_front(hand, one, goal) for hand, one in zip(hands, blocks, strict=True)])
    wrist = np.stack([from_wrist(hand, one, goal) for hand, one in zip(hands, blocks, strict=True)])
    return {
        "obs": {"front": front, "wrist": wrist, "hand": np.float32(hands)},
        "action": np.float32(np.diff(hands, axis=0, append=hands[-1:]) * 20),
        "reward": np.float32(0.3 - distance),
        "value": np.float32(3 * (0.4 - distance) + np.cumsum(rng.normal(0, 0.02, STEPS))),
    }


def from_front(hand: Any, block: Any, goal: Any) -> Picture:
    picture = _table(SIDE)
    _ring(picture, goal, 0.09)
    _square(picture, block, 0.05, (214, 84, 60))
    elbow = np.array([0.5, 0.02]) + (hand - [0.5, 0.02]) * 0.5 + [0.16, 0.0]
    for start, stop in ((np.array([0.5, 0.02]), elbow), (elbow, hand)):
        _limb(picture, start, stop, 0.028, (92, 104, 122))
    for joint in (elbow, hand):
        _disc(picture, joint, 0.035, (236, 184, 66))
    return picture


def from_wrist(hand: Any, block: Any, goal: Any) -> Picture:
    """What is below the hand, three times as large."""
    picture = _table(SIDE)
    near: Callable[[Any], Any] = lambda place: 0.5 + 3 * (np.asarray(place) - hand)  # noqa: E731
    _ring(picture, near(goal), 0.27)
    _square(picture, near(block), 0.15, (214, 84, 60))
    for side in (-0.12, 0.12):
        _limb(picture, np.array([0.5 + side, 0.5]), np.array([0.5 + side, 0.38]), 0.03, (92, 104, 122))
    return picture


def _table(side: int) -> Picture:
    picture = np.full((side, side, 3), (222, 216, 204), np.uint8)
    picture[:: side // 5] = picture[:, :: side // 5] = (206, 199, 185)
    return picture


def _paint(picture: Picture, inside: Callable[[Any, Any], Any], colour: tuple[int, int, int]) -> None:
    rows, columns = (np.mgrid[: len(picture), : len(picture)] + 0.5) / len(picture)
    picture[inside(columns, 1 - rows)] = colour


def _disc(picture: Picture, at: Any, radius: float, colour: tuple[int, int, int]) -> None:
    _paint(picture, lambda x, y: np.hypot(x - at[0], y - at[1]) < radius, colour)


def _ring(picture: Picture, at: Any, radius: float) -> None:
    _paint(picture, lambda x, y: abs(np.hypot(x - at[0], y - at[1]) - radius) < radius / 6, (56, 140, 108))


def _square(picture: Picture, at: Any, half: float, colour: tuple[int, int, int]) -> None:
    _paint(picture, lambda x, y: np.maximum(abs(x - at[0]), abs(y - at[1])) < half, colour)


def _limb(picture: Picture, start: Any, stop: Any, half: float, colour: tuple[int, int, int]) -> None:
    along = stop - start
    length = float(along @ along) or 1.0

    def inside(x: Any, y: Any) -> Any:
        part = np.clip(((x - start[0]) * along[0] + (y - start[1]) * along[1]) / length, 0, 1)
        return np.hypot(x - start[0] - part * along[0], y - start[1] - part * along[1]) < half

    _paint(picture, inside, colour)


# a language model that calls a tool

ASKED = (
    "A train leaves at 09:40 and takes 2 h 35 min. When does it arrive?",
    "Thank you. And the one that leaves at 18:05?",
)
TURNS = (
    "I need the sum of 09:40 and 2 h 35 min . <tool> add_time </tool> It arrives at 12:15 . <|end|>",
    "The way back takes as long , so I add 155 minutes again . <tool> add_time </tool> At 20:40 . <|end|>",
)
CALLS = tuple(
    f'{{"name": "add_time", "arguments": {{"start": "{start}", "minutes": 155}}}}' for start in ("09:40", "18:05")
)
WORDS = sorted({word for turn in TURNS for word in turn.split()})


def talks(url: str) -> archive.Archive:
    """Four samples of a prompt, with log probabilities and advantages of each token."""
    arc = archive.create(url)
    with arc.writer(run="tools") as w:
        for n in range(4):
            w.add_episode(
                talk(n), episode_id=f"prompt-07-sample-{n}", update_count=40, model_weights_uuid="policy-4",
                terminated=True, metadata={"prompt_id": "prompt-07"},
            )  # fmt: skip
    return arc


def talk(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    ids = [np.array([WORDS.index(word) for word in turn.split()]) for turn in TURNS]
    return {
        "user": [*ASKED],
        "response_tokens": ids,
        "logprobs": [-rng.exponential(0.7, len(turn)).astype(np.float32) for turn in ids],
        "advantages": [rng.normal(0.4 * (n - 1), 0.5, len(turn)).astype(np.float32) for turn in ids],
        "tool_call": [*CALLS],
        "reward": np.array([0.0, float(n > 0)], np.float32),
    }


def words(ids: Any) -> str:
    return " ".join(WORDS[int(one)] for one in np.atleast_1d(ids)) + " "


# a run that is resumed on fewer ranks


def checkpoints(url: str) -> archive.Archive:
    """A run on four ranks, which goes on with three."""
    arc = archive.create(url)
    _trains(arc, 4, range(5), [None] * 4)
    plan = resharding.plan(arc.refresh().checkpoints.latest, world_size=3)
    _trains(arc, 3, range(5, 9), [plan.share(rank=rank) for rank in range(3)])
    return arc.refresh()


def _trains(arc: archive.Archive, ranks: int, updates: range, shares: list[Any]) -> None:
    writers = [
        arc.writer(rank=rank, world_size=ranks, session=f"on-{ranks}", resume=share)
        for rank, share in enumerate(shares)
    ]
    for update in updates:
        for rank, w in enumerate(writers):
            rng = np.random.default_rng([update, rank])
            for n in range(3 + (update + rank) % 3):
                steps = {"obs": rng.normal(size=(60 + 10 * rank, 16)), "reward": rng.normal(update, 1, 60 + 10 * rank)}
                w.add_episode(steps, episode_id=f"u{update}-r{rank}-{n}", update_count=update, terminated=True)
        saved = [w.checkpoint(1000 * (update + 1), metrics={"loss": 2.0 / (update + 1)}) for w in writers]
        for one in saved:
            one.result()
    for w in writers:
        w.close()


# what `archive demo` writes


def demonstration(url: str) -> archive.Archive:
    """The episodes of the demo, and labels of the best ones."""
    for _ in demo.in_one_process(lambda **how: archive.open(url, **how)):
        pass
    arc = archive.open(url)
    arc.episodes.filter(where="return > 10").label(success=True, by="anna")
    return arc.refresh()


LABELS = ({"key": "success", "kind": "flag"}, {"key": "quality", "kind": "choice", "values": ["bad", "good"]})
SHOTS = (
    Shot(
        "images/viewer.png", demonstration, "#/episode?id={best}&step=6", "light",
        "document.querySelector('.ready')", {"labels": LABELS},
    ),
    Shot(
        "how-to/looking-episode.png", robots, "#/episode?id=push-021&step=46", "dark",
        "document.querySelector('.ready')", {"labels": LABELS},
    ),
    Shot(
        "how-to/looking-rollout.png", talks, "#/episode?id=prompt-07-sample-2", "light",
        "document.querySelector('.ready')", {"tokenizer": words},
    ),
    Shot(
        "how-to/looking-checkpoints.png", checkpoints, "#/checkpoints?ranks=2", "light",
        "document.querySelector('.ready, svg')",
    ),
)  # fmt: skip


def take(shot: Shot, browser: str, into: Path) -> None:
    """Make the archive, and the picture of it."""

    async def walk(page: Page) -> None:
        await page.size(1280, 800)
        await page.theme(shot.theme)
        await page.until(f"{shot.there} !== null && !document.querySelector('.waiting')")
        await asyncio.sleep(1.0)  # until pictures are decoded and drawn
        await page.screenshot(into / shot.name)
        _shrink(into / shot.name)

    arc = shot.make(f"memory://lab/{shot.make.__name__}")
    best = max(arc.episodes, key=lambda episode: episode.total_reward or 0.0)
    with serve(arc, settings=Settings(by="anna", **shot.settings)) as viewer:
        page = asyncio.run(visit(browser, viewer.url + shot.at.format(best=best.id), walk))
    assert page.complaints == [], page.complaints


def _shrink(file: Path) -> None:
    """A third of the bytes, by 256 colours, which are enough for what is drawn."""
    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def main(into: Path = FOLDER) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, chromium(Path(name)) as browser:
        for shot in SHOTS:
            take(shot, browser, into)
            print(f"{into / shot.name}: {(into / shot.name).stat().st_size} bytes")


if __name__ == "__main__":
    main(*(Path(name) for name in sys.argv[1:]))
