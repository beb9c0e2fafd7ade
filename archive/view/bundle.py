"""Does I/O: the viewer's own files as one page, offline: its modules as one script, its styles as one, and answers."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from archive.base import visible

_IMPORT = re.compile(r'^import (?:\* as (?P<all>\w+)|\{(?P<names>[^}]*)\}) from "\./(?P<module>\w+)\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.M)
_LISTED = re.compile(r"^export \{ ([\w, ]+) \};\n", re.M)
_LAZY = re.compile(r'import\("\./(\w+)\.js"\)')
_LEFT = re.compile(r"^\s*(?:import|export)\b.*|\bimport\(.*", re.M)
_STYLE = re.compile(r'<link rel="stylesheet" href="app/([\w./]+)">')
# Puts the styles and the script into the page, by whose digests its policy lets in nothing else.
_LOADER = """(async () => {
  for (const name of ["style", "script"]) {
    const text = atob(document.getElementById(`packed-${name}`).textContent);
    const bytes = Uint8Array.from(text, (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const made = document.createElement(name);
    made.textContent = await new Response(stream).text();
    document.head.append(made);
  }
})();"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<script type="application/json" id="saved">{saved}</script>
<script type="text/plain" id="packed-style">{style}</script>
<script type="text/plain" id="packed-script">{script}</script>
</head>
{body}
<script>{loader}</script>
</html>
"""


def page(title: str, saved: dict[str, Any]) -> str:
    """A page that shows what `saved` answers, and runs and loads nothing but the viewer's own script within it."""
    style, script, policy, body = _parts()
    given = {"style": style, "script": script, "policy": policy, "body": body, "loader": _LOADER}
    return _PAGE.format(title=html.escape(visible(title)), saved=as_script(saved), **given)


def as_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def json_bytes(value: Any) -> int:
    """The bytes of a value as it stands in a page."""
    return len(as_script(value))


@cache
def _parts() -> tuple[str, str, str, str]:
    """The packed styles and script, the policy that lets these in alone, and the body that they fill."""
    first = _own("index.html")
    style = "\n".join(_own(name) for name in _STYLE.findall(first))
    script = "\n".join(['"use strict";', _own("vendor/uPlot.iife.min.js"), *_modules("main", {})])
    policy = (
        f"default-src 'none'; script-src {_digest(_LOADER)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    body = first[first.index("<body>") : first.index("</html>")].strip()
    return _packed(style), _packed(script), policy, body


def _modules(name: str, done: dict[str, bool]) -> Iterator[str]:
    """The modules that one needs, each as a constant `$name` of what it exports, before those that import them."""
    if name in done:
        if not done[name]:
            raise ValueError(f"app/{name}.js needs itself: a page holds its modules one after the other")
        return
    done[name] = False
    text = _own(f"{name}.js")
    needed = [match["module"] for match in _IMPORT.finditer(text)] + _LAZY.findall(text)
    for one in needed:
        yield from _modules(one, done)
    names = [*_EXPORT.findall(text), *(one for found in _LISTED.findall(text) for one in found.split(", "))]
    text = _LAZY.sub(r"Promise.resolve($\1)", _LISTED.sub("", _EXPORT.sub("", _IMPORT.sub(_constant, text))))
    if left := _LEFT.search(text):
        raise ValueError(f"app/{name}.js: {left[0].strip()!r} is no import or export that a page can hold")
    done[name] = True
    yield f"const ${name} = (() => {{\n{text}return {{ {', '.join(names)} }};\n}})();"


def _constant(match: re.Match[str]) -> str:
    """An import as a constant."""
    if match["all"]:
        return f"const {match['all']} = ${match['module']};\n"
    return f"const {{{match['names'].replace(' as ', ': ')}}} = ${match['module']};\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@cache
def _own(name: str) -> str:
    """The text of one of the viewer's files."""
    return resources.files("archive.view").joinpath("app", *name.split("/")).read_text("utf-8")
