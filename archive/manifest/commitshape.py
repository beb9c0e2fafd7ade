"""Pure, no I/O: what the body of a commit must hold, as far as readers go by it. archive/FORMAT.md says what it means."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from archive.base import misshapen

_NULL = type(None)
_FILE = {"path": str, "rows": int, "bytes": int, "crc32c": int, "commit?": [int]}
_MARK = {"name": str, "step": int, "ordinal": int, "session": str, "commit": int}
_RUN = {
    "session": str, "superseded?": [str], "sequences?": {str: int}, "latest?": _MARK, "latest_replay?": _MARK,
    "resumed_from?": {"session": str, "commit": int},
    "forked_from?": {"run": str, "name": (str, _NULL), "commit": (int, _NULL)},
}  # fmt: skip
_CHECKPOINT = {
    "name": str, "step": int, "ordinal": int, "world_size": int, "whole": bool, "replay_saved?": bool,
    "sequences?": {str: int}, "missing": [{"rank": int, "last_whole": (int, _NULL)}],
    "ranks": [{"rank": int, "key": str, "nonce": str}],
    "buffers": {str: {"steps": int, "episodes": int, "columns": [str]}},
    "discarded": {str: {"episodes": int, "steps": int}}, "metrics": {str: (int, float)}, "lineage": dict,
}  # fmt: skip
_COMMIT = {
    "archive": str, "number": int, "parent": (str, _NULL), "transaction": str, "nonce": str, "created_at": str,
    "library": str, "kind": str, "run?": str, "session?": str, "runs?": {str: _RUN}, "segments?": [_FILE],
    "checkpoints?": [_FILE], "branches?": [_FILE], "bases?": {str: {"url": str}}, "added?": {str: int}, "message?": (str, _NULL),
}  # fmt: skip
_OPTIONAL = {"chunks": _FILE, "live": _FILE, "checkpoint": _CHECKPOINT}  # null where there is none


def problem(body: dict[str, Any]) -> str:
    """Where the body of a commit is not what it must be, in words; empty if it is."""
    if found := misshapen(body, _COMMIT):
        return found
    for name, shape in _OPTIONAL.items():
        if body.get(name) is not None and (found := misshapen(body[name], shape, name)):
            return found
    try:
        datetime.fromisoformat(body["created_at"])
    except ValueError:
        return "created_at is no time"
    return next(
        (f"{name} has less than nothing" for name, ref in _files(body) if min(ref["rows"], ref["bytes"]) < 0), ""
    )


def _files(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    lists = [(kind, ref) for kind in ("segments", "checkpoints", "branches") for ref in body.get(kind, [])]
    return lists + [(kind, body[kind]) for kind in ("chunks", "live") if body.get(kind)]
