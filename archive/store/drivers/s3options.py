"""Does no I/O: what obstore needs to reach a bucket as s3fs would, from s3fs's options, or why it can't.

s3fs passes on dozens of settings of botocore's. Those that are known here are translated; any other is a reason to
leave the bucket to s3fs, which is slower but means what it says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from archive.store.drivers.protocols import Place

_NAMED_ALIKE = {"username": "key", "password": "secret"}
_CLIENT_NAMES = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "endpoint_url": "endpoint_url",
    "region_name": "region",
}
_UNDERSTOOD = frozenset(("key", "secret", "token", "anon", "endpoint_url", "region", "profile"))
_NOT_OF_REQUESTS = frozenset(  # listings and files that s3fs keeps, checksums that obstore does not send
    ("use_listings_cache", "listings_expiry_time", "skip_instance_cache", "default_block_size", "default_fill_cache",
     "default_cache_type", "use_ssl", "max_concurrency", "max_pool_connections", "retries", "read_timeout",
     "connect_timeout", "request_checksum_calculation", "response_checksum_validation", "addressing_style")
)  # fmt: skip
_ENVIRONMENT = (  # what botocore heeds in it, and is not translated
    "AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT", "AWS_DATA_PATH",
    "AWS_S3_USE_ARN_REGION", "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT", "AWS_S3_DISABLE_MULTIREGION_ACCESS_POINTS",
)  # fmt: skip
_OF_CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
_PLAIN_REGIONS = ("us-", "eu-", "ap-", "sa-", "ca-", "me-", "af-", "il-", "mx-")


class UntranslatedError(ValueError):
    """The options, or what is around them, say something that obstore would not heed."""


def understood(place: Place) -> dict[str, Any]:
    """The options by one name each, those of no meaning here left out; UntranslatedError for one that is not known."""
    found: dict[str, Any] = {}
    for name, value in _flat(place.options):
        if name in _UNDERSTOOD and value is not None:
            found[name] = value
        elif name not in _UNDERSTOOD | _NOT_OF_REQUESTS:
            raise UntranslatedError(f"obstore has no equal of {name}")
    if place.options.get("use_ssl") is False and not str(found.get("endpoint_url")).startswith("http:"):
        raise UntranslatedError("use_ssl=False needs an endpoint_url that begins with http:")
    _check_environment(_ENVIRONMENT)
    return found


def settings(place: Place, options: Mapping[str, Any], configured: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of obstore's S3Store, but for credentials. configured: the profile of the AWS configuration."""
    bucket = place.target.partition("://")[2].partition("/")[0]
    endpoint, region = _endpoint(options, configured), _region(options, configured)
    if ":" in bucket or bucket.endswith("--x-s3"):
        raise UntranslatedError(f"{bucket} is no plain bucket")
    if not endpoint.startswith("http:"):
        _check_environment(_OF_CERTIFICATES)
    if not endpoint and not region.startswith(_PLAIN_REGIONS):
        raise UntranslatedError("no region is named" if not region else f"the region {region} has hosts of its own")
    config: dict[str, Any] = {"region": region or "us-east-1", "skip_signature": bool(options.get("anon"))}
    if endpoint:
        config["endpoint"] = endpoint
    if _checksums(place, configured):
        config["checksum_algorithm"] = "SHA256"  # which is signed in any case, but not every server looks at that
    config["disable_bulk_delete"] = True  # one object at a time; some stores know no other way
    config["virtual_hosted_style_request"] = not endpoint and "." not in bucket
    return {
        "bucket": bucket,
        "config": config,
        "client_options": _client(place, endpoint),
        "retry_config": {"max_retries": 0},
    }


def _checksums(place: Place, configured: Mapping[str, str]) -> bool:
    """Whether uploads carry a checksum that the server compares, as botocore's do unless it is told otherwise."""
    said = (place.options.get("config_kwargs") or {}).get("request_checksum_calculation")
    said = said or os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION") or configured.get("request_checksum_calculation")
    return str(said).lower() != "when_required"


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if name == "client_kwargs":
            yield from ((_CLIENT_NAMES.get(inner, f"client_kwargs {inner}"), one) for inner, one in value.items())
        elif name == "config_kwargs":
            yield from _config(value)
        elif not (value is False and name in ("requester_pays", "version_aware", "asynchronous", "cache_regions")):
            yield _NAMED_ALIKE.get(name, name), value


def _config(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if name == "signature_version" and value in ("s3v4", "v4"):
            continue
        if name == "s3" and set(value) <= {"addressing_style"} and value.get("addressing_style") in ("path", "auto"):
            continue
        yield name if name in _NOT_OF_REQUESTS else f"config_kwargs {name}", value


def _check_environment(names: Sequence[str]) -> None:
    for name in names:
        if os.environ.get(name):
            raise UntranslatedError(f"obstore does not heed {name}")


def _endpoint(options: Mapping[str, Any], configured: Mapping[str, str]) -> str:
    if options.get("endpoint_url"):
        return str(options["endpoint_url"]).rstrip("/")
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    found = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"), configured.get("endpoint_url"))
    return next((one.rstrip("/") for one in found if one), "")


def _region(options: Mapping[str, Any], configured: Mapping[str, str]) -> str:
    return str(options.get("region") or os.environ.get("AWS_DEFAULT_REGION") or configured.get("region") or "")


def _client(place: Place, endpoint: str) -> dict[str, Any]:
    """Timeouts as of s3fs's: for each read, not for the whole of a large object."""
    return {
        "timeout": f"{place.deadline_s * 1000:.0f}ms",
        "read_timeout": f"{min(15.0, max(1.0, place.deadline_s / 4)) * 1000:.0f}ms",
        "connect_timeout": f"{min(5.0, max(1.0, place.deadline_s / 4)) * 1000:.0f}ms",
        "allow_http": endpoint.startswith("http:"),
    }
