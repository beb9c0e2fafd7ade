"""An archive on a port of this machine, for a browser or a cell of a notebook."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from archive.base import ArchiveError, MissingPackageError
from archive.view.routes import application
from archive.view.server import LOOPBACK, Server
from archive.view.shown import Settings, Shown

if TYPE_CHECKING:
    from archive import Archive

STOP_S = 5.0


class Viewer:
    """A viewer that runs until it is closed: `with archive.view.serve(arc) as v: print(v.url)`. In a notebook it shows
    itself."""

    def __init__(self, shown: Shown, **how: Any) -> None:
        try:
            self._server = Server(application(shown), **how)
        except ImportError as e:
            raise MissingPackageError(f"the viewer needs more ({e}): pip install 'trajectory-archive[view]'") from e
        self._server.start()
        self._warming = threading.Thread(target=_warmed, args=(shown,), name="archive-view-warm", daemon=True)
        self._warming.start()

    @property
    def url(self) -> str:
        """The URL to open in a browser. Everybody who has it may look: pass it on to nobody."""
        return self._server.url

    def url_once(self) -> str:
        """A URL for the command line of a browser, which every user of this machine sees: a URL that opens it once,
        and whoever has opened it goes on."""
        return self._server.url_once()

    @property
    def origin(self) -> str:
        """The URL of the server, without the token."""
        return self._server.origin

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Block until it is closed, or Ctrl-C, or a call says so."""
        self._server.wait(interrupted)

    def close(self) -> None:
        """Serve no more."""
        self._server.close()
        self._warming.join(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{html.escape(self.url)}" width="100%" height="720" style="border:0" referrerpolicy="origin" '
            'allow="clipboard-write"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Viewer at {self.origin}>"


def _warmed(shown: Shown) -> None:
    """Begins while the browser opens; what goes wrong is told to whoever asks."""
    with contextlib.suppress(ArchiveError):
        shown.warm()


def serve(arc: Archive, *, host: str = LOOPBACK, port: int = 0, settings: Settings | None = None) -> Viewer:
    """Show an archive to browsers on this machine, from now on, in the background.

    MissingPackageError without the extra `view`, UsageError where the port cannot be had.
    """
    return Viewer(Shown(arc, settings), host=host, port=port)
