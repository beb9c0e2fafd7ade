"""XTuner's replay buffers and agent loop managers, on any store: `save` and `restore`, both coroutines.

    share = resharding.plan(ck, world_size=1).share(0) if ck else None
    step = await xtuner.restore(manager, share) if share is not None else 0  # buffer, samplers, progress
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
| paths, dates, Decimal, UUID, deque, OrderedDict and the like | metadata, of the same type again |
| models, dataclasses, enums, named tuples; what is derived from list, dict, str | metadata, with the class's name |
| the score of the reward | the field `reward`, so the table has a `return` |
| newest `response_model_steps` | update counts |
| uid, timestamp, task, status, staleness; the last two of each rollout, too | attributes: saved anew, as they change |
| content that changed, as when an expired group was reset | a revision of the episode |
| what uid and timestamp come next | state: ids of consumed groups are not given out again |
| a manager's samplers and dataloaders, model step, counters and status | state, each rank's own |
| a disaggregated manager's counters and status, of rank 0 | the checkpoint's progress |

Only groups that are new or changed since the last save are uploaded, and only their object refs resolved. Order and
expiry follow from staleness and timestamps, so it doesn't matter which storage or policy class restores what another
saved; fields that the class of rollouts no longer has are left out, and reported. Classes are those that `RolloutState`
and its module have, those of XTuner's sandbox schemas where they are imported, and those that `restore(classes=[...])`
is given; a group with another is an error that names it, before anything is changed. Not saved: rollouts under way (a
save refuses while there are any), trace sessions, the rollout controller.

Each owner of a buffer is a rank. On another number of ranks groups stay whole and get new uids and timestamps, in the
order of the old ones; samplers can't be divided or merged (two would draw the same prompts), so a manager is restored
by a world of the size that saved it, and another is refused.

With `no_save_replay_buffer=True` progress is rolled back as XTuner does it (`rollback`), and the prompts of the groups
in the buffer are kept without their responses. `restore` puts them back as ABORTED, which asynchronous strategies take
before they draw new prompts: none is skipped. Synchronous strategies draw from the dataloader only, and leave them
there.

**Between checkpoints.** `await xtuner.follow(manager, w)`, after `restore` and once there is a writer, keeps what
becomes of prompts in `w.ledger("prompts")`; `restore(..., writer=w)` does it, too, and so does the first `save` of a
writer that keeps a journal (`journal_s=`) or that is given `ledger=`. All else works as it does without.

| XTuner | is kept at once as |
|---|---|
| a prompt is drawn | an episode in the buffer `replay.prompts`, whose id is the ledger's key; where samplers stand |
| rollouts are under way | "started" |
| one is finished | an episode beside its prompt, "sealed"; of an agent loop in an actor of Ray when its group is |
| a group is put into the buffer | the episode that `save` would have written, in place of those of its rollouts |
| a group ages | its attributes |
| a group expires | its rollouts are under way again, but those that are kept |
| a batch is taken | "trained", with the training step if the manager counts it |
| a group failed, was filtered, is too old | "dropped" |

With `journal_s=` this is durable that much later, without a checkpoint. After a crash `follow` brings back what the
ledger has: finished groups that were not trained on, also those that no checkpoint has (`no_save_replay_buffer=True`
does not lose them any more), and what was trained on after the checkpoint, as its weights know nothing of it; groups
that lack rollouts as ABORTED, with those that are finished, which rollout workers pass over; prompts of which there is
none. It works for synchronous strategies, too: their samplers take these before they draw. Samplers go on where they
stood; rollouts that a pause cancelled are made again. On another number of ranks each gets its part, once; begin with
`ck = arc.recover()` where a job may have died before its first checkpoint. `siblings=False` leaves single rollouts to
their group, which uploads each once only.
"""

from __future__ import annotations

from archive.adapters.xtuner.adapter import restore, save
from archive.adapters.xtuner.codec import RestoredStep
from archive.adapters.xtuner.follow import follow
from archive.adapters.xtuner.groups import rollback

__all__ = [
    "RestoredStep",
    "follow",
    "restore",
    "rollback",
    "save",
]
