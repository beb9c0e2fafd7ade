"""Labels go where their episodes go: merged, split and filtered by reference or as copies, resharded and compacted."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

import archive
import resharding
from tests.support.archives import fresh, with_checkpoints
from tests.support.checkpoints import steps
from tests.support.clocks import running_backwards


def source(**said: Any) -> archive.Archive:
    """Three episodes, of which two have labels."""
    arc = with_checkpoints(f"memory://{uuid.uuid4().hex}")
    return arc.label({"e0": {"k": 0}, "e2": {"k": 2, "note": "ü"}}, by="anna")


def said(arc: archive.Archive) -> dict[str, Any]:
    return {ep.id: dict(ep.labels) for ep in arc.episodes}


@pytest.mark.parametrize("copy", [True, False])
def test_merging_takes_labels_along_and_again_those_that_are_new(copy: bool) -> None:
    arc, target = source(), fresh()
    how: dict[str, Any] = {"copy": copy, "allow_bases": True}
    merged = resharding.merge([arc.url], to=target.url, **how)
    assert said(merged) == said(arc) == {"e0": {"k": 0}, "e1": {}, "e2": {"k": 2, "note": "ü"}}
    assert merged.labels.drop_columns(["commit"]) == arc.labels.drop_columns(["commit"])
    before = merged.head.number
    assert resharding.merge([arc.url], to=target.url, **how).head.number == before
    arc.label({"e0": {"k": None}, "e1": {"k": 1}})
    merged.label({"e2": {"k": "ours"}})
    again = resharding.merge([arc.url], to=target.url, **how)
    assert said(again) == {"e0": {}, "e1": {"k": 1}, "e2": {"k": "ours", "note": "ü"}}
    assert [row["by"] for row in again.episodes["e0"].label_history] == ["anna", None]


@pytest.mark.parametrize("step_s", [60, 0])
def test_what_counts_in_a_source_counts_in_what_it_is_merged_into_whatever_clocks_said(step_s: float) -> None:
    """Revisions, labels and late fields of sessions one after the other, on a machine whose clock is set back."""
    arc, target, earlier = fresh(), fresh(), None

    def show(one: archive.Archive) -> Any:
        read = {ep.id: ep.read(["serial", "late"]) for ep in one.episodes}
        return said(one), {name: {k: v.tolist() for k, v in data.items()} for name, data in read.items()}

    with running_backwards(step_s):
        for n in range(3):
            with arc.writer() as w:
                for again in range(2 - n // 2):
                    w.add_episode(steps([n, again]), episode_id="e", replace=bool(n or again))
                    w.commit()
            arc.refresh().label({"e": {"k": n, "only": n}})
            arc.add_fields({"late": {"e": [n, n]}})
            arc.refresh().label({"e": {"k": -n}})
            arc.add_fields({"late": {"e": [-n, n]}})
            merged = resharding.merge([arc.url], to=target.url, copy=True)
            assert show(merged) == show(arc.refresh())
            earlier = earlier or resharding.merge([arc.url], to=fresh().url, copy=True)
        assert earlier is not None
        for several in ([arc.url], [earlier.url, arc.url]):
            assert show(resharding.merge(several, to=fresh().url, copy=True)) == show(arc)
        number = merged.head.number
        assert resharding.merge([arc.url], to=target.url, copy=True).head.number == number, "nothing is new"
        merged.label({"e": {"k": "ours"}})
        back = resharding.merge([target.url], to=arc.url, copy=True)
        assert said(back) == said(merged.refresh()) == {"e": {"k": "ours", "only": 2}}
        arc.refresh().label({"e": {"k": "theirs"}})
        merged.label({"e": {"k": "ours again"}})
        merged = resharding.merge([arc.url], to=target.url, copy=True)
        assert said(merged) == {"e": {"k": "theirs", "only": 2}}, "what comes last to the archive counts in it"
        assert said(resharding.merge([target.url], to=arc.url, copy=True)) == said(merged), "both sides agree"


def test_splitting_and_filtering_take_the_labels_of_what_they_take() -> None:
    arc = source()
    assert said(resharding.split(arc.url, to=fresh().url, count=2, allow_bases=True)) == {"e0": {"k": 0}, "e1": {}}
    chosen = resharding.filter(arc.url, to=fresh().url, where="label.k > 1", copy=True)
    assert said(chosen) == {"e2": {"k": 2, "note": "ü"}}
    assert chosen.labels.num_rows == 2


def test_resharding_takes_labels_along() -> None:
    arc = source()
    plan = resharding.plan(arc.checkpoints.latest, world_size=2)
    ck = resharding.reshard(arc, plan, to=fresh().url, copy=True)
    assert {ep.id: dict(ep.labels) for ep in ck.episodes} == said(arc)


def test_compacting_keeps_labels() -> None:
    arc = fresh()
    schema = archive.Schema(unit="step")
    with arc.writer(schema=schema) as w:
        w.add_episode(steps(range(100)), episode_id="long", env_id=0)
        arc.refresh() if w.commit() else None
        archive.open(arc.url).label({"long": {"k": 1}})
        w.evict(env_id=0, positions=[*range(10, 90)])
        w.checkpoint(0).result()
    arc.refresh()
    assert resharding.compact(arc, min_alive=0.5).steps == 20
    assert len(arc.index.chains.rows) > 1
    assert said(arc) == {"long": {"k": 1}}
    assert dict(arc.checkpoints.latest.episodes[0].labels) == {"k": 1}
