"""Does I/O: a port to listen on, and the names by which a browser may ask for what is served there."""

from __future__ import annotations

import os
import socket

from archive.base import UsageError

LOOPBACK = "127.0.0.1"
_OWN = frozenset({LOOPBACK, "localhost"})
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104  whoever asks for all addresses gives one of these
_FAR = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104  of documents: nobody has them, and nothing is sent


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, or on a free port for 0; UsageError where that cannot be had."""
    found = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two have the same port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(socket.SOMAXCONN)
    except (OSError, OverflowError) as e:
        found.close()
        raise UsageError(f"{_written(host)}:{port} cannot be listened on ({e}): give another host= or port=") from e
    return found


def reached(host: str) -> str:
    """How a browser writes where this is: an address that leads here, for those that only listen."""
    return _written(_outward(host) if host in _ANY else host)


def names(host: str) -> frozenset[str]:
    """Exactly those names by which it may be asked for, as a browser writes them."""
    if host in _ANY:
        found = {_outward(host), _ANY[host], socket.gethostname(), *_OWN}
    elif host in _OWN:
        found = set(_OWN)
    else:
        found = {host}
    return frozenset(_written(name).lower() for name in found)


def alone(host: str) -> bool:
    """Whether only this machine can come in there."""
    return host in _OWN or host == "::1" or host.startswith("127.")


def _outward(host: str) -> str:
    """The address by which this machine speaks to others; its own where there are none."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_FAR[host], 9))
        except OSError:
            return _ANY[host]
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host
