"""Pure, no I/O: the requests of a block of code, to be counted and looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from archive.base import UsageError
from archive.store import VERBS

if TYPE_CHECKING:
    import pandas as pd


def check_verb(verb: str) -> str:
    """The verb itself, or "any"; UsageError for all else."""
    if verb != "any" and verb not in VERBS:
        raise UsageError(f"{verb!r} is no operation of a store: give one of {', '.join(VERBS)}, or any")
    return verb


@dataclass
class Traced:
    """One request to a store; each try is one, and so is each range of several.

    at_s: when it began, since the trace did.  start, stop: of the range that a get asks for.  error: the name of the
    client's exception, or empty; it may have been tried again.
    """

    verb: str
    url: str
    key: str
    start: int | None = None
    stop: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    at_s: float = 0.0
    seconds: float = 0.0
    error: str = ""


@dataclass
class Trace:
    """The requests of a block: `rows` in the order in which they began."""

    rows: list[Traced] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many there were."""
        return len(self.rows)

    @property
    def bytes_in(self) -> int:
        """What came."""
        return sum(row.bytes_in for row in self.rows)

    @property
    def bytes_out(self) -> int:
        """What was sent; that of tries that failed, too."""
        return sum(row.bytes_out for row in self.rows)

    @property
    def bytes(self) -> int:
        """What came and what was sent."""
        return self.bytes_in + self.bytes_out

    def of(self, verb: str = "any", key: str = "") -> Trace:
        """Those of a verb (get, put, create, list, delete, head or copy) whose key has this text in it."""
        check_verb(verb)
        return Trace([row for row in self.rows if verb in ("any", row.verb) and key in row.key])

    def count(self, verb: str = "any", key: str = "") -> int:
        """How many requests of a verb there were, of keys with this text in them."""
        return self.of(verb, key).requests

    def to_pandas(self) -> pd.DataFrame:
        """A row a request."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows], columns=list(Traced.__dataclass_fields__))

    def __str__(self) -> str:
        verbs = dict.fromkeys(row.verb for row in self.rows)
        counts = ", ".join(f"{self.count(verb)} {verb}" for verb in verbs) or "no requests"
        return f"{counts}; {self.bytes_in:,} bytes in, {self.bytes_out:,} out"
