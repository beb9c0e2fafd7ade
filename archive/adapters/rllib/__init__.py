"""RLlib: its episode replay buffers into an archive and back, on any number of learners, and offline training from one.

```python
arc, share = archive.open(url, create=True), None
buffer = algorithm.local_replay_buffer  # an EpisodeReplayBuffer, or one of its kinds
if ck := arc.checkpoints.of("main").latest:
    share = resharding.plan(ck, capacity=buffer.capacity).share()
    print(rllib.restore(buffer, share))
w = arc.writer(resume=share)
for it in range(ck.step + 1 if ck else 0, iterations):
    algorithm.train()
    if it % 100 == 0:
        rllib.save(buffer, w, step=it)  # in the background
w.close()
```

| of RLlib's buffer | in the archive |
|---|---|
| an episode, done or not | an episode; one that has grown is written again, as a new revision |
| observations and infos, T + 1 | fields `obs`, `infos` (JSON, if any is not empty), a row more than there are steps |
| actions, rewards, extra model outputs | fields `actions`, `rewards`, `extra_model_outputs/...`, a row a step |
| rows of before the episode's first step | fields below `lookback` |
| what agents of a multi-agent episode have | fields below `agents/<agent>`; `agent_t`, its own step at each env step |
| ids, modules, spaces, types of items, custom data, actions without an answer yet | metadata; `metadata.rllib.id` |
| order of the episodes (first in, first out) | attribute `order` |
| order of the steps that are drawn from | column `sample`, for agents `sample/<agent>` |
| priorities and their leaves | columns `priority`, `priority_type`, `node`, likewise |
| counters, metrics, random generator, free leaves, largest priority, what was drawn last | state |
| `agent_to_module_mapping_fn` | not saved: a function; `restore` takes it |

Same learners and same capacity: the buffer is the same, bit for bit, and draws the same. Otherwise the plan says who
gets which episodes, whole; each priority stays with its step, in trees that are made anew; the oldest come first, so
that the newest of all learners are of the same age. What was counted over the lifetime goes to the first learner, but
for the steps that others hold; metrics and random generators begin anew. Open episodes stay open: RLlib never draws
from one into another. Where two learners had the same episode, the id of the second one gets a number, `#2`. What does
not fit is an error, unless `plan(capacity=)` drops the oldest. RLlib only adds to episodes: what is changed within one
that the writer has is not looked for.
"""

from __future__ import annotations

from archive.base import package

package("ray.rllib", "archive.adapters.rllib", "'trajectory-archive[rllib]'")

from archive.adapters import Report
from archive.adapters.rllib.buffer import follow, restore, save
from archive.adapters.rllib.offline import ArchiveOfflineData

__all__ = ["ArchiveOfflineData", "Report", "follow", "restore", "save"]
