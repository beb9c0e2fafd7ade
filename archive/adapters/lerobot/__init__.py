"""LeRobot datasets of version 3 (Parquet files and their metadata) into an archive and back; no package needed.

```python
ck = lerobot.import_dataset("pusht", arc, on_video="decode")  # a folder, or any fsspec URL
print(ck.episodes.filter(where="metadata.task = 'push'").table)
lerobot.export_dataset(ck, "pusht-again")  # episodes of another origin: fps=10
```

| of LeRobot | in the archive |
|---|---|
| features of numbers, `observation.state` | fields, nested at the dots: `observation/state`; with `timestamp` |
| lists of any length, shape `[-1]` (no convention of LeRobot's, but what its loader takes) | ragged fields, and back |
| `frame_index`, `index`, `episode_index`, `task_index` | derived; an episode's number is in its metadata |
| tasks | `task` in an episode's metadata; where it changes within one, `tasks` and the field `task_index` |
| instructions and names of another origin | `task="metadata.instruction"`, `rename={"front": "observation.front"}` |
| `fps`, `robot_type`, names of features | progress of the checkpoint that the import makes: `ck.progress["lerobot"]` |
| videos and images | on_video="decode": uint8 [height, width, channels] a step (extra `video`); "skip": left out |
| videos with on_video="keep" | a field of the episode: the bytes of an MP4 file of its frames; `frames` decodes it |

Exported pictures are what they were in LeRobot; `video=` says it of others. Videos are without loss unless a codec is
named; packets of `archive.adapters.video` become videos as they are encoded. The report that comes back names what the
dataset has no place for.
All episodes count as ended: LeRobot does not say how.
"""

from __future__ import annotations

from archive.adapters.lerobot.dataset import export_dataset, import_dataset
from archive.adapters.lerobot.videos import frames

__all__ = [
    "export_dataset",
    "frames",
    "import_dataset",
]
