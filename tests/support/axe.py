"""What axe finds in a page that is open: parts that people who listen, or see little, cannot use."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import pytest

from tests.support.browser import Page

GRAVE = ("serious", "critical")


async def grave(page: Page) -> list[str]:
    """Each serious or critical violation of what is shown now: its rule, why, and where."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_source())  # by the debugging protocol, which the page's policy does not concern
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)")
    return [_told(one) for one in found if one["impact"] in GRAVE]


def _source() -> str:
    pytest.importorskip("axe_core_python", reason="needs axe-core-python, which has axe.min.js")
    return (importlib.resources.files("axe_core_python") / "axe.min.js").read_text("utf-8") + "\n;undefined"


def _told(violation: dict[str, Any]) -> str:
    first = violation["nodes"][0]
    place = f"{json.dumps(first['target'])}: {first['html'][:160]}: {first['failureSummary']}"
    return f"{violation['id']} ({violation['impact']}), {len(violation['nodes'])} places, such as {place}"
