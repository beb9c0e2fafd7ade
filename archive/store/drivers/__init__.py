"""Drivers: one kind of store each. A key and bytes come in; bytes, or the client's own exception, go out."""

from __future__ import annotations

from archive.store.drivers.driver import LARGEST_PUT_BYTES, PAGE, Buffer, Driver, Listed, Location, ObjectInfo, Write
from archive.store.drivers.failures import Cause, answered, chain_of, judge, unreached
from archive.store.drivers.registry import open_driver, register, similar_protocols
from archive.store.drivers.s3transport import OWN_OPTIONS
from archive.store.drivers.wrappers import DelegatingDriver, SingleWriterDriver

__all__ = [
    "LARGEST_PUT_BYTES",
    "OWN_OPTIONS",
    "PAGE",
    "Buffer",
    "Cause",
    "DelegatingDriver",
    "Driver",
    "Listed",
    "Location",
    "ObjectInfo",
    "SingleWriterDriver",
    "Write",
    "answered",
    "chain_of",
    "judge",
    "open_driver",
    "register",
    "similar_protocols",
    "unreached",
]
