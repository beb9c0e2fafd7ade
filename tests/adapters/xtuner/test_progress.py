"""The producer's counters go back to the consumer's, to the letter."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from archive.adapters.xtuner import rollback
from archive.base.errors import UsageError


def live_progress() -> dict[str, Any]:
    return {
        "next_consumer_step": 2,
        "producer_future_step": 7,
        "consumed_samples": {"math": 1, "code": 3},
        "target_samples": {"math": 7, "code": 9},
        "target_upto_future_step": 7,
        "raw_rewards_sum": {"math": 1.5, "code": -2.0},
        "raw_rewards_count": {"math": 5, "code": 6},
        "produced_samples": {"math": 5, "code": 6},
        "produced_tokens": {"math": 500, "code": 600},
        "produce_time_s": 12.5,
        "failed_samples": {"math": 1, "code": 0},
        "filtered_samples": {"math": 0, "code": 2},
        "mine": [1, {"a": 2}],
    }


def test_eight_counters_are_rolled_back_and_the_rest_is_as_it_was() -> None:
    rolled = rollback(live_progress())
    assert rolled == {
        "next_consumer_step": 2,
        "producer_future_step": 2,
        "consumed_samples": {"math": 1, "code": 3},
        "target_samples": {"math": 1, "code": 3},
        "target_upto_future_step": 1,
        "raw_rewards_sum": {"math": 0.0, "code": 0.0},
        "raw_rewards_count": {"math": 0, "code": 0},
        "produced_samples": {"math": 0, "code": 0},
        "produced_tokens": {"math": 0, "code": 0},
        "produce_time_s": 0.0,
        "failed_samples": {"math": 1, "code": 0},
        "filtered_samples": {"math": 0, "code": 2},
        "mine": [1, {"a": 2}],
    }
    assert list(rolled) == list(live_progress())
    assert type(rolled["raw_rewards_sum"]["math"]) is float
    assert type(rolled["raw_rewards_count"]["math"]) is int


def test_the_input_is_neither_changed_nor_shared() -> None:
    progress = live_progress()
    before = copy.deepcopy(progress)
    rolled = rollback(MappingProxyType(progress))
    rolled["target_samples"]["math"] = 99
    assert progress == before
    assert rolled["consumed_samples"] == before["consumed_samples"]
    assert rollback(rollback(before)) == rollback(before)


@pytest.mark.parametrize(("step", "upto"), [(0, 0), (1, 0), (2, 1), (np.int64(5), 4)])
def test_target_is_the_step_before_and_never_negative(step: int, upto: int) -> None:
    rolled = rollback(live_progress() | {"next_consumer_step": step})
    assert rolled["target_upto_future_step"] == upto
    assert rolled["producer_future_step"] == step


NESTED = {"math": {"easy": 1, "hard": 2}}
ZEROED = ("raw_rewards_sum", "raw_rewards_count", "produced_samples", "produced_tokens")
STEPS = {"producer_future_step": 3, "target_samples": {"t": 4}, "target_upto_future_step": 2, "produce_time_s": 0.0}


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({}, {}),
        ({"frames": 10}, {"frames": 10}),
        ({"next_consumer_step": 3}, {"next_consumer_step": 3}),
        ({"consumed_samples": {"t": 1}}, {"consumed_samples": {"t": 1}}),
        ({"produced_samples": {"t": 9}, "target_samples": {"t": 9}},
         {"produced_samples": {"t": 0}, "target_samples": {"t": 9}}),
        ({"next_consumer_step": 3, "producer_future_step": 9}, {"next_consumer_step": 3, "producer_future_step": 3}),
        ({"consumed_samples": 4, "target_samples": 9, "produced_samples": 9},
         {"consumed_samples": 4, "target_samples": 4, "produced_samples": 0}),
    ],
)  # fmt: skip
def test_absent_keys_are_not_made_without_both_sources(progress: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rollback(progress) == expected


def test_with_both_sources_counters_are_made_of_the_tasks_that_consumed() -> None:
    sources = {"consumed_samples": {"t": 4}, "next_consumer_step": 3}
    assert rollback(sources) == sources | STEPS | {name: {"t": 0} for name in ZEROED}
    progress = live_progress() | {"produced_samples": {"math": 5}, "produced_tokens": {"old": 1}}
    rolled = rollback(progress)
    assert rolled["produced_samples"] == rolled["produced_tokens"] == {"math": 0, "code": 0}
    rolled = rollback({"consumed_samples": NESTED, "next_consumer_step": 1, "produced_tokens": {"math": 4}})
    assert rolled["target_samples"] == NESTED
    assert rolled["target_samples"]["math"] is not NESTED["math"]
    assert rolled["produced_tokens"] == {"math": {"easy": 0, "hard": 0}}


def test_a_step_that_is_no_number_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"progress\.next_consumer_step is a str"):
        rollback({"next_consumer_step": "3"})
