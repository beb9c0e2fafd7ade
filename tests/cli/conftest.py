"""An archive for commands to look at."""

from __future__ import annotations

import numpy as np
import pytest

import archive
from tests.support.commands import HOSTILE


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three episodes in two commits, one with a name and metadata that mean harm."""
    root = str(tmp_path_factory.mktemp("cli") / "runs")
    with archive.create(root).writer(session="one") as w:
        for i, name in enumerate(("a", "b")):
            w.add_episode(
                {"obs": {"x": np.arange(3.0)}, "reward": np.full(3, i + 0.5)},
                episode_id=name, model_weights_uuid=f"w{i}", update_count=10 * i, metadata={"task": name},
            )  # fmt: skip
        w.commit("the first two")
        w.add_episode({"reward": np.array([np.inf])}, episode_id=HOSTILE, metadata={"note": HOSTILE}, last=False)
    return root
