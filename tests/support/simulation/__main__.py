"""`python -m tests.support.simulation 'seed=7 kind=log ...' ...`: the digest of each history, and its failure. With
`--trace`, all that happened."""

from __future__ import annotations

import sys
import traceback

from tests.support.simulation.commits import LOG
from tests.support.simulation.histories import KINDS, History, run
from tests.support.simulation.library import forget_the_last, replaced
from tests.support.simulation.promises import JOBS

assert [*KINDS.values()] == [LOG, JOBS]  # each module adds its own


def main(words: list[str]) -> None:
    for text in (word for word in words if word != "--trace"):
        found = run(History.parse(text))
        forget_the_last()
        if "--trace" in words:
            print("\n".join(found.trace))
        print(found.digest)
        if found.error is not None:
            traceback.print_exception(found.error)


if __name__ == "__main__":
    with replaced():
        main(sys.argv[1:])
