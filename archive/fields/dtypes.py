"""Pure, no I/O: logical dtypes and the plain ones that zarr stores for them, bit for bit.

A logical dtype is a string: numpy's own (`<f4`, `|b1`, `>i2`, `<M8[ns]`, `|S10`, `<U5`; of structured ones a JSON list,
or an object of names, formats, offsets and itemsize where there is padding or one of ml_dtypes), `bfloat16`,
`float8_*` and other names of ml_dtypes, `str` (strings of any length) and `json`.
Stored are booleans, integers, floats, complex numbers (little-endian) and strings; all else is viewed as unsigned.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from archive.base import CorruptManifestError, FieldError

ML_NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
)
_NATIVE_KINDS = "biufc"
_BYTES_KINDS = "SV"


@lru_cache(maxsize=1024)  # numpy makes a dtype's name anew each time
def is_native(dtype: np.dtype[Any]) -> bool:
    """True if zarr stores this dtype itself."""
    return dtype.kind in _NATIVE_KINDS and dtype.name not in ("float128", "complex256", "longdouble", "clongdouble")


def is_number(dtype: np.dtype[Any]) -> bool:
    """True if its values are booleans or numbers, also of few bits."""
    return dtype.kind in _NATIVE_KINDS or dtype.name in ML_NAMES


def logical_name(dtype: np.dtype[Any]) -> str:
    """The logical name of a numpy dtype (not of Python objects)."""
    if dtype.name in ML_NAMES:
        return dtype.name
    if dtype.kind == "T":
        return "str"
    if dtype.names is not None:
        if dtype.hasobject:
            raise FieldError(f"dtype {dtype} holds Python objects and cannot be stored; use plain fields")
        return _structured_name(dtype)
    return dtype.str


def to_stored(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
    """The plain array that is stored for `array`, and its logical dtype."""
    if array.dtype.kind == "O":
        return _checked_strings(array), "str"
    logical = logical_name(array.dtype)
    if logical in ML_NAMES:
        return _view(array, np.dtype(f"u{array.dtype.itemsize}")), logical
    if array.dtype.kind in "UT":
        return _checked_strings(array.astype(object)), logical
    if array.dtype.kind in "mM":
        return _view(array.astype(array.dtype.newbyteorder("<"), copy=False), np.dtype("<i8")), logical
    if is_native(array.dtype):
        return array.astype(array.dtype.newbyteorder("<"), copy=False), logical
    return _as_bytes(array), logical


def from_stored(stored: np.ndarray[Any, Any], logical: str) -> np.ndarray[Any, Any]:
    """The array as the user gave it, from its stored form; CorruptManifestError if that is of another dtype."""
    if logical in ("str", "json"):
        return stored
    try:
        return _viewed(stored, logical)
    except (TypeError, ValueError) as e:
        raise CorruptManifestError(
            f"rows that are stored as {stored.dtype}{list(stored.shape[1:])} are said to be {logical!r:.80} ({e}); run "
            "`archive verify`"
        ) from e


def check_stored(stored: np.ndarray[Any, Any], logical: str) -> None:
    """CorruptManifestError unless the rows could be the stored form of a logical dtype."""
    dtype, texts = to_numpy(logical), logical in ("str", "json")
    if dtype.kind == "U" or texts:
        plain = np.dtype(object)
    elif dtype.kind in "mM":
        plain = np.dtype("<i8")
    elif logical in ML_NAMES:
        plain = np.dtype(f"u{dtype.itemsize}")
    else:
        plain = dtype.newbyteorder("<") if is_native(dtype) else np.dtype(np.uint8)
    none = dtype.subdtype is not None or dtype.kind == "T" or (dtype.itemsize == 0 and dtype.kind != "U")
    wide = stored_trailing(logical, ())
    shape = stored.shape[1:]
    if none or (dtype.hasobject and not texts) or stored.dtype != plain or shape[len(shape) - len(wide) :] != wide:
        raise CorruptManifestError(f"rows stored as {stored.dtype}{list(shape)} are said to be {logical!r:.80}")


def _viewed(stored: np.ndarray[Any, Any], logical: str) -> np.ndarray[Any, Any]:
    dtype = to_numpy(logical)
    if dtype.kind == "U":
        return stored.astype(dtype)
    if dtype.kind in "mM":
        return stored.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    if logical in ML_NAMES:
        return stored.view(dtype)
    if is_native(dtype):
        return stored.astype(dtype, copy=False)
    return np.ascontiguousarray(stored).view(dtype).reshape(stored.shape[:-1])


def as_stored(array: np.ndarray[Any, Any], logical: str) -> np.ndarray[Any, Any] | None:
    """The memory of the user's rows, as rows in stored form; None if the stored form differs."""
    dtype = to_numpy(logical)
    if logical in ML_NAMES:
        return array.view(np.dtype(f"u{dtype.itemsize}"))
    if dtype.kind in "OU" or (dtype.byteorder == ">" and dtype.kind not in _BYTES_KINDS):
        return None
    if dtype.kind in "mM":
        return array.view(np.dtype("<i8"))
    if is_native(dtype):
        return array
    return array.view(np.uint8).reshape(*array.shape, dtype.itemsize) if array.flags.c_contiguous else None


@lru_cache(maxsize=1024)
def to_numpy(logical: str) -> np.dtype[Any]:
    """The numpy dtype of a logical name; an unknown one is an error, never a guess."""
    if logical in ("str", "json"):
        return np.dtype(object)
    try:
        if logical in ML_NAMES:
            import ml_dtypes

            small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, logical))
            return small
        if logical.startswith("["):
            return np.dtype([tuple(_descr(part)) for part in json.loads(logical)])
        return _structured(json.loads(logical)) if logical.startswith("{") else np.dtype(_undivided(logical))
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as e:
        raise CorruptManifestError(f"unknown dtype {logical!r:.200} in a schema; a newer library may know it") from e


def stored_trailing(logical: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing shape of the stored array for a field of that logical dtype and trailing shape."""
    dtype = to_numpy(logical)
    plain = logical in ML_NAMES or dtype.kind in "OUmM" or is_native(dtype)
    return shape if plain else (*shape, dtype.itemsize)


def given_shape(logical: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The trailing shape as the user gave it, of that of the stored array."""
    return shape[: len(shape) - len(stored_trailing(logical, ()))]


def from_torch(tensor: Any, *, where: str) -> np.ndarray[Any, Any]:
    """A tensor's values as numpy, from any device; shares memory with tensors on the CPU."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise FieldError(f"field {where}: {tensor.layout} tensors cannot be stored; call .to_dense() or .dequantize()")
    if tensor.is_meta:
        raise FieldError(f"field {where}: a tensor on the meta device has no values to store")
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ML_NAMES:
        import ml_dtypes

        plain = torch.uint8 if tensor.element_size() == 1 else torch.int16
        array = tensor.contiguous().view(plain).numpy()
        return array.view(np.dtype(getattr(ml_dtypes, name)))  # type: ignore[no-any-return]
    try:
        return tensor.numpy()  # type: ignore[no-any-return]
    except TypeError as e:
        raise FieldError(f"field {where}: torch dtype {tensor.dtype} cannot be stored; convert it first") from e


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    """The tensor of an array; strings, and dtypes that torch lacks, stay as they are."""
    import torch

    if _is_small_float(array.dtype):
        plain = np.uint8 if array.dtype.itemsize == 1 else np.int16
        target = getattr(torch, array.dtype.name, None)
        plain_array = np.ascontiguousarray(array).view(plain).reshape(array.shape)  # 0-d became 1-d
        return array if target is None else torch.from_numpy(plain_array).view(target)
    if array.dtype.kind not in "biufc" or not is_native(array.dtype):
        return array
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(native if native.flags.writeable else native.copy())


@lru_cache(maxsize=1024)
def _is_small_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in ML_NAMES


def _checked_strings(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    for value in array.flat:
        if not isinstance(value, str):
            raise FieldError(
                f"an array of Python objects holds a {type(value).__name__}; arrays of objects must hold strings only "
                "(declare the field in Schema(json=[...]) to store JSON per step)"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as e:
            raise FieldError(f"the string {value!r} holds a lone surrogate and cannot be stored as UTF-8") from e
    return array


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        raise FieldError(f"dtype {array.dtype} cannot be stored; use a plain dtype")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def _view(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(array.shape).view(dtype)


def _descr(part: list[Any]) -> list[Any]:
    """One entry of a structured dtype's description: JSON made its tuples into lists."""
    name, kind, *rest = part
    kind = [tuple(_descr(p)) for p in kind] if isinstance(kind, list) else _undivided(kind)
    return [name, kind, *(tuple(r) for r in rest)]


def _undivided(name: str) -> str:
    """The name of a dtype; ValueError if it has a divided unit of time: numpy ends the process at "<M8[s/0]", and
    writes none."""
    if "/" in name:
        raise ValueError(f"{name!r:.80} has a divided unit")
    return name


def _structured_name(dtype: np.dtype[Any]) -> str:
    """A list of its fields; an object where that would lose padding or what kind of number a field is."""
    try:
        plain = json.dumps(dtype.descr)
        if np.dtype([tuple(_descr(part)) for part in json.loads(plain)]) == dtype:
            return plain
    except (TypeError, ValueError):
        pass
    parts = [dtype.fields[name] for name in dtype.names] if dtype.names and dtype.fields else []
    formats = [[logical_name(part[0].base), list(part[0].shape)] for part in parts]
    offsets = [part[1] for part in parts]
    return json.dumps({"names": dtype.names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize})


def _structured(body: dict[str, Any]) -> np.dtype[Any]:
    formats = [np.dtype((to_numpy(name), tuple(shape))) for name, shape in body["formats"]]
    return np.dtype(
        {"names": body["names"], "formats": formats, "offsets": body["offsets"], "itemsize": body["itemsize"]}
    )


def as_numbers(stored: np.ndarray[Any, Any], logical: str) -> np.ndarray[Any, Any] | None:
    """Stored rows as numbers that can be summed; None if they are none."""
    values = from_stored(stored, logical)
    if logical in ML_NAMES:
        return values.astype(np.float64)
    return values if values.dtype.kind in "biuf" else None
