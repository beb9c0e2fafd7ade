"""Small JSON objects of the bucket (archive.json, claims, answers to requests), read within a bound as records."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from archive.base import CorruptStateError, IntegrityError, Record, layout, plainjson
from archive.manifest.records import Claim
from archive.store import Storage

R = TypeVar("R", bound=Record)
_CLAIM = re.compile(r"rank-[0-9]{5,}\.json")


def read_bytes(storage: Storage, key: str, error: type[IntegrityError]) -> bytes:
    """The bytes of a small object; MissingObjectError if it is not there, `error` if it is not small."""
    most = plainjson.MAX_SMALL_BYTES
    return plainjson.check_size(storage.get_head(key, most + 1), most, what=storage.full_url(key), error=error)


def parse(data: bytes, what: str, error: type[IntegrityError]) -> Any:
    """The JSON value of a small object; `error` names `what` if it is none."""
    return plainjson.parse(data, what=what, error=error, max_depth=plainjson.MAX_DEPTH)


def read_small(storage: Storage, key: str, kind: type[R], error: type[IntegrityError]) -> R:
    """A small object as a record; MissingObjectError if it is not there, `error` if it is something else."""
    what = storage.full_url(key)
    return kind.from_json(parse(read_bytes(storage, key, error), what, error), what=what, error=error)


def read_claim(storage: Storage, key: str) -> Claim:
    """The claim of a writer; CorruptStateError if it does not say of itself what its name says."""
    claim = read_small(storage, key, Claim, CorruptStateError)
    if layout.rank_key(claim.session, claim.rank) != key:
        raise CorruptStateError(
            f"{storage.full_url(key)} is the claim of rank {claim.rank} of session {claim.session!r}: it does not "
            "belong there; put the right one back from a copy"
        )
    return claim


def claim_keys(storage: Storage) -> list[str]:
    """The claims of all writers that there have been."""
    folders = [f"sessions/{name.rstrip('/')}" for name in storage.list("sessions") if name.endswith("/")]
    return [f"{folder}/{name}" for folder in folders for name in storage.list(folder) if _CLAIM.fullmatch(name)]
