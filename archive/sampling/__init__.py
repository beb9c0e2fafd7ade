"""Random batches: episodes or a share come in; steps, windows or episodes drawn by a strategy go out."""

from __future__ import annotations

from archive.sampling.sampler import Sampler

__all__ = [
    "Sampler",
]
