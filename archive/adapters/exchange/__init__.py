"""What one system saved, into a live buffer of another: ALF, TorchRL, RLinf; see docs/adapters/exchange.md for what carries over.

```python
share = resharding.plan(ck, world_size=1).share(0)  # of a checkpoint that ALF's adapter made
print(exchange.restore(torchrl_buffer, share))
torchrl.save(torchrl_buffer, w, step=ck.step).result()  # from now on it is TorchRL's
```

| from | to | |
|---|---|---|
| ALF, TorchRL, RLinf | TorchRL | one item a transition: observation, action, next, collector/traj_ids; leaves of its tree |
| ALF, TorchRL, RLinf | RLinf | one trajectory [T, 1, ...] an episode: curr_obs, next_obs, actions, rewards, dones |
| TorchRL, RLinf | ALF | T + 1 steps, FIRST to LAST, dealt to the env rows; leaves of its trees |

The same system's own adapter restores more, and exactly.
"""

from __future__ import annotations

from archive.adapters.exchange.adapter import restore

__all__ = [
    "restore",
]
