"""What makes text of token ids, from what users give: a function, a tokenizer, or the name of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from archive.base import MissingPackageError, UsageError
from archive.views.tokens import Decode


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
