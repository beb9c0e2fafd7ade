"""Copying shards from one archive to another; what is there already is not copied again.

A store that holds both copies by itself: size and ETag are compared, and damage in the source stays what it was, an
error when it is read. Elsewhere the bytes come through here, and each is compared with its checksum on the way.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from archive import tables
from archive.base import AccessDeniedError, ByteRange, CorruptChunkError, StorageError, UnsafePathError, layout
from archive.index import chunkindex
from archive.store import Roots, Storage, split_key

if TYPE_CHECKING:
    import pyarrow as pa

AT_ONCE = 4
METADATA = "zarr.json"
_SHARD = re.compile(r"shards/[A-Za-z0-9_%-]+\.(?:zip|zarr)\Z|journal/[A-Za-z0-9_%-]+/rank-[0-9]{5,}/[0-9]{9}\.zip\Z")

Members = list[dict[str, Any]]  # of a shard, as rows of the chunk table


def copy_shards(
    source: Roots,
    target: Storage,
    chunks: pa.Table,
    known: Collection[str],
    moved: Callable[[int, int], None],
    *,
    verify: bool,
) -> dict[str, str]:
    """Copy the shards that the chunk rows name, but for `known` and others that are there, a few at once; the key of
    each in the target. The first error ends it.

    moved: called with (shards done, shards).  verify: every byte is read and checked, even where the store would copy
    by itself.
    """
    rows: dict[str, Members] = {}
    for row in chunks.to_pylist():
        rows.setdefault(row["shard"], []).append(row)
    listed = _listed(target) - {*known}
    keys = {shard: _plain(shard) for shard in rows}
    keys |= {s: layout.copy_key(secrets.token_hex(4), key) for s, key in keys.items() if key in listed}
    present = {f"shards/{name}" for name in target.list("shards")}
    if any(key.startswith("journal/") for key in keys.values()):
        present.update(one.key for one in target.scan("journal"))

    def is_there(key: str) -> bool:
        """A packed shard is there whole or not at all; of a directory the group's metadata comes last."""
        return key in present or (f"{key}/" in present and target.exists(f"{key}/{METADATA}"))

    def copy(shard: str, key: str, members: Members) -> None:
        members = sorted(members, key=lambda m: m["member"] == METADATA)
        if verify or not _copied_by_store(source, target, shard, key, members):
            _stream(source, target, shard, key, members)

    jobs = [
        (shard, keys[shard], members)
        for shard, members in rows.items()
        if keys[shard] not in known and not is_there(keys[shard])
    ]
    pool = ThreadPoolExecutor(AT_ONCE, "archive-copy")
    try:
        for i, _ in enumerate(pool.map(lambda job: copy(*job), jobs)):
            moved(i + 1, len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    return keys


def _listed(target: Storage) -> set[str]:
    """The keys that prunes have listed: they may be deleted at any time, so none of these names is used again."""
    files = [f"manifest/{name}" for name in target.list("manifest") if name.endswith(layout.PRUNED)]
    found = zip(files, target.get_all(files), strict=True)
    lists = (tables.loads(data, "pruned", where=target.full_url(key), columns=["key"]) for key, data in found)
    return {key for table in lists for key in table["key"].to_pylist()}


def _plain(shard: str) -> str:
    """The shard's key in any archive. Nothing else may be written to, whatever the source's tables say."""
    key = split_key(shard)[1]
    if not _SHARD.match(key):
        raise UnsafePathError(
            f"a table of the source names the shard {shard!r}, which is no shard's name; it was not copied"
        )
    return key


def _copied_by_store(source: Roots, target: Storage, shard: str, key: str, members: Members) -> bool:
    """Have the store copy a shard, if it can. One that refuses to is no error: the bytes can be streamed."""
    base, inside = split_key(shard)
    origin = source.storage(base)
    if not target.copies_from(origin):
        return False
    try:
        if key.endswith(".zip"):
            target.copy_from(origin, inside, key, least_bytes=max(m["offset"] + m["size"] for m in members))
        for member in members if not key.endswith(".zip") else ():
            name = member["member"]
            target.copy_from(origin, f"{inside}/{name}", f"{key}/{name}", least_bytes=member["size"])
    except (StorageError, AccessDeniedError) as e:
        if type(e) not in (StorageError, AccessDeniedError):
            raise
        logging.getLogger("archive").info("%s does not copy by itself, so the bytes are streamed: %s", target.url, e)
        return False
    return True


def _stream(source: Roots, target: Storage, shard: str, key: str, members: Members) -> None:
    if key.endswith(".zip"):
        data = memoryview(source.get(shard))
        for member in members:
            _check(source, shard, member, data[member["offset"] : member["offset"] + member["size"]])
        target.put(key, data)
        return
    ranges = [ByteRange(f"{shard}/{m['member']}", 0, m["size"]) for m in members]
    objects = list(zip(members, source.get_ranges(ranges), strict=True))
    for member, part in objects:
        _check(source, shard, member, memoryview(part))
    target.put_many((f"{key}/{m['member']}", part) for m, part in objects[:-1])
    target.put(f"{key}/{objects[-1][0]['member']}", objects[-1][1])


def _check(source: Roots, shard: str, member: dict[str, Any], data: memoryview) -> None:
    if len(data) != member["size"] or not chunkindex.is_sound(data, member["crc32c"], is_chunk=member["chunk"] >= 0):
        raise CorruptChunkError(
            f"{member['member']!r} of {source.full_url(shard)} does not match its checksum: the shard is damaged and "
            "was not copied, and nothing was committed; run `archive verify` on the source"
        )
