"""Torch users' side of the archive: rings of tensors, and datasets. Nothing below `archive` itself needs torch."""

from __future__ import annotations

from archive.torch import ring
from archive.torch.collate import collate
from archive.torch.datasets import EpisodeDataset, StepDataset, WindowDataset
from archive.torch.iterable import EpisodeStream, StepStream, StreamDataset, WindowStream
from archive.torch.joined import JoinedDataset, join
from archive.torch.loading import Loader, loader
from archive.torch.mixing import Mix, mix
from archive.torch.padding import Padded
from archive.torch.sampler import Sampler

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
