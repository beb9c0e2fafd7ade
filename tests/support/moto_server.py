"""moto's server as a program, `python -P tests/support/moto_server.py --port N`, at less than half the price of a
request: it finds out once which service a host is of, and keeps no log of requests."""

from __future__ import annotations

import functools
import logging

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    lasting = functools.cache(
        DomainDispatcherApplication.get_backend_for_host
    )  # it lists folders, and tries 400 patterns
    DomainDispatcherApplication.get_backend_for_host = lasting
    server.main()


if __name__ == "__main__":
    main()
