"""Drivers: one kind of filesystem each. A key and bytes come in; bytes, or the filesystem's own exception, go
out."""

from __future__ import annotations

from archive.store.drivers.failures import GaveUpError, Kind, described, explain, judge, printable_cause, unreached
from archive.store.drivers.local import LocalDriver
from archive.store.drivers.remote import ConditionalDriver, FsspecDriver, create_alone, default_options, driver_for

__all__ = [
    "ConditionalDriver",
    "FsspecDriver",
    "GaveUpError",
    "Kind",
    "LocalDriver",
    "create_alone",
    "default_options",
    "described",
    "driver_for",
    "explain",
    "judge",
    "printable_cause",
    "unreached",
]
