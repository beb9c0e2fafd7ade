"""Pure, no I/O: what one may set in the viewer, as a small JSON says it."""

from __future__ import annotations

from typing import Any

from archive.base import UsageError

KINDS = ("flag", "choice", "number", "note")
_EXAMPLE = '[{"key": "success", "kind": "flag"}, {"key": "quality", "kind": "choice", "values": ["bad", "ok", "good"]}]'


def labels_of(document: Any) -> tuple[dict[str, Any], ...]:
    """The labels of a list of {key, kind, values of a choice, least and most of a number}; UsageError for anything
    else, which says what is right."""
    if not isinstance(document, list) or not document:
        raise UsageError(f"labels are a list, such as {_EXAMPLE}")
    return tuple(_label(one) for one in document)


def _label(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("key"), str) or given.get("kind", "flag") not in KINDS:
        raise UsageError(f"{given!r:.100} is no label: it has a key and a kind of {', '.join(KINDS)}, as in {_EXAMPLE}")
    if given.get("kind") == "choice" and not _choices(given.get("values")):
        raise UsageError(f"label {given['key']!r}: a choice has `values`, a list of texts or numbers")
    return {"kind": "flag", **given}


def _choices(values: Any) -> bool:
    return isinstance(values, list) and 0 < len(values) <= 50 and all(isinstance(v, (str, int, float)) for v in values)
