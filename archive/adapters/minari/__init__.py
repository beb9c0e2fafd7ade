"""Minari datasets into an archive and back.

```python
ck = minari.import_dataset("hand/pen-v0", arc)  # a local dataset's id, or a MinariDataset
minari.export_dataset(ck, "hand/pen-again-v0")
good = ck.episodes.filter(where="return > 100")
if len(good):
    minari.export_dataset(good, "hand/pen-good-v0")  # spaces that are not known are boxes without bounds
```

| of Minari | in the archive |
|---|---|
| observations, infos of T + 1 rows | fields of the same nesting on axis offset; of a tuple, keys `_index_0`, ... |
| actions, rewards, terminations, truncations | fields, one row a step |
| an episode's id, seed and other attributes | its metadata |
| spaces and what else is known of the dataset | progress of the import's checkpoint: `ck.progress["minari"]` |

What is exported is Minari's: a dataset in its own folder, by its own code; images are not made JPEG unless asked for.
"""

from __future__ import annotations

from archive.adapters.minari.adapter import export_dataset, import_dataset

__all__ = [
    "export_dataset",
    "import_dataset",
]
