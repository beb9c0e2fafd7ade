"""`archive view`: the archive in a browser, until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from archive.base import UsageError
from archive.cli import output
from archive.cli.options import Target, on_archive

LOOPBACK = "127.0.0.1"


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: one that is free.")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    metavar="ADDRESS",
    help="Another lets other machines in, who have the URL; it is not encrypted.",
)
@click.option("--read-only", is_flag=True, help="Nobody may label here.")
@click.option("--labels", "file", metavar="FILE", help="JSON of the labels that one may set, and their keys.")
@click.option("--by", metavar="NAME", help="Who labels. Default: the name you are logged in by.")
@click.option("--tokenizer", metavar="NAME", help="Makes text of token ids: of the package tokenizers or transformers.")
@click.option(
    "--at", default="", metavar="PLACE", help="What to show first, as the viewer copies it: '#/episode?id=...'."
)
@click.option("--no-browser", is_flag=True, help="Only print the URL.")
@on_archive()
def view(
    target: Target,
    port: int,
    host: str,
    read_only: bool,
    file: str | None,
    by: str | None,
    at: str,
    tokenizer: str | None,
    no_browser: bool,
) -> None:
    """Look at episodes and checkpoints in a browser, and label them.

    Prints a URL with a token, without which nothing is shown; serves this machine alone, until Ctrl-C.
    """
    from archive.view import Settings, alone, serve

    who = by or os.environ.get("USER") or os.environ.get("USERNAME")
    arc, settings = target.open(), Settings(read_only, _labels(file), who, tokenizer)
    with _until_told(), serve(arc, host=host, port=port, settings=settings) as viewer:
        place = f"#{at.removeprefix('#')}" if at else ""
        url = viewer.url + place
        target.answer({"url": url}, f"{url}\nshows {target.url} until Ctrl-C")
        sys.stdout.flush()
        if not alone(host):
            output.say("warning: other machines can come in, with this URL; nothing is encrypted on the way", err=True)
        if not no_browser and _desktop():
            webbrowser.open(viewer.url_once() + place)
        viewer.wait()


@contextmanager
def _until_told() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is within, and are no error."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _labels(file: str | None) -> tuple[dict[str, Any], ...]:
    if file is None:
        return ()
    from archive.view import labels_of

    try:
        return labels_of(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"--labels {file} cannot be read as JSON: {e}") from e


def _desktop() -> bool:
    """True if somebody sits before this machine, rather than at the end of a line."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
