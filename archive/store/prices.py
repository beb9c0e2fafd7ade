"""Pure, no I/O: list prices of stores in US dollars, and the rates of requests that they promise to answer.

Each price has the month in which it was read, and the page that publishes it. Prices of other regions, tiers and
contracts differ: `dataclasses.replace(PRICES["s3"], gb_month=0.021)` is one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from archive.base import UsageError
from archive.store.counts import VERBS

GB = 2**30  # as bills count
_READS, _FREE = ("get", "head"), ("delete",)


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one kind of store, for clients in its own region.

    write: of a request that makes or lists; read: of one that reads; those that delete are free.  uploaded_gb, read_gb:
    of the bytes that these carry.  egress_gb: of bytes that leave the region for the internet, the first tier.
    writes_s, reads_s: requests a second up to which it answers from the start, `within` a prefix or a bucket.
    one_key_s: writes a second of one object's name, where that has a bound of its own.
    """

    store: str
    read_on: str
    source: str
    gb_month: float
    write: float
    read: float
    egress_gb: float
    uploaded_gb: float = 0.0
    read_gb: float = 0.0
    writes_s: float | None = None
    reads_s: float | None = None
    one_key_s: float | None = None
    within: str = "prefix"
    beyond: str = ""

    @property
    def verbs(self) -> dict[str, float]:
        """The dollars of one request, by verb."""
        return {verb: 0.0 if verb in _FREE else self.read if verb in _READS else self.write for verb in VERBS}

    def dollars(self, requests: Mapping[str, float], *, uploaded: float = 0, received: float = 0) -> float:
        """The dollars of requests, counted by verb, and of the bytes that they carry."""
        prices = self.verbs
        carried = uploaded * self.uploaded_gb + received * self.read_gb
        return sum(count * prices[verb] for verb, count in requests.items()) + carried / GB


PRICES = {
    "s3": Prices(
        "S3 Standard, us-east-1",
        "2026-11",
        "https://aws.amazon.com/s3/pricing/",
        gb_month=0.023,
        write=5e-6,
        read=0.4e-6,
        egress_gb=0.09,
        writes_s=3500,
        reads_s=5500,
        beyond="it splits a busy prefix within 30 to 60 minutes, and answers 503 until then",
    ),
    "s3-express": Prices(
        "S3 Express One Zone, us-east-1",
        "2026-11",
        "https://aws.amazon.com/s3/faqs/",
        gb_month=0.11,
        write=1.13e-6,
        read=0.03e-6,
        egress_gb=0.09,
        uploaded_gb=0.0032,
        read_gb=0.0006,
        writes_s=100_000,
        reads_s=200_000,
        within="bucket",
        beyond="a support case raises it",
    ),
    "gcs": Prices(
        "GCS Standard, us-central1",
        "2026-09",
        "https://cloud.google.com/storage/pricing",
        gb_month=0.020,
        write=5e-6,
        read=0.4e-6,
        egress_gb=0.12,
        writes_s=1000,
        reads_s=5000,
        one_key_s=1,
        within="bucket",
        beyond="raise the rate slowly: it may double every 20 minutes",
    ),
    "r2": Prices(
        "R2 Standard",
        "2026-11",
        "https://developers.cloudflare.com/r2/pricing/",
        gb_month=0.015,
        write=4.5e-6,
        read=0.36e-6,
        egress_gb=0.0,
        one_key_s=1,
    ),
}


def prices_of(given: str | Prices) -> Prices:
    """The prices of a store by its name, or those that were given; UsageError for a name without prices."""
    if isinstance(given, Prices):
        return given
    if given not in PRICES:
        raise UsageError(
            f"no prices are known for store {given!r}: give one of {', '.join(PRICES)}, or Prices of your own"
        )
    return PRICES[given]
