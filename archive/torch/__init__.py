"""Torch users' side of the archive: rings of tensors, and datasets. Nothing below `archive` itself needs torch."""

from __future__ import annotations

from archive.torch import ring
from archive.torch.datasets import EpisodeDataset, StepDataset, WindowDataset

__all__ = ["EpisodeDataset", "StepDataset", "WindowDataset", "ring"]
