"""Rows of an archive that go to another, and the form that they get there: by reference, or as copies.

A transfer adds new rows and refuses contradictions. A row of the segments table is named by session, rank and
sequence. Sessions are named by users, too, so two rows of one name are the same only if they were also made at the same
time. Rows that a compaction cut have names of their own: their steps, which keep stream and positions, identify them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive, tables
from archive.arrays import Ints, Mask, Steps, arrow, ascending, places, row_codes
from archive.base import (
    AccessDeniedError,
    AlreadyExistsError,
    ByteRange,
    CorruptChunkError,
    DuplicateEpisodeError,
    ExpiredError,
    StorageError,
    UnsafePathError,
    cached_property,
    layout,
)
from archive.index import Snapshot, chunkindex
from archive.jobs import JobCall, Procedure, Result
from archive.log import Pin, commits, tablefiles
from archive.read import Reader, Spans, sizes
from archive.shard import SHARD_BYTES
from archive.store import Roots, Storage, join_key, split_key
from archive.tables import ADDRESS, CHUNK_FILE, KEYS, among, coded, distinct, news, of_segments

if TYPE_CHECKING:
    import pyarrow as pa

AT_ONCE = 4
BATCH_BYTES = 256 * 1024 * 1024  # of the shards that a batch of a job copies,
_LEAST_BYTES = 1024 * 1024  # each of which counts as this much at least
METADATA = "zarr.json"
_SHARD = re.compile(
    r"shards/[A-Za-z0-9_%-]+\.(?:zip|zarr)\Z|journal/[A-Za-z0-9_%-]+/(?:rank|node)-[0-9]{5,}/[0-9]{9}\.zip\Z"
)

Members = list[dict[str, Any]]  # of a shard, as rows of the chunk table
Progress = Callable[[int, int], None]
Part = tuple[int, Snapshot, "pa.Table"]  # rows of a source's segments or late table: its number, and its tables


class Taken:
    """The keys of an archive that cannot be given to copies, or are copies already, as they were when they were first
    asked for."""

    def __init__(self, target: Storage) -> None:
        self._target = target
        self.copies = set[str]()  # that were made here

    @cached_property
    def listed(self) -> set[str]:
        """The keys that prunes have listed: they may be deleted at any time, so none of these is used again."""
        return _listed(self._target)

    @cached_property
    def shards(self) -> set[str]:
        """The shards; of one that is a directory, its folder."""
        return {f"shards/{name}" for name in self._target.list("shards")}

    @cached_property
    def journals(self) -> set[str]:
        """The objects of journals."""
        return {one.key for one in self._target.scan("journal")}

    def is_there(self, key: str) -> bool:
        """True for a shard that is there: a packed one whole or not at all; of a directory the group's metadata comes
        last."""
        if key in self.copies:
            return True
        present = self.journals if key.startswith("journal/") else self.shards
        return key in present or (f"{key}/" in present and self._target.exists(f"{key}/{METADATA}"))


def copy_shards(
    source: Roots,
    target: Storage,
    chunks: pa.Table,
    known: Collection[str],
    moved: Progress,
    *,
    verify: bool,
    taken: Taken | None = None,
) -> dict[str, str]:
    """Copy the objects of the shards that the chunk rows name, without `known` and existing ones, a few at once; the
    name of each shard in the target. The first error ends it.

    moved: called with (objects done, objects).  verify: every byte is read and checked, even where the store would copy
    by itself.
    """
    rows: dict[str, Members] = {}
    for row in chunks.to_pylist():
        rows.setdefault(layout.object_of(row["shard"]), []).append(row)
    keys, taken = {shard: _own_key(shard) for shard in rows}, taken or Taken(target)
    listed = taken.listed - {*known}
    keys |= {s: layout.copy_key(secrets.token_hex(4), key) for s, key in keys.items() if key in listed}

    def copy(shard: str, key: str, members: Members) -> str:
        members = sorted(members, key=lambda m: m["member"] == METADATA)
        if verify or not _copied_by_store(source, target, shard, key, members):
            _stream(source, target, shard, key, members)
        return key

    jobs = [
        (shard, keys[shard], members)
        for shard, members in rows.items()
        if keys[shard] not in known and not taken.is_there(keys[shard])
    ]
    pool = ThreadPoolExecutor(AT_ONCE, "archive-copy")
    try:
        for i, key in enumerate(pool.map(lambda job: copy(*job), jobs)):
            taken.copies.add(key)
            moved(i + 1, len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    found = {shard: layout.object_of(shard) for shard in distinct(chunks["shard"])}
    return {shard: keys[key] + shard[len(key) :] for shard, key in found.items()}


def _listed(target: Storage) -> set[str]:
    files = [f"manifest/{name}" for name in target.list("manifest") if name.endswith(layout.PRUNED)]
    found = zip(files, target.get_all(files), strict=True)
    lists = (tables.loads(data, "pruned", where=target.full_url(key), columns=["key"]) for key, data in found)
    return {key for table in lists for key in table["key"].to_pylist()}


def _own_key(shard: str) -> str:
    """The shard's key in any archive. No other key may be written, whatever the source's tables say."""
    key = split_key(shard)[1]
    if not _SHARD.match(key):
        raise UnsafePathError(
            f"a table of the source names the shard {shard!r}, which is no shard's name; it was not copied"
        )
    return key


def _copied_by_store(source: Roots, target: Storage, shard: str, key: str, members: Members) -> bool:
    """Let the store copy a shard, if it can. A refusal is no error: the bytes can be streamed."""
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
        target.create_once(key, data)
        return
    ranges = [ByteRange(f"{shard}/{m['member']}", 0, m["size"]) for m in members]
    objects = list(zip(members, source.get_ranges(ranges), strict=True))
    for member, part in objects:
        _check(source, shard, member, memoryview(part))
    target.create_all((f"{key}/{m['member']}", part) for m, part in objects[:-1])
    target.create_once(f"{key}/{objects[-1][0]['member']}", objects[-1][1])


def _check(source: Roots, shard: str, member: dict[str, Any], data: memoryview) -> None:
    if len(data) != member["size"] or not chunkindex.is_sound(data, member["crc32c"], is_chunk=member["chunk"] >= 0):
        raise CorruptChunkError(
            f"{member['member']!r} of {source.full_url(shard)} does not match its checksum: the shard is damaged and "
            "was not copied, and nothing was committed; run `archive verify` on the source"
        )


NAMED = ("episode_id", "session", "rank", "sequence", "created_at", "buffer", "env_id", "position", "length")
_STREAM = ("session", "rank", "buffer", "env_id", "created_at")


@dataclass(frozen=True)
class Outgoing:
    """Rows of one archive's segments table that go to another."""

    archive: Archive
    rows: Ints

    @cached_property
    def names(self) -> pa.Table:
        """The columns NAMED of these rows."""
        return self.archive.snapshot.take(self.rows, NAMED)

    def table(self) -> pa.Table:
        """The rows themselves."""
        return tables.only_used(self.archive.snapshot.take(self.rows, tables.schema("segments").names))

    def without(self, known: pa.Table, where: str) -> Outgoing:
        """The rows that an archive at `where` lacks; its rows are `known`. An id of another episode is refused."""
        new = np.flatnonzero(~held(self.names, known))
        names = self.names.take(new)
        _check_names(names, known, where)
        ours = known.filter(among(known["episode_id"], names["episode_id"]))
        if ours.num_rows:  # an episode may go on, or be replaced, if all that is there of it comes from here
            strange = np.flatnonzero(~held(ours, self.archive.snapshot.columns(NAMED)))
            if len(strange):
                raise _clash(ours["episode_id"][strange[0]].as_py(), where, "both have an episode of this id")
        return Outgoing(self.archive, self.rows[new])

    def beside(self, kind: str, known: pa.Table) -> pa.Table:
        """The rows of a table that follow these, without known ones, and those with newer known values."""
        snapshot = self.archive.snapshot
        rows: pa.Table = getattr(snapshot.annotations, kind)
        if rows.num_rows:
            rows = news(kind, rows.filter(of_segments(kind, rows, snapshot.take(self.rows, KEYS))), known)
        return rows


def held(rows: pa.Table, known: pa.Table) -> Mask:
    """Mask of the rows that are among others, by name, or by their steps if a compaction named them."""
    at, same = _by_name(rows, known)
    cut = np.flatnonzero((at < 0) & (rows["sequence"].to_numpy() < 0))
    if len(cut):
        mine = rows.take(cut)
        wanted, there = (
            Steps(stream, position, position + table["length"].to_numpy(), row=np.arange(len(stream)))
            for table, stream in zip((mine, known), row_codes(mine.select(_STREAM), known.select(_STREAM)), strict=True)
            for position in (table["position"].to_numpy(),)
        )
        same[np.delete(cut, ascending(wanted.minus(there)["row"]))] = True
    return same


def _by_name(rows: pa.Table, known: pa.Table) -> tuple[Ints, Mask]:
    """The place of each row's name among others, -1 for none; a mask of those that were also made at the same time."""
    at = places(*row_codes(rows.select(ADDRESS), known.select(ADDRESS)))
    now, then = (table["created_at"].cast("int64").to_numpy() for table in (rows, known))
    same = at >= 0
    same[same] = now[same] == then[at[same]]
    return at, same


def _check_names(names: pa.Table, known: pa.Table, where: str) -> None:
    """Refuse rows whose name belongs to other data: ids are never renumbered."""
    at, same = _by_name(names, known)
    other = np.flatnonzero((at >= 0) & ~same)
    if len(other):
        episode, session = (names[name][other[0]].as_py() for name in ("episode_id", "session"))
        raise _clash(episode, where, f"sessions of both are called {session!r}")


def _clash(episode: str, where: str, why: str) -> DuplicateEpisodeError:
    return DuplicateEpisodeError(
        f"episode {episode!r} of {where} differs from the one that is there already ({why}); nothing was committed. "
        "Leave it out with resharding.filter(...): ids are never renumbered"
    )


# -- by reference ------------------------------------------------------------------------------------------------------


def referred(source: Archive, rows: pa.Table, archive: Archive, moved: Progress) -> pa.Table:
    """Rows of the source's segments or late table, with shards and chunk tables named as in another archive; pinned at
    their place."""
    roots, needed = _roots(source), dict[str, set[str]]()
    shards = len(distinct(rows["shard"]))
    for name in ("shard", "chunks"):
        values = [None if v is None else join_key(source.id, v) for v in rows[name].to_pylist()]
        for base, key in (split_key(layout.object_of(v)) for v in values if v is not None):
            needed.setdefault(str(base), set()).add(key)
        rows = _with(rows, name, values)
    for base, keys in needed.items():  # so that garbage collection there spares them
        pin = Pin(archive.id, archive.url, tuple(sorted(keys)))
        digest = hashlib.sha256("\n".join(pin.objects).encode()).hexdigest()[:16]
        key, data = f"pins/{archive.id}-{digest}.json", json.dumps(pin.to_json()).encode()
        with suppress(AlreadyExistsError):  # of the same objects, by another URL
            roots.storage(None if base == source.id else base).create_once(key, data)
    _check_there(source, needed.get(source.id, set()))
    moved(shards, shards)
    return rows


def _roots(source: Archive) -> Roots:
    return Roots(source.storage, source.head.base_urls)


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    import pyarrow as pa

    field = rows.schema.field(name)
    column = pa.array(values, pa.string()).dictionary_encode().cast(field.type)
    return rows.set_column(rows.schema.get_field_index(name), field, column)


def _check_there(source: Archive, keys: Collection[str]) -> None:
    """ExpiredError if an object was pruned after the source was opened and before it was pinned."""
    pruned = commits.pruned_since(source.storage, source.head)
    gone = pruned.keys() & keys
    if gone:
        raise ExpiredError(
            f"{len(gone)} objects to be referred to, such as {source.storage.full_url(min(gone))}, were pruned by "
            f"commit {pruned[min(gone)]} after that archive was opened; nothing was committed. Open it again, or give "
            "copy=True"
        )


# -- as copies ---------------------------------------------------------------------------------------------------------


class Copying(Procedure):
    """Shards that are copied to another archive. Items name them: the number of the source, a space, and the key that
    the source has for it. A batch is of one source.

    sources, target: their tables.  moved: called with (shards done, shards) of each batch, in this process.
    """

    def __init__(
        self, sources: Sequence[Snapshot], target: Snapshot, *, verify: bool, moved: Progress | None = None
    ) -> None:
        self._sources, self._target = sources, target
        self._verify = verify
        self._moved = moved
        self._taken = Taken(target.storage)
        self._files: dict[str, pa.Table] = {}  # chunk files of the batch before

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_moved": None, "_taken": Taken(self._target.storage), "_files": {}}
        return {name: value for name, value in state.items() if name != "_known"}

    @cached_property
    def _known(self) -> set[str]:
        """The objects of the shards that the target's tables name."""
        held = (self._target.columns(["shard"]), self._target.annotations.late)
        return {layout.object_of(shard) for table in held for shard in distinct(table["shard"])}

    def run(self, items: Sequence[str], agree: Callable[[str], str]) -> Result:
        (number,) = {one.partition(" ")[0] for one in items}
        shards, source = [one.partition(" ")[2] for one in items], self._sources[int(number)]
        roots = Roots(source.storage, source.commit.base_urls)
        chunks = self._chunk_rows(roots, source, shards)
        keys = copy_shards(
            roots,
            self._target.storage,
            chunks,
            self._known,
            self._moved or (lambda done, total: None),
            verify=self._verify,
            taken=self._taken,
        )
        plain = _with(chunks, "shard", [keys[shard] for shard in chunks["shard"].to_pylist()])
        return Result({"chunks": plain}, said=[keys.get(shard) for shard in shards])

    def _chunk_rows(self, roots: Roots, source: Snapshot, shards: Sequence[str]) -> pa.Table:
        """The chunk rows of these shards, named as the source names them."""
        import pyarrow as pa

        names = ["shard", *CHUNK_FILE]
        rows = pa.concat_tables([source.columns(names), source.annotations.late.select(names)]).unify_dictionaries()
        rows = rows.filter(among(rows["shard"], shards))
        rows = rows.take(arrow(np.unique(coded(rows["shard"])[1], return_index=True)[1]))  # one file of each
        refs = tablefiles.chunk_files(rows)
        self._files = {path: self._files[path] for path in refs if path in self._files}
        new = {path: ref for path, ref in refs.items() if path not in self._files}
        for data, path in zip(tablefiles.fetch(roots, [*new.values()]), new, strict=True):
            table, base = tables.loads(data, "chunks", where=roots.full_url(path)), split_key(path)[0]
            self._files[path] = _with(table, "shard", [join_key(base, s) for s in table["shard"].to_pylist()])
        parts, left = [], {*shards}
        for table in self._files.values():
            mine = left.intersection(distinct(table["shard"]))
            left -= mine
            parts.append(table.filter(among(table["shard"], mine)))
        return tables.concat("chunks", parts)


def to_copy(parts: Sequence[Part], *, whole: bool) -> list[list[str]]:
    """The batches of the shards of rows of sources: of each source all, or so many as have some bytes together."""
    out, planned = list[list[str]](), set[tuple[int, str]]()
    for number, source, rows in parts:
        shards: dict[str, str] = {}  # a shard that several archives hold is copied from one
        for shard in distinct(rows["shard"]):
            shards.setdefault(split_key(shard)[1], shard)
        new = [shard for name, shard in shards.items() if (number, name) not in planned]
        planned |= {(number, name) for name in shards}
        runs = [(0, len(new))] if whole else sizes.runs(_estimated(source, new), BATCH_BYTES)
        out += [[f"{number} {shard}" for shard in new[start:stop]] for start, stop in runs if start < stop]
    return out


def _estimated(source: Snapshot, shards: Sequence[str]) -> Ints:
    """About the bytes of each shard, by the tables alone."""
    table, reader = source.columns(["shard", "length"]), Reader(source).as_written()
    rows = np.flatnonzero(among(table["shard"], shards))
    spans = Spans.of_each(rows, np.zeros(len(rows), np.int64), table["length"].to_numpy()[rows])
    segments = reader.segments(rows)
    held = np.bincount(segments.shard, reader.sizes(spans), len(segments.shards)).astype(np.int64).tolist()
    known = dict(zip(segments.shards, held, strict=True))
    return np.array([max(known.get(shard, SHARD_BYTES), _LEAST_BYTES) for shard in shards], np.int64)


def copied(call: JobCall, parts: Sequence[Part]) -> list[pa.Table]:
    """Rows of the sources' segments or late tables after their shards were copied, with chunk tables of their own."""
    keys, chunks = defaultdict[int, dict[str, str]](dict), defaultdict[int, list["pa.Table"]](list)
    for number, receipt in zip(sorted(call.results), call.read(call.results), strict=True):
        for item, key in zip(call.plan.batch(number - call.first), receipt.index.said, strict=True):
            source, _, shard = item.partition(" ")
            if key is not None:
                keys[int(source)][split_key(shard)[1]] = key
        chunks[int(source)].append(receipt.table("chunks"))
    return [_placed(call, rows, keys[of], tables.concat("chunks", chunks[of])) for of, _, rows in parts]


def _placed(call: JobCall, rows: pa.Table, keys: Mapping[str, str], chunks: pa.Table) -> pa.Table:
    if not rows.num_rows:
        return rows
    names = [None if shard is None else split_key(shard)[1] for shard in rows["shard"].to_pylist()]
    mine = chunks.filter(among(chunks["shard"], {keys.get(name, name) for name in names if name is not None}))
    file = tablefiles.write(call.store.storage, call.session, "chunks", mine) if mine.num_rows else None
    return _with(tablefiles.with_chunks(rows, file), "shard", [name and keys.get(name, name) for name in names])
