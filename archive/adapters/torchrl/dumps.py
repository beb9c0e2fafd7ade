"""`rb.dumps(url)` and `rb.loads(url)` into an archive: a storage checkpointer that takes over for the whole buffer."""

from __future__ import annotations

import functools
import os
import weakref
from contextlib import suppress
from typing import Any

import archive
from archive import Writer
from archive.adapters import Report, common
from archive.adapters.torchrl import adapter
from archive.adapters.torchrl.parts import module
from archive.base import NotFoundError, SupersededError, UsageError
from archive.checkpoint import Checkpoint


class ArchiveCheckpointer:
    """Give it to a buffer, and its `dumps` and `loads` (or save, dump, load) take any URL of an archive.

        rb = TensorDictReplayBuffer(storage=..., checkpointer=torchrl.ArchiveCheckpointer(storage_options=...))
        rb.dumps("s3://bucket/runs/42")                   # the next one uploads only what is new
        rb.loads("s3://bucket/runs/42")                   # the newest; at other capacities or world sizes too

    Or, of a buffer that there is: `torchrl.ArchiveCheckpointer(rb)`. `dumps` returns when the checkpoint is committed.
    storage_options: as `archive.open` takes them.  rank, world_size: as `arc.writer` takes them.  run: which one to
    save to and load from; default: "main", and for loading the only one that has checkpoints.
    buffer: the name in the archive.
    options: those of `torchrl.save`.  `close()` ends the writers that it holds.
    """

    def __init__(
        self,
        rb: Any = None,
        *,
        storage_options: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        buffer: str = "replay",
        existing: str = "replace",
        **options: Any,
    ) -> None:
        _take_over(module("replay_buffers").ReplayBuffer)
        common.check_option("existing", existing, common.EXISTING)
        self._storage_options = storage_options
        self._place = {"rank": rank, "world_size": world_size}
        self._run = run
        self._buffer = buffer
        self._existing = existing
        self._options = options
        self._writers: dict[str, Writer] = {}
        self._shares: dict[str, Any] = {}  # what was loaded: a writer goes on from it when there is something to write
        weakref.finalize(self, _close_all, self._writers)
        if rb is not None:
            if not rb.initialized:
                rb._init()
            rb._storage.checkpointer = self

    def save(self, rb: Any, url: Any, *, step: int | None = None) -> Checkpoint:
        """Checkpoint the buffer in the archive at `url`, which is created where there is none; the Checkpoint."""
        url = os.fspath(url)
        writer = self._writer(url)
        if step is None:
            newest = self._archive(url).checkpoints.of(writer.run).latest
            step = 0 if newest is None else int(newest.step) + 1
        return adapter.save({self._buffer: rb}, writer, step=step, **self._options).result()

    def load(self, rb: Any, url: Any) -> Report:
        """Restore the buffer from the newest checkpoint at `url`; the Report."""
        url = os.fspath(url)
        found = self._newest(url)
        world_size = self._place["world_size"]
        plan = common.planned(found, world_size=world_size)
        room = adapter.capacity({self._buffer: rb}, found)[self._buffer]
        if not plan.is_identity or max(plan.steps) > room:
            plan = common.planned(found, world_size=world_size, capacity=room)
        share = plan.share(self._place["rank"])
        reports: dict[str, Report] = adapter.restore({self._buffer: rb}, share, existing=self._existing)
        if url in self._writers:
            with suppress(SupersededError):  # `dumps` has said so, or there was nothing left to commit
                self._writers.pop(url).close()
        self._shares[url] = share
        return reports[self._buffer]

    def close(self) -> None:
        """End the writers that are open."""
        self._shares.clear()
        _close_all(self._writers)

    def _archive(self, url: str, *, create: bool = False) -> archive.Archive:
        return archive.open(url, create=create, storage_options=self._storage_options)

    def _writer(self, url: str) -> Writer:
        if url not in self._writers:
            arc, share = self._archive(url, create=True), self._shares.get(url)
            how = {**self._place, "run": self._run} if share is None else {"resume": share}
            self._writers[url] = arc.writer(**how)
            self._shares.pop(url, None)
        return self._writers[url]

    def _newest(self, url: str) -> Checkpoint:
        """The newest checkpoint of the run, or of the only one that has any."""
        checkpoints = self._archive(url).checkpoints
        if self._run is not None:
            checkpoints = checkpoints.of(self._run)
        try:
            found = checkpoints.latest
        except UsageError as e:
            raise UsageError(f"{e}; a checkpointer of one run is ArchiveCheckpointer(run=...)") from e
        if found is None:
            of_run = "" if self._run is None else f" of run {self._run!r}"
            raise NotFoundError(f"the archive at {url} has no checkpoint{of_run} yet")
        return found

    # -- what a storage expects of its checkpointer -------------------------------------------------------------

    def dumps(self, storage: Any, path: Any) -> None:
        raise UsageError("a storage alone is not archived: call dumps(url) of its replay buffer")

    def loads(self, storage: Any, path: Any) -> None:
        raise UsageError("a storage alone is not archived: call loads(url) of its replay buffer")

    def register_save_hook(self, hook: Any) -> None:
        raise UsageError("an archive saves the steps as they are: hooks that change them have no place here")

    register_load_hook = register_save_hook

    def _detach_from_load_path(self, storage: Any) -> None:
        """Nothing: what was loaded is in the storage's own memory."""


def _close_all(writers: dict[str, Writer]) -> None:
    while writers:
        writers.popitem()[1].close()


def _take_over(kind: Any) -> None:
    """Have `dumps` and `loads` ask whether the buffer's checkpointer is ours; they do as ever where it isn't."""
    for name, ours in (("dumps", ArchiveCheckpointer.save), ("loads", ArchiveCheckpointer.load)):
        theirs = getattr(kind, name)
        if not hasattr(theirs, "_asks_for_an_archive"):
            setattr(kind, name, _asking(theirs, ours))


def _asking(theirs: Any, ours: Any) -> Any:
    @functools.wraps(theirs)
    def method(self: Any, path: Any) -> Any:
        if not self.initialized:
            self._init()
        checkpointer = getattr(self._storage, "checkpointer", None)
        if isinstance(checkpointer, ArchiveCheckpointer):
            ours(checkpointer, self, path)
            return None
        return theirs(self, path)

    method._asks_for_an_archive = True  # type: ignore[attr-defined]
    return method
