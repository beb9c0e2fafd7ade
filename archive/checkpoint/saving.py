"""Staging one rank's part of a checkpoint: what was cut, and the rows written since the last commit, as one object."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archive.base import AlreadyExistsError, AmbiguousWriteError, CheckpointError, escape, layout
from archive.checkpoint import staging
from archive.manifest import Place, tables
from archive.shard import groups, packing
from archive.store import Storage
from archive.write import Column, Cut, Written, column_path, digest

COLUMN_CHUNK_BYTES = 1024 * 1024
CREATE_TRIES = 5  # while the store does not say whether the object is there; each has its own deadline


@dataclass(frozen=True)
class Request:
    """What `checkpoint()` was asked for, beyond the buffers."""

    name: str
    step: int
    ordinal: int
    save_replay: bool
    progress: str | None
    unconsumed: str | None
    metrics: Mapping[str, Any]
    lineage: Mapping[str, Any]
    partial: bool = False
    known_at: int = -1  # the commit up to which ids that the user gave were checked; -1 if he gave none
    resumed_from: int | None = None  # the commit of the checkpoint that the writer went on from
    committed: int = 0  # this rank's segments below this number are committed already


@dataclass
class SavedColumns:
    """Columns and attributes of the last committed checkpoint: digest -> where they lie, to refer to when unchanged."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)


def stage(
    storage: Storage,
    place: Place,
    request: Request,
    cuts: Sequence[Cut],
    written: Sequence[Written],
    saved: SavedColumns,
) -> tuple[str, dict[str, Any], SavedColumns]:
    """Write this rank's staged object, create-only; its key, its index, and what the next one may refer to."""
    key = layout.state_key(place.session, request.name, place.rank)
    cuts = cuts if request.save_replay else [_without_replay(c) for c in cuts]
    arrays: dict[str, Any] = {}
    here = {"object": key, "nonce": secrets.token_hex(8)}
    columns = {c.name: _columns(c, here, arrays, saved) for c in cuts}
    attributes = {c.name: {n: _attribute(c.name, n, t, here, saved) for n, t in c.attributes.items()} for c in cuts}
    states = {c.name: _state(c, arrays) for c in cuts if c.state is not None}
    segments, chunks = rows_of(written if request.save_replay else [])
    index: dict[str, Any] = {
        "rank": place.rank, "world_size": place.world_size, "run": place.run, "session": place.session,
        "name": request.name, "step": request.step, "ordinal": request.ordinal, "nonce": here["nonce"],
        "replay_saved": request.save_replay, "partial": request.partial, "known_at": request.known_at,
        "resumed_from": request.resumed_from, "sequence": max(request.committed, next_sequence(segments)),
        "metrics": dict(request.metrics),
        "lineage": dict(request.lineage), "progress": request.progress, "columns": columns, "attributes": attributes,
        "states": states, "rows": {"segments": segments.num_rows, "chunks": chunks.num_rows},
        "buffers": {c.name: _buffer(c) for c in cuts},
    }  # fmt: skip
    members = [
        staging.file_member("segments.parquet", tables.dumps(segments)),
        staging.file_member("chunks.parquet", tables.dumps(chunks)),
        staging.file_member("live.parquet", tables.dumps(tables.concat("live", [c.live for c in cuts]))),
        *_text_members(key, cuts, attributes, request),
        *groups.encode(arrays, attributes={}, chunk_bytes=COLUMN_CHUNK_BYTES),
    ]
    _create(storage, key, staging.pack(index, members), index["nonce"])
    return key, index, _saved(columns, attributes)


def rows_of(written: Sequence[Written]) -> tuple[Any, Any]:
    """Segment rows and chunk rows of what was written."""
    return (
        tables.concat("segments", [w.segments for w in written if w.segments is not None]),
        tables.concat("chunks", [w.chunks for w in written if w.chunks is not None]),
    )


def next_sequence(segments: Any) -> int:
    """The number after those of some rows of the segments table."""
    return 1 + max(segments["sequence"].to_pylist(), default=-1)


def _without_replay(cut: Cut) -> Cut:
    return Cut(cut.name, cut.live.slice(0, 0), 0, 0, cut.next_positions, cut.open_episodes, {}, {}, cut.state, {})


def _buffer(cut: Cut) -> dict[str, Any]:
    return {
        "steps": cut.steps, "episodes": cut.episodes, "discarded": cut.discarded,
        "next": [[env, position] for env, position in cut.next_positions.items()],
        "open": [[env, episode] for env, episode in cut.open_episodes.items()],
    }  # fmt: skip


def _columns(cut: Cut, here: dict[str, str], arrays: dict[str, Any], saved: SavedColumns) -> dict[str, dict[str, Any]]:
    out = {}
    for name, column in cut.columns.items():
        path = column_path(cut.name, name)
        earlier = saved.entries.get(path)
        if earlier is not None and earlier["digest"] == column.digest:
            out[name] = earlier
            continue
        arrays[path] = column.array
        out[name] = _entry(path, column) | here
    return out


def _entry(path: str, column: Column) -> dict[str, Any]:
    shape = list(column.array.shape)
    return {"array": path, "rows": shape[0], "dtype": column.dtype, "shape": shape[1:], "digest": column.digest}


def _attribute(buffer: str, name: str, text: str, here: dict[str, str], saved: SavedColumns) -> dict[str, Any]:
    member = f"attributes/{escape(buffer)}/{escape(name)}.json"
    mark = digest(np.frombuffer(text.encode(), np.uint8))
    earlier = saved.entries.get(member)
    return earlier if earlier is not None and earlier["digest"] == mark else {"member": member, "digest": mark} | here


def _text_members(
    key: str, cuts: Sequence[Cut], attributes: dict[str, dict[str, dict[str, Any]]], request: Request
) -> list[packing.Member]:
    out = [
        staging.file_member(entry["member"], cut.attributes[name].encode())
        for cut in cuts
        for name, entry in attributes[cut.name].items()
        if entry["object"] == key
    ]
    if request.unconsumed is not None:
        out.append(staging.file_member("unconsumed.json", request.unconsumed.encode()))
    return out


def _state(cut: Cut, arrays: dict[str, Any]) -> dict[str, Any]:
    assert cut.state is not None
    skeleton, values = cut.state
    prefix = f"state/{escape(cut.name)}/"
    scalars = [k for k, a in values.items() if a.ndim == 0]
    placed = {prefix + k: a.reshape(1) if a.ndim == 0 else a for k, a in values.items()}
    arrays.update(placed)
    return {
        "skeleton": skeleton,
        "prefix": prefix,
        "arrays": {p: len(a) for p, a in placed.items()},
        "scalars": scalars,
    }


def _saved(columns: dict[str, Any], attributes: dict[str, Any]) -> SavedColumns:
    entries = {e["array"]: e for of in columns.values() for e in of.values()}
    return SavedColumns(entries | {e["member"]: e for of in attributes.values() for e in of.values()})


def _create(storage: Storage, key: str, buffers: list[Any], nonce: str) -> None:
    """Create-only: a name is staged once by one writer. An unclear answer is settled by reading it back."""
    unclear: AmbiguousWriteError | None = None
    for _ in range(CREATE_TRIES):
        try:
            storage.create(key, buffers)
            return
        except AmbiguousWriteError as e:
            unclear = e
        except AlreadyExistsError as e:
            if _is_mine(storage, key, nonce):
                return
            raise CheckpointError(
                f"{storage.full_url(key)} is there already: this session has staged a checkpoint of this name before; "
                "give the checkpoint another name"
            ) from e
        if storage.exists(key) and _is_mine(storage, key, nonce):
            return
    raise unclear or CheckpointError(f"{storage.full_url(key)} could not be staged")


def _is_mine(storage: Storage, key: str, nonce: str) -> bool:
    return nonce.encode() in storage.get_head(key, staging.HEAD_BYTES)
