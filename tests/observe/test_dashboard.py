"""The dashboard asks for metrics that there are, all of them, by labels that they have; and so says the page."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

import archive
import resharding
from archive.observe import FAMILIES, MetricKind
from tests.support.documents import DOCS

PAGE = (DOCS / "how-to" / "observing.md").read_text("utf-8")
BOARD: dict[str, Any] = json.loads((DOCS / "how-to" / "observing-grafana.json").read_text("utf-8"))
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def metric(name: str) -> str:
    return HISTOGRAM.sub("", name)


def test_each_metric_that_it_asks_for_exists_and_none_is_left_out() -> None:
    asked = {metric(name) for query in QUERIES for name in re.findall(r"\barchive_[a-z_]+", query)}
    assert asked == {family.prometheus for family in FAMILIES}


def test_labels_are_those_that_the_metrics_have() -> None:
    arc = archive.create("memory://dashboard/labels")
    with arc.writer(journal_s=3600) as w:
        w.add_episode({"x": np.arange(5)})
        made = w.checkpoint(step=1).result()
        resharding.plan(made, world_size=1).share(0).read()
        arc.refresh().episodes.map(lambda steps: {"y": steps["x"]}, job="y")
        text = archive.metrics()
    has = {family.prometheus: {"operation"} if family.name.endswith("ures") else set[str]() for family in FAMILIES}
    for name, inside in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        has.setdefault(metric(name), set()).update(re.findall(r"(\w+)=", inside))
    for query in QUERIES:
        by = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", group)}
        by |= set(re.findall(r"(\w+)=\"", query))
        for name in re.findall(r"\barchive_[a-z_]+", query):
            assert by <= has[metric(name)], query


def test_it_is_a_dashboard() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert [one["name"] for one in BOARD["templating"]["list"]] == ["datasource"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(places) == len(set(places))
    for panel in BOARD["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_the_page_has_each_metric() -> None:
    for family in FAMILIES:
        assert f"`{family.prometheus}`" in PAGE
    assert {family.kind for family in FAMILIES} == set(MetricKind)
