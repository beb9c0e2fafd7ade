"""Drivers: one kind of store each. A key and bytes come in; bytes, or the client's own exception, go out."""

from __future__ import annotations

from archive.store.drivers.failures import Cause, chain_of, judge, unreached
from archive.store.drivers.protocols import (
    PAGE,
    Buffer,
    Copy,
    Create,
    DeleteMany,
    Driver,
    GetRanges,
    Listed,
    Location,
    ObjectInfo,
    Scan,
    Scatter,
    Tell,
)
from archive.store.drivers.registry import open_driver, register, similar_protocols
from archive.store.drivers.s3transport import OWN_OPTIONS
from archive.store.drivers.wrappers import DelegatingDriver, SingleWriterDriver

__all__ = [
    "OWN_OPTIONS",
    "PAGE",
    "Buffer",
    "Cause",
    "Copy",
    "Create",
    "DelegatingDriver",
    "DeleteMany",
    "Driver",
    "GetRanges",
    "Listed",
    "Location",
    "ObjectInfo",
    "Scan",
    "Scatter",
    "SingleWriterDriver",
    "Tell",
    "chain_of",
    "judge",
    "open_driver",
    "register",
    "similar_protocols",
    "unreached",
]
