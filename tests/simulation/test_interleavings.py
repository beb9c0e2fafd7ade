"""All interleavings of two short parties, up to a number of preemptions."""

from __future__ import annotations

import pytest

from tests.support.sampling import few_of
from tests.support.simulation.commits import LOG
from tests.support.simulation.histories import History, every

pytestmark = pytest.mark.usefixtures("simulated")

PAIRS = {
    "both open a session of one run, and commit": "A.begin:0 A.commit:1 B.begin:0 B.commit:3",
    "one opens a session and commits, the other forgets": "A.begin:1 A.commit:5 B.forget:3",
    "one loses an answer": "A.begin:1 A.commit:5 B.forget:3 A!lost:5",
}


@pytest.mark.parametrize("preemptions", few_of([2, 3], 1))
@pytest.mark.parametrize("words", PAIRS.values(), ids=PAIRS)
def test_all_interleavings_of_two_parties(words: str, preemptions: int) -> None:
    found = [one.error for one in every(History.parse(f"seed=1 kind={LOG.name} by=default {words}"), preemptions)]
    print(f"{len(found)} interleavings with at most {preemptions} preemptions")
    assert len(found) > 50
    assert not any(found)
