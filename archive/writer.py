"""The writer of one rank: buffers of steps, uploads in the background, and commits that make them visible."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from archive import commits, manifest, tables
from archive.bufferwriter import BufferWriter, Ids
from archive.commits import Body, Commit, CommitLog
from archive.errors import ClosedError, DuplicateEpisodeError, UsageError
from archive.manifest import FileRef, Snapshot
from archive.names import check_text
from archive.pipeline import Pipeline, Written
from archive.ranges import Ints
from archive.schema import Schema
from archive.sessions import Place, open_session
from archive.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MAIN_BUFFER = "replay"


class _Batch(NamedTuple):
    """What one commit adds; kept until it is known to be committed."""

    transaction: str
    segments: pa.Table
    chunks: FileRef | None
    claimed: frozenset[str]
    message: str | None


class Writer:
    """Writes one rank's buffers. Safe for several threads; belongs to the process that made it.

    Leaving it as a context commits what is pending, unless by an exception.
    """

    def __init__(
        self, storage: Storage, log: CommitLog, place: Place, schema: Schema, archive_layout: str, compression: str | None,
        on_commit: Any,
    ) -> None:  # fmt: skip
        self._storage, self._log, self._place, self._schema = storage, log, place, schema
        self._layout, self._compression, self._on_commit = archive_layout, compression, on_commit
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._pipelines: list[Pipeline] = []
        self._written: list[Written] = []
        self._batch: _Batch | None = None
        self._count = 0
        self._ids = Ids(place, self._known_ids)
        self._known_at = -1
        open_session(log, place)
        on_commit(log.head)
        self._buffers: dict[str, BufferWriter] = {}
        self._main = self._buffer(MAIN_BUFFER)

    # -- one buffer's verbs, of the main buffer -----------------------------------------------------------------

    def buffer(self, name: str) -> Buffer:
        """Another buffer of the same rank: the same verbs, its own streams, committed together."""
        with self._entered():
            return Buffer(self, self._buffer(check_text(name, "buffer")))

    def add_episode(self, steps: Any, **options: Any) -> str:
        """Add one whole episode; its id. Options as `Buffer.add_episode`."""
        return Buffer(self, self._main).add_episode(steps, **options)

    def append(self, steps: Any, **options: Any) -> Ints:
        """Append steps of env rows; their positions. Options as `Buffer.append`."""
        return Buffer(self, self._main).append(steps, **options)

    def weights(self, uuid: Any = None, update_count: int | None = None) -> None:
        """Which weights make what is added from now on, in all buffers of this writer that exist."""
        with self._entered():
            for buffer in self._buffers.values():
                buffer.set_weights(uuid, update_count)

    def evict(self, env_id: int | None = None, *, before: int | None = None, positions: Any = None) -> None:
        """Steps of an env row have left the buffer. See `Buffer.evict`."""
        Buffer(self, self._main).evict(env_id, before=before, positions=positions)

    def remove(self, episode_ids: str | Iterable[str]) -> int:
        """All live steps of these episodes have left the buffer; how many."""
        return Buffer(self, self._main).remove(episode_ids)

    def clear(self) -> None:
        """All steps have left the buffer. They stay in the archive."""
        Buffer(self, self._main).clear()

    def close_episodes(self, env_ids: Any = None, **how: Any) -> list[str]:
        """End open episodes without another step. See `Buffer.close_episodes`."""
        return Buffer(self, self._main).close_episodes(env_ids, **how)

    @property
    def live(self) -> pa.Table:
        """(env_id, position, length, episode_id) of the live steps, the order that columns follow."""
        return Buffer(self, self._main).live

    # -- all buffers --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def run(self) -> str:
        return self._place.run

    @property
    def session(self) -> str:
        return self._place.session

    def flush(self) -> None:
        """Upload everything added so far, and wait for it. It becomes visible with the next commit."""
        with self._entered():
            self._flush()

    def commit(self, message: str | None = None) -> Commit:
        """Make everything added so far visible: all of it or, if this raises, nothing.

        May be called again after an error: what was not committed is kept, and is committed once.
        """
        with self._entered():
            if self._batch is not None:
                self._commit_batch()
            self._flush()
            self._batch = self._collected(message)
            return self._commit_batch()

    def close(self) -> None:
        """Commit what is pending, and end the writer."""
        if not self._closed:
            self.commit()
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def __getstate__(self) -> Any:
        raise UsageError("a Writer does not pickle: open one in each process with arc.writer(rank=...)")

    def __repr__(self) -> str:
        p = self._place
        return f"<Writer rank {p.rank} of {p.world_size}, run={p.run!r} session={p.session!r} at {self._storage.url}>"

    def _entered(self) -> threading.RLock:
        """The lock, if the writer may be used here and nothing in the background has failed."""
        if self._closed:
            raise ClosedError(f"the writer of {self._storage.url} is closed; open another with arc.writer()")
        if os.getpid() != self._pid:
            raise UsageError("a Writer belongs to the process that opened it; open one in each process")
        return self._lock

    def _buffer(self, name: str) -> BufferWriter:
        if name not in self._buffers:
            self._buffers[name] = BufferWriter(name, self._place, self._schema, self._pipeline, self._ids)
        return self._buffers[name]

    def _pipeline(self, buffer: BufferWriter) -> Pipeline:
        p = self._place
        pipeline = Pipeline(self._storage, p.session, p.rank, self._layout, self._compression, buffer.describe)
        self._pipelines.append(pipeline)
        return pipeline

    def _surface(self) -> None:
        """Raise what failed in the background."""
        for pipeline in self._pipelines:
            if error := pipeline.failure():
                raise error

    def _flush(self) -> None:
        for buffer in self._buffers.values():
            buffer.send()
        for pipeline in self._pipelines:
            self._written += pipeline.drain()

    def _end(self) -> None:
        self._closed = True
        for pipeline in self._pipelines:
            pipeline.close()

    def _collected(self, message: str | None) -> _Batch | None:
        """What was written since the last commit, its chunk table on the store."""
        written = [w for w in self._written if w.segments is not None]
        if not written:
            return None
        parts = [w.chunks for w in written if w.chunks is not None]
        chunks = manifest.write(self._storage, self.session, "chunks", tables.concat("chunks", parts)) if parts else None
        segments = tables.concat("segments", [w.segments for w in written])
        self._count += 1
        batch = _Batch(
            f"{self.session}/{self.rank}/commit-{self._count}", _stamped(segments, chunks), chunks,
            frozenset(self._ids.claimed), message,
        )  # fmt: skip
        self._written, self._ids.claimed = [], set()
        return batch

    def _commit_batch(self) -> Commit:
        if self._batch is None:
            return self._log.head
        batch = self._batch
        commit = self._log.append(batch.transaction, lambda parent, attempt: self._body(batch, parent, attempt))
        self._batch = None
        self._known_at = commit.number
        self._on_commit(commit)
        return commit

    def _body(self, batch: _Batch, parent: Commit, attempt: int) -> Body:
        commits.fence(parent, self.run, self.session)
        self._check_claims(batch, parent)
        body, _ = manifest.add_rows(
            self._storage, self.session, "segments", parent, batch.segments, fold=attempt == 0
        )
        return {
            **commits.carried(parent), **body, "kind": "commit", "run": self.run, "session": self.session, "rank": self.rank,
            "chunks": batch.chunks, "added": {"segments": batch.segments.num_rows}, "message": batch.message,
        }  # fmt: skip

    def _known_ids(self) -> set[str]:
        self._known_at = self._log.catch_up().number
        return set(Snapshot(self._storage, self._log.head).columns(["episode_id"])["episode_id"].to_pylist())

    def _check_claims(self, batch: _Batch, parent: Commit) -> None:
        """Ids given by the user may have been committed by another writer since they were claimed."""
        if not batch.claimed or parent.number <= self._known_at:
            return
        taken = Snapshot(self._storage, parent).columns(["episode_id"])["episode_id"].to_pylist()
        clash = sorted(batch.claimed.intersection(taken))
        if clash:
            raise DuplicateEpisodeError(
                f"another writer committed an episode {clash[0]!r} at the same time ({len(clash)} in all); nothing was "
                "committed: write these episodes again under other ids, or with replace=True"
            )


def _stamped(segments: pa.Table, chunks: FileRef | None) -> pa.Table:
    """Segment rows with where their chunk table lies, and when they were collected."""
    from datetime import UTC, datetime

    segments = tables.set_column(segments, "created_at", datetime.now(UTC))
    for name, key in (("chunks", "path"), ("chunks_bytes", "bytes"), ("chunks_crc32c", "crc32c")):
        segments = tables.set_column(segments, name, chunks[key] if chunks else None)
    return segments


class Buffer:
    """One buffer of a writer: `w.buffer("demo")`; the writer's own verbs are those of its main buffer."""

    def __init__(self, writer: Writer, inner: BufferWriter) -> None:
        self._writer, self._inner = writer, inner

    @property
    def name(self) -> str:
        return self._inner.name

    def add_episode(
        self,
        steps: Any,
        *,
        model_weights_uuid: Any = None,
        update_count: Any = None,
        env_id: int | None = None,
        episode_id: str | None = None,
        terminated: bool | None = None,
        truncated: bool | None = None,
        metadata: dict[str, Any] | None = None,
        replace: bool = False,
        first: bool = True,
        last: bool = True,
    ) -> str:
        """Add one whole episode; its id.

        steps: a nest of named arrays, axis 0 the step (see Schema for others). Copied: it may be changed afterwards.
        model_weights_uuid, update_count: one value, one a step, or the name of a field that has them.
        replace: a new revision of an episode of this id.  first, last: whether its first and last step are there.
        """
        with self._writer._entered():
            self._writer._surface()
            return self._inner.add_episode(
                steps, model_weights_uuid=model_weights_uuid, update_count=update_count, env_id=env_id, episode_id=episode_id,
                terminated=terminated, truncated=truncated, metadata=metadata, replace=replace, first=first, last=last,
            )  # fmt: skip

    def append(
        self,
        steps: Any,
        *,
        env_ids: Any = None,
        first: Any = None,
        last: Any = None,
        episode_ids: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        model_weights_uuid: Any = None,
        update_count: Any = None,
        metadata: dict[str, Any] | None = None,
        positions: Any = None,
    ) -> Ints:
        """Append rows to the streams of env rows; the position of each row.

        Row i belongs to env `env_ids[i]`: one step of a vector env (None: rows 0 to N), a run of steps of one env (one
        id), or any mix in time order. Episodes begin at `first`, after `last` (or terminated or truncated), where
        `episode_ids` change and where `positions` (default: the next ones) jump; that closes the one before (reason
        "gap"). Of a run of one env, a single True means its first or its last row.
        metadata: of the episodes that begin here.
        """
        with self._writer._entered():
            self._writer._surface()
            return self._inner.append(
                steps, env_ids=env_ids, first=first, last=last, episode_ids=episode_ids, terminated=terminated,
                truncated=truncated, model_weights_uuid=model_weights_uuid, update_count=update_count, metadata=metadata,
                positions=positions,
            )  # fmt: skip

    def weights(self, uuid: Any = None, update_count: int | None = None) -> None:
        """Which weights make what is added to this buffer from now on."""
        with self._writer._entered():
            self._inner.set_weights(uuid, update_count)

    def evict(self, env_id: int | None = None, *, before: int | None = None, positions: Any = None) -> None:
        """Steps of an env row have left the buffer: all before a position, or those at some positions."""
        with self._writer._entered():
            self._inner.evict(env_id, before, positions)

    def remove(self, episode_ids: str | Iterable[str]) -> int:
        """All live steps of these episodes have left the buffer; how many."""
        with self._writer._entered():
            return self._inner.remove(episode_ids)

    def clear(self) -> None:
        """All steps have left the buffer. They stay in the archive."""
        with self._writer._entered():
            self._inner.live_set.clear()

    def close_episodes(
        self, env_ids: Any = None, *, terminated: bool | None = None, truncated: bool | None = True, reason: str | None = None
    ) -> list[str]:
        """End the open episodes of these env rows (None: all) without another step; their ids."""
        with self._writer._entered():
            return self._inner.close_episodes(env_ids, terminated, truncated, reason)

    @property
    def live(self) -> pa.Table:
        """(env_id, position, length, episode_id) of the live steps, the order that columns follow."""
        with self._writer._entered():
            return self._inner.live
