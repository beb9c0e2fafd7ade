"""Pure, no I/O: the page of one episode, of a bounded size: pictures that play, a conversation, curves, texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from archive.base import MAX_PAGE_BYTES, UsageError, size
from archive.views import frames, page, rollouts, summaries, texts
from archive.views.budget import Part, Shown, dealt
from archive.views.conversation import Conversation
from archive.views.curves import Curves
from archive.views.films import Film
from archive.views.markup import Markup, facts, join, section, table, tag
from archive.views.tokens import Decode

PART_BYTES = 200  # of each part's frame, at most
UNBOUNDED = 2**62
TRIES = 6
PLACES = ("films", "rollout", "written", "curves", "numbers")  # of the parts, from top to bottom


def episode(
    about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any,
    decode: Decode | None = None, max_bytes: int | None = MAX_PAGE_BYTES,
) -> str:  # fmt: skip
    """A page of one episode: pictures that play, what was said, curves with their values, and the text of each step.

    `data` is what reading it gave; `decode` makes text of token ids. What `max_bytes` leaves no room for is said there;
    UsageError if not even that fits.
    """
    free = {path for path, kind in fields.items() if kind.rpartition(" ")[2] == "free"}
    whole = {path: leaf for path, leaf in frames.leaves(data) if path in free}
    leaves = {path: leaf for path, leaf in frames.leaves(data) if path not in free}
    rollout = rollouts.find(leaves, whole, metadata, int(about["steps"]))
    parts = [*_parts(leaves, rollout, int(about["steps"]))]
    parts += [Conversation(rollout, decode)] if rollout else []
    made = _Page(about, parts, whole, summaries.episode(fields, metadata, attributes))
    return made.whole() if max_bytes is None else made.within(max_bytes)


def _parts(leaves: Mapping[str, Any], rollout: rollouts.Rollout | None, steps: int) -> Iterator[Part]:
    """What each field is shown as, that is not shown with the conversation."""
    ids = {track.path for track in rollout.tracks} if rollout else set()
    in_conversation = rollout.paths | (ids if rollout.flat else set()) if rollout else set()
    for path, leaf in leaves.items():
        if path in in_conversation:
            continue
        if path not in ids and (pictures := frames.as_pictures(leaf)):
            yield Film(path, pictures, steps)
        elif path not in ids and (lines := frames.as_curves(leaf)):
            yield Curves(path, lines, frames.components(leaf))
        elif text := texts.as_texts(leaf):
            yield texts.TextPart(path, text)


class _Page:
    """A page of these parts; `free`: fields of the whole episode; `after`: what stands at its end."""

    def __init__(self, about: Mapping[str, Any], parts: Sequence[Part], free: Mapping[str, Any], after: Markup) -> None:
        self.about = about
        self.steps = int(about["steps"])
        self.parts = parts
        self.free = _free(free)
        self.after = after

    def whole(self) -> str:
        """All of it, whatever that takes."""
        return self._text([part.shown(UNBOUNDED) for part in self.parts], "Left out")

    def within(self, max_bytes: int) -> str:
        """As much as fits."""
        space = max_bytes - len(self._text([], "").encode()) - PART_BYTES * len(self.parts)
        why, text = f"Left out, as this page is held to {size(max_bytes)}", ""
        for _ in range(TRIES):
            given = dealt({f"{part.kind} {part.path}": part.need for part in self.parts}, space)
            shown = [part.shown(given[f"{part.kind} {part.path}"]) for part in self.parts]
            text = self._text(shown, why)
            over = len(text.encode()) - max_bytes
            if over <= 0:
                return text
            space -= over + over // 8 + 64
            if space < 0:
                break
        raise UsageError(
            f"the page of episode {self.about['id']!r} does not fit into max_bytes={max_bytes}: it takes "
            f"{len(text.encode())} with next to nothing on it; allow more, or name fewer fields="
        )

    def _text(self, shown: Sequence[Shown], why: str) -> str:
        played: dict[str, Any] = {"steps": self.steps, "films": {}, "texts": {}, "curves": {}}
        drawn: dict[str, dict[str, Markup]] = {name: {} for name in PLACES}
        for part, one in zip(self.parts, shown, strict=False):
            if part.kind == "rollout":
                played["rollout"] = one.played
            elif one.played is not None:
                played[part.kind][part.path] = one.played
            if one.markup:
                drawn[part.place][part.path] = one.markup
        left_out = [tag("li", one.left_out) for one in shown if one.left_out]
        films, rollout, written, curves = (join(drawn[name].values()) for name in PLACES[:4])
        content = [
            facts(self.about),
            tag("section", tag("h4", why), tag("ul", *left_out), id="left") if left_out else "",
            _player(self.steps),
            tag("div", films, class_="films") if films else "",
            rollout, written, curves, _folded(drawn["numbers"]), self.free, self.after,
        ]  # fmt: skip
        own = (("page", "rollout"), ("rollout", "page")) if rollout else (("page",), ("page",))
        return page.document(str(self.about["id"]), content, played if self.steps else None, *own)


def _player(steps: int) -> Markup:
    if not steps:
        return Markup("")
    speeds = [tag("option", f"{n} a second", value=n, selected="" if n == 10 else None) for n in (2, 10, 30, 60)]
    return tag(
        "div", tag("button", "Play", id="play", type="button"),
        tag("input", id="step", type="range", min=0, max=steps - 1, value=0, aria_label="step"),
        tag("span", id="at"), tag("select", *speeds, id="speed", aria_label="steps a second"), id="player",
    )  # fmt: skip


def _folded(numbers: Mapping[str, Markup]) -> Markup:
    """Lists of numbers, which are long and seldom looked at."""
    if not numbers:
        return Markup("")
    return tag("details", tag("summary", f"Lists of numbers: {', '.join(numbers)}"), join(numbers.values()))


def _free(leaves: Mapping[str, Any]) -> Markup:
    """What belongs to the episode and not to its steps."""
    rows = [[path, texts.readable(leaf)] for path, leaf in leaves.items()]
    return section("Of the whole episode", table(("field", "value"), rows)) if rows else Markup("")
