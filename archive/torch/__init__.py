"""Torch users' side of the archive: rings of tensors, and datasets. Nothing below `archive` itself needs torch."""

from __future__ import annotations

from archive.base import package

package("torch", "archive.torch", "'trajectory-archive[torch]'")

from archive.datasets import (
    EpisodeDataset,
    EpisodeStream,
    JoinedDataset,
    Loader,
    Mix,
    Padded,
    StepDataset,
    StepStream,
    StreamDataset,
    WindowDataset,
    WindowStream,
    collate,
    join,
    loader,
    mix,
)
from archive.sampling import Sampler
from archive.torch import ring

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
