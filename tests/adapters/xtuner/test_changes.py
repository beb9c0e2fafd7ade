"""XTuner's buffers: saves that were lost, restores that fail half way, and odd values in rollouts."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import types
import uuid
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import resharding
from archive.adapters import xtuner
from archive.base.errors import CorruptStateError, FieldError, UsageError
from tests.support.xtuner_buffers import (
    AgentRolloutItem,
    StageRecord,
    StageStatus,
    buffer,
    contents,
    fresh,
    group_of,
    rollout,
    saved,
    share_of,
)


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_a_lost_save_wrote_is_not_taken_for_saved(is_restored: bool) -> None:
    """A job goes back to an older checkpoint and keeps its live buffer: what has changed since is uploaded anew."""
    arc, rb = fresh(), buffer()
    asyncio.run(rb.put(group_of(0), "math"))
    asyncio.run(rb.put(group_of(1), "math"))
    with arc.writer() as w:
        first = saved(rb, w)
    if is_restored:
        rb = buffer()
        asyncio.run(xtuner.restore(rb, share_of(first)))
    items = asyncio.run(rb._storage.get({}))
    with arc.writer(resume=share_of(first)) as w:
        items[0].item[0].response = "changed"
        saved(rb, w, 2)
    with arc.writer(resume=share_of(arc.refresh().checkpoints["step-1"])) as w:
        third = saved(rb, w, 3)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(third)))
    assert contents(again) == contents(rb)


def test_one_of_several_that_cannot_be_read_leaves_the_others_alone() -> None:
    named = {"replay": buffer(), "eval": buffer()}
    asyncio.run(named["replay"].put(group_of(0, 1), "math"))
    asyncio.run(named["eval"].put(group_of(1, 2), "math"))
    with fresh().writer() as w:
        ck = saved(named, w)  # type: ignore[arg-type]
    share = resharding.plan(ck, world_size=1, num_envs=1, max_length=1).share(0)  # which cuts groups of two
    again = {"replay": buffer(), "eval": buffer()}
    asyncio.run(again["replay"].put(group_of(7), "math"))
    before = contents(again["replay"])
    with pytest.raises(CorruptStateError, match="1 of 2 rollouts"):
        asyncio.run(xtuner.restore(again, share, existing="replace"))
    assert contents(again["replay"]) == before


def test_tensors_without_a_dimension_and_names_that_look_alike_come_back() -> None:
    odd = {
        "number": torch.tensor(5), "flag": torch.tensor(True), "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "zero": np.array(3), "x": [np.zeros(2000, np.int64), np.ones(2000, np.float32)],
        "x~2": np.full(2000, 7, np.int8),
    }  # fmt: skip
    arc, rb = fresh(), buffer()
    asyncio.run(rb.put([rollout(0, 0, mm_info=odd)], "math"))
    with arc.writer() as w:
        ck = saved(rb, w)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(ck)))
    assert contents(again) == contents(rb)


def test_an_array_of_objects_is_refused_by_name() -> None:
    rb = buffer()
    asyncio.run(rb.put([rollout(0, 0, mm_info={"names": np.array(["a", None], object)})], "math"))
    with fresh().writer() as w, pytest.raises(FieldError, match=r"mm_info\.names.*not all strings"):
        saved(rb, w)


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Turn(NamedTuple):
    role: str
    at: pathlib.Path


class Renamed(NamedTuple):
    role: str
    at: Any


@dataclasses.dataclass(frozen=True)
class Score:
    value: float
    turn: Turn
    half: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.value / 2)


class Name(str):
    """Text with an attribute of its own."""


class Config(dict[str, Any]):
    """Not made of what it holds."""

    def __init__(self, source: str) -> None:
        super().__init__(source=source)


ALLOWED = [Level, Turn, Score, Name, Config]
_NAME = Name("n")
_NAME.language = "en"  # type: ignore[attr-defined]
KEPT: list[Any] = [
    pathlib.Path("/tasks/7"), pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/x"), Level.LOW | Level.HIGH,
    StageStatus.COMPLETED, Turn("user", pathlib.Path("x")), Score(1.0, Turn("a", pathlib.Path("y"))), _NAME,
    Config("c"), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=zoneinfo.ZoneInfo("Europe/Paris"), fold=1),
    datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), datetime.time(3, 4, tzinfo=datetime.UTC),
    datetime.timedelta(-1, 2, 3), datetime.timezone(datetime.timedelta(hours=2), "here"), decimal.Decimal("1.10"),
    fractions.Fraction(1, 3), uuid.UUID(int=7), bytearray(b"\x00a"), range(0, 9, 2), slice(1, None, 2),
    collections.deque([1, 2], 5), collections.OrderedDict(b=1, a=2), collections.Counter("abca"),
    collections.defaultdict(list, {"k": [1]}), types.SimpleNamespace(a=(1,)), np.str_("x"), np.bytes_(b"y"),
    np.float32(1.5), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"),
    {Level.HIGH: 1, (1, pathlib.Path("k")): 2, np.str_("n"): 3, "plain": 4}, {pathlib.Path("s")}, [Name("m")] * 70,
]  # fmt: skip


def restored(value: Any, classes: Any = ()) -> Any:
    rb = buffer()
    asyncio.run(rb.put([rollout(0, 0, extra_fields={"value": value}), rollout(0, 1)], "math"))
    with fresh().writer() as w:
        ck = saved(rb, w)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(ck), classes=classes))
    (item,) = asyncio.run(again._storage.get({}))
    return item.item[0].extra_fields["value"]


def test_values_are_of_the_types_that_pickle_keeps() -> None:
    found = restored(KEPT, ALLOWED)
    for value, got in zip(KEPT, found, strict=True):
        assert type(got) is type(value)
        assert got == value == pickle.loads(pickle.dumps(value))
    assert [type(key) for key in found[-3]] == [type(key) for key in KEPT[-3]]
    assert found[7].language == "en"
    assert found[21].maxlen == 5
    assert (found[9].tzinfo.key, found[9].fold) == ("Europe/Paris", 1)
    masked = restored(np.ma.MaskedArray([1, 2], mask=[False, True]))
    assert masked.mask.tolist() == [False, True]
    weight = restored(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert isinstance(weight, torch.nn.Parameter)
    assert not weight.requires_grad


def test_what_an_agent_loop_keeps_of_a_rollout_is_its_own_class_again() -> None:
    """Its class is that of no declared field, but the module of rollouts has it."""
    item = AgentRolloutItem(
        id="a", task_root=pathlib.Path("/t"), judgers={"j": StageRecord(status=StageStatus.COMPLETED)}
    )
    item._started = 2.5
    found = restored(item)
    assert type(found) is AgentRolloutItem
    assert (found, found.model_fields_set) == (item, item.model_fields_set)
    copied = found.model_copy(deep=True)
    assert (type(copied.task_root), type(copied.infer), copied._started) == (type(item.task_root), StageRecord, 2.5)


def test_a_class_that_is_not_allowed_is_asked_for_by_name() -> None:
    value = [Turn("user", pathlib.Path("x")), Level.LOW, Config("c")]
    with pytest.raises(UsageError, match=r"holds a Turn, a class that is not known here.*classes=\[Turn\]"):
        restored(value)
    found = restored(value, {"Turn": Renamed, "Level": dict, "Config": dict})
    assert (type(found[0]), found[0].at, found[1:]) == (Renamed, pathlib.Path("x"), [1, {"source": "c"}])
    assert [type(one) for one in found[1:]] == [int, dict]
    with pytest.raises(FieldError, match="is no instance of"):
        restored(Level.LOW, {"Level": Score})


def test_a_value_that_contains_itself_is_refused() -> None:
    odd: list[Any] = []
    odd.append(odd)
    with pytest.raises(FieldError, match="contains itself"):
        restored(odd)
