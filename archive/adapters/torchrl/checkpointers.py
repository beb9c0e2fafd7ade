"""TorchRL's own ways to checkpoint a buffer, into an archive: `rb.dumps(url)` and `rb.loads(url)`, by a checkpointer of
its storage; and `torchrl.checkpoint.Checkpoint`, by an adapter of its component."""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import archive
from archive import Writer
from archive.adapters import Report, common
from archive.adapters.torchrl import buffer as buffers
from archive.adapters.torchrl.parts import INSTALL, module
from archive.base import IntegrityError, NotFoundError, SupersededError, UsageError, visible
from archive.checkpoint import Checkpoint


class _Archives:
    """Saves a buffer to archives by their URLs, and loads it: a writer for each that is saved to."""

    def __init__(
        self,
        *,
        storage_options: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str | None = None,
        buffer: str = "replay",
        existing: str = "replace",
        **options: Any,
    ) -> None:
        common.check_option("existing", existing, common.EXISTING)
        self._storage_options = storage_options
        self._place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self._run = run
        self._buffer = buffer
        self._existing = existing
        self._options = options
        self._writers: dict[str, Writer] = {}
        self._shares: dict[str, Any] = {}  # what was loaded: a writer goes on from it when there is something to write
        weakref.finalize(self, _close_all, self._writers)

    def _saved(self, rb: Any, url: str, step: int | None, **options: Any) -> Checkpoint:
        """Checkpoint the buffer in the archive at `url`, which is created where there is none."""
        writer = self._writer(url)
        if step is None:
            newest = self._archive(url).checkpoints.of(writer.run).latest
            step = 0 if newest is None else int(newest.step) + 1
        return buffers.save({self._buffer: rb}, writer, step=step, **{**self._options, **options}).result()

    def _loaded(self, rb: Any, url: str, found: Checkpoint, tails: str | None = None, **options: Any) -> Report:
        """Restore the buffer from a checkpoint at `url`. tails: as of a plan."""
        world_size = self._place["world_size"]
        plan = common.planned(found, world_size=world_size, tails=tails)
        room = buffers.capacity({self._buffer: rb}, found)[self._buffer]
        if not plan.is_identity or max(plan.steps) > room:
            plan = common.planned(found, world_size=world_size, capacity=room, tails=tails)
        share = plan.share(self._place["rank"])
        reports = buffers.restore({self._buffer: rb}, share, **{"existing": self._existing, **options})
        if url in self._writers:
            with suppress(SupersededError):  # saving has said so, or there was nothing left to commit
                self._writers.pop(url).close()
        self._shares[url] = share
        return reports[self._buffer]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the writers that are open."""
        self._shares.clear()
        _close_all(self._writers)

    def _archive(self, url: str, *, create: bool = False) -> archive.Archive:
        return archive.open(url, create=create, storage_options=self._storage_options)

    def _writer(self, url: str) -> Writer:
        if url not in self._writers:
            arc, share = self._archive(url, create=True), self._shares.get(url)
            self._writers[url] = arc.writer(**self._place, run=self._run) if share is None else arc.writer(resume=share)
            self._shares.pop(url, None)
        return self._writers[url]


def _close_all(writers: dict[str, Writer]) -> None:
    while writers:
        writers.popitem()[1].close()


# -- rb.dumps(url), rb.loads(url) --------------------------------------------------------------------------------------


class ArchiveCheckpointer(_Archives):
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

    def __init__(self, rb: Any = None, **options: Any) -> None:
        _take_over(module("replay_buffers").ReplayBuffer)
        super().__init__(**options)
        if rb is not None:
            if not rb.initialized:
                rb._init()
            rb._storage.checkpointer = self

    def save(self, rb: Any, url: Any, *, step: int | None = None) -> Checkpoint:
        """Checkpoint the buffer in the archive at `url`, which is created where there is none; the Checkpoint."""
        return self._saved(rb, os.fspath(url), step)

    def load(self, rb: Any, url: Any) -> Report:
        """Restore the buffer from the newest checkpoint at `url`; the Report."""
        url = os.fspath(url)
        return self._loaded(rb, url, self._newest(url))

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


# -- torchrl.checkpoint ------------------------------------------------------------------------------------------------

_FILE, _MAX_BYTES = "archive.json", 64 * 1024
_COMMIT = {"archive": str, "commit": int, "digest": str}  # what the file has, and of which type


class CheckpointAdapter(_Archives):
    """A component of `torchrl.checkpoint.Checkpoint` that is a replay buffer, in the archive at a URL.

        checkpoint = Checkpoint(policy=policy, optimizer=optimizer)
        checkpoint.register("replay_buffer", rb, adapter=torchrl.CheckpointAdapter("s3://bucket/runs/42"))
        checkpoint.save(path)                             # on each rank, a path of its own
        checkpoint.load(path)                             # just that commit; on other numbers of ranks, too

    A save commits the buffers of all ranks, uploading only what is new, and leaves in `path` the number and the digest
    of the commit. A load refuses what is damaged, or of another archive, before the buffer changes.
    Arguments: as of `ArchiveCheckpointer`. save_kwargs of the component are options of `torchrl.save` (step, name,
    verify, ...), load_kwargs those of `torchrl.restore` (existing, unfinished).  `close()` ends the writer.
    """

    adapter_id = "archive.replay_buffer"
    format_version = 1

    def __init__(self, url: Any, **options: Any) -> None:
        common.system("torchrl.checkpoint", INSTALL).CheckpointAdapter.register(CheckpointAdapter)
        super().__init__(**options)
        self.url = os.fspath(url)

    def save(
        self, component: Any, path: Any, *, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Checkpoint the buffer; the Checkpoint."""
        _check_args(args)
        done = self._saved(component, self.url, **{"step": None, **(kwargs or {})})
        known = {"archive": done.archive_id, "commit": done.number, "digest": done.commit.digest, "name": done.name}
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, _FILE).write_text(json.dumps(known), "utf-8")
        return done

    def load(
        self,
        component: Any,
        path: Any,
        *,
        map_location: Any = None,
        tensor_load_kwargs: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Report:
        """Restore the buffer from the commit that `path` names; the Report."""
        _check_args(args)
        return self._loaded(component, self.url, self._named(Path(path, _FILE)), tails="ignore", **(kwargs or {}))

    def _named(self, file: Path) -> Checkpoint:
        """The checkpoint that a file names."""
        known, arc = _read(file), self._archive(self.url)
        if known["archive"] != arc.id:
            raise UsageError(
                f"{file} is of a checkpoint in archive {visible(known['archive'])}, and {arc.url} is archive {arc.id}: "
                "give the adapter the URL at which that one lies"
            )
        numbers = arc.checkpoints.table["commit"].to_pylist()
        if known["commit"] not in numbers:
            raise NotFoundError(
                f"{file} names commit {known['commit']} of {arc.url}, which is no checkpoint there, or no longer: load "
                "another path"
            )
        found = arc.checkpoints[numbers.index(known["commit"])]
        if found.commit.digest != known["digest"]:
            raise IntegrityError(
                f"{file} names commit {found.number} of {arc.url} by another digest: one of the two was changed; load "
                "another path, and run `archive verify`"
            )
        return found

    def _detach_from_load_path(self, component: Any) -> None:
        """Nothing: what was loaded is in the buffer's own memory."""


def _check_args(args: tuple[Any, ...]) -> None:
    if args:
        raise UsageError("the adapter of a replay buffer takes options by name: save_kwargs= and load_kwargs=")


def _read(file: Path) -> dict[str, Any]:
    """The content of a saved file, checked."""
    try:
        with file.open("rb") as opened:
            known = json.loads(opened.read(_MAX_BYTES))
    except FileNotFoundError as e:
        raise NotFoundError(f"there is no {file}: this path was not saved by archive.adapters.torchrl") from e
    except (OSError, ValueError, RecursionError) as e:
        raise IntegrityError(f"{file} cannot be read: {e}; load another path") from e
    if type(known) is not dict or any(type(known.get(name)) is not kind for name, kind in _COMMIT.items()):
        raise IntegrityError(f"{file} does not name a commit: it is damaged; load another path")
    return known
