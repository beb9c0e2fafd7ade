"""The dollars of a run: figures that people know, what makes a tenth, limits, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import archive
from archive import UsageError
from archive.costs import PRICES, Workload
from archive.costs import requests as of
from archive.costs.causes import stays
from archive.log import log as logs
from archive.store import GB, VERBS
from tests.support.commands import document as document_of
from tests.support.commands import printed
from tests.support.places import ROOT
from tests.support.ticks import NEVER_S

DENSE = {"steps_s": 1024 * 100.0, "journal_s": 2.0}  # additions come without a pause


def of_cause(found: Any, cause: str, store: str = "s3") -> dict[str, Any]:
    (row,) = (one for one in found.table.to_pylist() if (one["store"], one["cause"]) == (store, cause))
    return dict(row)


def test_a_journal_of_two_seconds_on_1024_ranks() -> None:
    found = archive.cost(ranks=1024, **DENSE)
    journal = of_cause(found, "journal")
    assert journal["writes"] == 1024 * 86_400 / 2 == 44_236_800
    assert 221 < journal["dollars_day"] < 223
    assert 6_600 < journal["dollars_month"] < 6_700
    assert 49 < of_cause(found, "journal", "s3-express")["dollars_day"] < 80
    assert found.spent[0].cause == "journal"
    node = archive.cost(ranks=1024, journal_ranks=8, **DENSE)
    assert of_cause(node, "journal")["writes"] == 44_236_800 / 8


def test_no_tick_where_nothing_was_added() -> None:
    rare = Workload(ranks=1024, steps_s=1024.0, episode_steps=600, call_steps=600, journal_s=2.0)
    assert rare.objects_s * 86_400 == pytest.approx(1024 * 144)  # an episode each ten minutes


@pytest.mark.parametrize("store", PRICES)
def test_a_tenth(store: str) -> None:
    found = archive.cost(ranks=1024, step_bytes=50, stores=store, **DENSE)
    before = found.dollars[store]
    assert found.savings[-1].dollars_day * 30 <= before / 10
    costs = [before / 30, *(one.dollars_day for one in found.savings)]
    assert costs == sorted(costs, reverse=True)
    assert not found.savings[0].loses  # first what gives up nothing
    assert str(found).count("gives up") == 1


def test_a_small_run_has_little_to_save() -> None:
    found = archive.cost(ranks=1, steps_s=1.0, step_bytes=1.0, checkpoint_s=86_400, resumes_day=0)
    assert all(value < 2 for value in found.dollars.values())


def test_what_is_charged() -> None:
    requests = {"get": 10**6, "head": 10**6, "put": 10**6, "create": 10**6, "list": 10**6, "copy": 0, "delete": 10**9}
    told = {name: round(one.dollars(requests), 4) for name, one in PRICES.items()}
    assert told == {"s3": 15.8, "s3-express": 3.45, "gcs": 15.8, "r2": 14.22}
    carried = {name: round(one.dollars({}, uploaded=1000 * GB, received=1000 * GB), 4) for name, one in PRICES.items()}
    assert carried == {"s3": 0, "s3-express": 3.8, "gcs": 0, "r2": 0}
    for one in PRICES.values():
        assert set(one.verbs) == set(VERBS)
        assert re.fullmatch(r"20\d\d-\d\d", one.read_on)
        assert one.source.startswith("https://")


def test_what_stays() -> None:
    day = 86_400.0
    assert stays(1.0, None, 30 * day) == stays(1.0, 40 * day, 30 * day) == 15 * day
    assert stays(1.0, 10 * day, 30 * day) == pytest.approx((10 * 5 + 20 * 10) / 30 * day)
    grows, bounded = archive.cost(), archive.cost(keep=archive.Keep(last=3))
    assert of_cause(bounded, "steps at rest")["stored"] < of_cause(grows, "steps at rest")["stored"] / 4
    states = archive.cost(keep=archive.Keep(last=3), forget="checkpoints")
    assert of_cause(states, "steps at rest") == of_cause(grows, "steps at rest")
    assert "prunes" not in {one.cause for one in grows.spent}


def test_bytes_that_leave_the_region() -> None:
    away, here = (archive.cost(exports_day=1, egress=part) for part in (1.0, 0.0))
    more = {name: away.dollars[name] - here.dollars[name] for name in PRICES}
    read = of_cause(away, "exports")["received"] * 30 / GB
    assert more == pytest.approx({name: read * one.egress_gb for name, one in PRICES.items()})


def test_limits() -> None:
    assert archive.cost(ranks=8, journal_s=2.0).warnings == []
    near = archive.cost(ranks=1024, samples_s=3000, **DENSE).warnings
    assert [one.partition(":")[0] for one in near] == [PRICES[name].store for name in ("s3", *["gcs"] * 3)]
    assert "1,024 writes a second below states/, more than the 1,000" in " ".join(near)
    busy = archive.cost(ranks=8192, stores="s3", steps_s=8192 * 100.0, journal_s=1.0).warnings
    assert len(busy) == 4
    often = archive.cost(checkpoint_s=1.5).warnings
    assert [one.split()[0] for one in often] == ["GCS", "R2"]


def test_a_notebook_and_programs_get_the_same() -> None:
    found = archive.cost(ranks=1024, **DENSE)
    document = json.loads(json.dumps(found.to_json()))
    assert document["causes"] == found.table.to_pylist()
    assert set(document) == {"run", "stores", "causes", "dollars_month", "savings", "warnings"}
    for name in PRICES:
        rows = [row for row in document["causes"] if row["store"] == name]
        assert sum(row["dollars_month"] for row in rows) == pytest.approx(document["dollars_month"][name])
    page = found._repr_html_()
    assert "steps at rest" in page
    assert "44,236,800" in page
    assert all(len(line) <= 120 for line in str(found).splitlines())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ranks": 0}, "above 0"), ({"ranks": 1.5}, "whole number"), ({"ranks": True}, "a number"),
        ({"ranks": 10**6}, "more than a run may have"), ({"steps_s": float("nan")}, "a number"),
        ({"steps_s": -1}, "above 0"), ({"viewers": -1}, "0 or more"), ({"journal_s": 0}, "journal_s=0"),
        ({"journal_ranks": 9}, "more than there are"), ({"egress": 1.1}, "0 to 1"), ({"forget": "all"}, "unreferenced"),
        ({"keep": archive.Keep(every=10)}, "say how many"), ({"rank": 3}, "no figure 'rank'"),
        ({"stores": "azure"}, "no prices are known"), ({"stores": ()}, "give one of"),
        ({"run": "main"}, "of an archive"), ({"step_bytes": "1"}, "a number"), ({"group": "no"}, "process group"),
        ({"archive": "s3://bucket/run"}, "archive.open(url)"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(wrong: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        archive.cost(**wrong)


def test_prices_of_ones_own() -> None:
    mine = replace(PRICES["s3"], store="ours", gb_month=0.0, write=0.0, read=0.0)
    assert archive.cost(stores=mine).dollars == {"ours": 0.0}
    assert list(archive.cost(stores=["r2", mine]).dollars) == ["r2", "ours"]


def test_the_viewer_looks_as_often_as_is_told() -> None:
    text = (ROOT / "archive" / "view" / "app" / "live.js").read_text("utf-8")
    found = re.search(r"LATE_MS\] = \[\d+, (\d+)\]", text)
    assert found is not None
    assert int(found[1]) / 1000 == of.IDLE_LOOK_S


# -- from an archive ---------------------------------------------------------------------------------------------------


def job(
    url: str, monkeypatch: pytest.MonkeyPatch, *, journal: bool, checkpoints: int = 4, layout: str = "packed"
) -> archive.Archive:
    """A run that ticks twice between two checkpoints, which are an hour apart."""
    began, ranks, made, completed = datetime(2026, 1, 1, tzinfo=UTC), 2, [0], logs.completed

    def later(*given: Any) -> Any:
        return replace(completed(*given), created_at=began + timedelta(hours=made[0]))

    monkeypatch.setattr(logs, "completed", later)
    archive.create(url, layout=layout)
    writers = [
        archive.open(url).writer(rank, ranks, session="s", journal_s=NEVER_S if journal else None)
        for rank in range(ranks)
    ]
    for made[0] in range(checkpoints):
        for _ in range(2):
            for w in writers:
                w.add_episode({"obs": np.random.default_rng(0).random((50, 100))})
                if journal:
                    w.sync()
        saves = [w.checkpoint(made[0], state={"a": np.zeros(1000)}) for w in writers]
        for one in saves:
            one.result()
    for w in writers:
        w.close()
    return archive.open(url)


@pytest.mark.parametrize("journal", [True, False])
def test_the_figures_of_an_archive(journal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = job(f"memory://costs/observed-{journal}", monkeypatch, journal=journal)
    found = archive.cost(arc, viewers=1)
    run = found.run
    assert (run.ranks, run.viewers) == (2, 1)
    assert run.checkpoint_s == pytest.approx(3600, rel=0.01)
    assert run.steps_s == pytest.approx(200 / 3600, rel=0.01)
    assert (run.episode_steps, run.call_steps, run.live_steps) == (50, 50, 800)
    assert 700 < run.step_bytes < 1200
    assert 1_000 < run.state_bytes < 100_000
    assert run.journal_s == (pytest.approx(1800, rel=0.01) if journal else None)
    if journal:
        assert run.objects_s * 86_400 == pytest.approx(2 * 48, rel=0.01)
    assert arc.url in str(found)
    assert archive.cost(arc, ranks=8).run.ranks == 8
    assert "figures of its newest checkpoints" in printed("cost", arc.url)
    assert document_of("cost", arc.url)["run"]["ranks"] == 2


def test_an_archive_that_tells_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = job("memory://costs/young", monkeypatch, journal=False, checkpoints=1)
    with pytest.raises(UsageError, match="1 whole checkpoints"):
        archive.cost(arc)
    with pytest.raises(UsageError, match="say which run"):
        archive.cost(archive.create("memory://costs/none"))
    folders = job("memory://costs/folders", monkeypatch, journal=False, layout="directory")
    with pytest.raises(UsageError, match="give step_bytes="):
        archive.cost(folders)
    assert archive.cost(folders, step_bytes=1000).run.ranks == 2
    with pytest.raises(archive.NotFoundError, match="no run 'other'"):
        archive.cost(arc, run="other")


def test_the_command_takes_every_figure() -> None:
    from archive.cli import COMMANDS

    options = {one.name for one in COMMANDS["cost"].params}
    known = {one.name for one in fields(Workload)} - {"keep"}
    assert known <= options
    out = document_of("cost", "--ranks", 64, "--journal-s", 0, "--keep-last", 3, "--store", "r2")
    assert (out["run"]["journal_s"], list(out["stores"])) == (None, ["r2"])
    assert out["run"]["keep"] == "Keep(last=3)"
