"""Datasets for torch: episodes come in; items and batches of tensors, in a known order, go out."""

from __future__ import annotations

from archive.datasets.batches import Padded, as_kind, collate
from archive.datasets.datasets import EpisodeDataset, StepDataset, WindowDataset, feed_of
from archive.datasets.items import tensors
from archive.datasets.loaders import Loader, loader
from archive.datasets.mixes import Mix, mix
from archive.datasets.streams import EpisodeStream, JoinedDataset, StepStream, StreamDataset, WindowStream, join

__all__ = [
    "EpisodeDataset",
    "EpisodeStream",
    "JoinedDataset",
    "Loader",
    "Mix",
    "Padded",
    "StepDataset",
    "StepStream",
    "StreamDataset",
    "WindowDataset",
    "WindowStream",
    "as_kind",
    "collate",
    "feed_of",
    "join",
    "loader",
    "mix",
    "tensors",
]
