"""Work over all that is stored, to be interrupted anywhere: see `operations`."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from archive.testing import assert_whole, small_archive, steps
from tests.support.backends import Backend
from tests.support.said import Said
from tests.support.tampering import same

EPISODES, GONE = 4, 1


def ended(root: Backend) -> None:
    """Episodes of a session that cannot commit any more."""
    small_archive(root.url, EPISODES, commits=2, storage_options=root.storage_options)
    root.open().writer().close()


def redact(root: Backend, said: Said) -> None:
    """An episode goes from the shard that it shares with others."""
    if f"e{GONE}" in _ids(root.open()):
        root.open().forget(ids=[f"e{GONE}"], redact=True, dry_run=False)
    said("redacted")


def check_redacted(root: Backend, said: Said) -> None:
    there = _check(root, range(EPISODES))
    assert len(there) == EPISODES or f"e{GONE}" not in there
    assert "redacted" not in said or len(there) == EPISODES - 1


def score(root: Backend, said: Said) -> None:
    """A job that gives each episode a column, batch by batch."""
    root.open().episodes.map(
        lambda data: {"twice": 2 * data["reward"]}, ["reward"], ["twice"], job="score", batch_size=1, commit_every="0s"
    )
    said("scored")


def check_scored(root: Backend, said: Said) -> None:
    _check(root, range(EPISODES))
    arc = root.open()
    rows = sum(arc.late_fields["length"].to_pylist())
    assert rows == sum(4 + i for i in range(EPISODES)) or "scored" not in said
    for _, data in arc.episodes.stream(missing="skip"):
        assert "twice" not in data or (data["twice"] == 2 * data["reward"]).all()


def _ids(arc: archive.Archive) -> list[str]:
    return [str(name) for name in arc.episodes.table["episode_id"].to_pylist()]


def _check(root: Backend, numbers: range) -> list[str]:
    """Nothing is wrong with the archive, or with any of these episodes that is there; those that are."""
    arc = root.open()
    assert_whole(arc)
    there = _ids(arc)
    assert set(there) <= {f"e{i}" for i in numbers}
    for episode in arc.episodes:
        number = int(episode.id[1:])
        assert same(_own(episode.read()), steps(4 + number, number)), episode.id
    return there


def _own(data: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The fields that an episode had when it was written."""
    return {name: values for name, values in data.items() if name != "twice"}
