"""Stores whose listings lag: what was committed a moment ago is found all the same."""

from __future__ import annotations

import uuid

import archive
from archive.store import around
from archive.store.drivers import DelegatingDriver


class Lagging(DelegatingDriver):
    """Nothing that was made is in a listing yet."""

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        return [], 1


def test_the_first_commits_are_found_while_no_listing_has_them() -> None:
    url = f"memory://lagging-{uuid.uuid4().hex}"
    archive.create(url).writer(session="s").close()
    with around(lambda _, driver: Lagging(driver)):
        assert not archive.open(url).storage.driver.lists_at_once
        assert archive.open(url).head.number == 1
        archive.open(url).writer(session="s2").close()
        assert archive.open(url).head.number == 2
