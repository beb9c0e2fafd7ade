"""Pure, no I/O: self-contained HTML pages of an episode, a checkpoint or a plan. They load nothing and run nothing else."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np

from archive.views import charts, frames, summaries
from archive.views.markup import Markup, facts, join, section, tag

MAX_FILM_BYTES = 24 * 1024 * 1024  # of one field's pictures; of more, every second, third, ... is shown
MAX_TEXT = 20_000  # of one step
# Nothing from elsewhere, whatever a text from the bucket might say: style and script are the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def episode(about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any) -> str:
    """A page of one episode: curves, pictures that play, and the text of each step. `data` is what reading it gave."""
    parts = dict(frames.leaves(data))
    films = {path: f for path, leaf in parts.items() if (f := frames.as_frames(leaf)) is not None}
    curves = {path: c for path, leaf in parts.items() if path not in films and (c := frames.as_curves(leaf))}
    texts = {path: [t[:MAX_TEXT] for t in x] for path, leaf in parts.items() if (x := frames.as_texts(leaf))}
    steps = int(about["steps"])
    content = [
        facts(about), _player(steps), _canvases(films), _curves(curves), _texts(texts),
        summaries.episode_parts(fields, metadata, attributes),
    ]  # fmt: skip
    played = {"steps": steps, "films": {path: _film(f, steps) for path, f in films.items()}, "texts": texts}
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


def _film(shots: frames.Array, steps: int) -> dict[str, Any]:
    """Deflated pixels of all pictures, or of every n-th where they are too many."""
    every = max(1, -(-shots.nbytes // MAX_FILM_BYTES))
    kept = np.ascontiguousarray(shots[::every])
    packed = base64.b64encode(zlib.compress(kept.tobytes(), 6)).decode()
    per_frame = max(1, round(steps / len(shots))) * every
    return {"width": shots.shape[2], "height": shots.shape[1], "count": len(kept), "every": per_frame, "pixels": packed}


def _canvases(films: Mapping[str, frames.Array]) -> Markup:
    return join(
        section(path, tag("canvas", width=f.shape[2], height=f.shape[1], class_="frames", data_field=path,
                          style=f"width:{min(640, max(168, 2 * f.shape[2]))}px"))
        for path, f in films.items()
    )  # fmt: skip


def _curves(curves: Mapping[str, Mapping[str, frames.Array]]) -> Markup:
    out = []
    for path, lines in curves.items():
        drawn = charts.lines(lines, width=960, height=90, axis=False)
        if drawn:
            known = np.concatenate([v[np.isfinite(v)] for v in lines.values()])
            span = f"{known.min():.5g} … {known.max():.5g}"
            box = tag("div", drawn, tag("div", class_="cursor"), class_="curve")
            out.append(section(path, box, tag("figcaption", span)))
    return join(out)


def _texts(texts: Mapping[str, list[str]]) -> Markup:
    return join(section(path, tag("pre", class_="text", data_field=path)) for path in texts)
