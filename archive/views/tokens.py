"""Pure, no I/O: the text of each token of a list of ids, by what makes text of several ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from archive.base import UsageError

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # what a tokenizer says for bytes that are no whole character yet
MAX_UNFINISHED = 8  # tokens that one character may take; longer runs are shown as they are


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """One text a token; joined they are the text of all.

    A character of several tokens is shown at the last of them. Without `decode`, and for ids below 0 (padding), the id.
    """
    if decode is None:
        return [str(i) for i in ids]
    out: list[str] = []
    start = 0
    for stop in range(len(ids) + 1):
        if stop < len(ids) and ids[stop] >= 0:
            continue
        out += _run(ids[start:stop], decode)
        out += [f"⟨{ids[stop]}⟩"] if stop < len(ids) else []
        start = stop + 1
    return out


def _run(ids: Sequence[int], decode: Decode) -> list[str]:
    """Each token decoded together with those before that its text may depend on, such as a space between words."""
    out: list[str] = []
    before, begin = 0, 0  # ids [before, begin) are shown and give the next ones their context
    for end in range(1, len(ids) + 1):
        known = _decoded(ids[before:begin], decode)
        text = _decoded(ids[before:end], decode)
        if text.endswith(UNFINISHED) and end - begin < MAX_UNFINISHED and end < len(ids):
            out.append("")
            continue
        out.append(text[len(known) :] if text.startswith(known) else _decoded(ids[begin:end], decode))
        before, begin = begin, end
    return out


def _decoded(ids: Sequence[int], decode: Decode) -> str:
    if not ids:
        return ""
    try:
        text = decode(list(ids))
    except Exception as e:
        raise UsageError(
            f"the tokenizer failed on the ids {list(ids)} ({type(e).__name__}: {e}); give the one that made them"
        ) from e
    if not isinstance(text, str):
        raise UsageError(
            f"the tokenizer made a {type(text).__name__} of ids; give a function of a list of ids that returns text, "
            "something with such a decode(), or the name of one"
        )
    return text
