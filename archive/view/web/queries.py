"""Pure, no I/O: what a request asks for, as values that are checked where they are taken out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from archive.base import UsageError

MAX_NUMBER = 2**53  # what a browser's numbers hold


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request, those of its path among them, and its JSON body."""

    given: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)

    def text(self, name: str, default: str = "") -> str:
        """A text; the default where it is not given."""
        return self.given.get(name, default)

    def needed(self, name: str) -> str:
        """A text that must be given, or a UsageError."""
        if not (text := self.text(name)):
            raise UsageError(f"{name}= is missing in the request: give it")
        return text

    def number(self, name: str, default: int) -> int:
        """A whole number that is not negative, or a UsageError."""
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > MAX_NUMBER:
            raise UsageError(f"{name}={text[:40]!r} is no number from 0 to {MAX_NUMBER}")
        return int(text)

    def flag(self, name: str) -> bool:
        """Whether it is given as 1."""
        return self.text(name) == "1"

    def names(self, name: str) -> list[str]:
        """Several texts, given as a JSON list of them; none where it is not given."""
        return _texts(name, self.text(name)) if self.text(name) else []

    def document(self) -> Any:
        """The body as JSON, or a UsageError."""
        return _parsed("the request's body", self.body)


def _texts(name: str, text: str) -> list[str]:
    found = _parsed(f"{name}=", text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"{name}= is no JSON list of texts")
    return found


def _parsed(what: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{what} is no JSON: {e}") from e
