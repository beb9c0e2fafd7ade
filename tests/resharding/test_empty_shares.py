"""Shares of checkpoints that have no buffer: nobody added a step, or it was saved without them."""

from __future__ import annotations

import uuid

import archive
import resharding


def test_a_recovery_of_prompts_alone_has_no_columns() -> None:
    arc = archive.create(f"memory://empty-{uuid.uuid4().hex}")
    writer = arc.writer(session="s", journal_s=30.0)
    writer.ledger("prompts").draw(["a"])
    writer.sync()
    found = archive.open(arc.url).recover()
    assert found is not None
    assert "replay" not in found.buffers
    for world_size in (1, 2):
        share = resharding.plan(found, world_size).share(0)
        assert (share.columns, share.attributes, len(share)) == ({}, {}, 0)
    writer.close()
