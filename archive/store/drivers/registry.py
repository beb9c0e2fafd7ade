"""Does no I/O: the drivers by protocol. The only module that imports fsspec.

A new store is a driver in a file of its own, and a line here: of `_DRIVERS` by its protocol, or of `_FILESYSTEMS` where
fsspec has a filesystem for it that only needs its own way to create.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from archive.store.drivers.driver import Driver, Location
from archive.store.drivers.local import LocalDriver
from archive.store.drivers.obstore import ObstoreDriver
from archive.store.drivers.plain import BucketDriver, FsspecDriver, HttpDriver, MemoryDriver
from archive.store.drivers.s3 import S3Driver
from archive.store.drivers.s3transport import open_s3

Opener = Callable[[Location], Driver]


_FILESYSTEMS: dict[str, type[FsspecDriver]] = {  # the package of a filesystem's class, or of one it is made from
    "obstore": ObstoreDriver,
    "s3fs": S3Driver,
    "gcsfs": BucketDriver,
    "adlfs": BucketDriver,
}
_FSSPECS_OWN: dict[str, type[FsspecDriver]] = {  # the very module: what is made from these may work otherwise
    "fsspec.implementations.http": HttpDriver,
    "fsspec.implementations.memory": MemoryDriver,
}


def register(protocol: str, opener: Opener) -> None:
    """Let `opener` serve all URLs of `protocol`, from now on and in this process."""
    _DRIVERS[protocol] = opener


def _open_s3(place: Location) -> Driver:
    """Make the driver of an `s3://` URL, with the options that fsspec's own configuration adds."""
    from fsspec.config import conf
    from fsspec.registry import known_implementations, registry

    module = registry["s3"].__module__ if "s3" in registry else known_implementations["s3"]["class"]
    options = {**conf.get("s3", {}), **place.options}
    return open_s3(replace(place, options=options), _open_filesystem, not module.startswith("s3fs."))


_DRIVERS: dict[str, Opener] = {  # the protocol of a URL -> its driver; others are fsspec's
    "file": LocalDriver,
    "s3": _open_s3,
}


def open_driver(place: Location) -> Driver:
    """The driver of a place; nothing is sent. ImportError or ValueError for an unknown protocol."""
    return _DRIVERS.get(place.protocol, _open_filesystem)(place)


def similar_protocols(protocol: str) -> str:
    """Suggestions for an unknown protocol; empty for a known one."""
    from fsspec import available_protocols

    known = sorted(available_protocols())
    if protocol in known or "::" in protocol:
        return ""
    alike = difflib.get_close_matches(protocol, known, 3, 0.5)
    meant = f"; did you mean {' or '.join(f'{name}://' for name in alike)}?" if alike else ""
    return f"{meant} (known: {', '.join(known)})"


def _open_filesystem(place: Location) -> FsspecDriver:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(place.target, **_all_options(place))
    return _driver_of(type(fs))(fs, path, place)


def _all_options(place: Location) -> dict[str, Any]:
    """The options of each part of a URL: of the first at the top, of those it is chained to below their protocol."""
    from fsspec import get_filesystem_class

    first, *rest = [part.partition("://")[0] for part in place.target.split("::")]
    options = _driver_of(get_filesystem_class(first)).defaults(place.options, place)
    for protocol in rest:
        own = options.get(protocol, {})
        options[protocol] = _driver_of(get_filesystem_class(protocol)).defaults(own, place)
    return options


def _driver_of(filesystem: type) -> type[FsspecDriver]:
    """Filesystems around others count as unknown, since they may not pass on what makes a create atomic."""
    packages = {cls.__module__.partition(".")[0] for cls in filesystem.__mro__}
    by_package = (driver for package, driver in _FILESYSTEMS.items() if package in packages)
    return next(by_package, _FSSPECS_OWN.get(filesystem.__module__, FsspecDriver))
