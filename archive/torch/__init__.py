"""Torch users' side of the archive: rings of tensors, and datasets. Nothing below `archive` itself needs torch."""

from __future__ import annotations

from archive.base import package

package("torch", "archive.torch", "'trajectory-archive[torch]'")

from archive.torch import ring
from archive.torch.batches import Padded, collate
from archive.torch.datasets import EpisodeDataset, JoinedDataset, StepDataset, WindowDataset, join
from archive.torch.loaders import Loader, loader
from archive.torch.mixes import Mix, mix
from archive.torch.sampler import Sampler
from archive.torch.streams import EpisodeStream, StepStream, StreamDataset, WindowStream

IterableDataset = StreamDataset

__all__ = [
    "EpisodeDataset",
    "EpisodeStream",
    "IterableDataset",
    "JoinedDataset",
    "Loader",
    "Mix",
    "Padded",
    "Sampler",
    "StepDataset",
    "StepStream",
    "StreamDataset",
    "WindowDataset",
    "WindowStream",
    "collate",
    "join",
    "loader",
    "mix",
    "ring",
]
