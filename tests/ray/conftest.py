"""The cluster that tests share, for Ray's datasets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's of itself
        pytest.importorskip("ray.data")
        with ray_cluster.cluster(2) as ray:
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield ray
