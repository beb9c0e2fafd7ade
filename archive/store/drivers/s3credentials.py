"""Does I/O (files, and what issues credentials): who signs requests of obstore's, found as botocore finds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from archive.store.drivers.failures import in_place_of
from archive.store.drivers.s3options import UntranslatedError

Credentials = dict[str, Any]
Provider = Callable[[], Credentials]

_KEPT_S = 300.0  # botocore renews its own 10 to 15 minutes ahead, whenever it is asked
_KNOWN = ("aws_", "sso_", "role_", "source_profile", "credential_", "mfa_", "external_id", "duration_seconds",
          "web_identity_", "cli_", "region", "output", "endpoint_url", "retry_mode", "max_attempts",
          "metadata_service_", "request_checksum_", "response_checksum_")  # fmt: skip


class Session:
    """botocore's own session, which is only made where files or roles have to be looked at."""

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._made: Any = None

    @property
    def botocore(self) -> Any:
        if self._made is None:
            import botocore.session

            self._made = botocore.session.Session(profile=self._profile)
        return self._made

    def configured(self) -> Mapping[str, str]:
        """What the AWS configuration says of the profile; UntranslatedError for what obstore would not heed."""
        if not (self._profile or _has_configuration()):
            return {}
        found: Mapping[str, Any] = self.botocore.get_scoped_config()
        unknown = [name for name, value in found.items() if not name.startswith(_KNOWN) or isinstance(value, Mapping)]
        if unknown:
            raise UntranslatedError(f"obstore has no equal of {unknown[0]} in the AWS configuration")
        return found

    def provider(self, options: Mapping[str, Any]) -> Provider | None:
        """Who gives credentials; None for requests without. UntranslatedError if there are none."""
        if options.get("anon"):
            return None
        if options.get("key") or options.get("secret"):
            return _constant(options.get("key"), options.get("secret"), options.get("token"))
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if key and secret and not self._profile:
            return _constant(key, secret, os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN"))
        return self._renewing()

    def _renewing(self) -> Provider:
        if self._finds_nobody():
            raise UntranslatedError("botocore finds no credentials")

        def give() -> Credentials:
            now = self.botocore.get_credentials().get_frozen_credentials()
            ends = datetime.now(UTC) + timedelta(seconds=_KEPT_S)
            return _signed_by(now.access_key, now.secret_key, now.token) | {"expires_at": ends}

        return give

    def _finds_nobody(self) -> bool:
        try:
            return self.botocore.get_credentials() is None
        except Exception:  # somebody is named who does not answer now: asked again by each request, which tells of it
            return False


class Signer:
    """Gives obstore credentials, and remembers them.

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
        """Why there were no credentials, which obstore only has in words; else the same error without what requests
        were signed with: obstore's hold the whole answer of the store."""
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


def _has_configuration() -> bool:
    name = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    path = Path(name).expanduser()
    return path.is_file() and path.stat().st_size > 0
