"""Cost. The figures of a run, or an archive that has them, come in; dollars a day and a month come out, by cause and
store, and what to change first."""

from __future__ import annotations

from archive.costs.bill import Cost, cost
from archive.costs.workload import Workload
from archive.store import PRICES, Prices

__all__ = ["PRICES", "Cost", "Prices", "Workload", "cost"]
