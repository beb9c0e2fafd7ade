"""RLinf's TrajectoryReplayBuffer on any filesystem, its trajectories in an archive."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from archive.adapters import Saved
from archive.adapters.rlinf import SYSTEM
from archive.adapters.rlinf.buffer import flatten, loading, mapping, moving, numbering, ranks, settings
from archive.adapters.rlinf.buffer.contents import Contents, Limits
from archive.adapters.rlinf.buffer.home import ArchiveHome
from archive.adapters.rlinf.buffer.mapping import Weights
from archive.adapters.rlinf.buffer.ranks import Job
from archive.adapters.rlinf.buffer.sink import Added, Sink
from archive.adapters.rlinf.buffer.sinks import Earlier, Sinks
from archive.adapters.rlinf.buffer.start import Start
from archive.adapters.rlinf.buffer.window import Entry, drawn_from
from archive.adapters.rlinf.buffer.writing import Writing
from archive.base import UsageError, forking
from archive.checkpoint import MAIN_BUFFER, Pending, finish_at_exit
from archive.fields import unflatten
from archive.read import Episodes


class TrajectoryReplayBuffer(Writing):
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
    there from the next save_checkpoint() on.

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
        cache_bytes: int = 2**28,
        disk_cache: Any = None,
    ) -> None:
        counts = {"cache_size": cache_size, "sample_window_size": sample_window_size}
        settings.check(counts, max_trajectories, trajectory_format, missing)
        self._journal_s = settings.check_auto_save(auto_save, auto_save_path, journal_s)
        self.seed = seed
        self.sample_window_size = int(sample_window_size)
        self.auto_save = bool(auto_save)
        self.trajectory_format = trajectory_format
        self.auto_save_path = auto_save_path if auto_save else None
        self.enable_cache = enable_cache or not auto_save
        self.cache_size = int(cache_size)
        self._missing = missing
        self._max_trajectories = max_trajectories
        given = ranks.where(auto_save_path) if auto_save_path else None
        self._where = given if auto_save else None
        own = given.rank if given and rank is None else rank
        self._job = Job(own, world_size, run, session, buffer, storage_options)
        self._writing = forking.lock(self, "_writing")
        self._lock = forking.lock(self)
        self._closed = False
        self._pid = os.getpid()
        self._closing = None
        self._added = 0
        self._contents = self._emptied()
        self._next_id: int | None = None
        self.random_generator = settings.seeded(seed, self._job.own_rank)
        self._homes = partial(ArchiveHome, cache_bytes=cache_bytes, disk_cache=disk_cache)
        self._sinks = Sinks(self._job, self._where, auto_save_interval_s, self._visible, self._homes, self._journal_s)
        if auto_save:
            self._sinks.agree(self._job.own_rank)
        finish_at_exit(self)

    def _emptied(self, loaded: int = 0) -> Contents:
        own = None if self.auto_save else self.sample_window_size or None
        return Contents(self._missing, Limits(self._in_memory_limit, own, self._max_trajectories), loaded)

    @property
    def _in_memory_limit(self) -> int | None:
        """How many trajectories stay in memory; None for all."""
        if not self.auto_save:
            return self.sample_window_size or None
        return self.cache_size if self.enable_cache else 0

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
            taken = mapping.take_all(trajectories, Weights(model_weights_uuid, model_update_count))
            with self._lock:
                self._contents.check(t.flat for t in taken)
            ids = [self._add(t) for t in taken]
            if self._where is not None and len(self._contents.cached) > (self._in_memory_limit or 0):
                self._sinks.at(self._where).commit_now()  # what is in the archive need not be in memory
            return ids

    def _add(self, taken: mapping.Taken) -> int:
        entry = Entry(self._claim_id(), taken.flat.steps, taken.flat.envs, taken.weights)
        if self._where is not None:
            with self._lock:
                leaving, count = self._contents.leaving(), self._added + 1
            counted = taken if self._journal_s is None else taken.counted(count)
            moving.append(self._sinks.at(self._where), entry, counted, leaving)
        with self._lock:
            self._contents.left.clear()
            self._contents.add(entry, taken.flat)
            self._added += 1
            self._contents.trim()
        return entry.trajectory_id

    def _claim_id(self) -> int:
        if self._next_id is None:  # not those of trajectories that earlier starts of the job left in the archive
            left = [] if self._where is None else numbering.ids_of(self._sinks.at(self._where).arc.episodes)
            self._next_id = numbering.next_id((), left)
        world_size = self._job.world_size or ranks.job_world_size() or 1
        claimed = numbering.next_of(self._next_id, self._job.own_rank, world_size)
        self._next_id = claimed + 1
        return claimed

    def _visible(self, made: list[Added], home: ArchiveHome) -> None:
        """These can be read from the archive now."""
        with self._lock:
            for added in made:
                if added.entry.home is None:
                    added.entry.home, added.entry.name = home, added.name
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
            count = drawn_from(window, num_chunks, replace=replace)
            drawn = torch.randint(window.total, (count,), generator=self.random_generator)
            parts, misses = self._contents.gather(window, drawn)
        parts += [part for miss in misses for part in miss.read()]
        return unflatten(flatten.joined(parts, count, self._missing))

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """As `sample`."""
        return self.sample(num_chunks)

    def _flatten_trajectory(self, trajectory: Any) -> dict[str, Any]:
        """A trajectory's transitions as batches have them, [T * B, ...]; nothing is added. RLinf's workers call it."""
        return mapping.transitions(trajectory)

    def is_ready(self, min_size: int) -> bool:
        """Whether so many trajectories have been added (of those that left since, too) that training may begin."""
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
        return self._contents.ids

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
            sink = self._sinks.at(ranks.where(save_path))
            moving.bring(self._contents, self._lock, sink)
            saved = Saved(attributes=moving.renumbered(self._contents, sink), state=self._state())
            return sink.checkpoint(saved, step, on_progress, options)

    def _state(self) -> dict[str, Any]:
        """As the adapter of RLinf has it, so that it exports to folders and into RLinf's buffers."""
        with self._lock:
            return {
                "system": SYSTEM, "seed": self.seed, "trajectory_format": self.trajectory_format,
                "counter": self._next_id or 0, "ids": np.array(self._contents.ids, np.int64), "lost": {},
                "listed": np.zeros(0, np.int64), "added": self._added, "generator": self.random_generator,
            }  # fmt: skip

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
            where, part = ranks.where(load_path), int(local_rank) if is_distributed else None
            self._sinks.each(Sink.settle)
            own = self._sinks.sessions(where.name)
            self._take_over(loading.find(where, self._job, part, world_size, own), where)

    def _take_over(self, loaded: Start, where: ranks.Where) -> None:
        entries = loading.entries_of(lambda: loaded.episodes, self._homes, loaded.numbers)
        next_id = numbering.next_id((*loaded.source_states, loaded.state), loaded.taken)
        contents = moving.fill(self._emptied(len(entries)), entries, self._in_memory_limit)
        self._sinks.close_all()
        self._sinks.forget()
        owned = {e.trajectory_id: e.name for e in entries}
        numbers = {e.name: e.trajectory_id for e in entries if e.renumbered}
        self._sinks.go_on_from(where.name, Earlier(loaded.source, loaded.rank, loaded.world_size, owned, numbers))
        self._job.rank, self._job.world_size = loaded.rank, loaded.world_size
        with self._lock:
            self._contents, self._next_id = contents, next_id
            self._restore(loaded)
        self._sinks.begin(where)

    def load_episodes(self, episodes: Episodes, *, in_memory: int | None = None) -> None:
        """Hold these episodes of an archive in place of what there is, such as `arc.episodes.filter(update_count=(100,
        200), model_weights_uuid=...)`. in_memory: how many of the newest; default: as many as the buffer keeps."""
        with self._writing:
            self._enter()
            entries = loading.entries_of(lambda: episodes, self._homes)
            limit = self._in_memory_limit if in_memory is None else in_memory
            contents = moving.fill(self._emptied(len(entries)), entries, limit)
            with self._lock:
                self._contents, self._added = contents, len(entries)
                self._next_id = max((self._next_id or 0, *(e.trajectory_id + 1 for e in entries)))
            self._sinks.journal_left(contents.entries)

    def _restore(self, loaded: Start) -> None:
        """Counters and the random generator: as they were, for a new world from its plan, and else as they are."""
        state, sources = loaded.state, loaded.source_states
        self.seed = next((s["seed"] for s in (state, *sources) if "seed" in s), self.seed)
        counted = int(state.get("added", len(self._contents.entries)))
        self._added = counted if loaded.added is None else loaded.added
        self.random_generator = loaded.generator or self.random_generator

    def clear(self) -> None:
        """All trajectories leave the buffer. What was saved stays in the archive, and ids are not used again."""
        with self._writing:
            self._sinks.journal_left(())
            with self._lock:
                self._contents, self._added = self._emptied(), 0

    def clear_cache(self) -> None:
        """Free the memory of trajectories that can be read from an archive."""
        with self._lock:
            self._contents.forget_read(len(self._contents.cached))

    def __getstate__(self) -> Any:
        raise UsageError("a TrajectoryReplayBuffer does not pickle: make one in each process, and load what was saved")

    def __repr__(self) -> str:
        return f"<TrajectoryReplayBuffer of {len(self)} trajectories, {self.total_samples} transitions>"
