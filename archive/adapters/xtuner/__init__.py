"""XTuner's replay buffers and agent loop managers, on any store: `save` and `restore`, both coroutines.

    share = resharding.plan(ck, world_size=1).share(0) if ck else None
    step = await xtuner.restore(manager, share) if share else 0        # buffer, samplers, progress
    w = arc.writer(rank=0, world_size=1, resume=share)
    while step < steps:
        await train_one(manager, step)
        step += 1
        if step % interval == 0:
            await manager.pause_produce()
            await xtuner.save(manager, w, step=step)
            await manager.continue_produce(model_step=step)

What is saved:

| of | as |
|---|---|
| a group | an episode with an id of its own; a step is a rollout |
| `rollout_id`, `response`, tokens, logprobs, masks, `response_model_steps` | fields, ragged where they are lists |
| arrays, tensors, long lists of numbers, wherever they are | ragged fields named by place: `mm_info.pixel_values` |
| Ray object refs, nested ones too | what they refer to, once a group; put into Ray again by `restore` |
| everything else of a rollout | metadata; what is longer than 512 characters, the field `long` |
| the score of the reward | the field `reward`, so the table has a `return` |
| newest `response_model_steps` | update counts |
| uid, timestamp, task, status, staleness; the last two of each rollout, too | attributes: saved anew, as they change |
| content that changed, as when an expired group was reset | a revision of the episode |
| what uid and timestamp come next | state: ids of consumed groups are not given out again |
| a manager's samplers and dataloaders, model step | state |
| a disaggregated manager's counters and status | the checkpoint's progress |

Only groups that are new or changed since the last save are uploaded, and only their object refs resolved. Order and
expiry follow from staleness and timestamps, so it doesn't matter which storage or policy class restores what another
saved; fields that the class of rollouts no longer has are left out, and reported. Not saved: rollouts under way (a save
refuses while there are any), trace sessions, the rollout controller.

Each owner of a buffer is a rank. On another number of ranks groups stay whole and get new uids and timestamps, in the
order of the old ones; samplers can't be divided, so a manager is restored by a world of the size that saved it.

With `no_save_replay_buffer=True` progress is rolled back as XTuner does it (`rollback`), and the prompts of the groups
in the buffer are kept without their responses. `restore` puts them back as ABORTED, which asynchronous strategies take
before they draw new prompts: none is skipped. Synchronous strategies draw from the dataloader only, and leave them
there.
"""

from __future__ import annotations

from archive.adapters.xtuner.adapter import RestoredStep, restore, save
from archive.adapters.xtuner.progress import rollback

__all__ = [
    "RestoredStep",
    "restore",
    "rollback",
    "save",
]
