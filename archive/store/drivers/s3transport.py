"""Does I/O (files, and sources of credentials): the choice of the client for an `s3://` URL.

It is obstore if that can do the same, else s3fs, which passes on dozens of settings of botocore's. Those that are
known here are translated; any other is a reason to use s3fs, which is slower but honours all of them.
Credentials are found as botocore finds them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from archive.base import cached_property, in_child
from archive.store.drivers.driver import Buffer, Driver, Location
from archive.store.drivers.failures import in_place_of, wrong_region
from archive.store.drivers.obstore import ObstoreDriver
from archive.store.drivers.plain import Renewal, given_for_good
from archive.store.drivers.wrappers import DelegatingDriver

Credentials = dict[str, Any]
Provider = Callable[[], Credentials]

_KEPT_S = 300.0  # botocore renews its own 10 to 15 minutes ahead, whenever it is asked
_KNOWN = ("aws_", "sso_", "role_", "source_profile", "credential_", "mfa_", "external_id", "duration_seconds",
          "web_identity_", "cli_", "region", "output", "endpoint_url", "retry_mode", "max_attempts",
          "metadata_service_", "request_checksum_", "response_checksum_")  # fmt: skip
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
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_DATA_PATH",
    "AWS_S3_USE_ARN_REGION",
    "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT",
    "AWS_S3_DISABLE_MULTIREGION_ACCESS_POINTS",
)
_OF_CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
_PLAIN_REGIONS = ("us-", "eu-", "ap-", "sa-", "ca-", "me-", "af-", "il-", "mx-")


class UntranslatedError(ValueError):
    """The options, or their environment, have a setting that obstore would not honour."""


def understood(place: Location) -> dict[str, Any]:
    """The options by one name each, without meaningless ones; UntranslatedError for an unknown one."""
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


def settings(place: Location, options: Mapping[str, Any], configured: Mapping[str, str]) -> dict[str, Any]:
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
    read_s, connect_s = place.timeouts_s
    client = {
        "timeout": f"{place.deadline_s * 1000:.0f}ms",
        "read_timeout": f"{read_s * 1000:.0f}ms",
        "connect_timeout": f"{connect_s * 1000:.0f}ms",
        "allow_http": endpoint.startswith("http:"),
    }
    return {
        "bucket": bucket,
        "config": config,
        "client_options": client,
        "retry_config": {"max_retries": 0},
    }


def _checksums(place: Location, configured: Mapping[str, str]) -> bool:
    """True if uploads carry a checksum that the server compares, as botocore's do unless it is told otherwise."""
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


# -- credentials -------------------------------------------------------------------------------------------------------


class Session:
    """botocore's own session, made only if files or roles must be read."""

    def __init__(self, profile: str | None) -> None:
        self._profile = profile

    @cached_property
    def botocore(self) -> Any:
        import botocore.session

        return botocore.session.Session(profile=self._profile)

    def configured(self) -> Mapping[str, str]:
        """The AWS configuration of the profile; UntranslatedError for settings that obstore would not honour."""
        path = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
        if not (self._profile or (path.is_file() and path.stat().st_size > 0)):
            return {}
        found: Mapping[str, Any] = self.botocore.get_scoped_config()
        unknown = [name for name, value in found.items() if not name.startswith(_KNOWN) or isinstance(value, Mapping)]
        if unknown:
            raise UntranslatedError(f"obstore has no equal of {unknown[0]} in the AWS configuration")
        return found

    def provider(self, options: Mapping[str, Any]) -> Provider | None:
        """The provider of credentials; None for requests without. UntranslatedError if there are none."""
        if options.get("anon"):
            return None
        if options.get("key") or options.get("secret"):
            return _constant(options.get("key"), options.get("secret"), options.get("token"))
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if key and secret and not self._profile:
            return _constant(key, secret, os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN"))
        return self._renewing()

    def _renewing(self) -> Provider:
        nobody = False
        with suppress(Exception):  # of who is named and does not answer now: each request asks again, and tells of it
            nobody = self.botocore.get_credentials() is None
        if nobody:
            raise UntranslatedError("botocore finds no credentials")

        def give() -> Credentials:
            now = self.botocore.get_credentials().get_frozen_credentials()
            ends = datetime.now(UTC) + timedelta(seconds=_KEPT_S)
            return _signed_by(now.access_key, now.secret_key, now.token) | {"expires_at": ends}

        return give


class Signer:
    """A source of credentials for obstore, which remembers them.

    It knows of no store: a store holds on to it, where Python sees no cycle, so that neither would ever go.
    """

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._failure: Exception | None = None

    def giving(self, provider: Provider) -> Provider:
        """The same credentials, remembered."""

        def give() -> Credentials:
            try:
                found = provider()
            except Exception as error:
                self._failure = error
                raise
            names = ("access_key_id", "secret_access_key", "token")
            self._secrets.update(found[name] for name in names if found[name])
            return found

        return give

    def told(self, error: Exception) -> Exception:
        """The reason that there were no credentials, which obstore only has in words; else the error without the
        signature of requests: obstore's hold the whole answer of the store."""
        failure, self._failure = self._failure, None
        if failure is not None and type(error).__name__ == "UnauthenticatedError":
            return failure
        text = str(error)
        if not any(secret in text for secret in self._secrets):
            return error
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return in_place_of(error, type(error)(text))


def _constant(key: Any, secret: Any, token: Any) -> Provider:
    if not (isinstance(key, str) and isinstance(secret, str)):
        raise UntranslatedError("key and secret belong together")
    return lambda: _signed_by(key, secret, token) | {"expires_at": None}


def _signed_by(key: str, secret: str, token: str | None) -> Credentials:
    return {"access_key_id": key, "secret_access_key": secret, "token": token}


# -- which client ------------------------------------------------------------------------------------------------------

T = TypeVar("T")
TRANSPORTS = ("obstore", "s3fs")
# Obstore names one of the objects that stay of many, does not ask for versions, does not say what came with an answer,
# copies neither from another bucket nor what is larger than 5 GB, and completes parts without a condition.
_BY_S3FS = ("delete_many", "versioned", "now", "copy", "create_in_parts")
OWN_OPTIONS = ("transport", "late_list")  # ours, among those of the filesystem
_forked = threading.Event()  # set in processes whose parent may have used obstore, by itself or through somebody else


def _look_back() -> None:
    if "obstore" in sys.modules:
        _forked.set()


in_child(_look_back)


class Bucket:
    """One bucket, as `ObstoreDriver` asks a filesystem for it."""

    def __init__(
        self, keywords: Mapping[str, Any], provider: Provider | None, find: Callable[[], Provider | None]
    ) -> None:
        self._keywords = keywords
        self._find = find
        self.signer = Signer()
        self._store = self._signing(provider)

    def renew(self) -> None:
        """Go on with the credentials that are found now."""
        self._store = self._signing(self._find())

    def _signing(self, provider: Provider | None) -> Any:
        return _made({**self._keywords, "credential_provider": provider and self.signer.giving(provider)})

    def _split_path(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.partition("/")
        return bucket, key

    def _construct_store(self, bucket: str) -> Any:
        return self._store


class S3Transport(DelegatingDriver):
    """A bucket through obstore; through s3fs once the store says that it is in another region.

    s3fs follows it there, obstore does not. Such an answer means that nothing was done.
    """

    def __init__(self, bucket: Bucket, fast: Driver, through_s3fs: Callable[[], Driver], given: bool) -> None:
        super().__init__(fast)
        self._bucket = bucket
        self._through_s3fs = through_s3fs
        self._given = given
        self._renewal = Renewal()
        self._spare: Driver | None = None

    def renew(self) -> bool:
        if self._given:
            return False
        self._renewal.once(self._bucket.renew)
        return self._spare is None or self._spare.renew()

    def can(self, verb: str) -> bool:
        return (self._s3fs() if verb in _BY_S3FS else self._inner).can(verb)

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        return self._s3fs().delete_many(keys, timeout_s)

    def versioned(self, timeout_s: float) -> bool:
        return self._s3fs().versioned(timeout_s)

    def create_in_parts(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._s3fs().create_in_parts(key, parts, timeout_s)

    def now(self, folder: str, timeout_s: float) -> datetime | None:
        return self._s3fs().now(folder, timeout_s)

    def locate(self, key: str) -> str:
        return self._s3fs().locate(key)

    def copy(self, source: str, key: str, timeout_s: float) -> None:
        self._s3fs().copy(source, key, timeout_s)

    def _ask(self, verb: str, key: str, call: Callable[[Driver], T], timeout_s: float) -> T:
        shown = None
        try:
            return call(self._inner)
        except Exception as error:
            if not wrong_region(error):
                shown = self._bucket.signer.told(error)
                if shown is error:
                    raise
        if shown is not None:  # out of the handler, or it would hang on to the error that says more
            raise shown
        self._inner = self._s3fs()
        return call(self._inner)

    def _s3fs(self) -> Driver:
        if self._spare is None:
            self._spare = self._through_s3fs()
        return self._spare


def open_s3(place: Location, through_s3fs: Callable[[Location], Driver], registered: bool) -> Driver:
    """The driver of an `s3://` URL. The option `transport` names one of TRANSPORTS: ValueError if obstore can't.

    The option `late_list` means that new objects may be missing in a LIST.

    registered: `s3` has another filesystem in fsspec, which is then used.
    """
    wanted = place.options.get("transport")
    if wanted not in (None, *TRANSPORTS):
        raise ValueError(f"transport={wanted!r}: give one of {', '.join(TRANSPORTS)}, or leave it out")
    bare = replace(place, options={name: value for name, value in place.options.items() if name not in OWN_OPTIONS})
    driver = None
    if not (wanted == "s3fs" or (registered and wanted is None)):
        try:
            driver = _through_obstore(bare, through_s3fs)
        except UntranslatedError as why:
            if wanted == "obstore":
                raise ValueError(f"transport='obstore' cannot be: {why}") from why
    driver = driver or through_s3fs(bare)
    driver.lists_at_once = driver.lists_at_once and not place.options.get("late_list")
    return driver


def _through_obstore(place: Location, through_s3fs: Callable[[Location], Driver]) -> Driver:
    if find_spec("obstore") is None:
        raise UntranslatedError("obstore is not installed: pip install 'trajectory-archive[fast]'")
    if _forked.is_set():
        raise UntranslatedError("this process was forked from one that had imported obstore")
    if _is_mocked():
        raise UntranslatedError("moto's mock_aws is active")
    options = understood(place)
    session = Session(options.get("profile"))
    keywords = settings(place, options, session.configured())
    bucket = Bucket(keywords, session.provider(options), lambda: Session(options.get("profile")).provider(options))
    fast = ObstoreDriver(bucket, place.target.partition("://")[2], place)
    return S3Transport(bucket, fast, lambda: through_s3fs(place), given_for_good(options))


def _made(keywords: Mapping[str, Any]) -> Any:
    """A store of obstore's; nothing is sent. UntranslatedError where a release does not know one of the settings."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    try:
        return S3Store(**keywords)
    except (BaseError, ValueError) as error:
        raise UntranslatedError(f"obstore refuses the settings: {type(error).__name__}") from error


def _is_mocked() -> bool:
    """True if moto answers for botocore within this process: what goes through obstore would reach the real thing."""
    models = sys.modules.get("moto.core.models")
    return bool(models and getattr(models.botocore_stubber, "enabled", False))
