"""State trees come back in type, order and bits, or are refused with their place."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import random
import re
import struct
import subprocess
import sys
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from archive.base.errors import ArchiveError, CorruptStateError, StateError, UpgradeError, UsageError
from archive.base.jsontree import MAX_DEPTH
from archive.fields.trees import flatten, unflatten
from tests.support.sampling import examples

BIT_GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
ZARR_KINDS = "biufc"
torch_dtypes = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, np.generic):
        return (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(tensor_bits(a), tensor_bits(b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


def tensor_bits(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else None


def through_json(tree: Any) -> Any:
    """The tree after a trip through text, and arrays that zarr can hold."""
    skeleton, arrays = flatten(tree)
    for array in arrays.values():
        assert array.dtype.kind in ZARR_KINDS
        assert array.dtype.isnative
        assert array.flags.c_contiguous
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), arrays)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    width = dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, (*shape, width), np.uint8)
    return torch.from_numpy(bits.reshape(-1)).view(dtype).reshape(shape)


numpy_dtypes = (
    npst.scalar_dtypes()
    | npst.byte_string_dtypes()
    | npst.unicode_string_dtypes()
    | npst.array_dtypes(npst.scalar_dtypes(), max_size=3, allow_subarrays=True)
)
numpy_arrays = npst.arrays(numpy_dtypes, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
tensors = st.builds(
    make_tensor,
    st.sampled_from(torch_dtypes),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    st.integers(0, 99),
)
any_text = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["$array", "$", "\ud83d\ude00"])
any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | any_float
    | st.complex_numbers()
    | any_text
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")])
    | st.sampled_from([np.dtype(">f4"), np.dtype("M8[us]"), np.dtype([("a", "<i4", (2,)), ("b", "S3")])])
    | st.sampled_from([np.float32(1.5), np.int8(-1), np.bool_(True), np.str_("a\x00"), np.bytes_(b"a\x00")])
    | st.sampled_from([np.datetime64("2020-01-01", "ms"), np.timedelta64(3, "D"), np.complex64(1j), np.void(b"ab")])
)
keys = any_text | st.integers() | st.tuples(any_text, st.integers())
trees = st.recursive(
    scalars | numpy_arrays | tensors,
    lambda child: (
        st.lists(child, max_size=4)
        | st.lists(child, max_size=4).map(tuple)
        | st.dictionaries(keys, child, max_size=4)
        | st.dictionaries(keys, child, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, child, max_size=4).map(lambda items: defaultdict(list, items))
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(trees)
def test_every_tree_comes_back_in_type_order_and_bits(tree: Any) -> None:
    assert same(through_json(tree), tree)


@settings(deadline=None)
@given(numpy_arrays)
def test_every_array_comes_back(array: Any) -> None:
    assert same(through_json(array), array)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", torch_dtypes, ids=str)
def test_every_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make_tensor(dtype, shape, seed=1)
    assert same(through_json({"x": tensor})["x"], tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12)[::-2],
        np.array(7, ">i2"),
        np.zeros(2, {"names": ["a", "b"], "formats": ["<i4", ">f8"], "offsets": [0, 16], "itemsize": 32}),
        np.zeros(2, [("a", [("b", "U2"), ("c", "M8[25s]")])]),
        np.zeros(2, [(("title", "name"), "<i4"), ("b", "?")]),
        np.zeros(3, np.dtype([])),
        np.zeros(2, "U0"),
        np.array([1.5], np.longdouble),
        np.zeros((2, 0), ">c8"),
    ],
    ids=lambda array: str(array.dtype)[:40],
)
def test_odd_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    back = through_json([array])[0]
    assert back.dtype == array.dtype
    assert back.dtype.itemsize == array.dtype.itemsize
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_tensors_come_back_plain() -> None:
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "expanded": torch.ones(1).expand(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "computed": torch.ones(2, requires_grad=True) * 2,
    }
    back = through_json(tree)
    for name, tensor in tree.items():
        assert type(back[name]) is torch.Tensor
        assert not back[name].requires_grad
        assert torch.equal(back[name], tensor.detach().resolve_conj())


def test_optimizer_state_comes_back_and_goes_on_the_same() -> None:
    def trained(state: dict[str, Any] | None, steps: int) -> tuple[list[float], dict[str, Any]]:
        weight = torch.nn.Parameter(torch.ones(3) if state is None else state["weight"].clone())
        optimizer = torch.optim.Adam([weight], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            weight.grad = 2 * weight.detach()
            optimizer.step()
        return weight.detach().tolist(), {"weight": weight, "optimizer": optimizer.state_dict()}

    half = trained(None, 3)[1]
    assert trained(through_json(half), 3)[0] == trained(None, 6)[0]


def test_the_snapshot_does_not_follow_the_source() -> None:
    array, strings, blob = np.zeros(3), np.array(["a"]), bytearray(10_000)
    tensor, half = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    tree = [array, strings, blob, tensor, half]
    skeleton, arrays = flatten(tree)
    expected = unflatten(*flatten(tree))
    array[:], strings[:], blob[0] = 1, "b", 1
    tensor.fill_(1)
    half.fill_(1)
    assert same(unflatten(skeleton, arrays), expected)
    assert not same(expected, tree)
    assert expected[0].sum() == expected[3].sum() == 0


def test_without_copy_arrays_are_passed_on() -> None:
    array, tensor = np.zeros(3), torch.zeros(3)
    _, arrays = flatten([array, tensor], copy=False)
    assert np.shares_memory(arrays["a0"], array)
    assert np.shares_memory(arrays["a1"], tensor.numpy())


def test_what_comes_back_shares_no_memory_with_the_arrays() -> None:
    skeleton, arrays = flatten([np.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.float8_e5m2)])
    array, tensor, half = unflatten(skeleton, arrays)
    array += 1
    tensor += 1
    half.view(torch.uint8).fill_(1)
    assert all(not stored.any() for stored in arrays.values())
    for stored in arrays.values():
        stored.flags.writeable = False
    assert unflatten(skeleton, arrays)[1].sum() == 0


def test_an_object_in_two_places_is_stored_once_and_is_one_again() -> None:
    array, tensor, rng = np.zeros(3), torch.zeros(3), np.random.default_rng(1)
    twin = np.random.default_rng(1)
    tree = [array, tensor, rng, {"again": [array, tensor, rng]}, np.zeros(3), twin, rng.bit_generator]
    skeleton, arrays = flatten(tree)
    assert len(arrays) == 3
    back = unflatten(json.loads(json.dumps(skeleton)), arrays)
    assert all(one is other for one, other in zip(back[:3], back[3]["again"], strict=True))
    assert back[4] is not back[0]
    assert back[5] is not back[2]
    assert back[2].bit_generator is back[6]
    assert back[2].random() == back[5].random()


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_numpy_generators_go_on_and_spawn_the_same(name: str) -> None:
    rng = np.random.Generator(getattr(np.random, name)(7))
    rng.spawn(2)
    rng.integers(0, 9, 5, np.uint32)
    back = through_json({"rng": rng})["rng"]
    assert type(back) is np.random.Generator
    assert type(back.bit_generator) is type(rng.bit_generator)
    assert back.bit_generator.random_raw(1500).tolist() == rng.bit_generator.random_raw(1500).tolist()
    assert back.spawn(1)[0].random() == rng.spawn(1)[0].random()


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_legacy_and_bare_numpy_generators_go_on(name: str) -> None:
    bits = getattr(np.random, name)(7)
    legacy = np.random.RandomState(bits)
    legacy.standard_normal()  # leaves the second of a pair behind
    back = through_json([legacy, np.random.RandomState(5)])
    assert type(back[0]) is np.random.RandomState
    assert back[0].standard_normal(5).tolist() == legacy.standard_normal(5).tolist()
    assert back[1].rand() == np.random.RandomState(5).rand()


def test_python_and_torch_generators_go_on() -> None:
    python, generator = random.Random(3), torch.Generator().manual_seed(4)
    python.gauss(0, 1)
    torch.rand(3, generator=generator)
    back = through_json([python, generator])
    assert type(back[0]) is random.Random
    assert [back[0].gauss(0, 1), back[0].random()] == [python.gauss(0, 1), python.random()]
    assert type(back[1]) is torch.Generator
    assert torch.equal(torch.rand(9, generator=back[1]), torch.rand(9, generator=generator))


@pytest.mark.parametrize("entropy", [0, 2**100, [1, 2], (3,), np.array([4, 5], np.uint32), None])
def test_every_kind_of_seed_spawns_the_same(entropy: Any) -> None:
    rng = np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(1, 2), pool_size=8))
    back = through_json(rng)
    assert [one.random() for one in back.spawn(2)] == [one.random() for one in rng.spawn(2)]


def test_default_factories_come_back() -> None:
    back = through_json({"a": defaultdict(int, x=1), "b": defaultdict(None)})
    back["a"]["y"] += 2
    assert back["a"] == {"x": 1, "y": 2}
    assert back["b"].default_factory is None


@pytest.mark.parametrize("size", [4096, 4097])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_bytes_become_arrays(kind: type, size: int) -> None:
    skeleton, arrays = flatten(kind(size))
    assert len(arrays) == (size > 4096)
    assert same(unflatten(skeleton, arrays), kind(size))


class OddTensor(torch.Tensor):
    pass


class Opaque:
    pass


class NewStr(str):
    pass


@dataclasses.dataclass
class Config:
    lr: float = 0.1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Opaque(), r"is a .*Opaque"),
        ({1}, r"is a set.*sorted list"),
        (Point(1, 2), r"namedtuple Point: turn it into a dict"),
        (Config(), r"Config.*dataclasses\.asdict"),
        (pathlib.PurePosixPath("a"), r"PurePosixPath.*str\(value\)"),
        (NewStr("a"), r"NewStr.*plain str"),
        (collections.Counter("a"), r"Counter.*plain dict"),
        (defaultdict(lambda: 1), r"defaultdict.*factory.*dict\(value\)"),
        (np.array([None]), r"ndarray.*dtype object"),
        (np.zeros(1, [("a", object)]), r"ndarray.*pickle"),
        (np.array(["a"], np.dtypes.StringDType()), r"ndarray.*StringDType"),
        (np.ma.masked_array([1]), r"MaskedArray.*np\.asarray"),
        (np.random.RandomState, r"is a type"),
        (np.random.SeedSequence(1), r"SeedSequence"),
        (random.SystemRandom(), r"SystemRandom.*exactly random\.Random"),
        (torch.nn.Linear(1, 1), r"Linear.*state_dict\(\)"),
        (torch.ones(2).to_sparse(), r"Tensor.*to_dense"),
        (torch.ones(2, device="meta"), r"Tensor.*meta"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), r"nested|NestedTensor"),
        (torch.ones(1).as_subclass(OddTensor), r"OddTensor.*plain tensor"),
        (torch.qint8, r"dtype.*qint8"),
        (print, r"builtin_function_or_method"),
        ({frozenset(): 1}, r"as a key"),
        ({torch.ones(1): 1}, r"as a key"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_anything_else_is_refused_with_its_place_and_a_remedy(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=r"^state\.optimizer\['x y'\]\[3\](?s:.*)" + message):
        flatten({"optimizer": {"x y": [0, 1, 2, value]}})


def test_nested_tensors_of_the_plain_layout_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    with pytest.raises(StateError, match=r"state\.x is .*nested.*unbind"):
        flatten({"x": nested})


def test_extension_dtypes_are_refused_rather_than_stored_as_raw_bytes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for value in (np.zeros(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16(1), np.zeros(2, ml_dtypes.float8_e5m2)):
        with pytest.raises(StateError, match="state"):
            flatten(value)


@pytest.mark.parametrize("kind", [list, dict, OrderedDict, defaultdict])
def test_a_tree_that_holds_itself_is_refused(kind: type) -> None:
    inner: Any = kind()
    tree = {"a": (inner,)}
    inner.append(tree) if kind is list else inner.update(b=tree)
    with pytest.raises(StateError, match=r"state\.a\[0\].*contains itself"):
        flatten(tree)


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: {1: v}, lambda v: OrderedDict(a=v)])
def test_deep_trees_come_back_and_deeper_ones_are_refused(wrap: Any) -> None:
    tree: Any = []
    for _ in range(MAX_DEPTH - 1):
        tree = wrap(tree)
    assert same(through_json(tree), tree)
    with pytest.raises(StateError, match="levels deep"):
        flatten(wrap(wrap(tree)))


GOOD_ARRAYS: dict[str, np.ndarray[Any, Any]] = {"a0": np.zeros(3, np.float32), "a1": np.zeros(8, np.uint8)}


@pytest.mark.parametrize(
    "tree",
    [
        {"$pickle": "gASV"},
        {"$array": {"key": "a9", "dtype": "<f4", "shape": [3]}},
        {"$array": {"key": 0, "dtype": "<f4", "shape": [3]}},
        {"$array": {"key": "a0", "dtype": "<f4", "shape": [4]}},
        {"$array": {"key": "a0", "dtype": "<f4", "shape": "3"}},
        {"$array": {"key": "a0", "dtype": "<f8", "shape": [3]}},
        {"$array": {"key": "a0", "dtype": "O", "shape": [3]}},
        {"$array": {"key": "a1", "dtype": "|O8", "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"fields": [["a", "|O8", 0, None]], "itemsize": 8}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"fields": [["a", "<i8", 4, None]], "itemsize": 8}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"fields": [[3, "<i8", 0, None]], "itemsize": 8}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"fields": [["a", "<i8"]], "itemsize": 8}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"base": "<i4", "shape": [2]}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": {"base": "<i4", "shape": [-2]}, "shape": [1]}},
        {"$array": {"key": "a1", "dtype": [], "shape": [1]}},
        {"$array": {"dtype": "<f4"}},
        {"$array": 3},
        {"$tensor": {"key": "a0", "dtype": "float64", "shape": [3]}},
        {"$tensor": {"key": "a0", "dtype": "load", "shape": [3]}},
        {"$tensor": {"key": "a0", "dtype": ["float32"], "shape": [3]}},
        {"$torch.dtype": "hub"},
        {"$torch.dtype": "qint8"},
        {"$torch.device": "nonsense"},
        {"$torch.device": "cpu; rm"},
        {"$torch.device": 3},
        {"$torch.size": [1.5]},
        {"$torch.generator": {"device": "cpu", "state": {"$tensor": {"key": "a1", "dtype": "uint8", "shape": [8]}}}},
        {"$torch.generator": {"device": "cpu", "state": 3}},
        {"$np.scalar": {"dtype": "<f4", "data": "00"}},
        {"$np.scalar": {"dtype": {"base": "<f4", "shape": [1]}, "data": "00000000"}},
        {"$np.str": 3},
        {"$np.dtype": "O"},
        {"$np.dtype": "os.system"},
        {"$np.generator": {"id": 1, "bits": 3}},
        {"$np.bitgenerator": {"id": 1, "state": {"bit_generator": "seed"}, "seed": None}},
        {"$np.bitgenerator": {"id": 1, "state": {"bit_generator": "PCG64"}, "seed": None}},
        {"$random": {"id": 1, "state": [3, {"$array": {"key": "a0", "dtype": "<f4", "shape": [3]}}, None]}},
        {"$blob": {"key": "a1", "size": 9, "mutable": False}},
        {"$defaultdict": ["eval", []]},
        {"$defaultdict": ["int"]},
        {"$ordereddict": {"a": 1}},
        {"$tuple": 1},
        {"$a": 1, "$b": 2},
        {1: 2},
        (1,),
        float("nan"),
        np.float64(1),
        b"",
    ],
    ids=lambda tree: str(tree)[:60],
)
def test_a_skeleton_that_nobody_wrote_is_refused(tree: Any) -> None:
    with pytest.raises(CorruptStateError, match=r"^state\.x"):
        unflatten({"format": 1, "tree": {"x": tree}}, GOOD_ARRAYS)


def rich_tree() -> dict[Any, Any]:
    return {
        "arrays": [np.zeros(3), np.array(["ab"]), np.zeros(2, [("a", "<i4"), ("b", "S2", (2,))]), np.float32(1)],
        ("k", 1): OrderedDict(a=float("nan"), b=2**2000, c=b"x", d=bytearray(5000), e=1j, f="\ud800"),
        "torch": [torch.zeros(2, dtype=torch.bfloat16), torch.Size([1]), torch.int8, torch.device("cpu")],
        "random": [random.Random(1), np.random.RandomState(1), torch.Generator(), defaultdict(int, a=1)],
        "bits": [np.random.default_rng(1), np.random.Philox(1), np.random.SFC64(1), np.dtype("M8[s]"), np.str_("a")],
    }


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and key."""
    steps = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for step in steps for place in [(value, step), *nodes(value[step])]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a0", "a1", "<f8", "uint8", "", "ff"]),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.sampled_from(["key", "dtype", "$tuple"]), child),
    max_leaves=3,
)
RICH_SKELETON, RICH_ARRAYS = flatten(rich_tree())
RICH_TEXT = json.dumps(RICH_SKELETON)
PLACES = len(nodes(RICH_SKELETON))


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, PLACES - 1), json_values | st.integers(0, PLACES - 1).map(lambda place: ("copy", place)))
def test_a_spoilt_skeleton_decodes_or_is_refused_and_nothing_else(place: int, value: Any) -> None:
    skeleton = json.loads(RICH_TEXT)
    places = nodes(skeleton)
    container, step = places[place]
    if isinstance(value, tuple):
        other, its_step = places[value[1]]
        value = json.loads(json.dumps(other[its_step]))
    container[step] = value
    try:
        unflatten(skeleton, RICH_ARRAYS)
    except ArchiveError as error:
        assert "state" in str(error)  # noqa: PT017 either outcome is right, other exceptions are not


@pytest.mark.parametrize("skeleton", [None, [], {}, {"tree": 1}, {"format": "1", "tree": 1}, {"format": 1, "t": 1}])
def test_what_is_no_skeleton_is_refused(skeleton: Any) -> None:
    with pytest.raises(CorruptStateError, match="skeleton"):
        unflatten(skeleton, {})


def test_a_newer_format_asks_for_an_upgrade() -> None:
    with pytest.raises(UpgradeError, match="upgrade"):
        unflatten({"format": 2, "tree": None}, {})


def test_a_skeleton_nested_without_end_is_refused() -> None:
    tree: Any = None
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(CorruptStateError, match="nested"):
        unflatten({"format": 1, "tree": tree}, {})


@pytest.mark.parametrize(("name", "field"), [("MT19937", "pos"), ("Philox", "buffer_pos"), ("PCG64", "has_uint32")])
@pytest.mark.parametrize("value", [-1, 10**6, "0", 2**200])
def test_a_generator_state_that_would_read_beyond_its_buffer_is_refused(name: str, field: str, value: Any) -> None:
    skeleton, arrays = flatten(getattr(np.random, name)(1))
    text = json.dumps(skeleton)
    spoilt = re.sub(rf'"{field}": \d+', f'"{field}": {json.dumps(value)}', text)
    assert spoilt != text
    with pytest.raises(CorruptStateError, match=field):
        unflatten(json.loads(spoilt), arrays)


def test_a_generator_state_of_another_length_is_refused() -> None:
    skeleton, arrays = flatten(np.random.MT19937(1))
    text = json.dumps(skeleton).replace("[624]", "[600]")
    with pytest.raises(CorruptStateError, match="key"):
        unflatten(json.loads(text), {key: array[:600] for key, array in arrays.items()})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_generator_of_a_device_that_is_not_here_says_so() -> None:
    skeleton, arrays = flatten(torch.Generator())
    elsewhere = json.loads(json.dumps(skeleton).replace('"cpu"', '"cuda:0"'))
    with pytest.raises(UsageError, match="cuda:0"):
        unflatten(elsewhere, arrays)


def test_numpy_trees_need_no_torch() -> None:
    code = (
        "import sys, numpy as np; from archive.fields.trees import flatten, unflatten; "
        "unflatten(*flatten({'a': np.zeros(3), 'rng': np.random.default_rng(1)})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_tensors_without_torch_says_what_to_install() -> None:
    skeleton, arrays = flatten(torch.zeros(2))
    code = (
        "import sys, json, numpy as np; sys.modules['torch'] = None\n"
        "from archive.base.errors import UsageError; from archive.fields.trees import unflatten\n"
        f"try: unflatten(json.loads({json.dumps(skeleton)!r}), {{'a0': np.zeros(2, 'f4')}})\n"
        "except UsageError as error: sys.exit(0 if 'install torch' in str(error) else 2)\n"
        "sys.exit(3)"
    )
    assert arrays.keys() == {"a0"}
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensordicts_come_back_nested_with_batch_size_names_and_other_data() -> None:
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, [2, 3])
    tree = tensordict.TensorDict({"a": torch.ones(2, 4), "inner": inner}, [2], names=["env"])
    tree["note"] = tensordict.NonTensorData({"k": (1, "x")}, batch_size=[2])
    back = through_json({"td": tree, "empty": tensordict.TensorDict({}, [3])})
    assert type(back["td"]) is tensordict.TensorDict
    assert type(back["td"]["inner"]) is tensordict.TensorDict
    assert back["td"].batch_size == (2,)
    assert back["td"]["inner"].batch_size == (2, 3)
    assert back["td"].names == ["env"]
    assert back["td"]["note"] == {"k": (1, "x")}
    assert same(back["td"]["inner", "b"], inner["b"])
    assert same(back["td"]["a"], tree["a"])
    assert back["empty"].batch_size == (3,)


def test_other_tensordict_classes_are_refused_and_wrong_batch_sizes_too() -> None:
    tensordict = pytest.importorskip("tensordict")
    lazy = tensordict.LazyStackedTensorDict(tensordict.TensorDict({"a": torch.ones(1)}), stack_dim=0)
    with pytest.raises(StateError, match=r"state\.x is a .*Lazy.*to_tensordict"):
        flatten({"x": lazy})
    skeleton, arrays = flatten({"x": tensordict.TensorDict({"a": torch.ones(2)}, [2])})
    wrong = json.loads(json.dumps(skeleton).replace('"batch_size": [2]', '"batch_size": [3]'))
    with pytest.raises(CorruptStateError, match=r"^state\.x"):
        unflatten(wrong, arrays)
