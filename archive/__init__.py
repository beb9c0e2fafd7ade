"""Trajectory archive: reinforcement-learning trajectories on any object store,
and a training job brought back from there.

    arc = archive.open("s3://bucket/run", create=True)
    with arc.writer() as w:
        w.add_episode({"obs": obs, "action": action, "reward": reward})
        w.checkpoint(step=1000)
    arc.episodes.filter(where="return > 10").read()

| to | see |
|---|---|
| make or open one; write, find, read | `create`, `open`, `Archive`, `Writer`, `Episodes`, `Checkpoint` |
| retention of checkpoints; replay of what was trained on | `archive.Keep`; `replay` |
| go on with another number of ranks; merge, split, filter, compact | the package `resharding` |
| checkpoint on SIGTERM, on request, on a crash | `archive.checkpointing` |
| rings, datasets, samplers of tensors | `archive.torch`, `archive.torch.ring` |
| TorchRL, ALF, RLinf, XTuner, RLlib, TransferQueue; Minari, LeRobot | `archive.adapters`, `archive.buffers` |
| dollars of a run | `cost`; `docs/how-to/cost.md` |
| watch a running job | `metrics`; `docs/how-to/observing.md` |
| handle an error | `archive.errors`, whose names are here too |

Pages: `docs/index.md` lists them, beside this file. Other modules are not public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive import errors as errors
from archive.base import __version__ as __version__
from archive.base import make_visible as _make_visible
from archive.errors import *  # noqa: F403 (the error tree is part of the public face)

if TYPE_CHECKING:
    from archive.checkpoint import Checkpoint as Checkpoint
    from archive.checkpoint import Keep as Keep
    from archive.costs import cost as cost
    from archive.facade import Archive as Archive
    from archive.fields import Ragged as Ragged
    from archive.fields import Schema as Schema
    from archive.log import Commit as Commit
    from archive.observe import metrics as metrics
    from archive.opening import create as create
    from archive.opening import open as open
    from archive.read import Episode as Episode
    from archive.read import Episodes as Episodes
    from archive.replaying import replay as replay
    from archive.write import Buffer as Buffer
    from archive.writer import Writer as Writer

__all__ = [
    "Archive",
    "Buffer",
    "Checkpoint",
    "Commit",
    "Episode",
    "Episodes",
    "Keep",
    "Ragged",
    "Schema",
    "Writer",
    "cost",
    "create",
    "errors",
    "metrics",
    "open",
    "replay",
]

_LAZY = {  # name -> the room, or the facade's module, that has it
    "Archive": "facade",
    "Buffer": "write",
    "Checkpoint": "checkpoint",
    "Commit": "log",
    "Episode": "read",
    "Episodes": "read",
    "Keep": "checkpoint",
    "Ragged": "fields",
    "Schema": "fields",
    "Writer": "writer",
    "cost": "costs",
    "create": "opening",
    "metrics": "observe",
    "open": "opening",
    "replay": "replaying",
}


_make_visible()


def __getattr__(name: str) -> Any:
    """Parts are imported when first used, so that `import archive` is quick."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f"archive.{_LAZY[name]}"), name)
    try:
        return import_module(f"archive.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"archive.{name}":
            raise
        raise AttributeError(f"module 'archive' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__") or name.endswith("Error"))
    return sorted({*own, *__all__})
