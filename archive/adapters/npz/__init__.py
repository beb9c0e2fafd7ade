"""Offline datasets as npz or HDF5 files, laid out as D4RL and d3rlpy do, into an archive and back.

```python
ck = npz.import_dataset("hopper-medium.npz", arc)  # or .hdf5, on any filesystem
npz.export_dataset(ck.episodes.filter(complete=True), "whole.h5")  # d3rlpy's ReplayBuffer.load reads it
npz.export_dataset(ck, "all.npz")
```

| in the file | in the archive |
|---|---|
| flat: `observations`, `actions`, `rewards` and any other array of one row a step | fields of the same names |
| flat: `terminals`; `timeouts` or `episode_terminals` | ends of episodes: terminated, truncated; others are open |
| by episode (d3rlpy 2): `observations_0`, `actions_0`, ... | fields; of several observations `observations/0`, ... |
| by episode: `terminated_0` | terminated, else truncated |
| arrays of another length | left out, their names in `ck.progress["npz"]["left_out"]` |
"""

from __future__ import annotations

from archive.adapters.npz.adapter import export_dataset, import_dataset

__all__ = [
    "export_dataset",
    "import_dataset",
]
