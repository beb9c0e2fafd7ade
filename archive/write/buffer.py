"""One buffer of a writer: `w.buffer("demo")`. The writer's own verbs are those of its main buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from archive.arrays import Ints
from archive.fields import Schema
from archive.write.bufferwriter import BufferWriter
from archive.write.pipeline import Changes

if TYPE_CHECKING:
    import threading

    import pyarrow as pa


class _Guard(Protocol):
    def _entered(self) -> threading.RLock: ...
    def _surface(self) -> None: ...
    def _say(self, inner: BufferWriter, columns: Any, attributes: Any, progress: Any) -> None: ...
    @property
    def _changes(self) -> Changes: ...


class Buffer:
    """One buffer of a writer: `w.buffer("demo")`; the writer's own verbs are those of its main buffer."""

    def __init__(self, writer: _Guard, inner: BufferWriter) -> None:
        self._writer = writer
        self._inner = inner

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
        schema: Schema | None = None,
    ) -> str:
        """Add one whole episode; its id.

        steps: a nest of named arrays, axis 0 the step (see Schema for others; a list of lists is ragged).
        Copied: it may be changed afterwards.
        model_weights_uuid, update_count: one value, one a step, or the name of a field that has them.
        replace: a new revision of an episode of this id, with all of its steps.
        first, last: whether its first and last step are there.
        schema: what the fields of this episode mean, where that is not what the writer was told.
        """
        with self._writer._entered():
            self._writer._surface()
            with self._writer._changes(wait=True):
                return self._inner.add_episode(
                    steps, model_weights_uuid=model_weights_uuid, update_count=update_count, env_id=env_id,
                    episode_id=episode_id, terminated=terminated, truncated=truncated, metadata=metadata,
                    replace=replace, first=first, last=last, schema=schema,
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
            with self._writer._changes(wait=True):
                return self._inner.append(
                    steps, env_ids=env_ids, first=first, last=last, episode_ids=episode_ids, terminated=terminated,
                    truncated=truncated, model_weights_uuid=model_weights_uuid, update_count=update_count,
                    metadata=metadata, positions=positions,
                )  # fmt: skip

    def journal(
        self,
        columns: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Any = None,
    ) -> None:
        """Journal values with the next tick (a writer with `journal_s=`): see `Writer.journal`."""
        with self._writer._entered():
            self._writer._surface()
            with self._writer._changes(wait=True):
                self._writer._say(self._inner, columns, attributes, progress)

    def next_position(self, env_id: int) -> int:
        """Position that the next step of an env row gets; 0 for one that has none."""
        with self._writer._entered():
            return self._inner.next_position(env_id)

    @contextmanager
    def exclusive(self, *, bounded: bool = True) -> Iterator[BufferWriter]:
        """What is behind this buffer, to nobody else's use meanwhile: several appends and evictions as one.

        bounded: whether appending waits while much is being uploaded; else the copies queue up in memory.
        """
        with self._writer._entered():
            self._writer._surface()
            with self._writer._changes(wait=bounded):
                yield self._inner

    @contextmanager
    def together(self) -> Iterator[None]:
        """`with w.together():` all that is said within becomes durable at once, or not at all; other threads wait."""
        with self._writer._entered():
            yield

    def weights(self, uuid: Any = None, update_count: int | None = None) -> None:
        """Which weights make what is added to this buffer from now on."""
        with self._writer._entered(), self._writer._changes(wait=True):
            self._inner.set_weights(uuid, update_count)

    def evict(self, env_id: int | None = None, *, before: int | None = None, positions: Any = None) -> None:
        """Steps of an env row have left the buffer: all before a position, those in a range (start, stop), half-open,
        or those in a list or array of positions."""
        with self._writer._entered(), self._writer._changes(wait=True):
            self._inner.evict(env_id, before, positions)

    def remove(self, episode_ids: str | Iterable[str], missing: str = "error") -> int:
        """All live steps of these episodes have left the buffer; how many. missing: "ignore" passes over ids that are
        not in it; "error" (default): NotFoundError, and nothing was removed.

        A recovery takes it back with the training, of prompts that were trained on after the checkpoint.
        """
        with self._writer._entered(), self._writer._changes(wait=True):
            return self._inner.remove(episode_ids, missing)

    def clear(self) -> None:
        """All steps have left the buffer. They stay in the archive."""
        with self._writer._entered(), self._writer._changes(wait=True):
            self._inner.live_set.clear()

    def close_episodes(
        self,
        env_ids: Any = None,
        *,
        terminated: bool | None = None,
        truncated: bool | None = True,
        reason: str | None = None,
    ) -> list[str]:
        """End the open episodes of these env rows (None: all) without another step; their ids."""
        with self._writer._entered(), self._writer._changes(wait=True):
            return self._inner.close_episodes(env_ids, terminated, truncated, reason)

    @property
    def live(self) -> pa.Table:
        """(env_id, position, length, episode_id) of the live steps, the order that columns follow."""
        with self._writer._entered():
            return self._inner.live
