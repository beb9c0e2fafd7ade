"""Pure, no I/O: the conversation of a language rollout as a part of a page."""

from __future__ import annotations

from typing import Any

from archive.views import turns
from archive.views.budget import FIELD_BYTES, Shown, json_bytes
from archive.views.markup import Markup, tag
from archive.views.rollouts import Rollout
from archive.views.tokens import Decode

_NO_TEXTS = "Tokens are shown by their ids; to_html(tokenizer=...) or --tokenizer shows their text."


class Conversation:
    """What was said in a rollout, and what is known of each token; `decode` makes text of token ids."""

    kind = place = path = "rollout"

    def __init__(self, rollout: Rollout, decode: Decode | None) -> None:
        self.rollout = rollout
        self.has_texts = decode is not None
        self.blocks = turns.blocks_of(rollout, decode)
        self.need = json_bytes(self.blocks) + FIELD_BYTES

    def shown(self, most: int) -> Shown:
        """The first blocks that fit."""
        blocks, left_out = turns.fitted(self.blocks, most - FIELD_BYTES)
        if not blocks:
            return Shown(left_out=left_out)
        return Shown(self._place(), {"blocks": blocks, **turns.about(self.rollout)}, left_out)

    def _place(self) -> Markup:
        """Where the script draws it, and what chooses the colours of its tokens."""
        tools: list[Any] = []
        if self.rollout.tracks:
            tools += [tag("label", "Colour ", tag("select", class_="colour")), tag("span", class_="scale")]
            tools += [tag("label", "Dim ", tag("select", class_="dims"))]
        note = tag("figcaption", _NO_TEXTS) if tools and not self.has_texts else ""
        tools = [tag("div", *tools, class_="tools")] if tools else []
        return tag("section", tag("h4", "Conversation"), *tools, tag("div", class_="turns"), note, class_="rollout")
