"""Does no I/O of its own: which client an `s3://` URL goes through. obstore where it can say the same, else s3fs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from typing import Any, TypeVar

from archive.base import in_child
from archive.store.drivers.driver import Driver, Location
from archive.store.drivers.failures import wrong_region
from archive.store.drivers.obstore import ObstoreDriver
from archive.store.drivers.plain import Renewal, given_for_good
from archive.store.drivers.s3options import Provider, Session, Signer, UntranslatedError, settings, understood
from archive.store.drivers.wrappers import DelegatingDriver

T = TypeVar("T")
TRANSPORTS = ("obstore", "s3fs")
# Obstore names one of the objects that stay of many, does not ask for versions, does not say what came with an answer,
# and copies neither from another bucket nor what is larger than 5 GB.
_BY_S3FS = ("delete_many", "versioned", "now", "copy")
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
    """A bucket through obstore; through s3fs from when the store says that it lies in another region.

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
    """The driver of an `s3://` URL. The option `transport` names one of TRANSPORTS: ValueError where obstore can't.

    The option `late_list` says that what was made may not be listed yet.

    registered: somebody has given `s3` another filesystem, which is then used.
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
