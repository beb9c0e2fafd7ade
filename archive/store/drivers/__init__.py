"""Drivers: one kind of store each. A key and bytes come in; bytes, or the client's own exception, go out."""

from __future__ import annotations

from archive.store.drivers.alone import SingleWriterDriver
from archive.store.drivers.failures import Kind, chain_of, judge, unreached
from archive.store.drivers.protocols import PAGE, Buffer, DeleteMany, Driver, Found, GetRanges, Info, Place, Scatter
from archive.store.drivers.registry import open_driver, register, similar_protocols
from archive.store.drivers.s3transport import OWN_OPTIONS

__all__ = [
    "OWN_OPTIONS",
    "PAGE",
    "Buffer",
    "DeleteMany",
    "Driver",
    "Found",
    "GetRanges",
    "Info",
    "Kind",
    "Place",
    "Scatter",
    "SingleWriterDriver",
    "chain_of",
    "judge",
    "open_driver",
    "register",
    "similar_protocols",
    "unreached",
]
