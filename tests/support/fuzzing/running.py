"""Runs a parser on many invalid inputs in a child process, and says what escaped: errors that are not the library's,
time, memory, a crash.

`python -m tests.support.fuzzing.running COUNT [SEED] [NAME ...]` is that for all parsers or some, with all bombs of
these before; what it prints of a finding (`NAME COUNT SEED`) makes the same input again: `input_of`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from archive.base import ArchiveError
from tests.support.limits import StuckError, limited, peak_bytes

MAX_S = 1.0  # of processor time, of one input
MAX_BYTES = 256 << 20  # beyond what the process had before
STUCK_S = 20  # after so long an input is given up
_ROOM_BYTES = 2 << 30  # of addresses, so that a bomb is a MemoryError before the machine is full


@dataclass
class Findings:
    """What became of the inputs of one parser. escaped: what went wrong -> (how often, its first input, where)."""

    name: str
    tried: int = 0
    refused: int = 0
    escaped: dict[str, list[Any]] = field(default_factory=dict)
    slowest_s: float = 0.0
    most_bytes: int = 0

    def add(self, what: str, number: int, where: str = "") -> None:
        found = self.escaped.setdefault(what, [0, number, where])
        found[0] += 1

    def __str__(self) -> str:
        head = f"{self.name}: {self.tried} inputs, {self.refused} refused, slowest {self.slowest_s:.2f} s, most memory "
        lines = [f"  {n} x {what}\n    input {i}: {where}" for what, (n, i, where) in self.escaped.items()]
        return "\n".join([f"{head}{self.most_bytes >> 20} MB", *lines])


def input_of(parser: Any, seeds: Sequence[Any], name: str, seed: int, number: int) -> Any:
    """Input `number` of a parser; those below 0 are its bombs."""
    if number < 0:
        return next(itertools.islice(parser.bombs(seeds), -1 - number, None))
    rng = Random(f"{name} {seed} {number}")
    return parser.mutate(rng.choice(seeds), rng)


def run(name: str, parser: Any, count: int, seed: int, first: int = 0) -> Findings:
    """Try all bombs, and inputs [first, first + count), in this process."""
    found = Findings(name)
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "seeds").mkdir()
        seeds = parser.seeds(Path(tmp) / "seeds")
        parse = parser.reader(Path(tmp)) if parser.reader else parser.parse
        for one in seeds[:3]:
            parse(parser.as_input(one))  # what is valid is read; and what is imported is
        for number, bomb in enumerate(parser.bombs(seeds)):
            _try(found, parse, bomb, -1 - number)
        for number in range(first, first + count):
            print(number, file=sys.stderr, flush=True) if os.environ.get("FUZZ_TRACE") else None
            _try(found, parse, input_of(parser, seeds, name, seed, number), number)
    return found


def _try(found: Findings, parse: Any, given: Any, number: int) -> None:
    before, begun = peak_bytes(reset=True), time.process_time()
    try:
        with limited(STUCK_S, _ROOM_BYTES):
            parse(given)
    except ArchiveError as e:
        found.refused += 1
        str(e)
    except StuckError:
        found.add("stuck", number, _place(sys.exc_info()[2]))
    except Exception as e:
        found.add(f"{type(e).__name__} at {_place(e.__traceback__)}", number, repr(str(e))[:160])
    spent_s, grown = time.process_time() - begun, peak_bytes() - before
    found.tried += 1
    found.slowest_s, found.most_bytes = max(found.slowest_s, spent_s), max(found.most_bytes, grown)
    if spent_s > MAX_S:
        found.add(f"takes more than {MAX_S} s", number, f"{spent_s:.1f} s")
    if grown > MAX_BYTES:
        found.add(f"takes more than {MAX_BYTES >> 20} MB", number, f"{grown >> 20} MB")


def _place(trace: Any) -> str:
    """The innermost line of the library, or of all."""
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if "/archive/" in f.filename or "/resharding/" in f.filename] or frames
    return " < ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in reversed(own[-3:]))


def in_child(name: str, parser: Any, count: int, seed: int) -> Findings:
    """As `run`, in a child of this process; a crash is a finding."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        code = 1
        try:
            os.environ["FUZZ_CHILD"] = "1"
            text = json.dumps(vars(run(name, parser, count, seed)))
            with os.fdopen(writer, "w") as out:
                out.write(text)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Findings(**json.loads(text))
    return Findings(name, escaped={f"the process ended with status {status}": [1, -1, "FUZZ_TRACE=1 says where"]})


def main() -> None:
    from tests.support.fuzzing import manifests
    from tests.support.parsers import PARSERS

    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    names = sys.argv[3:] or list(PARSERS)
    if len(names) > 1:
        manifests.archives()  # most take their seeds from these: once, and not in each child
    for name in names:
        begun = time.monotonic()
        print(in_child(name, PARSERS[name], count, seed), f"({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
