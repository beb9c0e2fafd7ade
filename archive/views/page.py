"""Pure, no I/O: what all pages share. They load and run nothing but their own. And what stands in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from archive.views.budget import as_script
from archive.views.markup import Markup, tag

# Nothing from elsewhere, whatever a text from the bucket might say: style and script are the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LISTING = (("page", "rows"), ("rows",))  # styles and scripts of a page that lists episodes


class Framed:
    """A page in a frame of a notebook. It may run its script there, and reaches nothing of the notebook."""

    def __init__(self, text: str, height: int) -> None:
        self.text = text
        self.height = height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{int(self.height)}px;border:0"
        return tag("iframe", srcdoc=self.text, sandbox="allow-scripts", style=style)


def block(heading: str, *content: Any) -> Markup:
    """What a notebook shows, with its own style, which changes nothing around it."""
    return tag("div", _style("notebook"), tag("strong", heading), *content, class_="trajectories")


def document(
    title: str,
    content: Sequence[Any],
    played: Any = None,
    styles: Sequence[str] = ("page",),
    scripts: Sequence[str] = ("page",),
) -> str:
    """The whole page. `played`: what its scripts show; without it there are none."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY), tag("title", title), *map(_style, styles),
    )  # fmt: skip
    body = [tag("h1", title), *content]
    if played:
        body.append(tag("script", Markup(as_script(played)), type="application/json", id="data"))
        body += [tag("script", Markup(own(f"{name}.js"))) for name in ("shared", *scripts)]
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _style(name: str) -> Markup:
    return tag("style", Markup(own(f"{name}.css")))  # ours, and a browser reads no entities inside <style>


@cache
def own(name: str) -> str:
    """The text of one of the files beside this one."""
    return resources.files("archive.views").joinpath(name).read_text("utf-8")
