"""The simulator finds each fault that was there once, where what keeps it out is taken out."""

from __future__ import annotations

import pytest

from tests.support.sampling import fresh_seed
from tests.support.simulation.histories import History, run
from tests.support.simulation.known_faults import KNOWN_FAULTS, KnownFault
from tests.support.simulation.library import forget_the_last
from tests.support.simulation.promises import JOBS

pytestmark = pytest.mark.usefixtures("simulated")

CPU_S = 60.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [one for one in KNOWN_FAULTS if one.given], ids=lambda one: one.name)
def test_a_known_fault_is_seen_in_its_shortest_history(fault: KnownFault) -> None:
    history = History.parse(f"seed=1 kind={JOBS.name} by=default {fault.given}")
    with fault.back():
        assert run(history).error is not None
    forget_the_last()
    assert run(history).error is None


@pytest.mark.timeout(900)  # a minute of CPU at the most
@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda one: one.name)
def test_a_known_fault_is_found(fault: KnownFault) -> None:
    _find(fault, 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda one: one.name)
def test_a_known_fault_is_found_by_fresh_seeds(fault: KnownFault) -> None:
    _find(fault, fresh_seed())


def _find(fault: KnownFault, first: int) -> None:
    histories, seconds, error = fault.found(first, CPU_S)
    print(f"{fault.name}: {histories} histories, {seconds:.1f} s")
    assert error is not None, f"{histories} histories in {seconds:.1f} s did not show: {fault.name}"
