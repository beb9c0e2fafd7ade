"""Values of users survive strict JSON, or are refused with their place."""

from __future__ import annotations

import collections
import enum
import json
import math
import struct
import subprocess
import sys
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.base.errors import IntegrityError, StateError
from archive.base.jsontree import MAX_ARRAY_BYTES, MAX_DEPTH, dumps, loads

any_text = st.text(st.characters(exclude_categories=())) | st.text("$ab\ud83d\ude00\udc80", max_size=4)
any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2000), 2**2000)
    | any_float
    | st.complex_numbers()
    | any_text
    | st.binary()
)
keys = any_text | st.integers() | st.booleans() | st.none() | st.tuples(any_text, st.integers() | st.tuples(any_text))
values = st.recursive(
    scalars,
    lambda child: st.lists(child) | st.lists(child).map(tuple) | st.dictionaries(keys, child),
    max_leaves=15,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


def strict_parse(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    assert text.isascii()
    return json.loads(text, parse_constant=refuse)


@settings(deadline=None)
@given(values)
def test_every_value_comes_back_in_type_order_and_bits(value: Any) -> None:
    text = dumps(value, where="metadata")
    strict_parse(text)
    assert same(loads(text), value)
    assert dumps(loads(text), where="metadata") == text


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text("abc"),
                    lambda child: st.lists(child) | st.dictionaries(st.text("abc"), child)))  # fmt: skip
def test_plain_values_are_plain_compact_json(value: Any) -> None:
    assert dumps(value, where="m") == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, '{"$float":"nan"}'),
        (-math.inf, '{"$float":"-inf"}'),
        ((1, "a"), '{"$tuple":[1,"a"]}'),
        (b"\x00\xff", '{"$bytes":"AP8="}'),
        ({1: 2}, '{"$dict":[[1,2]]}'),
        ({(1, "a"): 2}, '{"$dict":[[{"$tuple":[1,"a"]},2]]}'),
        ({"$tuple": [1]}, '{"$$tuple":[1]}'),
        ({"$$": 1, "$": 2}, '{"$$$":1,"$$":2}'),
        (-0.0, "-0.0"),
        ("\ud83d\ude00", '{"$str":"eda0bdedb880"}'),
    ],
)
def test_the_text_is_this_and_stays_this(value: Any, text: str) -> None:
    assert dumps(value, where="m") == text
    assert same(loads(text), value) or math.isnan(value)


@pytest.mark.parametrize(
    "value",
    [2**20_000, -(2**20_000), struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]],
    ids=["large", "negative", "nan"],
)
def test_integers_beyond_pythons_digits_and_odd_nans_come_back(value: Any) -> None:
    assert same(loads(dumps([value], where="m")), [value])


def test_two_surrogates_are_not_joined_into_one_character() -> None:
    assert loads(dumps({"\ud83d\ude00": "\ud83d" + "\ude00"}, where="m")) == {"\ud83d\ude00": "\ud83d\ude00"}
    assert len(loads(dumps("\ud83d\ude00", where="m"))) == 2


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.5), 0.5),
        (np.float64(2.5), 2.5),
        (np.float64("inf"), math.inf),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
        (np.complex64(1 + 2j), 1 + 2j),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (collections.OrderedDict(a=1), {"a": 1}),
        ({np.int64(1): {Colour.RED: np.float16(1)}}, {1: {"red": 1.0}}),
    ],
)
def test_numpy_scalars_and_subclasses_become_plain(value: Any, plain: Any) -> None:
    assert same(loads(dumps(value, where="m")), plain)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(1.5, np.float16),
        np.zeros((0, 3), bool),
        np.array(["a", "\u00e9\U0001f600"]),
        np.array([b"ab", b"c"]),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([1, 2], "m8[25s]"),
        np.array([1 + 2j], np.complex64),
        np.zeros(2, "U0"),
    ],
    ids=lambda a: f"{a.dtype.str}-{a.shape}",
)
def test_small_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    text = dumps({"goal": array}, where="m")
    strict_parse(text)
    back = loads(text)["goal"]
    assert back.dtype == array.dtype
    assert back.dtype.byteorder == array.dtype.byteorder
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"goal": [1, 2, {3}]}, r"metadata\.goal\[2\] is a set.*sorted list"),
        ({"a b": {(1, 2): Opaque()}}, r"metadata\['a b'\]\[\(1, 2\)\] is a .*Opaque"),
        ({"f": print}, r"metadata\.f is a builtin_function"),
        ([bytearray()], r"metadata\[0\] is a bytearray.*bytes\(value\)"),
        (np.datetime64("2020"), r"metadata is a numpy\.datetime64"),
        ([np.longdouble(1)], r"metadata\[0\] is a numpy\.longdouble"),
        ({"x": np.array([None])}, r"metadata\.x is a numpy\.ndarray.*object"),
        ({"x": np.ma.masked_array([1])}, r"metadata\.x is a numpy\.ma.*MaskedArray"),
        ({"x": np.zeros(MAX_ARRAY_BYTES + 1, "u1")}, r"metadata\.x .*65537 bytes"),
        ({frozenset(): 1}, r"metadata\[frozenset\(\)\].*key"),
        ({(1, frozenset()): 1}, r"metadata.*as a key"),
    ],
)
def test_anything_else_is_refused_with_its_place_and_a_remedy(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        dumps(value, where="metadata")


def test_torch_tensors_are_refused_with_a_remedy() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(StateError, match=r"metadata\.loss is a torch\.Tensor.*\.item\(\)"):
        dumps({"loss": torch.ones(1)}, where="metadata")


@pytest.mark.parametrize("kind", [list, collections.OrderedDict, dict])
def test_a_value_that_holds_itself_is_refused(kind: type) -> None:
    inner: Any = kind()
    value = {"a": [inner]}
    inner.append(value) if kind is list else inner.update(b=value)
    with pytest.raises(StateError, match=r"m\.a.*contains itself"):
        dumps(value, where="m")


def test_a_value_that_is_shared_is_no_cycle() -> None:
    shared = [1]
    assert loads(dumps([shared, shared], where="m")) == [[1], [1]]


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"k": v}])
def test_deep_values_come_back_and_deeper_ones_are_refused(wrap: Any) -> None:
    value: Any = []
    for _ in range(MAX_DEPTH - 1):
        value = wrap(value)
    assert same(loads(dumps(value, where="m")), value)
    with pytest.raises(StateError, match="levels deep"):
        dumps(wrap(wrap(value)), where="m")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "[Infinity]",
        "1e999",
        '{"a":1,"a":2}',
        '{"$unknown":1}',
        '{"$tuple":1}',
        '{"$tuple":"ab"}',
        '{"$float":"1.5"}',
        '{"$float":"3ff0000000000000"}',
        '{"$float":"00"}',
        '{"$float":[]}',
        '{"$int":3}',
        '{"$int":"xyz"}',
        '{"$str":"ff"}',
        '{"$bytes":"a"}',
        '{"$bytes":"a*=="}',
        '{"$bytes":null}',
        '{"$complex":[1]}',
        '{"$complex":[1,2]}',
        '{"$dict":{"a":1}}',
        '{"$dict":["ab"]}',
        '{"$dict":[[[],1]]}',
        '{"$dict":[[1,2],[1,3]]}',
        '{"$dict":[[{"$tuple":[[]]},2]]}',
        '{"$a":1,"b":2}',
        '{"$array":1}',
        '{"$array":{"dtype":"O","shape":[1],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"|O8","shape":[1],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"i4,i4","shape":[1],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"<i8","shape":[2],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"<i8","shape":[-1],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"<i8","shape":1,"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"<i7","shape":[1],"data":"AAAAAAAAAAA="}}',
        '{"$array":{"dtype":"<U1","shape":[1],"data":"/////w=="}}',
        '{"$array":{"dtype":"<U0","shape":[1000000000],"data":""}}',
        '{"$array":{"dtype":"<i8","shape":[0,4611686018427387903,4],"data":""}}',
        "[" * 100_000 + "]" * 100_000,
        "[" * 200 + "]" * 200,
        "9" * 10_000,
    ],
    ids=lambda text: text[:40],
)
def test_text_that_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError, match=r"^progress"):
        loads(text, where="progress")


@settings(deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda child: st.lists(child) | st.dictionaries(
        st.sampled_from(["$tuple", "$dict", "$array", "$str", "$int", "$float", "$$", "dtype", "shape", "data"]), child)
))  # fmt: skip
def test_loads_either_decodes_or_raises_integrity_error(value: Any) -> None:
    try:
        loads(json.dumps(value))
    except IntegrityError as error:
        assert "JSON value" in str(error)  # noqa: PT017 either outcome is right, other exceptions are not


def test_errors_of_loads_name_the_place() -> None:
    with pytest.raises(IntegrityError, match=r"progress\.tasks\[1\].*\$zip"):
        loads('{"tasks":[1,{"$zip":1}]}', where="progress")


def test_importing_it_imports_no_numpy() -> None:
    code = "import sys, archive.base.jsontree; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
