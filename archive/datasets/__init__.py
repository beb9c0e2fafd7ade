"""Datasets for torch: episodes come in; items and batches of tensors, in a known order, go out."""

from __future__ import annotations

from archive.datasets.collating import as_kind, collate
from archive.datasets.datasets import EpisodeDataset, StepDataset, WindowDataset
from archive.datasets.feeds import feed_of
from archive.datasets.items import tensors
from archive.datasets.iterable import EpisodeStream, StepStream, StreamDataset, WindowStream
from archive.datasets.joined import JoinedDataset, join
from archive.datasets.loading import Loader, loader
from archive.datasets.mixing import Mix, mix
from archive.datasets.padding import Padded

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
