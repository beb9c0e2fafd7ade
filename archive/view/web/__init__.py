"""What a browser sends, checked, becomes a Query; a Reply goes back with the headers that keep it where it belongs.
Knows HTTP, and nothing of archives."""

from __future__ import annotations

from archive.view.web.ports import LOOPBACK, alone
from archive.view.web.queries import Query
from archive.view.web.replies import Reply, arrow_reply, bytes_reply, json_reply, text_reply
from archive.view.web.serving import Server

__all__ = [
    "LOOPBACK",
    "Query",
    "Reply",
    "Server",
    "alone",
    "arrow_reply",
    "bytes_reply",
    "json_reply",
    "text_reply",
]
