"""Replay buffers that keep their data in an archive, with the interfaces that training code knows.

    buf = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"s3://bucket/replay/rank_{rank}")
    buf.load_checkpoint(f"s3://bucket/replay/rank_{rank}", world_size=world)   # of a world of any size
    buf.add_trajectories(trajectories)                                         # [T, B, ...], as RLinf's workers do
    batch = buf.sample(256)                                                    # nested dicts of tensors [256, ...]
    buf.save_checkpoint(f"s3://bucket/replay/rank_{rank}")                     # visible when all ranks have saved
    buf.close()

| what | where it is kept |
|---|---|
| a trajectory [T, B, ...] | an episode of T steps, to the bit; its id, T, B and model_weights_id in the metadata |
| model_weights_uuid, model_update_count | the episode's, for `episodes.filter(update_count=(100, 200))`; metadata |
| which trajectories the buffer has | the checkpoint's live steps |
| random generator, seed, counters | state, as the adapter of RLinf has it |
| window, cache | not kept: they are the new buffer's own |
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.buffers", "'trajectory-archive[torch]'")

from archive.adapters.rlinf import TrajectoryReplayBuffer

__all__ = ["TrajectoryReplayBuffer"]
