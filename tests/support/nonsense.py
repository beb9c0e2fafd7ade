"""What the tests of nonsense share: an archive with everything in it, and whoever reads all of that."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import ArchiveError
from archive.checkpoint.retention import Keep
from archive.maintain import verify
from archive.shard import indexed


def filled(root: Path) -> Path:
    """An archive with everything in it: two runs, one of them forked and resumed, kept by a rule;
    a partial checkpoint; what was forgotten, brought back, and pruned, tags and labels."""
    arc = archive.create(str(root))
    with arc.writer(keep=Keep(last=2, every=5, best=("loss", "min")), session="first") as w:
        w.append({"x": np.arange(4)}, env_ids=0, first=True, update_count=3, model_weights_uuid="w")
        w.buffer("demo").add_episode({"x": np.arange(2)}, episode_id="e")
        for name in ("extra", "also extra"):
            w.buffer("demo").add_episode({"x": np.arange(2)}, episode_id=name)
        w.buffer("demo").remove(["extra", "also extra"])
        given = {
            "columns": {"p": np.arange(4.0)},
            "attributes": {"tag": {}},
            "state": {"a": np.arange(3), "n": np.int64(1)},
        }
        ck = w.checkpoint(
            1, progress={"n": 1}, metrics={"loss": 1.0}, config={"lr": 1}, unconsumed=[1], **given
        ).result()
    with arc.writer(resume=ck, session="second") as w:
        w.append({"x": np.arange(2)}, env_ids=0)
        w.checkpoint(2, columns={"p": np.arange(6.0)}).result()
    arc.writer(run="other", fork_from=ck, session="third").close()
    with arc.writer(rank=0, world_size=2, run="wide", session="fourth") as w:
        w.append({"x": np.arange(2)}, env_ids=0, first=True)
        w.checkpoint(1, partial=True, state={"a": np.arange(3), "n": np.int64(1)}, progress={"n": 1}).result()
    _let_go(arc.refresh())
    return root


def _let_go(arc: archive.Archive) -> None:
    arc.label({"e": {"good": True}}, by="anna")
    arc.forget(ids=["extra"], dry_run=False)
    arc.undo()
    arc.label({"e": {"good": None, "quality": 0.5}})
    arc.add_fields({"score": {"e": np.arange(2.0)}, "other": {"e": np.arange(2)}}, provenance={"v": 1}, by="bob")
    arc.drop_fields(["other"])
    arc.tag("paper", arc.checkpoints["step-2"])
    arc.forget(ids=["extra"], dry_run=False)
    arc.prune(older_than="0s", force=True, dry_run=False)


def everything(root: Path) -> None:
    """Read whatever there is."""
    arc = archive.open(str(root))
    arc.episodes.read()
    repr(arc.runs.about), repr(arc.head), arc.checkpoints.kept()
    for commit in arc.commits:
        repr(commit)
    for ck in arc.checkpoints:
        repr(ck), ck.about, ck.lineage, ck.missing, ck.buffers, ck.discarded, ck.metrics, ck.progress, ck.unconsumed
        ck.values, ck.steps_per_rank, ck.origin, ck.episodes.read()
        for rank in ck.ranks:
            ck.state(rank)
            for name in ck.staged(rank).index.columns.get("replay", {}):
                ck.column(name, rank)
            if ck.whole:
                ck.to_resume(rank)
        if ck.missing:
            with pytest.raises(ArchiveError):
                ck.staged(1)


def look_after(root: Path) -> None:
    """Whatever reads records to find out what goes, without writing."""
    arc = archive.open(str(root))
    repr(arc.tags), repr(arc.labels), repr(arc.late_fields), arc.episodes["e"].labels, arc.episodes["e"].label_history
    verify(arc), arc.info
    str(arc.forget(Keep(last=1), episodes="unreferenced")), str(arc.prune(older_than="0s", force=True))


def index_of(path: Path) -> Any:
    """The index of an object that a rank wrote."""
    data = path.read_bytes()
    start, stop = indexed.index_span(data, "")
    return json.loads(data[start:stop].split(b"\n")[0])


def sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def put_index(path: Path, line: bytes) -> None:
    """Gives the object another index under a right checksum, whose length its header says."""
    data, text = path.read_bytes(), sealed(line)
    start, stop = indexed.index_span(data, "")
    path.write_bytes(data[:18] + len(text).to_bytes(4, "little") * 2 + data[26:start] + text + data[stop:])
