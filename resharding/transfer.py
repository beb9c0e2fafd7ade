"""Merging and splitting archives: episodes of some archives become visible in another, by reference or as copies.

Ids are never renumbered. Everything is written before one commit makes it visible, so a run that fails leaves the
target as it was; run again, it finds the copies that are there and goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import commits, manifest, tables
from archive.bases import Roots, join_key, split_key
from archive.commits import Body, Commit, CommitLog
from archive.errors import DuplicateEpisodeError, UsageError
from archive.facade import Archive
from archive.facade import open as open_archive
from archive.ranges import Ints
from archive.sessions import new_session
from resharding.copying import copy_shards

if TYPE_CHECKING:
    import pyarrow as pa

_ADDRESS = ("session", "rank", "sequence")


@dataclass(frozen=True)
class Selection:
    """Rows of one archive's segments table that go to another."""

    archive: Archive
    rows: Ints


def merge(
    urls: Sequence[Any],
    to: Any,
    *,
    copy: bool = False,
    engine: str = "local",
    storage_options: Mapping[str, Any] | None = None,
    allow_bases: bool | Sequence[str] = (),
) -> Archive:
    """Make the episodes of several archives visible in one, which is made if it is not there.

    copy=False refers to the sources' shards (they are pinned there; the target must be opened with `allow_bases`);
    copy=True copies them.  engine: "local", or "ray" to copy on a Ray cluster.  Merging again adds what is new.
    """
    sources = [_opened(url, storage_options, allow_bases) for url in urls]
    return _transfer([Selection(a, a.index.chains.rows) for a in sources], to, copy, engine, storage_options, allow_bases)


def split(
    url: Any,
    to: Any,
    count: int,
    *,
    copy: bool = False,
    engine: str = "local",
    storage_options: Mapping[str, Any] | None = None,
    allow_bases: bool | Sequence[str] = (),
) -> Archive:
    """Make the first `count` episodes of an archive visible in another."""
    source = _opened(url, storage_options, allow_bases)
    if not 0 < count <= len(source.episodes):
        raise UsageError(f"count={count}: the archive at {source.url} has {len(source.episodes)} episodes; give 1 to that many")
    return _transfer([_episodes(source, np.arange(count))], to, copy, engine, storage_options, allow_bases)


def filter(
    url: Any,
    to: Any,
    *,
    copy: bool = False,
    engine: str = "local",
    storage_options: Mapping[str, Any] | None = None,
    allow_bases: bool | Sequence[str] = (),
    **conditions: Any,
) -> Archive:
    """Make the episodes that meet the conditions (as `Episodes.filter` takes them) visible in another archive."""
    source = _opened(url, storage_options, allow_bases)
    chosen = np.flatnonzero(source.index.mask(**conditions))
    return _transfer([_episodes(source, chosen)], to, copy, engine, storage_options, allow_bases)


def _opened(url: Any, options: Mapping[str, Any] | None, allow_bases: bool | Sequence[str]) -> Archive:
    return url if isinstance(url, Archive) else open_archive(url, storage_options=options, allow_bases=allow_bases)


def _episodes(source: Archive, chosen: Ints) -> Selection:
    chains = source.index.chains
    parts = [chains.of(int(i)) for i in chosen]
    return Selection(source, np.concatenate(parts) if parts else np.zeros(0, np.int64))


def _transfer(
    selections: Sequence[Selection], to: Any, copy: bool, engine: str, options: Mapping[str, Any] | None,
    allow_bases: bool | Sequence[str],
) -> Archive:  # fmt: skip
    target = to if isinstance(to, Archive) else open_archive(to, create=True, storage_options=options, allow_bases=allow_bases)
    if any(s.archive.id == target.id for s in selections):
        raise UsageError(f"{target.url} is one of the sources; give another archive as target")
    log = CommitLog(target.storage, target.id, target.refresh().head)
    fresh = [_fresh(s, target) for s in selections]
    segments = [_rows(s) for s in fresh]
    _check_ids(segments, target)
    session = new_session()
    if copy:
        segments = [_copied(s, rows, target, session, engine) for s, rows in zip(fresh, segments, strict=True)]
        bases: dict[str, Any] = {}
    else:
        segments = [_referring(s, rows) for s, rows in zip(fresh, segments, strict=True)]
        bases = _bases(fresh)
        for selection in fresh:
            _pin(selection.archive, target)
    rows = tables.concat("segments", segments)
    if rows.num_rows == 0:
        return target

    def build(parent: Commit, attempt: int) -> Body:
        body, _ = manifest.add_rows(target.storage, session, "segments", parent, rows, fold=attempt == 0)
        known = {**parent.body.get("bases", {}), **bases}
        about = {"kind": "merge", "run": "", "session": session, "added": {"segments": rows.num_rows}, "bases": known}
        return {**commits.carried(parent), **body, **about, "runs": parent.runs}

    log.append(_transaction(fresh, copy), build)
    return target.refresh()


def _transaction(selections: Sequence[Selection], copy: bool) -> str:
    """The same for the same rows of the same commits, so that a run that is repeated commits once."""
    what = [[s.archive.id, s.archive.head.number, hashlib.sha256(s.rows.tobytes()).hexdigest()] for s in selections]
    return f"merge/{hashlib.sha256(json.dumps([what, copy]).encode()).hexdigest()}"


def _fresh(selection: Selection, target: Archive) -> Selection:
    """Without the rows that the target has already, by their addresses."""
    if not target.snapshot.rows or not len(selection.rows):
        return selection
    present = set(_addresses(target.snapshot.columns(_ADDRESS)))
    mine = _addresses(selection.archive.snapshot.take(selection.rows, _ADDRESS))
    keep = np.array([a not in present for a in mine], bool)
    return Selection(selection.archive, selection.rows[keep])


def _addresses(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name].to_pylist() for name in _ADDRESS), strict=True))


def _rows(selection: Selection) -> pa.Table:
    return tables.from_columns("segments", _as_columns(selection.archive.snapshot.take(selection.rows, tables.schema("segments").names)))


def _as_columns(table: pa.Table) -> dict[str, Any]:
    import pyarrow as pa

    texts = {f.name for f in table.schema if pa.types.is_dictionary(f.type)}
    return {n: table[n].cast(pa.string()).to_pylist() if n in texts else table[n] for n in table.column_names}


def _check_ids(segments: Sequence[pa.Table], target: Archive) -> None:
    """An id that two archives have for different episodes is refused: ids are never renumbered."""
    owner = dict.fromkeys(target.snapshot.columns(["episode_id"])["episode_id"].to_pylist(), target.url)
    for rows in segments:
        begun = [(e, p) for e, p in zip(rows["episode_id"].to_pylist(), rows["predecessor"].to_pylist(), strict=True) if p is None]
        clash = [e for e, _ in begun if e in owner]
        if clash:
            raise DuplicateEpisodeError(
                f"episode {clash[0]!r} ({len(clash)} in all) is in {owner[clash[0]]} already and is another one here; nothing "
                "was written. Leave it out with resharding.filter(...), as ids are never renumbered"
            )
        owner |= dict.fromkeys((e for e, _ in begun), "another source")


def _referring(selection: Selection, rows: pa.Table) -> pa.Table:
    """The rows with shards and chunk tables named as another archive must name them."""
    source = selection.archive.id
    for name in ("shard", "chunks"):
        values = [None if v is None else join_key(source, v) for v in rows[name].to_pylist()]
        rows = _with(rows, name, values)
    return rows


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    import pyarrow as pa

    field = rows.schema.field(name)
    column = pa.array(values, pa.string()).dictionary_encode().cast(field.type)
    return rows.set_column(rows.schema.get_field_index(name), field, column)


def _bases(selections: Sequence[Selection]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for selection in selections:
        out |= selection.archive.head.body.get("bases", {})
        out[selection.archive.id] = {"url": selection.archive.url}
    return out


def _pin(source: Archive, target: Archive) -> None:
    """Tell the source that its shards are needed elsewhere, so that collecting garbage there spares them."""
    body = {"archive": target.id, "url": target.url, "commit": source.head.number}
    source.storage.put(f"pins/{target.id}.json", json.dumps(body).encode())


def _copied(selection: Selection, rows: pa.Table, target: Archive, session: str, engine: str) -> pa.Table:
    """The rows after their shards were copied, with one chunk table of their own."""
    from archive.joining import stamped

    created = rows["created_at"]
    source = selection.archive
    roots = Roots(source.storage, source.head.body.get("bases", {}))
    wanted = sorted({s for s in rows["shard"].to_pylist() if s is not None})
    chunks = _chunk_tables(roots, rows, set(wanted))
    copy_shards(roots, target.storage, chunks, engine=engine)
    plain = {key: split_key(key)[1] for key in wanted}
    rows = _with(rows, "shard", [None if s is None else plain[s] for s in rows["shard"].to_pylist()])
    ref = manifest.write(target.storage, session, "chunks", chunks) if chunks.num_rows else None
    rows = stamped(rows, ref)
    return rows.set_column(rows.schema.get_field_index("created_at"), rows.schema.field("created_at"), created) if rows.num_rows else rows


def _chunk_tables(roots: Roots, rows: pa.Table, wanted: set[str]) -> pa.Table:
    """The chunk rows of the wanted shards; shards named as the source names them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    refs = {
        path: {"path": path, "bytes": size, "crc32c": crc}
        for path, size, crc in zip(*(rows[n].to_pylist() for n in ("chunks", "chunks_bytes", "chunks_crc32c")), strict=True)
        if path is not None
    }
    parts = []
    for data, path in zip(manifest.fetch(roots, list(refs.values())), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(path))
        base = split_key(path)[0]
        names = pa.array([join_key(base, s) for s in table["shard"].to_pylist()], pa.string())
        parts.append(table.filter(pc.is_in(names, value_set=pa.array(sorted(wanted), pa.string()))))
    return tables.concat("chunks", parts)


