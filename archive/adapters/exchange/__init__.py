"""What one system saved, into a live buffer of another: ALF, TorchRL, RLinf. docs/adapters/exchange.md has more.

```python
share = resharding.plan(ck, world_size=1).share(0)  # of a checkpoint that ALF's adapter made
print(exchange.restore(torchrl_buffer, share))
torchrl.save(torchrl_buffer, w, step=ck.step).result()  # from now on it is TorchRL's
```

| from | to | |
|---|---|---|
| ALF, TorchRL, RLinf | TorchRL | one item a transition: observation, action, next, traj_ids; its tree's leaves |
| ALF, TorchRL, RLinf | RLinf | one trajectory [T, 1, ...] an episode: curr_obs, next_obs, actions, rewards, dones |
| TorchRL, RLinf | ALF | T + 1 steps, FIRST to LAST, dealt to the env rows; leaves of its trees |

The same system's own adapter restores more, and exactly.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.exchange", "'trajectory-archive[torch]'")

from archive.adapters.exchange.adapter import restore

__all__ = [
    "restore",
]
