"""Pure, no I/O: self-contained HTML pages of an episode, a checkpoint or a plan. They load nothing and run nothing else."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np

from archive.views import charts, frames, summaries, texts
from archive.views.markup import Markup, facts, join, section, shown, table, tag

MAX_FILM_BYTES = 24 * 1024 * 1024  # of one field's pictures, before they are packed
MIN_FILM_SIDE = 112  # pixels that a picture keeps if there is not room for all
EXACT_FLOAT32 = 2**24  # integers beyond have no float32 of their own
# Nothing from elsewhere, whatever a text from the bucket might say: style and script are the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Framed:
    """A page in a frame of a notebook. It may run its script there, and reaches nothing of the notebook."""

    def __init__(self, text: str, height: int) -> None:
        self.text, self.height = text, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{int(self.height)}px;border:0"
        return tag("iframe", srcdoc=self.text, sandbox="allow-scripts", style=style)


def episode(about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any) -> str:
    """A page of one episode: pictures that play, curves with their values, and the text of each step.

    `data` is what reading it gave.
    """
    whole = {path for path, kind in fields.items() if kind.rpartition(" ")[2] == "free"}
    parts = {path: leaf for path, leaf in frames.leaves(data) if path not in whole}
    films = {path: f for path, leaf in parts.items() if (f := frames.as_film(leaf))}
    curves = {path: c for path, leaf in parts.items() if path not in films and (c := frames.as_curves(leaf))}
    rest = {path: leaf for path, leaf in parts.items() if path not in films and path not in curves}
    said = {path: t for path, leaf in rest.items() if (t := texts.as_texts(leaf))}
    steps = int(about["steps"])
    shots = {path: _film(f, steps) for path, f in films.items()}
    content = [
        facts(about), _player(steps), _canvases(shots), _texts(said, written=True), _curves(curves, parts),
        _texts(said, written=False), _whole({path: leaf for path, leaf in frames.leaves(data) if path in whole}),
        summaries.episode_parts(fields, metadata, attributes),
    ]  # fmt: skip
    played = {
        "steps": steps, "films": shots, "texts": {path: t.steps for path, t in said.items()},
        "curves": {path: _values(c) for path, c in curves.items()},
    }  # fmt: skip
    return document(str(about["id"]), content, played if steps else None)


def checkpoint(
    about: Mapping[str, Any], found: Any, fields: Mapping[str, str], per_rank: Mapping[int, int], buffers: Any,
    discarded: Any, progress: Any,
) -> str:  # fmt: skip
    """A page of a checkpoint: its ranks and buffers, and how its episodes are spread."""
    parts = summaries.checkpoint_parts(per_rank, buffers, discarded, progress)
    overview = summaries.overview(found, fields)
    return document(f"{about['name']} of run {about['run']}", [facts(about), parts, overview])


def plan(about: Mapping[str, Any], moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any) -> str:
    """A page of a plan: which ranks get what of which."""
    title = f"{about['checkpoint']}: {about['source ranks']} ranks to {about['target ranks']}"
    return document(title, [facts(about), summaries.plan_parts(moved, ranks, dropped, about)])


def document(title: str, content: list[Any], played: Any = None) -> str:
    """The whole page. `played`: what the script shows step by step."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY), tag("title", title),
        tag("style", Markup(_own("page.css"))),
    )  # fmt: skip
    body = [tag("h1", title), *content]
    if played is not None:
        body += [
            tag("script", _script_json(played), type="application/json", id="data"),
            tag("script", Markup(_own("page.js"))),
        ]
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _own(name: str) -> str:
    return resources.files("archive.views").joinpath(name).read_text("utf-8")


def _script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _player(steps: int) -> Markup:
    if not steps:
        return Markup("")
    speeds = [tag("option", f"{n} a second", value=n, selected="" if n == 10 else None) for n in (2, 10, 30, 60)]
    return tag(
        "div", tag("button", "Play", id="play", type="button"),
        tag("input", id="step", type="range", min=0, max=steps - 1, value=0, aria_label="step"),
        tag("span", id="at"), tag("select", *speeds, id="speed", aria_label="steps a second"), id="player",
    )  # fmt: skip


def _film(film: frames.Film, steps: int) -> dict[str, Any]:
    """Deflated pixels; of more than there is room for, every second, third, ... row and column, then every n-th picture."""
    shots, notes = film.pixels, [film.note]
    count, height, width, _ = shots.shape
    apart = 1
    while shots.nbytes > MAX_FILM_BYTES * apart**2 and min(height, width) // (apart + 1) >= MIN_FILM_SIDE:
        apart += 1
    shots = shots[:, ::apart, ::apart]
    every = max(1, -(-shots.nbytes // MAX_FILM_BYTES))
    kept = np.ascontiguousarray(shots[::every])
    notes += [f"{height} x {width} pixels", f"one row and column in {apart}" if apart > 1 else ""]
    notes += [f"one picture in {every}" if every > 1 else ""]
    packed = base64.b64encode(zlib.compress(kept.tobytes(), 6)).decode()
    per_frame = max(1, round(steps / count)) * every
    return {
        "width": kept.shape[2], "height": kept.shape[1], "count": len(kept), "every": per_frame, "pixels": packed,
        "note": "; ".join(filter(None, notes)),
    }  # fmt: skip


def _canvases(films: Mapping[str, Mapping[str, Any]]) -> Markup:
    drawn = join(
        section(path, tag("canvas", width=f["width"], height=f["height"], class_="frames", data_field=path,
                          style=f"width:{min(640, max(168, 2 * f['width']))}px"), tag("figcaption", f["note"]))
        for path, f in films.items()
    )  # fmt: skip
    return tag("div", drawn, class_="films") if drawn else drawn


def _curves(curves: Mapping[str, Mapping[str, frames.Array]], parts: Mapping[str, Any]) -> Markup:
    return join(_curve(path, lines, frames.components(parts[path])) for path, lines in curves.items())


def _curve(path: str, lines: Mapping[str, frames.Array], components: int) -> Markup:
    """The lines of a field; above them the values at the step shown, below from where to where they go."""
    if not len(next(iter(lines.values()))):
        return Markup("")
    drawn = charts.lines(lines, width=960, height=90, axis=False)
    known = np.concatenate([v[np.isfinite(v)] for v in lines.values()])
    span = f"{shown(float(known.min()))} … {shown(float(known.max()))}" if len(known) else "no finite value"
    left = f"; the first {len(lines)} of {components} are shown" if components > len(lines) else ""
    keys = [
        tag("span", tag("i", style=f"background:{charts.COLORS[i % len(charts.COLORS)]}"), name, tag("b"), class_="key")
        for i, name in enumerate(lines)
    ]
    box = tag("div", drawn, tag("div", class_="cursor"), class_="curve", data_field=path)
    return section(path, tag("div", *keys, class_="keys"), box, tag("figcaption", span + left))


def _values(lines: Mapping[str, frames.Array]) -> dict[str, Any]:
    """The numbers of all lines, one after the other, as float32 where that has the digits that are shown."""
    every = np.stack(list(lines.values()))
    wide = np.abs(every[np.isfinite(every)]).max(initial=0) > EXACT_FLOAT32
    packed = every.astype("<f8" if wide else "<f4")
    text = base64.b64encode(packed.tobytes()).decode()
    return {"length": every.shape[1], "width": packed.dtype.itemsize, "values": text}


def _texts(said: Mapping[str, texts.Texts], *, written: bool) -> Markup:
    chosen = [path for path, text in said.items() if text.written is written]
    return join(section(path, tag("pre", class_="text", data_field=path)) for path in chosen)


def _whole(leaves: Mapping[str, Any]) -> Markup:
    """What belongs to the episode and not to its steps."""
    rows = [[path, texts.told(leaf)] for path, leaf in leaves.items()]
    return section("Of the whole episode", table(("field", "value"), rows)) if rows else Markup("")
