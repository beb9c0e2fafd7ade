"""Language rollouts: which fields are one, its tokens as text, their pages, and the bound on a page's bytes."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import MissingPackageError, UsageError
from archive.view import frames, rollouts, tokens
from archive.view.tokens import decoder
from tests.support.browser import Page, held, visited

WORDS = ["one", "two", "<script>window.hacked=1</script>", "four\n", "five"]
SYSTEM = {"role": "system", "content": "Be </script><script>window.hacked=2</script> kind."}


def text_of(ids: list[int]) -> str:
    return " ".join(WORDS[i % 5] for i in ids)


def turns() -> dict[str, Any]:
    """Three turns, each with the whole history in its prompt and its messages."""
    prompts, answers = [[0]], [[1, 2], [3], [4, 0, 1]]
    for answer in answers[:2]:
        prompts.append([*prompts[-1], *answer, 3])
    messages = [[SYSTEM, {"role": "assistant", "content": "a"}]]
    for t in range(1, 3):
        messages.append([*messages[-1], {"role": "tool", "content": f"tool {t}"}])
    return {
        "prompt_ids": list(map(np.array, prompts)), "response_ids": list(map(np.array, answers)),
        "logprobs": [-np.ones(len(a), np.float32) for a in answers], "mask": [np.arange(len(a)) > 0 for a in answers],
        "advantage": [np.full(len(a), 0.5) for a in answers], "reward": np.array([0, 0.5, 1]), "messages": messages,
    }  # fmt: skip


def flat(n: int = 12) -> dict[str, Any]:
    return {
        "token_ids": np.arange(n), "logprob": np.where(np.arange(n) == 5, -np.inf, -0.5),
        "loss_mask": np.arange(n) >= 4, "reward": np.zeros(n),
    }  # fmt: skip


def episode(steps: dict[str, Any], **how: Any) -> archive.Episode:
    arc = archive.create(f"memory://rollouts-{uuid.uuid4().hex}")
    with arc.writer(schema=archive.Schema(json=["messages"])) as w:
        w.add_episode(steps, episode_id="it", **how)
    return arc.refresh().episodes["it"]


def blocks_of(page: str) -> Any:
    return held(page)["answers"]["rollout"]["blocks"]


def test_turns_are_told_once_with_what_is_known_of_each_token() -> None:
    blocks = blocks_of(episode(turns()).to_html(tokenizer=text_of))
    said = [(b["step"], b["role"], b.get("text", b.get("pieces"))) for b in blocks]
    assert said == [
        (0, "system", SYSTEM["content"]), (0, "assistant", "a"), (0, "prompt_ids", ["one"]),
        (0, "response_ids", ["two", f" {WORDS[2]}"]),
        (1, "tool", "tool 1"), (1, "prompt_ids", ["four\n"]), (1, "response_ids", ["four\n"]),
        (2, "tool", "tool 2"), (2, "prompt_ids", ["four\n"]), (2, "response_ids", ["five", " one", " two"]),
    ]  # fmt: skip
    assert [b["before"] for b in blocks if "before" in b] == [3, 5]
    last = blocks[-1]
    assert (last["signals"], last["masks"]) == (
        {"logprobs": [-1, -1, -1], "advantage": [0.5, 0.5, 0.5]},
        {"mask": "011"},
    )
    assert blocks[0]["numbers"] == {"reward": "0"}


def test_steps_that_are_tokens_are_cut_where_the_mask_changes() -> None:
    page = episode(flat(), metadata={"prompt": "Count."}).to_html(tokenizer=text_of)
    told, given, made = blocks_of(page)
    assert (told["step"], told["text"]) == (None, "Count.")
    assert [(b["step"], len(b["pieces"]), b["kind"]) for b in (given, made)] == [(0, 4, "user"), (4, 8, "assistant")]
    assert made["signals"]["logprob"][:3] == [-0.5, "-inf", -0.5]
    drawn = {name for name, curve in held(page)["curves"].items() if not curve["derived"]}
    assert drawn == {"logprob", "loss_mask", "reward"}


@pytest.mark.parametrize(
    ("steps", "tracks", "told"),
    [
        ({"obs": np.zeros((4, 3)), "reward": np.zeros(4)}, None, None),
        ({"action": np.arange(4), "done": np.zeros(4, bool)}, None, None),
        ({"obs": [np.arange(3)] * 4, "ids": np.arange(4)}, None, None),
        ({"responses": [np.arange(3)] * 4, "entropy": [np.ones(3)] * 4}, {"responses": (["entropy"], [])}, []),
        ({"input_ids": np.zeros((4, 6), int), "seen_mask": np.ones((4, 6))}, {"input_ids": ([], ["seen_mask"])}, []),
        ({"input_ids": [np.arange(5)] * 4, "logp": [np.ones(4)] * 4}, {"input_ids": (["logp"], [])}, []),
        ({"input_ids": [np.arange(5)] * 4, "state": np.ones((4, 3))}, {"input_ids": ([], [])}, []),
        ({"prompt": ["a"] * 4, "response": ["b"] * 4}, {}, ["prompt", "response"]),
        ({"a": {"prompt": ["x"] * 4}, "other": ["b"] * 4}, {}, ["a/prompt"]),
    ],
)  # fmt: skip
def test_what_a_rollout_is(steps: dict[str, Any], tracks: Any, told: Any) -> None:
    leaves = dict(frames.leaves(steps))
    found = rollouts.find(leaves, {}, None, 4)
    if tracks is None:
        assert found is None
        return
    assert found is not None
    assert {t.path: (list(t.signals), list(t.masks)) for t in found.tracks} == tracks
    assert list(found.spoken) == told


def test_a_prompt_that_comes_again_is_named_by_its_step() -> None:
    long = "a question of many words " * 8
    page = episode({"prompt": [long, long], "response": ["yes", "no"], "reward": np.zeros(2)}).to_html()
    assert [(b["text"], b.get("same")) for b in blocks_of(page)] == [
        (long, None), ("yes", None), ("", 0), ("no", None),
    ]  # fmt: skip


def bytes_of(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_joined_are_the_text() -> None:
    said = "naïve 日本 🙂!"
    ids = list(said.encode())
    made = tokens.pieces(ids, bytes_of)
    assert "".join(made) == said
    assert len(made) == len(ids)
    assert tokens.pieces([*ids[:3], -100, *ids[3:6]], bytes_of)[3] == "⟨-100⟩"
    assert "".join(tokens.pieces(ids[:-4], bytes_of)).endswith("\ufffd")
    assert tokens.pieces([3, 5], None) == ["3", "5"]
    assert tokens.pieces([], bytes_of) == []


class Decoding:
    def decode(self, ids: list[int]) -> str:
        return text_of(ids)

    __call__ = None  # as encoders have one that is not meant


def test_tokenizers_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (text_of, Decoding()):
        made = decoder(given)
        assert made is not None
        assert made([0, 1]) == "one two"
    assert decoder(None) is None
    for wrong in (3, Decoding, ["a"]):
        with pytest.raises(UsageError, match="is none: give a function"):
            decoder(wrong)
    with pytest.raises(UsageError, match=r"failed on the ids \[7\].*TypeError"):
        tokens.pieces([7], {}.__getitem__)
    with pytest.raises(UsageError, match="made a list of ids"):
        tokens.pieces([7], list)  # type: ignore[arg-type]
    for package in ("tokenizers", "transformers"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingPackageError, match="pip install tokenizers"):
        decoder("gpt2")


def test_a_tokenizer_by_its_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    models = pytest.importorskip("tokenizers.models")
    made = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "you": 2}, unk_token="<s>"))
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    for given in (str(tmp_path), str(tmp_path / "tokenizer.json"), made):
        found = decoder(given)
        assert found is not None
        assert tokens.pieces([0, 1, 2], found) == ["<s>", " hello", " you"]


# -- the bound on bytes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> archive.Episode:
    rng, n = np.random.default_rng(0), 400
    return episode({
        "camera": rng.integers(0, 255, (n, 48, 64, 3), np.uint8), "state": rng.normal(size=(n, 12)),
        "says": ["日本" * 200] * n, "response_ids": [rng.integers(0, 5, 40) for _ in range(n)],
        "logprobs": [rng.normal(size=40) for _ in range(n)], "force": [rng.normal(size=90) for _ in range(n)],
    })  # fmt: skip


@pytest.mark.parametrize("most", [160_000, 300_000, 1_000_000, 3_000_000, 30_000_000])
def test_a_page_keeps_to_its_bytes_and_says_what_is_missing(large: archive.Episode, most: int) -> None:
    page = large.to_html(tokenizer=text_of, max_bytes=most)
    assert len(page.encode()) <= most
    left = held(page)["answers"]["episode"]["left_out"]
    assert (left is None) is (most == 30_000_000)
    if left is not None:
        assert any("camera" in one for one in left["what"])
    assert most > 3_000_000 or len(page) > 0.5 * most
    assert blocks_of(page)[0]["pieces"][0] in WORDS


def test_a_page_is_bounded_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (120, 240, 320, 3), np.uint8)
    one = episode({"a": {"image": noise}, "b": {"image": noise}})
    assert len(one.to_html().encode()) <= 16_000_000
    assert len(one.to_html(max_bytes=None)) > 18_000_000
    with pytest.raises(UsageError, match=r"does not fit into max_bytes=3000.*allow more"):
        one.to_html(max_bytes=3000)


# -- in a browser ------------------------------------------------------------------------------------------------------


READY = "document.querySelector('.episode.ready') !== null"


async def at_step(page: Page, step: int) -> None:
    """The step, as somebody types it."""
    await page.evaluate("document.querySelector('.at').select()")
    await page.type(str(step))
    await page.press("Enter")


def test_a_conversation_is_drawn(browser: str, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.until(READY)
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 3
        assert await page.evaluate("document.querySelectorAll('.token').length") == 9
        assert SYSTEM["content"] in await page.evaluate("document.querySelector('.said').textContent")
        assert await page.evaluate("[...document.querySelectorAll('.turn .head')].map((x) => x.textContent)") == [
            "step 0reward 0", "step 1reward 0.5", "step 2reward 1",
        ]  # fmt: skip
        await page.evaluate("window.colour = document.querySelector('.colour')")
        assert await page.evaluate("colour.selectedOptions[0].text") == "logprobs"
        background = "document.querySelectorAll('.assistant .token')[0].style.background"
        orange = await page.evaluate(background)
        await page.evaluate("colour.value = '.advantage'; colour.dispatchEvent(new Event('change'))")
        assert await page.evaluate(background) not in ("", orange)
        await page.evaluate("colour.value = ''; colour.dispatchEvent(new Event('change'))")
        assert await page.evaluate(background) == ""
        assert await page.evaluate("document.querySelectorAll('.token.dim').length") == 3
        await page.evaluate("document.querySelectorAll('.turn')[2].querySelector('.token').click()")
        assert await page.evaluate("document.querySelector('.slider').value") == "2"
        assert await page.evaluate("document.querySelector('.turn.now .head').textContent") == "step 2reward 1"
        over = "dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        last = "[...document.querySelectorAll('.token')].at(-1)"
        await page.evaluate(f"{last}.{over}")
        assert await page.evaluate(f"{last}.title") == "token 2 · id 1 · advantage 0.5 · logprobs -1 · mask 1"
        assert "token 2 · id 1" in await page.text(".token-told")

    visited(browser, episode(turns()).to_html(tokenizer=text_of), tmp_path, look)


def test_tokens_that_are_steps_play(browser: str, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.until(READY)
        assert await page.evaluate("document.querySelector('.token.now').textContent") == "0"
        await at_step(page, 7)
        await page.until("document.querySelector('.token.now').textContent === '7'")
        await page.evaluate("document.querySelectorAll('.token')[3].click()")
        assert await page.evaluate("document.querySelector('.slider').value") == "3"
        assert "tokenizer=" in await page.text(".rollout")

    visited(browser, episode(flat()).to_html(), tmp_path, look)


def test_thinned_values_stay_with_their_steps(browser: str, large: archive.Episode, tmp_path: Path) -> None:
    text = large.to_html(max_bytes=160_000)
    every = held(text)["curves"]["state"]["every"]
    wanted = float(large.read(["state"])["state"][399 // every * every, 0])

    async def look(page: Page) -> None:
        await page.until(READY)
        await at_step(page, 399)
        assert await page.evaluate("document.querySelector('[aria-label=state] .curve-cursor').style.left") == "100%"
        value = await page.evaluate("document.querySelector('.chart[aria-label=state] .key b').textContent")
        assert every > 1
        assert float(value.removeprefix("≈ ")) == pytest.approx(wanted, rel=1e-4)

    visited(browser, text, tmp_path, look)
