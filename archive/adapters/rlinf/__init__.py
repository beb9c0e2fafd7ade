"""RLinf's TrajectoryReplayBuffer: live buffers saved and restored, its folders imported and exported.

    from archive.adapters import rlinf

    ck = rlinf.import_checkpoint("logs/replay_buffer", arc)      # rank_0, rank_1, ... or one buffer's folder
    share = resharding.plan(ck, world_size=3, policy="by_trajectory").share(rank)
    with arc.writer(resume=share) as w:
        rlinf.restore(buffer, share)                             # an empty TrajectoryReplayBuffer
        buffer.add_trajectories(trajectories)
        rlinf.save(buffer, w, step=100).result()                 # uploads what is new
    rlinf.export_checkpoint(arc.checkpoints.of(ck.run).latest, "elsewhere/replay_buffer")  # for load_checkpoint()

| of a buffer | where it is kept | M == N | M != N |
|---|---|---|---|
| a trajectory [T, B, ...] | an episode of T steps, B an inner axis | to the bit | to the bit, whole |
| T, B, shape, max_episode_length, model_weights_id | metadata | the same | the same |
| its number | metadata, attribute | the same | the same if all are of one source rank, else 0, 1, ... |
| uuid and update count of `uuid_count` | model_weights_uuid, update_count | the same | the same |
| index, list, counter, size, total_samples | state | the same | of what the share has |
| entries whose data RLinf has dropped | state | the same | gone |
| cache: slots, lengths, write position | state; contents from the episodes | the same | the newest |
| window | state | the same | computed anew |
| torch generator, seed, numpy's global generator | state | the same | seeded from the share; numpy's left alone |
| stale rows in cache slots, what RLinf has dropped | not kept | | |

`follow` has a journal keep all of this between saves, but for the window and for entries whose data RLinf has dropped.

A buffer without auto_save has what fits into its cache: the newest, where that is smaller; the others are counted.
What a trajectory is made of: `rlinf.trajectory`. A buffer without auto_save has only what its cache holds, so done
fields lose their extra rows there: RLinf's own doing. Works with `rlinf.data.replay_buffer` and, of newer versions,
`rlinf.data.storage.replay`; importing and exporting take no rlinf at all.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.rlinf", "'trajectory-archive[torch]'")

from archive.adapters.rlinf import trajectory
from archive.adapters.rlinf.buffer import TrajectoryReplayBuffer
from archive.adapters.rlinf.checkpoints import export_checkpoint, import_checkpoint, merge, problems, split
from archive.adapters.rlinf.folders import Problem
from archive.adapters.rlinf.live import follow, restore, save
from archive.adapters.rlinf.stored import held_by, where
from archive.adapters.rlinf.trajectory import NUMBER, SYSTEM, Steps

__all__ = [
    "NUMBER",
    "SYSTEM",
    "Problem",
    "Steps",
    "TrajectoryReplayBuffer",
    "export_checkpoint",
    "follow",
    "held_by",
    "import_checkpoint",
    "merge",
    "problems",
    "restore",
    "save",
    "split",
    "trajectory",
    "where",
]
