"""What a buffer goes on from, whether a checkpoint has it or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from archive.read import Episodes


@dataclass(frozen=True)
class Start:
    """One rank's part of a checkpoint, or of what was committed without one."""

    source: Any  # for arc.writer(resume=source)
    rank: int
    world_size: int
    episodes: Episodes
    numbers: Mapping[str, int]  # episode -> trajectory id
    taken: Sequence[int | None]  # trajectory ids that are used, here or elsewhere
    state: Mapping[str, Any] = field(default_factory=dict)  # of the same rank, where nothing moves
    source_states: Sequence[Mapping[str, Any]] = ()
    generator: torch.Generator | None = None
    added: int | None = None  # trajectories so far, where the state does not know them all
