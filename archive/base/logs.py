"""Pure, no I/O: what the library logs, made visible: the logger "archive" passes nothing on that acts on a terminal."""

from __future__ import annotations

import logging
import traceback

from archive.base.plaintext import one_line, visible

logger = logging.getLogger("archive")  # the one that all rooms log by


class _Visible(logging.Filter):
    """Writes messages, a line each, and tracebacks out, once, with nothing in them that acts."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = one_line(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True


def make_visible() -> None:
    """From now on, whatever the library logs."""
    if not any(type(one).__name__ == _Visible.__name__ for one in logger.filters):
        logger.addFilter(_Visible())
