"""Pure, no I/O: where things lie under an archive's root, and the version of the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from archive.base.errors import UpgradeError
from archive.base.names import escape

MAGIC = "trajectory-archive"
ARCHIVE_KEY = "archive.json"
VERSION = 2  # of archives: the first that is promised
PART_VERSION = 1  # of shards and of what ranks stage
JOURNAL, RUN_FILES = "journal", "run files"
FEATURES = frozenset({JOURNAL, RUN_FILES})  # that this library knows; an archive has those that it uses
COMMITS_PER_FOLDER = 1000
LAYOUTS = ("packed", "directory")
PRUNED = ".pruned.parquet"  # how the lists of prunes end, which stay as commits do
_JOURNALED = re.compile(r"journal/(?P<session>[^/.]+)/rank-(?P<rank>[0-9]{5,})/(?P<number>[0-9]{9})\.zip")
_MADE = (  # by writers: nothing else is ever deleted
    re.compile(r"manifest/[0-9a-f]{8}-(?P<session>[^/.]+)\.[a-z]+\.parquet"),
    re.compile(r"shards/[0-9a-f]{8}-(?P<session>[^/.]+)-[0-9]{5,}\.(?:zip|zarr)"),
    _JOURNALED,
    re.compile(r"states/(?P<session>[^/.]+)/[^/.]+/rank-[0-9]{5,}\.zip"),
)
_TEMPORARY = re.compile(r"(?:.*/)?\.[0-9a-f]{16}\.tmp")


def temporary_name(nonce: str) -> str:
    """The name of a file on disk while it is being written, beside what it will be; `nonce`: 16 hexadecimal digits."""
    return f".{nonce}.tmp"


def is_temporary(key: str) -> bool:
    """True for a file that was being written: who was killed then has left it."""
    return _TEMPORARY.fullmatch(key) is not None


def commit_key(number: int) -> str:
    return f"commits/{number // COMMITS_PER_FOLDER:06d}/{number:09d}.json"


def commit_folder(folder: str) -> str:
    return f"commits/{folder}"


def rank_key(session: str, rank: int) -> str:
    return f"sessions/{escape(session)}/rank-{rank:05d}.json"


def shard_key(nonce: str, session: str, rank: int, layout: str) -> str:
    """Random first, so that load spreads over the store's partitions."""
    suffix = ".zip" if layout == "packed" else ".zarr"
    return f"shards/{nonce}-{escape(session)}-{rank:05d}{suffix}"


def copy_key(nonce: str, key: str) -> str:
    """Another key for a copy of a shard, or of an object of a journal that is one."""
    place = journal_place(key)
    last = key.rpartition("-")[2] if place is None else f"{place[1]:05d}.zip"
    return f"shards/{nonce}-{session_of(key)}-{last}"


def state_key(session: str, checkpoint: str, rank: int) -> str:
    return f"states/{escape(session)}/{escape(checkpoint)}/rank-{rank:05d}.zip"


def journal_key(session: str, rank: int, number: int) -> str:
    """The key of what a rank of a session made durable at one tick; numbers count from 0, without gaps."""
    return f"journal/{escape(session)}/rank-{rank:05d}/{number:09d}.zip"


def journal_place(key: str) -> tuple[str, int, int] | None:
    """The session (escaped), rank and number of an object of a journal; None for all else."""
    found = _JOURNALED.fullmatch(key)
    return None if found is None else (found["session"], int(found["rank"]), int(found["number"]))


def request_key(name: str) -> str:
    """A request for a checkpoint."""
    return f"requests/{name}.json"


def agreement_folder(session: str, number: int) -> str:
    return f"sessions/{escape(session)}/requests/{number:06d}"


def agreement_key(session: str, number: int, rank: int) -> str:
    """At which step a rank is ready for the checkpoint of a round of requests."""
    return f"{agreement_folder(session, number)}/rank-{rank:05d}.json"


def manifest_key(nonce: str, session: str, kind: str) -> str:
    return f"manifest/{nonce}-{escape(session)}.{kind}.parquet"


def session_of(key: str) -> str | None:
    """The session (escaped) that made a manifest file, a shard, a staged or journal object; None for all else.

    None as well for a part of a shard that is a directory: such a shard goes or stays as one.
    """
    return next((found["session"] for made in _MADE if (found := made.fullmatch(key))), None)


def format_block(version: int = VERSION) -> dict[str, object]:
    return {"read": version, "write": version, "features": []}


def with_feature(block: Mapping[str, Any], name: str) -> dict[str, object]:
    """A format, and that a reader must know this feature."""
    return {**block, "features": sorted({*block.get("features", ()), name})}


def check_format(block: object, *, where: str, least: int = VERSION) -> None:
    """Refuse what a newer library wrote: `read` is the least version that may read, features must all be known.
    Formats below `least` were never promised."""
    if not isinstance(block, dict) or not _is_version(block.get("read")) or not _are_names(block.get("features")):
        raise UpgradeError(f"{where} names no format version that this library knows; upgrade trajectory-archive")
    unknown = sorted(set(block["features"]) - FEATURES)
    if block["read"] > VERSION or unknown:
        what = f"format {block['read']}" + (f" with features {', '.join(unknown)}" if unknown else "")
        raise UpgradeError(f"{where} is written in {what}, this library reads format {VERSION}; upgrade it")
    if block["read"] < least:
        raise UpgradeError(f"{where} is written in format {block['read']}, which no release wrote; write it anew")


def _is_version(value: object) -> bool:
    return type(value) is int and value > 0


def _are_names(features: object) -> bool:
    """A list of names: what is none may be what a later version makes of it, and no later commit could carry it on."""
    return isinstance(features, list) and all(isinstance(one, str) for one in features)
