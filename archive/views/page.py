"""Pure, no I/O: self-contained pages of a checkpoint or a plan, and what all pages share. They load and run nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from archive.views import room, summaries
from archive.views.markup import Markup, facts, tag
from archive.views.rows import listed

# Nothing from elsewhere, whatever a text from the bucket might say: style and script are the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LISTING = (("page", "rows"), ("rows",))  # styles and scripts of a page that lists episodes


class Framed:
    """A page in a frame of a notebook. It may run its script there, and reaches nothing of the notebook."""

    def __init__(self, text: str, height: int) -> None:
        self.text, self.height = text, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{int(self.height)}px;border:0"
        return tag("iframe", srcdoc=self.text, sandbox="allow-scripts", style=style)


def checkpoint(
    about: Mapping[str, Any], found: Any, fields: Mapping[str, str], per_rank: Mapping[int, int], buffers: Any,
    discarded: Any, progress: Any,
) -> str:  # fmt: skip
    """A page of a checkpoint: its ranks and buffers, and how its episodes are spread."""
    parts = summaries.checkpoint_parts(per_rank, buffers, discarded, progress)
    place, rows = listed(found)
    content = [facts(about), parts, summaries.overview(found, fields, rows=place)]
    return document(f"{about['name']} of run {about['run']}", content, rows, *LISTING)


def plan(about: Mapping[str, Any], moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any) -> str:
    """A page of a plan: which ranks get what of which."""
    title = f"{about['checkpoint']}: {about['source ranks']} ranks to {about['target ranks']}"
    return document(title, [facts(about), summaries.plan_parts(moved, ranks, dropped, about)])


def document(
    title: str, content: list[Any], played: Any = None, own: tuple[str, ...] = ("page",),
    scripts: tuple[str, ...] | None = None,
) -> str:  # fmt: skip
    """The whole page. `played`: what the scripts show.  own: names of the style sheets and, unless others are named, of
    the scripts."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY), tag("title", title),
        *(tag("style", Markup(_own(f"{name}.css"))) for name in own),
    )  # fmt: skip
    body = [tag("h1", title), *content]
    if played:
        body.append(tag("script", Markup(room.as_script(played)), type="application/json", id="data"))
        body += [tag("script", Markup(_own(f"{name}.js"))) for name in reversed(own if scripts is None else scripts)]
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _own(name: str) -> str:
    return resources.files("archive.views").joinpath(name).read_text("utf-8")
