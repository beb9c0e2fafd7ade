"""Texts of token ids: what makes text of several ids, from what users give, and the text of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from archive.base import MissingPackageError, UsageError

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # what a tokenizer says for bytes that are no whole character yet
MAX_UNFINISHED = 8  # tokens that one character may take; longer runs are shown as they are


def decoder(tokenizer: Any) -> Decode | None:
    """A function of a list of ids that returns text.

    tokenizer: such a function, something with such a `decode` (of tokenizers, transformers, tiktoken), or a name: a
    folder or file, or what the Hugging Face Hub calls it; that needs the package transformers or tokenizers.
    None: none.
    """
    if tokenizer is None:
        return None
    found = _named(str(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
    decode = getattr(found, "decode", None)
    if decode is None and callable(found):
        decode = found
    if decode is None or isinstance(found, type):
        raise UsageError(
            f"tokenizer={tokenizer!r} is none: give a function of a list of ids, something with a decode(), or a name"
        )
    package = type(found).__module__.partition(".")[0]
    if package in ("tokenizers", "transformers"):  # they leave special tokens out unless asked for
        exact: Decode = partial(decode, skip_special_tokens=False)
        return exact
    given: Decode = decode
    return given


def _named(name: str) -> Any:
    """The tokenizer of that name, by whichever package is there."""
    try:
        return _loaded(name)
    except (ImportError, MissingPackageError) as e:
        raise MissingPackageError(
            f"tokenizer {name!r} needs the package transformers or tokenizers ({e}): pip install tokenizers, or give a "
            "function of a list of ids as tokenizer="
        ) from e
    except Exception as e:  # each package has errors of its own for a name that leads nowhere
        raise UsageError(
            f"there is no tokenizer {name!r} that can be loaded ({type(e).__name__}: {e}); give the folder or "
            "tokenizer.json of one, or its name on the Hugging Face Hub"
        ) from e


def _loaded(name: str) -> Any:
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    try:
        from transformers import AutoTokenizer
    except ImportError:
        from tokenizers import Tokenizer

        return Tokenizer.from_pretrained(name)
    return AutoTokenizer.from_pretrained(name)


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
    """Decode each token together with those before that its text may depend on, such as a space between words."""
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
