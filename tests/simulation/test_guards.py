"""The simulator finds each fault that was there once, when what keeps it out is taken out."""

from __future__ import annotations

import pytest

from tests.support.sampling import fresh_seed
from tests.support.simulation.guards import GUARDS, Guarded
from tests.support.simulation.histories import History, run
from tests.support.simulation.library import forget_the_last
from tests.support.simulation.promises import JOBS

pytestmark = pytest.mark.usefixtures("simulated")

CPU_S = 60.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("guard", [one for one in GUARDS if one.given], ids=lambda one: one.fault)
def test_what_a_guard_keeps_out_is_seen_in_its_shortest_history(guard: Guarded) -> None:
    history = History.parse(f"seed=1 kind={JOBS.name} by=default {guard.given}")
    with guard.taken_out():
        assert run(history).error is not None
    forget_the_last()
    assert run(history).error is None


@pytest.mark.timeout(900)  # a minute of CPU at the most
@pytest.mark.parametrize("guard", [one for one in GUARDS if not one.slow], ids=lambda one: one.fault)
def test_what_a_guard_keeps_out_is_found_without_it(guard: Guarded) -> None:
    _find(guard, 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("guard", GUARDS, ids=lambda one: one.fault)
def test_what_a_guard_keeps_out_is_found_by_fresh_seeds(guard: Guarded) -> None:
    _find(guard, fresh_seed())


def _find(guard: Guarded, first: int) -> None:
    histories, seconds, error = guard.found(first, CPU_S)
    print(f"{guard.fault}: {histories} histories, {seconds:.1f} s")
    assert error is not None, f"{histories} histories in {seconds:.1f} s did not show: {guard.fault}"
