"""Pure, no I/O: names given by users, made safe for zarr nodes, ZIP members and object keys, and back; where things lie
under an archive's root, and the version of the format.

`[A-Za-z0-9_-]` stand for themselves, every other byte of the UTF-8 form is `%XX`, and the empty name is `%`.
A leading `__` (reserved by zarr) has its first underscore escaped. The mapping is one to one, so any string
that is legal in Python comes back as it was, and no two names meet in one key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from archive.base.errors import FieldError, UnsafePathError, UpgradeError
from archive.base.plaintext import one_line

MAGIC = "trajectory-archive"
ARCHIVE_KEY = "archive.json"
VERSION = 2  # of archives: the first that is promised
PART_VERSION = 1  # of shards and of staged parts
JOBS = "jobs"  # the folder of jobs
REQUESTS = "requests"  # that of requests for checkpoints
MAX_NDIM = 8  # axes of an array of a shard
JOURNAL, RUN_FILES, NODES = "journal", "run files", "node journals"
SCATTERED, ENDS = "scattered columns", "ended journals"  # of single objects of a journal
FEATURES = frozenset({JOURNAL, RUN_FILES, NODES, SCATTERED, ENDS})  # the known ones; objects name theirs
COMMITS_PER_FOLDER = 1000
LAYOUTS = ("packed", "directory")
PRUNED = ".pruned.parquet"  # how the lists of prunes end, which stay as commits do
_JOURNALED = re.compile(r"journal/(?P<session>[^/.]+)/(?P<line>(?:rank|node)-[0-9]{5,})/(?P<number>[0-9]{9})\.zip")
_TICK = re.compile(r"rank-(?P<rank>[0-9]{5,8})-(?P<number>[0-9]{9})\.zip")
_MADE = (  # by writers: nothing else is ever deleted
    re.compile(r"manifest/[0-9a-f]{8}-(?P<session>[^/.]+)\.[a-z]+\.parquet"),
    re.compile(r"shards/[0-9a-f]{8}-(?P<session>[^/.]+)-[0-9]{5,}\.(?:zip|zarr)"),
    _JOURNALED,
    re.compile(r"states/(?P<session>[^/.]+)/[^/.]+/rank-[0-9]{5,}\.zip"),
    re.compile(r"plans/(?P<session>[^/.]+)/(?:[0-9a-f]{8}/[0-9]{5,}\.zip|[0-9a-f]{16}\.json)"),
)
_TEMPORARY = re.compile(r"(?:.*/)?\.[0-9a-f]{16}\.tmp")

MAX_ESCAPED_BYTES = 240  # file names end at 255 bytes on common file systems
MAX_PATH_BYTES = 800  # S3 keys end at 1024 bytes; the shard's own key goes before

_NO_FILE = re.compile(r'[/\\:*?"<>|]|^[-~]|^\.+$|[. ]$|^$')
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}  # of Windows
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+\Z")


def escape(name: str) -> str:
    """The key component for a name; `unescape` is its inverse."""
    if name == "":
        return "%"
    raw = name.encode("utf-8", "surrogatepass")
    text = "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in raw)
    return "%5F" + text[1:] if text.startswith("__") else text


def unescape(component: str) -> str:
    """The name behind a key component; anything `escape` cannot have made is refused."""
    if component == "%":
        return ""
    if not _ESCAPED.match(component):
        raise UnsafePathError(f"the name {component!r} in the archive is not one that this library writes")
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), component.encode("ascii"))
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as e:
        raise UnsafePathError(f"the name {component!r} in the archive is not one that this library writes") from e


@lru_cache(maxsize=4096)  # a table of chunks names few fields, each thousands of times
def escape_path(path: tuple[str, ...]) -> str:
    """The zarr path of a field: its keys escaped and joined by slashes."""
    parts = [escape(key) for key in path]
    joined = "/".join(parts)
    if any(len(p) > MAX_ESCAPED_BYTES for p in parts) or len(joined) > MAX_PATH_BYTES:
        raise FieldError(
            f"field name {show(path)!r} is too long: at most {MAX_ESCAPED_BYTES} bytes a key and "
            f"{MAX_PATH_BYTES} in all, escaped; use shorter keys"
        )
    return joined


def unescape_path(text: str) -> tuple[str, ...]:
    """The keys of a field from its zarr path."""
    return tuple(unescape(part) for part in text.split("/"))


def show(path: tuple[str, ...]) -> str:
    """A field's path for people: keys joined by slashes, long ones shortened."""
    text = "/".join(path)
    return text if len(text) <= 200 else text[:100] + "..." + text[-60:]


def check_file_name(name: str, what: str) -> str:
    """A name that a file may have on any system, and that acts on no terminal; else an error naming `what`."""
    wrong = (
        one_line(name) != name
        or _NO_FILE.search(name)
        or name.partition(".")[0].lower() in _DEVICES
        or len(name.encode("utf-8", "surrogatepass")) > MAX_ESCAPED_BYTES
    )
    if wrong:
        raise FieldError(f"{what} {name!r:.200} cannot be the name of a file or folder; give it another")
    return name


def check_text(value: object, what: str) -> str:
    """A string that can be stored in a table: str, encodable as UTF-8; else an error naming `what`."""
    if not isinstance(value, str):
        raise FieldError(f"{what} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise FieldError(f"{what} {value!r} holds a lone surrogate and cannot be stored as UTF-8 text") from e
    return value


def temporary_name(nonce: str) -> str:
    """The name of a file on disk while it is being written, beside what it will be; `nonce`: 16 hexadecimal digits."""
    return f".{nonce}.tmp"


def is_temporary(key: str) -> bool:
    """True for a file that was being written; a killed process has left it."""
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
    last = key.rpartition("-")[2] if place is None else f"{place[1].rpartition('-')[2]}.zip"
    return f"shards/{nonce}-{session_of(key)}-{last}"


def state_key(session: str, checkpoint: str, rank: int) -> str:
    return f"states/{escape(session)}/{escape(checkpoint)}/rank-{rank:05d}.zip"


def journal_line(kind: str, number: int) -> str:
    """The folder of the objects of a rank's journal, or of a node's."""
    return f"{kind}-{number:05d}"


def journal_key(session: str, rank: int, number: int) -> str:
    """The key of one flush of a rank's journal; numbers count from 0, without gaps."""
    return f"journal/{escape(session)}/{journal_line('rank', rank)}/{number:09d}.zip"


def node_key(session: str, node: int, number: int) -> str:
    """The key of one object of a node's journal; numbers count from 0, without gaps."""
    return f"journal/{escape(session)}/{journal_line('node', node)}/{number:09d}.zip"


def journal_place(key: str) -> tuple[str, str, int] | None:
    """The session (escaped), line ("rank-00003", "node-00000") and number of an object of a journal; None for all
    else."""
    found = _JOURNALED.fullmatch(key)
    return None if found is None else (found["session"], found["line"], int(found["number"]))


def tick_name(rank: int, number: int) -> str:
    """The name of a rank's tick as a member of an object of its node."""
    return f"{journal_line('rank', rank)}-{number:09d}.zip"


def tick_place(name: str) -> tuple[int, int] | None:
    """The rank and number of a tick by its name as a member; None for all else."""
    found = _TICK.fullmatch(name)
    return None if found is None else (int(found["rank"]), int(found["number"]))


def shard_in_node(session: str, node: int, number: int, rank: int, tick: int) -> str:
    """The name of a shard: a rank's tick, in an object of its node."""
    return f"{node_key(session, node, number)}/{tick_name(rank, tick)}"


def object_of(shard: str) -> str:
    """The key of the object in which a shard lies: its own, or that of the ZIP of which it is a member. No escaped
    name has a dot."""
    head, inside, _ = shard.partition(".zip/")
    return f"{head}.zip" if inside else shard


def job_key(job: str, name: str = "") -> str:
    """The key of an object of a job; without a name, its folder."""
    return f"{JOBS}/{escape(job)}/{name}".rstrip("/")


def batch_key(job: str, number: int) -> str:
    """The key of the result of one batch of a job; numbers count from 0 over all rounds of it."""
    return job_key(job, f"{number:09d}.zip")


def request_key(name: str) -> str:
    """A request for a checkpoint."""
    return f"{REQUESTS}/{name}.json"


def agreement_folder(session: str, number: int) -> str:
    return f"sessions/{escape(session)}/requests/{number:06d}"


def agreement_key(session: str, number: int, rank: int) -> str:
    """The key of a rank's answer: the step at which it is ready for the checkpoint of a round of requests."""
    return f"{agreement_folder(session, number)}/rank-{rank:05d}.json"


def asked_key(session: str, number: int) -> str:
    """The key of what tells the ranks that one of them was asked: the answer of the first to say so."""
    return f"{agreement_folder(session, number)}/asked.json"


def agreed_key(session: str, number: int) -> str:
    """The key of what the ranks agreed on in a round of requests."""
    return f"{agreement_folder(session, number)}/agreed.json"


def plan_key(session: str, plan: str, number: int) -> str:
    """A group of target ranks of a shared plan."""
    return f"plans/{escape(session)}/{plan}/{number:05d}.zip"


def shared_plan_key(session: str, about: str) -> str:
    """The object that makes a shared plan of some terms known to the ranks of a session."""
    return f"plans/{escape(session)}/{about}.json"


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
    """A format block with a feature that readers must know."""
    return {**block, "features": sorted({*block.get("features", ()), name})}


def check_format(block: object, *, where: str, least: int = VERSION) -> None:
    """Refuse formats of newer libraries: `read` is the least version that may read, features must all be known.
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
    """True for a list of names: other values may come from a later version, and no commit could repeat them."""
    return isinstance(features, list) and all(isinstance(one, str) for one in features)
