"""ALF: its replay buffer into an archive and back, on any number of ranks, rows and slots, and its checkpoint files.

```python
arc = archive.open(url, create=True)
ck = arc.checkpoints.of("main").latest  # this run's own: an archive may hold several
algorithm.train_iter()  # ALF makes its buffer lazily
rb = algorithm._replay_buffer
share = resharding.plan(ck, num_envs=rb.num_environments, max_length=rb._max_length).share() if ck else None
if share is not None:
    print(alf.restore(rb, share, existing="replace"))  # how much was kept, closed, reheaded, dropped
w = arc.writer(resume=share)
for it in range(ck.step + 1 if ck else 0, iterations):
    algorithm.train_iter()
    if archive.checkpointing.requested() or it % 1000 == 0:
        alf.save(rb, w, step=it, progress={"iter": it})  # on every rank; in the background
    if archive.checkpointing.terminating():
        break
w.close()
```

| of ALF's buffer | in the archive |
|---|---|
| fields, `time_step\\|reward` and the like | fields of the same nesting, one row a step, once |
| `_current_pos`, `_current_size` | positions and live steps; a cleared row goes on at a multiple of its length |
| FIRST, LAST, discount | episodes; LAST with discount 0 is terminated, else truncated |
| `env_id` | declared as the env row's id: it is the row's number after any redistribution |
| sum and max tree | column `priority`: the leaves; trees and `_nnz` are made of them |
| `_mini_batch_length` | state; of several ranks the greatest; 1 where other steps end a row than did, see below |
| `_episodic_discounted_return` | column `episodic_return` |
| `_indexed_pos`, `_headless_indexed_pos`, `_prev_disc_0_pos` | made of the steps; three numbers for a lost start |
| random numbers | not saved: ALF draws from torch's global generator |

Same ranks and same size: the buffer's state is the same, bit for bit. Otherwise the plan says who gets what, and
unfinished="close" (default): the last step of an open episode becomes LAST, its discount kept, for ALF's targets run
across a MID before a FIRST. In the archive the episode stays as it was. "continue": the one at the end of a row goes
on. A headless episode that is not the first of its row gets its first live step made FIRST;
`plan(incomplete="drop")` drops it. Each step keeps its priority. ALF keeps those at 0 that are too near to the end of
their row to begin a mini batch, and makes them so when it draws one of another length than `_mini_batch_length`: so it
does at its first batch where other steps end a row now. What was 0 stays 0.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.alf", "'trajectory-archive[torch]'")

from archive.adapters.alf.buffer import follow, restore, save, write
from archive.adapters.alf.files import export_checkpoint, import_checkpoint
from archive.adapters.alf.restored import Rebuilt, Target, rebuild, target_of
from archive.adapters.alf.tensors import FIRST, LAST, PRIORITY, path_by_key

__all__ = [
    "FIRST",
    "LAST",
    "PRIORITY",
    "Rebuilt",
    "Target",
    "export_checkpoint",
    "follow",
    "import_checkpoint",
    "path_by_key",
    "rebuild",
    "restore",
    "save",
    "target_of",
    "write",
]
