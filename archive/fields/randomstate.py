"""Pure, no I/O: random generators of numpy and Python inside state trees.

States from outside are compared with a fresh one of the same class before they are set: numpy checks neither lengths
nor indices, and would read beyond its buffers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from archive.fields.trees import StateDecoder, StateEncoder

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}
_HIGHEST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": 2**32 - 1}
_MAX_POOL_SIZE = 1024


def encode(encoder: StateEncoder, value: Any) -> Any:
    """The JSON for a random generator; NotImplemented for any other value."""
    encode_one = _ENCODERS.get(type(value))
    if encode_one is None and isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
        encoder.refuse(value, "store a generator of exactly random.Random, numpy's Generator or RandomState")
    if encode_one is None and isinstance(value, np.random.BitGenerator):
        encoder.refuse(value, f"use one of {', '.join(_BIT_GENERATORS)}")
    return NotImplemented if encode_one is None else encoder.once(value, lambda: encode_one(encoder, value))


def _encode_bits(encoder: StateEncoder, value: np.random.BitGenerator) -> Any:
    state = encoder.encode(value.state)
    seed = value.seed_seq
    return {"$np.bitgenerator": {"id": encoder.number(), "state": state, "seed": _encode_seed(encoder, seed)}}


def _encode_seed(encoder: StateEncoder, seed: Any) -> Any:
    if type(seed) is not np.random.SeedSequence:
        return None
    return encoder.encode([seed.entropy, tuple(seed.spawn_key), seed.pool_size, seed.n_children_spawned])


def _encode_generator(encoder: StateEncoder, value: np.random.Generator) -> Any:
    return {"$np.generator": {"id": encoder.number(), "bits": encoder.encode(value.bit_generator)}}


def _encode_legacy(encoder: StateEncoder, value: np.random.RandomState) -> Any:
    state = value.get_state(legacy=False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        encoder.refuse(value, f"use one of {', '.join(_BIT_GENERATORS)}")
    return {"$np.randomstate": {"id": encoder.number(), "state": encoder.encode(state)}}


def _encode_python(encoder: StateEncoder, value: random.Random) -> Any:
    version, words, gauss = value.getstate()
    state = [version, np.array(words, np.uint32), gauss]
    return {"$random": {"id": encoder.number(), "state": encoder.encode(state)}}


def _decode_bits(decoder: StateDecoder, payload: Any) -> np.random.BitGenerator:
    state, seed = decoder.decode(payload["state"]), decoder.decode(payload["seed"])
    bits = _bit_generator(decoder, state)(_decode_seed(decoder, seed) if seed is not None else 0)
    _check_state(decoder, state, bits.state)
    bits.state = state
    return bits


def _bit_generator(decoder: StateDecoder, state: Any) -> type[np.random.BitGenerator]:
    if type(state) is not dict:
        decoder.corrupt("the state of a generator is expected")
    return _BIT_GENERATORS[state["bit_generator"]]


def _decode_seed(decoder: StateDecoder, seed: Any) -> np.random.SeedSequence:
    entropy, spawn_key, pool_size, children = seed
    numbers = (pool_size, children, *(entropy if isinstance(entropy, list | tuple) else (entropy,)), *spawn_key)
    is_array = isinstance(entropy, np.ndarray) and entropy.dtype.kind == "u" and entropy.ndim == 1
    is_numbers = all(type(n) is int or (n is entropy and (n is None or is_array)) for n in numbers)
    if not is_numbers or type(spawn_key) is not tuple or not 4 <= pool_size <= _MAX_POOL_SIZE or children >= 2**32:
        decoder.corrupt("it is no seed")
    return np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=children)


def _decode_generator(decoder: StateDecoder, payload: Any) -> np.random.Generator:
    bits = decoder.decode(payload["bits"])
    if not isinstance(bits, np.random.BitGenerator):
        decoder.corrupt("a bit generator is expected")
    return np.random.Generator(bits)


def _decode_legacy(decoder: StateDecoder, payload: Any) -> np.random.RandomState:
    state = decoder.decode(payload["state"])
    generator = np.random.RandomState(_bit_generator(decoder, state)(0))
    _check_state(decoder, state, generator.get_state(legacy=False))
    generator.set_state(state)
    return generator


def _decode_python(decoder: StateDecoder, payload: Any) -> random.Random:
    version, words, gauss = decoder.decode(payload["state"])
    is_words = isinstance(words, np.ndarray) and words.dtype == np.uint32 and words.shape == (625,)
    if not is_words or not isinstance(gauss, float | None):
        decoder.corrupt("it is no state of random.Random")
    generator = random.Random()
    generator.setstate((version, tuple(words.tolist()), gauss))
    return generator


def _check_state(decoder: StateDecoder, state: Any, fresh: Any, name: str = "state") -> None:
    """Check that `state` has the keys, types, lengths and ranges of a fresh state."""
    is_same = type(state) is type(fresh) or (isinstance(fresh, int) and type(state) is int)
    if is_same and isinstance(fresh, np.ndarray):
        is_same = state.dtype == fresh.dtype and state.shape == fresh.shape
    elif is_same and isinstance(fresh, dict):
        is_same = set(state) == set(fresh)
    elif is_same and isinstance(fresh, int):
        is_same = 0 <= state <= _HIGHEST.get(name, 2**128 - 1)
    if not is_same:
        decoder.corrupt(f"{name!s:.40} is not that of a random generator")
    for key in fresh if isinstance(fresh, dict) else ():
        _check_state(decoder, state[key], fresh[key], key)


_ENCODERS: dict[type, Callable[[StateEncoder, Any], Any]] = {
    **dict.fromkeys(_BIT_GENERATORS.values(), _encode_bits),
    np.random.Generator: _encode_generator,
    np.random.RandomState: _encode_legacy,
    random.Random: _encode_python,
}
DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "$np.bitgenerator": _decode_bits,
    "$np.generator": _decode_generator,
    "$np.randomstate": _decode_legacy,
    "$random": _decode_python,
}
