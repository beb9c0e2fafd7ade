"""RLinf's TrajectoryReplayBuffer on any filesystem, its trajectories in an archive."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from archive import Writer
from archive.adapters import check_option
from archive.adapters.rlinf import trajectory as rlinf
from archive.adapters.rlinf.contents import Contents, Entry, Flat, Taken, joined, read, taken, taken_apart
from archive.adapters.rlinf.sinks import Sink, Sinks
from archive.adapters.rlinf.stored import ADDED, Asked, BufferJob, Home, Start, entries_of, find, job_world_size, where
from archive.adapters.rlinf.trajectory import SYSTEM, Weights
from archive.base import ClosedError, EmptyBufferError, UsageError, forking, logger
from archive.checkpoint import MAIN_BUFFER, Pending, finish_at_exit
from archive.fields import unflatten
from archive.journal import JOURNALS, Durable, seconds
from archive.read import Episodes

FORMATS = ("pt", "pkl")


class TrajectoryReplayBuffer:
    """Trajectories [T, B, ...], of which single transitions are drawn. Safe for several threads, of one process.

    A path may be any fsspec URL; one that ends in `rank_3` means rank 3 of the archive above it.

    seed: of the draws; each rank draws differently. None: from the system.  enable_cache, cache_size: how many of the
    newest trajectories stay in memory; transitions of others are read from the archive, and no more than the chunks
    they lie in.  sample_window_size: draw from that many of the newest trajectories; 0 for all.
    auto_save: append what is added to the archive at `auto_save_path`, in the background; it is committed every
    `auto_save_interval_s`, and when more than `cache_size` wait for that. Without it all is in memory, older
    trajectories than the window leave the buffer, nothing is written before save_checkpoint().
    trajectory_format: of exports.
    journal_s: with auto_save, what is added or leaves is durable after so many seconds at the latest, and
    load_checkpoint() brings it back after a crash; see `sync()` and `durable_until`. What was loaded from elsewhere is
    there from the next save_checkpoint() on.  journal: "rank" or "node", as `arc.writer` has it.

    rank, world_size: default: the path's rank, torch.distributed, or RANK and WORLD_SIZE.  run, session: as
    `arc.writer` has them.  buffer: its name in the archive.  missing: what becomes in batches of a field that some
    trajectories lack: "error" (such a trajectory is refused), "skip" or a number to fill in.  max_trajectories: the
    oldest beyond leave the buffer (they stay in the archive).  cache_bytes: of the archive's chunks that are kept in
    memory, besides those trajectories; disk_cache: a folder to keep chunks in.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: Any = "",
        trajectory_format: str = "pt",
        *,
        storage_options: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str = "main",
        session: str | None = None,
        buffer: str = MAIN_BUFFER,
        missing: Any = "error",
        max_trajectories: int | None = None,
        auto_save_interval_s: float = 60.0,
        journal_s: float | None = None,
        journal: str = "rank",
        cache_bytes: int = 2**28,
        disk_cache: Any = None,
    ) -> None:
        for name, value in (("cache_size", cache_size), ("sample_window_size", sample_window_size)):
            if int(value) < 0:
                raise UsageError(f"{name}={value} must be at least 0")
        if max_trajectories is not None and max_trajectories < 1:
            raise UsageError(f"max_trajectories={max_trajectories} must be at least 1, or None")
        check_option("trajectory_format", trajectory_format, FORMATS)
        if missing not in ("error", "skip") and not isinstance(missing, (bool, int, float)):
            raise UsageError(f"missing={missing!r}: give 'error', 'skip' or a number to fill in")
        if auto_save and not auto_save_path:
            raise UsageError("auto_save=True needs auto_save_path=: a folder or any fsspec URL")
        if journal_s is not None and not auto_save:
            raise UsageError(
                "journal_s= needs auto_save=True and auto_save_path=: without them nothing is written before "
                "save_checkpoint()"
            )
        check_option("journal", journal, JOURNALS)
        self._journal_s = seconds(journal_s)
        self.seed = seed
        self.sample_window_size = int(sample_window_size)
        self.auto_save = bool(auto_save)
        self.trajectory_format = trajectory_format
        self.auto_save_path = auto_save_path if auto_save else None
        self.enable_cache = enable_cache or not auto_save
        self.cache_size = int(cache_size)
        self._missing = missing
        self._max_trajectories = max_trajectories
        given = where(auto_save_path) if auto_save_path else None
        self._where = given if auto_save else None  # the archive that all is appended to
        own = given.rank if given and rank is None else rank
        self._job = BufferJob(own, world_size, run, session, buffer, storage_options)
        self._writing = forking.lock(self, "_writing")  # of the calls that use its sinks, which take turns
        self._lock = forking.lock(self)
        self._closed = False
        self._pid = os.getpid()
        self._closing: Thread | None = None
        self._added = 0
        self._contents = self._emptied()
        self._next_id: int | None = None
        self.random_generator = _seeded(seed, self._job.own_rank)
        self._homes = partial(Home, cache_bytes=cache_bytes, disk_cache=disk_cache)
        how = (auto_save_interval_s, self._visible, self._homes, self._journal_s, journal)
        self._sinks = Sinks(self._job, self._where, *how)
        finish_at_exit(self)

    @property
    def _in_memory(self) -> int | None:
        """The number of trajectories that stay in memory; None for all."""
        if not self.auto_save:
            return self.sample_window_size or None
        return self.cache_size if self.enable_cache else 0

    def _emptied(self, entries: Sequence[Entry] = (), in_memory: int | None = None) -> Contents:
        """Contents with these trajectories, which lie in archives; the newest of them (None: all) in memory, too."""
        window = None if self.auto_save or not self.sample_window_size else self.sample_window_size
        limits = (None if window is None else max(window, len(entries)), self._max_trajectories)
        most = min((n for n in limits if n is not None), default=None)
        contents = Contents(self._missing, self._in_memory, most)
        for entry in entries:
            contents.add(entry)
        newest = entries if in_memory is None else entries[max(0, len(entries) - in_memory) :]
        for entry, tree in read(newest):
            contents.remember(entry, taken_apart(tree, entry.steps, entry.envs))
        return contents

    # -- adding -------------------------------------------------------------------------------------------------

    def add_trajectories(
        self,
        trajectories: Iterable[Any] | None,
        *,
        model_weights_uuid: str | None = None,
        model_update_count: int | None = None,
    ) -> list[int]:
        """Add trajectories, copied; their ids. Each is RLinf's Trajectory, or any object or dict with the same fields.

        Those without any steps are passed over. All are looked at before the first is added.
        model_weights_uuid, model_update_count: of the weights that made them;
        default: what their model_weights_id says.
        """
        with self._writing:
            self._enter()
            if trajectories is not None and (
                isinstance(trajectories, Mapping) or not isinstance(trajectories, Iterable)
            ):
                raise UsageError(f"a list of trajectories is expected, not a {type(trajectories).__name__}")
            weights = Weights(model_weights_uuid, model_update_count)
            every = (taken(trajectory, weights) for trajectory in trajectories or ())
            new = [one for one in every if one is not None]
            with self._lock:
                self._contents.check(one.flat for one in new)
            ids = [self._add(one) for one in new]
            if self._where is not None and len(self._contents.cached) > (self._in_memory or 0):
                self._sinks.at(self._where).commit_now()  # what is in the archive need not be in memory
            return ids

    def _add(self, new: Taken) -> int:
        entry = Entry(self._claimed(), new.flat.steps, new.flat.envs, new.made.weights)
        number = entry.trajectory_id
        if self._where is None:
            self._keep(entry, new.flat)
            return number
        sink = self._sinks.at(self._where)
        more = {} if self._journal_s is None else {ADDED: self._added + 1}
        try:
            with sink.writer.together():
                sink.append(entry, new.as_episode(number, more))
                sink.drop(self._keep(entry, new.flat))
        finally:
            if number in sink.known:
                sink.added(entry, new.nbytes)
        return number

    def _keep(self, entry: Entry, flat: Flat) -> list[int]:
        """Keep a trajectory; the ids of those that leave for it."""
        with self._lock:
            self._contents.add(entry, flat)
            self._added += 1
            left = self._contents.evict()
            self._contents.trim()
            return left

    def _claimed(self) -> int:
        if self._next_id is None:  # not those of trajectories that earlier starts of the job left in the archive
            left = [] if self._where is None else rlinf.ids_of(self._sinks.at(self._where).arc.episodes)
            self._next_id = rlinf.next_id((), left)
        claimed = next_of(self._next_id, self._job.own_rank, self._job.world_size or job_world_size() or 1)
        self._next_id = claimed + 1
        return claimed

    def _visible(self, names: Mapping[Entry, str], home: Home) -> None:
        """These can be read from the archive now."""
        with self._lock:
            for entry, name in names.items():
                if entry.home is None:
                    entry.home, entry.name, entry.original = home, name, entry.trajectory_id
            self._contents.trim()

    # -- sampling -----------------------------------------------------------------------------------------------

    def sample(self, num_chunks: int = 0, *, replace: bool = False) -> dict[str, Any]:
        """A batch of `num_chunks` transitions, nested dicts of tensors [num_chunks, ...].

        Drawn uniformly, with replacement, from all transitions of the window; if it has fewer, as many as it has,
        unless replace=True. EmptyBufferError (a RuntimeError) where it has none.
        """
        self._sinks.each(Sink.surface)
        with self._lock:
            window = self._contents.window(self.sample_window_size)
            if num_chunks < 1:
                raise UsageError(f"num_chunks={num_chunks}: ask for at least 1")
            if not window.total:
                raise EmptyBufferError(
                    "the buffer is empty, so there is nothing to sample; add trajectories, or load some"
                )
            count = num_chunks if replace else min(num_chunks, window.total)
            drawn = torch.randint(window.total, (count,), generator=self.random_generator)
            parts, reads = window.gather(drawn)
        parts += [part for call in reads for part in call()]
        return unflatten(joined(parts, count, self._missing))

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """The same as `sample`."""
        return self.sample(num_chunks)

    def _flatten_trajectory(self, trajectory: Any) -> dict[str, Any]:
        """A trajectory's transitions as batches have them, [T * B, ...]; {} for one without any steps. Nothing is
        added. RLinf's workers call it."""
        found = taken(trajectory, Weights())
        return {} if found is None else unflatten(found.flat.rows)

    def is_ready(self, min_size: int) -> bool:
        """True if so many trajectories have been added that training may begin; those that left since count, too."""
        return len(self) > 0 and self._added >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        return self.is_ready(min_size)

    def __len__(self) -> int:
        """Trajectories in the buffer."""
        return len(self._contents.entries)

    size = property(__len__)

    @property
    def total_samples(self) -> int:
        """Transitions of all trajectories in the buffer."""
        return self._contents.total_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the trajectories in the buffer, in order."""
        return list(self._contents.entries)

    def get_stats(self) -> dict[str, float]:
        """num_trajectories and total_samples of the buffer; cache_size: trajectories in memory."""
        with self._lock:
            cached = len(self._contents.cached)
            return {"num_trajectories": len(self), "total_samples": self.total_samples, "cache_size": cached}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_path: Any, *, step: int | None = None, on_progress: Any = None, **options: Any
    ) -> Pending:
        """Save all trajectories, the random generator and the counters. Each rank calls it; the checkpoint is visible
        when all have. Uploads only what the archive at `save_path` does not have.

        Returns once this rank's part is there; errors after that surface at the next call, or at `result()` of what it
        returns.  step: default: one more than the last.  options: those of `Writer.checkpoint`, such as progress=.
        """
        with self._writing:
            self._enter()
            sink = self._sinks.at(where(save_path))
            self._bring(sink)
            with self._lock:  # as the adapter of RLinf has it, so that it exports to folders and into RLinf's buffers
                state: dict[str, Any] = {
                    "system": SYSTEM,
                    "seed": self.seed,
                    "trajectory_format": self.trajectory_format,
                }
                state |= {"counter": self._next_id or 0, "ids": np.array(self.trajectory_ids, np.int64), "lost": {}}
                state |= {"listed": np.zeros(0, np.int64), "added": self._added, "generator": self.random_generator}
            return sink.checkpoint(state, step, on_progress, options)

    def _bring(self, sink: Sink) -> None:
        """Append to an archive the trajectories that it lacks, and remove there those that left the buffer."""
        with self._lock:
            entries = dict(self._contents.entries)
        sink.keep_only(entries)
        lacking = [e for number, e in entries.items() if number not in sink.known]
        elsewhere = read([e for e in lacking if e.slab is None])
        ahead = next(elsewhere, None)
        for entry in lacking:
            if ahead is not None and ahead[0] is entry:
                tree, ahead = ahead[1], next(elsewhere, None)
            else:
                tree = self._tree(entry)
            found = taken(tree, entry.weights)
            assert found is not None
            sink.append(entry, found.as_episode(entry.trajectory_id))
            sink.added(entry, found.nbytes)

    def _tree(self, entry: Entry) -> dict[str, Any]:
        """A trajectory that is, or was a moment ago, in memory."""
        with self._lock:
            if entry.slab is not None:
                return self._contents.tree(entry)
        return next(read([entry]))[1]

    def load_checkpoint(
        self, load_path: Any, is_distributed: bool = False, local_rank: int = 0, world_size: int | None = None
    ) -> None:
        """Go on from the newest checkpoint at `load_path`, in place of what the buffer holds; where none was made, from
        all that auto_save committed there.

        A world of the same size goes on exactly: trajectories, counters, the random generator. In a world of another
        size each rank takes a contiguous part of all trajectories. What is saved there next refers to what is there.
        world_size: default: this job's, else the checkpoint's.
        is_distributed: take part `local_rank` of `world_size` of what the path means, though all ranks give the same.
        """
        with self._writing:
            self._enter()
            meant = where(load_path)
            self._sinks.each(Sink.settle)
            asked = Asked(meant, int(local_rank) if is_distributed else None, world_size)
            start: Start = find(self._job, asked, self._sinks.sessions(meant.name))
            entries = entries_of(lambda: start.episodes, self._homes, start.numbers)
            contents = self._emptied(entries, self._in_memory)
            self._sinks.go_on_from(meant, start, entries)
            with self._lock:
                self._contents, self._next_id = contents, start.next_id
                self.seed = start.seeds[0] if start.seeds else self.seed
                self._added = len(self) if start.added is None else int(start.added)
                self.random_generator = start.generator or self.random_generator
            self._sinks.begin(meant)

    def load_episodes(self, episodes: Episodes, *, in_memory: int | None = None) -> None:
        """Hold these episodes of an archive in place of what there is, such as `arc.episodes.filter(update_count=(100,
        200), model_weights_uuid=...)`. in_memory: how many of the newest; default: as many as the buffer keeps."""
        with self._writing:
            self._enter()
            entries = entries_of(lambda: episodes, self._homes)
            contents = self._emptied(entries, self._in_memory if in_memory is None else in_memory)
            with self._lock:
                self._contents, self._added = contents, len(entries)
                self._next_id = max((self._next_id or 0, *(e.trajectory_id + 1 for e in entries)))
            self._sinks.each(partial(Sink.keep_only, numbers=contents.entries))

    def clear(self) -> None:
        """Empty the buffer. What was saved stays in the archive, and ids are not used again."""
        with self._writing:
            self._sinks.each(partial(Sink.keep_only, numbers=()))
            with self._lock:
                self._contents, self._added = self._emptied(), 0

    def clear_cache(self) -> None:
        """Free the memory of trajectories that can be read from an archive."""
        with self._lock:
            self._contents.forget_read(len(self._contents.cached))

    # -- made visible, made durable, and ended ------------------------------------------------------------------

    def flush(self) -> None:
        """Commit what was added so far (with auto_save)."""
        with self._writing:
            self._enter()
            self._sinks.each(Sink.commit)

    def sync(self, timeout_s: float = 60.0) -> Durable:
        """Wait until all that was added is durable (with journal_s=); how far that is.

        Raises what storing it failed with; NotDurableError (a TimeoutError) after the time. What was added is kept.
        """
        return self._journaling().sync(timeout_s)

    @property
    def durable_until(self) -> Durable:
        """The extent to which all that was added is durable, with journal_s=: `seconds_behind` is 0.0 if all is."""
        return self._journaling().durable_until

    def _journaling(self) -> Writer:
        """The writer that keeps a journal."""
        if self._where is None or self._journal_s is None:
            raise UsageError("this buffer keeps no journal: make it with auto_save=True and journal_s=2.0")
        with self._writing:
            self._enter()
            return self._sinks.at(self._where).writer

    def close(self, wait: bool = True) -> None:
        """Finish what is under way and commit what was added. What the buffer has may still be sampled.

        wait=False: do so in the background; an error is logged.
        """
        with self._writing:
            if self._closed:
                return
            self._closed = True
            if wait:
                return self._sinks.close_all()
            self._closing = Thread(target=self._logged, args=(self._sinks.close_all,), name="archive-close")
            self._closing.start()

    def settle_at_exit(self) -> None:
        """Commit what was added with auto_save, before the interpreter ends."""
        if self._pid == os.getpid():
            self._closing.join() if self._closing else self._logged(lambda: self._sinks.each(Sink.finish))

    def tell_at_exit(self) -> None:
        """Nothing: its writers say what they have left."""

    def _logged(self, work: Any) -> None:
        """Do what nobody waits for; an error is logged, as there is nobody to raise it to."""
        try:
            work()
        except Exception:
            logger.exception("trajectories that were added could not be committed at the end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._sinks.close_all(error)

    def _enter(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed; make another, and load what was saved")
        self._sinks.each(Sink.surface)

    def __getstate__(self) -> Any:
        raise UsageError("a TrajectoryReplayBuffer does not pickle: make one in each process, and load what was saved")

    def __repr__(self) -> str:
        return f"<TrajectoryReplayBuffer of {len(self)} trajectories, {self.total_samples} transitions>"


def next_of(first: int, rank: int, world_size: int) -> int:
    """The first number from `first` on that is this rank's: ranks take turns, so that no two have the same."""
    return first + (rank - first) % world_size


def _seeded(seed: int | None, rank: int) -> torch.Generator:
    """A rank's generator: rank 0's is that of the seed itself, the others' differ. None: from the system."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    if rank:
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
    return generator.manual_seed(seed)
