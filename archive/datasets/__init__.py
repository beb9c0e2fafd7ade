"""Datasets for torch: episodes come in; items and batches of tensors, in a known order, go out."""

from __future__ import annotations

from archive.datasets.batches import Padded, as_kind, collate, tensors
from archive.datasets.datasets import EpisodeDataset, Feed, JoinedDataset, StepDataset, WindowDataset, join
from archive.datasets.loaders import Loader, loader
from archive.datasets.mixes import Mix, mix
from archive.datasets.streams import EpisodeStream, StepStream, StreamDataset, WindowStream

__all__ = [
    "EpisodeDataset",
    "EpisodeStream",
    "Feed",
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
    "join",
    "loader",
    "mix",
    "tensors",
]
