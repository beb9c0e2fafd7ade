"""Labels on pages, in notebooks and in what is exported."""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from pathlib import Path

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import FieldError
from archive.views import rows
from tests.support.archives import with_checkpoints


def labelled() -> archive.Archive:
    arc = with_checkpoints(f"memory://{uuid.uuid4().hex}")
    return arc.label({"e0": {"success": True, "quality": 0.5, "note": "<b>"}, "e2": {"success": False}})


def test_each_label_is_a_column_of_a_page() -> None:
    _, given = rows.listed(labelled().episodes.table)
    columns = json.loads(zlib.decompress(base64.b64decode(given["rows"])))["columns"]
    said = {c["name"]: (c["kind"], c["values"]) for c in columns if c["name"].startswith("label.")}
    assert said == {
        "label.note": ("text", ["<b>", None, None]),
        "label.quality": ("number", [0.5, None, None]),
        "label.success": ("flag", [1, None, 0]),
    }


def test_an_episode_shows_its_labels() -> None:
    shown = labelled().episodes["e0"]._repr_html_()
    assert "note = &lt;b&gt;, quality = 0.5, success = True" in shown
    assert "labels" not in labelled().episodes["e1"]._repr_html_()


def test_what_is_exported_has_labels(tmp_path: Path) -> None:
    (name,) = resharding.export(labelled(), tmp_path)
    with np.load(tmp_path / name) as file:
        about = json.loads(str(file["episodes"]))
    assert [row["label.success"] for row in about] == [True, None, False]


def test_a_label_is_drawn() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = labelled().episodes.plot(y="label.quality")
    assert axes[0].get_ylabel() == "label.quality"
    assert axes[0].lines[0].get_ydata()[0] == 0.5
    labelled().episodes.plot(y="label.success")
    with pytest.raises(FieldError, match=r"numbers in .*label\.quality, label\.success"):
        labelled().episodes.plot(y="label.note")
