"""Every dtype comes back as it was, bit for bit, in every kind of field."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import archive
from archive import Ragged, Schema
from archive.base.errors import CorruptManifestError, FieldError
from archive.fields import dtypes
from tests.support.archives import fresh, identical, reopened, round_trip
from tests.support.sampling import examples

NUMPY = [
    *("?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i8", ">i8", "<u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8"),
    *("<c8", ">c8", "<c16", ">c16", "g", "G", "<M8[ns]", ">M8[D]", "<M8[25s]", "<m8[us]", ">m8[h]", "M8", "m8"),
    *("S1", "S7", "V3", "<U1", "<U9", ">U4"),
]
STRUCTURED = [
    np.dtype([("x", "<f4"), ("y", ">i2", (2, 3))]),
    np.dtype([("flag", "?"), ("inner", [("name", "S3"), ("at", "<M8[s]")])]),
    np.dtype([("x", "u1"), ("y", "<f8")], align=True),
    np.dtype({"names": ["b", "a"], "formats": ["<i4", "<i2"], "offsets": [8, 2], "itemsize": 16}),
    np.dtype([("h", ml_dtypes.bfloat16), ("q", ml_dtypes.float8_e4m3fn, (2,)), ("z", "<f4")]),
]
ML = [np.dtype(getattr(ml_dtypes, name)) for name in dtypes.ML_NAMES]
ALL = [*map(np.dtype, NUMPY), *STRUCTURED, *ML]


def random_bits(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bits at all, so any NaN, where the dtype allows it."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "U":
        letters = np.array([*"abé\U0001f600 /"])
        words = ["".join(rng.choice(letters, dtype.itemsize // 4)) for _ in range(int(np.prod(shape)))]
        return np.array(words, dtype).reshape(shape)
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype.names:  # a byte that is no bool is no value
        array = raw.view(dtype)
        for name in (n for n in dtype.names if dtype[n] == np.dtype(bool)):
            array[name] = raw[: len(array)] % 2
        return array.reshape(shape)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_dtype_comes_back_bit_for_bit(dtype: np.dtype[Any]) -> None:
    schema = Schema(next_of={"next": "obs"}, axes={"free": "free", "offset": "offset", "pieces": "ragged"})
    nests = [every_kind_of_field(dtype, steps) for steps in (4, 1, 0)]
    arc = fresh()
    with arc.writer(schema=schema) as w:
        for nest in nests:
            w.add_episode(nest)
    nests[-1]["pieces"] = []
    assert all(map(identical, reopened(arc).episodes.read(), nests))
    flat = reopened(arc).episodes[2].read("pieces", ragged="flat")["pieces"]
    assert identical(flat.values, random_bits(dtype, (0, 2)))


def every_kind_of_field(dtype: np.dtype[Any], steps: int) -> dict[str, Any]:
    rows = random_bits(dtype, (steps, 2, 3))
    return {
        "obs": rows,
        "next": rows[[*range(1, steps), 0]] if steps else rows,  # the last row repeats none
        "flat": random_bits(dtype, (steps,), 1),
        "free": random_bits(dtype, (2,), 2),
        "offset": random_bits(dtype, (steps + 1, 2), 3),
        "pieces": [random_bits(dtype, (n, 2), n) for n in (1, 0, 3, 2)[:steps]]
        or Ragged(random_bits(dtype, (0, 2)), np.zeros(0)),
    }


@pytest.mark.parametrize("dtype", [d for d in ALL if d.kind != "U"], ids=str)
def test_logical_name_gives_the_dtype_back(dtype: np.dtype[Any]) -> None:
    assert dtypes.to_numpy(dtypes.logical_name(dtype)) == dtype


def test_nan_payloads_and_negative_zero_survive() -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    half = np.array([0x7E01, 0xFE01, 0x8000, 0x7C01], np.uint16)
    got = round_trip({"x": bits.view(np.float32)})["x"]
    assert got.view(np.uint32).tolist() == bits.tolist()
    assert round_trip({"x": half.view(np.float16)})["x"].view(np.uint16).tolist() == half.tolist()
    assert round_trip({"x": half.view(ml_dtypes.bfloat16)})["x"].view(np.uint16).tolist() == half.tolist()


def test_not_a_time_survives() -> None:
    times = np.array(["NaT", "2024-02-29", "1677-09-22"], "M8[ns]")
    assert identical(round_trip({"t": times})["t"], times)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_strings_of_any_length_survive(texts: list[str]) -> None:
    assert round_trip({"s": texts, "x": np.zeros(len(texts))})["s"].tolist() == texts


def test_strings_with_zeros_and_nested_lists_survive() -> None:
    got = round_trip({"a": ["x\0", "\0", ""], "b": [["a\0", "b"], ["", "\0\0"], ["c", "d"]]})
    assert got["a"].tolist() == ["x\0", "\0", ""]
    assert [row.tolist() for row in got["b"]] == [["a\0", "b"], ["", "\0\0"], ["c", "d"]]


def test_string_dtypes_are_told_apart() -> None:
    got = round_trip({
        "fixed": np.array(["ab", "c"]),
        "objects": np.array(["ab", "c"], object),
        "variable": np.array(["ab", "c"], np.dtypes.StringDType()),
        "listed": ["ab", "c"],
    })  # fmt: skip
    assert got["fixed"].dtype == np.dtype("<U2")
    assert all(got[name].dtype == np.dtype(object) for name in ("objects", "variable", "listed"))
    assert all(value.tolist() == ["ab", "c"] for value in got.values())


@settings(max_examples=examples(40), deadline=None)
@given(
    hnp.array_shapes(min_dims=1, max_dims=7, min_side=0, max_side=3).flatmap(
        lambda shape: hnp.arrays(st.sampled_from(["i1", "f4", "?", "c8", "M8[s]"]), shape)
    )
)
def test_any_shape_comes_back(array: np.ndarray[Any, Any]) -> None:
    assert identical(round_trip({"x": array})["x"], array)


@pytest.mark.parametrize("shape", [(3, 0), (3, 0, 2), (3, 2, 0), (0, 0), (1, 0)])
@pytest.mark.parametrize("dtype", ["f4", "S4", "U3", "M8[s]", "g", "bfloat16", "O"])
def test_rows_without_elements_come_back(shape: tuple[int, ...], dtype: str) -> None:
    array = np.zeros(shape, getattr(ml_dtypes, dtype, dtype))
    schema = Schema(next_of={"next": "obs"}, axes={"off": "offset", "free": "free"})
    nest = {"obs": array, "next": array, "free": array, "t": np.arange(shape[0]), "off": np.zeros((shape[0] + 1, 0))}
    arc = fresh()
    with arc.writer(schema=schema) as w:
        w.add_episode(nest)
    episode = reopened(arc).episodes[0]
    assert identical(episode.read(), nest)
    if shape[0] == 3:
        assert episode.read(["obs", "next"], 1, 3)["next"].shape == (2, *shape[1:])


def test_a_field_has_up_to_eight_dimensions() -> None:
    array = np.arange(2**8).reshape((2,) * 8)
    assert identical(round_trip({"x": array})["x"], array)
    arc = fresh()
    with arc.writer() as w:
        for bad in (array[None], array.astype(np.longdouble), [array[None], array[None]]):
            with pytest.raises(FieldError, match="'x' has 9 dimensions"):
                w.add_episode({"x": bad})
    assert arc.head.number == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([1, None], object), "holds a int"),
        (np.array([{}, []], object), "holds a dict"),
        (np.zeros(2, [("o", object)]), "Python objects"),
        (np.zeros(2, "V0"), "cannot be stored"),
        (["\ud800"], "lone surrogate"),
        (np.array(["ok", "\udfff"]), "lone surrogate"),
        (np.ma.masked_array([1, 2], [0, 1]), "masked array"),
        ([1, "a"], "holding a int"),
        ([[1, "a"]], "holding a int"),
        ([b"a"], "holding a bytes"),
        ([None, 1.0], "holding a NoneType"),
        ([[[1], [2, 3]]], "rows within a step"),
        ("text", "is a str"),
        (b"raw", "is a bytes"),
        ((1, 2), "is a tuple"),
        ({1, 2}, "is a set"),
        (iter([1]), "is a list_iterator"),
        (object(), "is a object"),
        (2**70, "holds"),
        (3, "no step axis"),
        (np.float32(3), "no step axis"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(bad: Any, message: str) -> None:
    arc = fresh()
    with arc.writer() as w, pytest.raises(FieldError, match=message) as caught:
        w.add_episode({"deep": {"field": bad}})
    assert "deep/field" in str(caught.value)
    assert len(reopened(arc).episodes) == 0


def test_unknown_dtype_of_a_newer_library_is_an_error() -> None:
    divided = ("<M8[s/0]", '[["x", "<m8[D/4294967296]"]]', '[["x", [["y", "<M8[s/0]"]]]]')  # which end the process
    for name in ("float3_e1", "bogus", "[[", '{"names": ["a"]}', '[["x", "bogus"]]', *divided):
        with pytest.raises(CorruptManifestError, match="unknown dtype"):
            dtypes.to_numpy(name)


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.longdouble, ">f4", "i1", "?", np.float16, ml_dtypes.float8_e5m2]
)
def test_return_is_the_sum_of_rewards_of_any_dtype(dtype: Any) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"reward": np.array([1, 0, 1], dtype)})
        w.add_episode({"reward": np.array([[1], [1], [1]], dtype)})
    assert archive.open(arc.url).episodes.table["return"].to_pylist() == [2.0, 3.0]


@pytest.mark.parametrize("rewards", [["a", "b"], np.zeros(2, "S3"), np.zeros(2, "M8[s]"), np.zeros(2, complex)])
def test_return_is_null_where_rewards_are_no_numbers(rewards: Any) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"reward": rewards})
    assert reopened(arc).episodes[0].total_reward is None
