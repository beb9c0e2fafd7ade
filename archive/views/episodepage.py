"""Pure, no I/O: the page of one episode, of a bounded size: pictures that play, a conversation, curves, texts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from archive.base import UsageError
from archive.views import charts, films, frames, page, rollouts, room, summaries, texts, turns
from archive.views.markup import Markup, facts, join, section, shown, size, table, tag
from archive.views.tokens import Decode

EXACT_FLOAT32 = 2**24  # integers beyond have no float32 of their own
POINT_BYTES, VALUE_BYTES = 13, 16 / 3  # of a point of a line, and of a value that is told
FIELD_BYTES = 500  # of a field's heading and frame
MIN_SHARE = 0.002  # of a curve's points; one of fewer is left out
TRIES = 6


def episode(
    about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any,
    decode: Decode | None = None, max_bytes: int | None = room.MAX_PAGE_BYTES,
) -> str:  # fmt: skip
    """A page of one episode: pictures that play, what was said, curves with their values, and the text of each step.

    `data` is what reading it gave; `decode` makes text of token ids. What `max_bytes` leaves no room for is said there.
    """
    shown_of = _Shown(about, fields, metadata, attributes, data, decode)
    if max_bytes is None:
        return shown_of.page(None)
    space = max_bytes
    for _ in range(TRIES):
        text = shown_of.page(space, max_bytes)
        over = len(text.encode()) - max_bytes
        if over <= 0:
            return text
        space -= over + over // 8 + 64
        if space < 0:
            break
    raise UsageError(
        f"the page of episode {about['id']!r} does not fit into max_bytes={max_bytes}: it takes {len(text.encode())} with "
        "next to nothing on it; allow more, or name fewer fields="
    )


class _Shown:
    """What an episode's fields are shown as, before it is known how much room there is."""

    def __init__(
        self, about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any,
        decode: Decode | None,
    ) -> None:  # fmt: skip
        self.about, self.fields, self.metadata, self.attributes = about, fields, metadata, attributes
        self.steps, self.has_texts = int(about["steps"]), decode is not None
        free = {path for path, kind in fields.items() if kind.rpartition(" ")[2] == "free"}
        self.whole = {path: leaf for path, leaf in frames.leaves(data) if path in free}
        self.parts = {path: leaf for path, leaf in frames.leaves(data) if path not in free}
        self.rollout = rollouts.find(self.parts, self.whole, metadata, self.steps)
        self.blocks = turns.blocks_of(self.rollout, decode) if self.rollout else []
        told = self.rollout.paths if self.rollout else set()
        ids = {track.path for track in self.rollout.tracks} if self.rollout else set()
        rest = {path: leaf for path, leaf in self.parts.items() if path not in told}
        drawn = {path: leaf for path, leaf in rest.items() if path not in ids}
        self.films = {path: f for path, leaf in drawn.items() if (f := frames.as_film(leaf))}
        self.curves = {p: c for p, leaf in drawn.items() if p not in self.films and (c := frames.as_curves(leaf))}
        flat = ids if self.rollout and self.rollout.flat else set()
        said = {path: leaf for path, leaf in rest.items() if path not in {*self.films, *self.curves, *flat}}
        self.said = {path: t for path, leaf in said.items() if (t := texts.as_texts(leaf))}

    def needs(self) -> dict[str, int]:
        """Bytes that each would take in full."""
        out = {f"film {path}": films.need(film) for path, film in self.films.items()}
        out |= {f"curve {path}": _curve_bytes(lines) for path, lines in self.curves.items()}
        out |= {f"text {path}": room.json_bytes(text.steps) + FIELD_BYTES for path, text in self.said.items()}
        return out | ({"rollout": room.json_bytes(self.blocks) + FIELD_BYTES} if self.blocks else {})

    def page(self, space: int | None, max_bytes: int | None = None) -> str:
        """The page with about so many bytes for what is shown of the fields; None: for all of it."""
        needs = self.needs()
        frame = self._frame([], None, []) if space is not None else ""
        given = (
            dict.fromkeys(needs, 2**62)
            if space is None
            else room.dealt(needs, space - len(frame.encode()) - 200 * len(needs))
        )
        gone: list[str] = []
        shots = {path: self._film(path, film, given[f"film {path}"], gone) for path, film in self.films.items()}
        lines = {path: self._thinned(path, given[f"curve {path}"], gone) for path in self.curves}
        said = {path: self._told(path, given[f"text {path}"], gone) for path in self.said}
        blocks, left = turns.fitted(self.blocks, given["rollout"] - FIELD_BYTES) if self.blocks else ([], "")
        gone += [left] if left else []
        films_shown = {path: shot for path, shot in shots.items() if shot}
        every = {path: one[1] for path, one in lines.items() if one}
        content = [
            _player(self.steps), _canvases(films_shown), _conversation(self.rollout, self.has_texts) if blocks else "",
            _texts(said, written=True), join(self._curve(path, *one) for path, one in lines.items() if one),
            _texts(said, written=False), _whole(self.whole),
        ]  # fmt: skip
        played = {
            "steps": self.steps, "films": films_shown,
            "texts": {path: {"steps": t.steps, "every": t.every} for path, t in said.items()},
            "curves": {path: _values(self.curves[path], step) for path, step in every.items()},
        }  # fmt: skip
        if blocks and self.rollout:
            played["rollout"] = {"blocks": blocks, **turns.about(self.rollout)}
        return self._frame(content, played, _left(gone, max_bytes))

    def _frame(self, content: list[Any], played: Any, left: Any) -> str:
        after = summaries.episode_parts(self.fields, self.metadata, self.attributes)
        own = ("page", "rollout") if self.blocks else ("page",)
        return page.document(
            str(self.about["id"]), [facts(self.about), left, *content, after], played if self.steps else None, own
        )

    def _film(self, path: str, film: frames.Film, most: int, gone: list[str]) -> dict[str, Any] | None:
        made = films.packed(film, self.steps, most)
        if made is None:
            gone.append(f"{path}: its pictures")
        elif made.pop("thinned"):
            gone.append(f"{path}: {made['note'].partition('pixels; ')[2]}")
        return made

    def _thinned(self, path: str, most: int, gone: list[str]) -> tuple[float, int] | None:
        """(share of the points, one value in so many) of a field's curves."""
        share = min(1.0, (most - FIELD_BYTES) / max(1, _curve_bytes(self.curves[path]) - FIELD_BYTES))
        if share < MIN_SHARE:
            gone.append(f"{path}: its curves")
            return None
        every = int(np.ceil(1 / share))
        if every > 1:
            gone.append(f"{path}: one value in {every}")
        return share, every

    def _told(self, path: str, most: int, gone: list[str]) -> texts.Texts:
        text, need = self.said[path], room.json_bytes(self.said[path].steps) + FIELD_BYTES
        if most >= need:
            return text
        chars = sum(map(len, text.steps))
        cut = texts.fitted(text, int(chars * max(0, most - FIELD_BYTES) / need))
        gone.append(
            f"{path}: most of longer texts" + (f", and all but one step in {cut.every}" if cut.every > 1 else "")
        )
        return cut

    def _curve(self, path: str, share: float, every: int) -> Markup:
        """The lines of a field; above them the values at the step shown, below from where to where they go."""
        lines = self.curves[path]
        components = frames.components(self.parts[path])
        if not len(next(iter(lines.values()))):
            return Markup("")
        points = max(2, int(charts.MAX_POINTS * share))
        drawn = charts.lines(lines, width=960, height=90, axis=False, points=points)
        known = np.concatenate([v[np.isfinite(v)] for v in lines.values()])
        span = f"{shown(float(known.min()))} … {shown(float(known.max()))}" if len(known) else "no finite value"
        left = f"; the first {len(lines)} of {components} are shown" if components > len(lines) else ""
        left += f"; one value in {every}" if every > 1 else ""
        keys = [_key(i, name) for i, name in enumerate(lines)]
        box = tag("div", drawn, tag("div", class_="cursor"), class_="curve", data_field=path)
        return section(path, tag("div", *keys, class_="keys"), box, tag("figcaption", span + left))


def _curve_bytes(lines: Mapping[str, frames.Array]) -> int:
    length = len(next(iter(lines.values())))
    return int(len(lines) * (POINT_BYTES * min(length, charts.MAX_POINTS) + VALUE_BYTES * length)) + FIELD_BYTES


def _left(gone: list[str], max_bytes: int | None) -> Markup:
    """What did not fit."""
    if not gone:
        return Markup("")
    why = f"Left out, as this page is held to {size(max_bytes)}" if max_bytes is not None else "Left out"
    return tag("section", tag("h4", why), tag("ul", *(tag("li", one) for one in gone)), id="left")


def _key(number: int, name: str) -> Markup:
    color = f"background:{charts.COLORS[number % len(charts.COLORS)]}"
    return tag("span", tag("i", style=color), name, tag("b"), class_="key")


def _values(lines: Mapping[str, frames.Array], apart: int) -> dict[str, Any]:
    """The numbers of all lines, one after the other, as float32 where that has the digits that are shown."""
    every = np.stack([line[::apart] for line in lines.values()])
    wide = np.abs(every[np.isfinite(every)]).max(initial=0) > EXACT_FLOAT32
    packed = every.astype("<f8" if wide else "<f4")
    text = base64.b64encode(packed.tobytes()).decode()
    length = len(next(iter(lines.values())))
    return {"length": every.shape[1], "of": length, "every": apart, "width": packed.dtype.itemsize, "values": text}


def _player(steps: int) -> Markup:
    if not steps:
        return Markup("")
    speeds = [tag("option", f"{n} a second", value=n, selected="" if n == 10 else None) for n in (2, 10, 30, 60)]
    return tag(
        "div", tag("button", "Play", id="play", type="button"),
        tag("input", id="step", type="range", min=0, max=steps - 1, value=0, aria_label="step"),
        tag("span", id="at"), tag("select", *speeds, id="speed", aria_label="steps a second"), id="player",
    )  # fmt: skip


def _canvases(shots: Mapping[str, Mapping[str, Any]]) -> Markup:
    drawn = join(
        section(path, tag("canvas", width=f["width"], height=f["height"], class_="frames", data_field=path,
                          style=f"width:{min(640, max(168, 2 * f['width']))}px"), tag("figcaption", f["note"]))
        for path, f in shots.items()
    )  # fmt: skip
    return tag("div", drawn, class_="films") if drawn else drawn


def _conversation(rollout: rollouts.Rollout | None, has_texts: bool) -> Markup:
    """The place of the conversation, and what chooses the colours of its tokens."""
    tools: list[Any] = []
    note = ""
    if rollout and rollout.tracks:
        tools += [tag("label", "Colour ", tag("select", id="colour")), tag("span", id="scale")]
        tools += [tag("label", "Dim ", tag("select", id="dim"))]
        note = (
            ""
            if has_texts
            else "Tokens are shown by their ids; to_html(tokenizer=...) or --tokenizer shows their text."
        )
    return tag(
        "section", tag("h4", "Conversation"), tag("div", *tools, class_="tools") if tools else "", tag("div", id="turns"),
        tag("figcaption", note) if note else "", id="rollout",
    )  # fmt: skip


def _texts(said: Mapping[str, texts.Texts], *, written: bool) -> Markup:
    """What each step says; lists of numbers folded away."""
    chosen = [path for path, text in said.items() if text.written is written]
    shown_at_step = join(section(path, tag("pre", class_="text", data_field=path)) for path in chosen)
    if written or not shown_at_step:
        return shown_at_step
    return tag("details", tag("summary", f"Lists of numbers: {', '.join(chosen)}"), shown_at_step)


def _whole(leaves: Mapping[str, Any]) -> Markup:
    """What belongs to the episode and not to its steps."""
    rows = [[path, texts.told(leaf)] for path, leaf in leaves.items()]
    return section("Of the whole episode", table(("field", "value"), rows)) if rows else Markup("")
