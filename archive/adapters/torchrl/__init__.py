"""TorchRL's replay buffers: saved as trajectories, restored exactly where nothing moved, dealt out anew where it did.

    def train(url, rb, batches):
        arc, share = archive.open(url, create=True), None
        if ck := arc.checkpoints.of("main").latest:  # the run's own: an archive may hold several
            share = resharding.plan(ck, capacity=torchrl.capacity(rb, ck)).share()
            print(torchrl.restore(rb, share))  # or {"replay": rb, "demo": demo}; here and below
        with arc.writer(resume=share) as w:
            for step, batch in enumerate(batches, start=ck.step + 1 if ck else 0):
                rb.extend(batch)
                learn(rb.sample())
                torchrl.save(rb, w, step=step)  # in the background; errors surface at the next call

| of the buffer | saved as | back, nothing moved | other ranks or capacities |
|---|---|---|---|
| items of tensor storages and of lists | steps, ragged where they differ | as they were | oldest first |
| trajectories (1) | episodes, a stream a column | as they were | ids renumbered; what stops is ended: truncated, done |
| slot of each step | column `slot` | as it was | anew, "index" with it |
| write cursor, write count, generations | state | as they were | behind the newest step |
| heap of the best items | columns `heap_rank`, `heap_place` | as it was | heap of the ranks |
| priorities | column `priority`: float64 leaves | trees rebuilt | trees rebuilt, the maximum of the sources |
| remaining permutation | column `remaining` | as it was | used items stay used, the sources take turns |
| times an item was drawn (consuming) | column `uses` | as it was | as it was |
| random generator, batch size | state | as they were | seeded by commit, world size and rank |
| transforms | state | as they were | those of the first rank |
| prefetched batches | state | as they were | dropped, counted |

(1) Told apart by `traj_key`, else the collector's ids, else `end_key`; without either, steps stand on their own.
Steps that fill no whole row of a 2-d storage are dropped and counted.
Not saved: hooks, collate functions, the process's own random generators (give the buffer a generator).
Only what changed since the last save is written: the storage notifies a tracker of each write; where
something else wrote (another process, `rb[i] = x`, `empty()`), digests tell which rows differ. What is changed behind
the storage's back (in place, through a view) is found with `verify=True`; so is what samplers set on the items of a
LazyStackStorage: its samples are its items.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.torchrl", "'trajectory-archive[torch]'")

from archive.adapters import Report
from archive.adapters.torchrl.buffer import capacity, follow, restore, save
from archive.adapters.torchrl.checkpointers import ArchiveCheckpointer, CheckpointAdapter

__all__ = [
    "ArchiveCheckpointer",
    "CheckpointAdapter",
    "Report",
    "capacity",
    "follow",
    "restore",
    "save",
]
