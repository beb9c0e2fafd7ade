"""Spans and metrics of OpenTelemetry, collected by its SDK; without it, and without a provider, there is nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.observe import FAMILIES, operation, tracing
from tests.support.places import ROOT

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What ended, with a provider that is set for the test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def test_a_checkpoint_is_a_part_of_the_step_that_asked_for_it(spans: InMemorySpanExporter) -> None:
    with archive.create("memory://tracing/parts").writer(compression=None) as w:
        w.add_episode({"x": np.arange(5)})
        with trace.get_tracer_provider().get_tracer("mine").start_as_current_span("train"):
            pending = w.checkpoint(step=7)
        made = pending.result()
    found = {span.name: span for span in spans.get_finished_spans()}
    whole = found["archive.checkpoint"]
    assert whole.parent is not None
    assert whole.parent.span_id == found["train"].context.span_id
    for part in ("archive.checkpoint.stage", "archive.checkpoint.join"):
        parent = found[part].parent
        assert parent is not None
        assert parent.span_id == whole.context.span_id
    told: dict[str, Any] = dict(whole.attributes or {})
    wanted = {"archive.name": "step-7", "archive.step": 7, "archive.rank": 0, "archive.commit": made.number}
    assert wanted.items() <= told.items()
    assert 40 < told["archive.bytes"] < 1000


def test_each_operation_is_a_span(spans: InMemorySpanExporter) -> None:
    arc = archive.create("memory://tracing/each")
    with arc.writer() as w:
        w.add_episode({"x": np.arange(5)})
        w.commit()
        made = w.checkpoint(step=1).result()
    arc.episodes.read()
    arc.episodes[0].read()
    archive.open("memory://tracing/each")
    arc.episodes.label(good=True)
    arc.add_fields({"v": {arc.episodes[0].id: np.arange(5.0)}})
    arc.drop_fields(["v"])
    share = resharding.plan(made, world_size=1).share(0)
    next(share.stream())  # and no more of it
    share.read()
    found = [span.name.removeprefix("archive.") for span in spans.get_finished_spans()]
    ours = {"open", "session", "commit", "checkpoint", "read", "plan", "resume"}
    assert ours | {"read.episode", "label", "add_fields", "drop_fields"} <= set(found)
    assert {span.status.status_code for span in spans.get_finished_spans()} == {StatusCode.UNSET}


def test_a_failure_is_told_without_its_text(spans: InMemorySpanExporter) -> None:
    with pytest.raises(archive.StorageError), operation("read", name="\x1b[2J"):
        raise archive.StorageError("secret-from-a-bucket")
    (span,) = spans.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "StorageError")
    assert "secret" not in span.to_json()
    assert dict(span.attributes or {})["archive.name"] == r"\x1b[2J"


def test_metrics_are_collected_under_the_names_of_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    with archive.create("memory://tracing/metrics").writer(journal_s=3600) as w:
        w.add_episode({"x": np.arange(5)})
        w.commit()
        data = reader.get_metrics_data()
    assert data is not None
    found = {one.name: one for one in data.resource_metrics[0].scope_metrics[0].metrics}
    named = {family.name: family for family in FAMILIES}
    assert {"archive.operation", "archive.requests", "archive.written", "archive.journal.behind"} <= set(found)
    assert all(found[name].unit == named[name].unit for name in found)
    provider.shutdown()


def test_without_a_provider_there_is_no_span() -> None:
    assert tracing.begin("commit", {}) is None


def test_without_the_package_all_works_and_it_is_not_imported() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith("opentelemetry"), name
sys.meta_path.insert(0, Refuse())
import archive, numpy as np
with archive.create("memory://x").writer() as w:
    w.add_episode({"x": np.arange(3)})
    w.checkpoint(step=1, wait=True)
print(archive.metrics().count('operation="checkpoint"') > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
