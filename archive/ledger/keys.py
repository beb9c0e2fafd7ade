"""Pure, no I/O: keys of prompts, as JSON text, and an index of millions of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from archive.base import CorruptManifestError, UsageError, check_text

Key = str | int

_PLAIN = {str, int}
_MAX_BITS = 1024  # of an integer
_AT_ONCE = 65536  # texts that are Python objects at a time


def normalised(given: Any) -> list[Key]:
    """A key, or several, as a list of plain str and int; UsageError for anything else, and for a key that is given
    twice."""
    keys = _listed(given)
    kinds = set(map(type, keys))
    if not kinds <= _PLAIN:
        keys = [_checked_key(key) for key in keys]
    if kinds != {str} and any(type(key) is int and key.bit_length() > _MAX_BITS for key in keys):
        # Python would not read it again from its text
        raise UsageError(f"a key of a ledger is an integer of more than {_MAX_BITS} bits; nothing was changed")
    if len(set(keys)) < len(keys):
        seen: set[Key] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise UsageError(f"key {twice!r:.80} is given twice in one call; nothing was changed")
    try:
        "".join(key for key in keys if type(key) is str).encode()  # all are checked together
    except UnicodeEncodeError:
        for key in keys:
            check_text(str(key), "key")
    return keys


def _listed(given: Any) -> list[Any]:
    if isinstance(given, str) or (isinstance(given, SupportsIndex) and not hasattr(given, "__len__")):
        return [given]
    if isinstance(given, np.ndarray):
        return list(given.reshape(-1).tolist()) if given.ndim < 2 else list(given)
    if isinstance(given, (bytes, bytearray, memoryview)) or not isinstance(given, Iterable):  # bytes: small integers
        return [_checked_key(given)]
    return list(given)


def _checked_key(key: Any) -> Key:
    if isinstance(key, str):
        return str(key)
    if not isinstance(key, (bool, np.bool_, np.ndarray)) and isinstance(key, SupportsIndex):
        return index(key)
    raise UsageError(f"a key of a ledger is a string or an integer, not {key!r:.80}; nothing was changed")


def texts(keys: Iterable[Key]) -> list[str]:
    """Keys as JSON text: one text is one key."""
    quoted = json.encoder.encode_basestring_ascii
    return [quoted(key) if type(key) is str else str(key) for key in keys]


def parsed(many: Sequence[str]) -> list[Key]:
    """The keys of JSON texts; CorruptManifestError if a text is no key."""
    if len(many) > _AT_ONCE:
        return [key for at in range(0, len(many), _AT_ONCE) for key in parsed(many[at : at + _AT_ONCE])]
    try:
        keys = json.loads(f"[{','.join(many)}]")
    except ValueError:
        keys = []
    if len(keys) == len(many) and set(map(type, keys)) <= _PLAIN:
        return list(keys)
    return [_parsed(text) for text in many]


def _parsed(text: str) -> Key:
    try:
        key = json.loads(text)
    except ValueError:
        key = None
    if type(key) not in _PLAIN:
        raise CorruptManifestError(f"a row of a ledger has {text!r:.80}, which is no key; run `archive verify`")
    return key  # type: ignore[no-any-return]


class TextIndex:
    """An index of texts: the places of millions, in some 12 bytes each."""

    def __init__(self, texts: Any) -> None:
        """texts: an Arrow array of strings."""
        self.texts = texts
        parts = (texts[at : at + _AT_ONCE].to_pylist() for at in range(0, len(texts), _AT_ONCE))
        hashes = np.fromiter((hash(text) for part in parts for text in part), np.int64, len(texts))
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def of(self, wanted: Sequence[str]) -> list[int | None]:
        """The place of each text; None where it is not there."""
        hashes = np.fromiter(map(hash, wanted), np.int64, len(wanted))
        low, high = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        out: list[int | None] = [None] * len(wanted)
        for i in np.flatnonzero(low < high).tolist():
            some = self._order[low[i] : high[i]].tolist()
            out[i] = next((place for place in some if self.texts[place].as_py() == wanted[i]), None)
        return out
