"""Pure, no I/O: values of torch and tensordict in state trees; imports torch only to decode them.

Tensors come back on the CPU, without gradients. Names of dtypes and classes are looked up in fixed tables only.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import UsageError

if TYPE_CHECKING:
    from archive.fields.trees import StateDecoder, StateEncoder

_STORED_AS = {  # torch dtype: the dtype of the same width that both numpy and torch have
    **{name: name for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")},
    **{name: name for name in ("complex64", "complex128")},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), "uint8"),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), "uint8"),
    **dict.fromkeys(("bfloat16", "uint16"), "int16"),
    **dict.fromkeys(("uint32", "complex32"), "int32"),
    "uint64": "int64",
}
_TENSOR_CLASSES = {"Tensor", "Parameter", "Buffer", "MemoryMappedTensor"}
_DEVICE = re.compile(r"[a-z_]{1,32}(:\d{1,5})?")


def encode(encoder: StateEncoder, value: Any) -> Any:
    """The JSON for a value of torch's or tensordict's; NotImplemented for any other."""
    torch, tensordict = sys.modules.get("torch"), sys.modules.get("tensordict")
    if torch is not None and isinstance(value, torch.Tensor):
        return encoder.once(value, lambda: _encode_tensor(encoder, value))
    if torch is not None and isinstance(value, torch.Size):
        return {"$torch.size": list(value)}
    if torch is not None and isinstance(value, torch.dtype):
        return {"$torch.dtype": _dtype_name(encoder, value, value)}
    if torch is not None and isinstance(value, torch.device):
        return {"$torch.device": str(value)}
    if torch is not None and type(value) is torch.Generator:
        return encoder.once(value, lambda: _encode_generator(encoder, value))
    if tensordict is not None and type(value) is tensordict.TensorDict:
        return _encode_tensordict(encoder, value)
    if tensordict is not None and type(value) is tensordict.NonTensorData:
        [data] = encoder.children(value, [("data", value.data)])
        return {"$tensordict.nontensor": {"batch_size": list(value.batch_size), "data": data}}
    if tensordict is not None and isinstance(value, tensordict.TensorDictBase):
        encoder.refuse(value, "store value.to_tensordict() or a dict of tensors")
    return NotImplemented


def _encode_tensor(encoder: StateEncoder, value: Any) -> Any:
    torch = sys.modules["torch"]
    _refuse_odd_tensor(encoder, value, torch)
    dtype = _dtype_name(encoder, value, value.dtype)
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    array = plain.view(getattr(torch, _STORED_AS[dtype])).cpu().numpy()
    return {"$tensor": {"key": encoder.store(array), "dtype": dtype, "shape": list(array.shape)}}


def _refuse_odd_tensor(encoder: StateEncoder, value: Any, torch: Any) -> None:
    is_known = type(value).__name__ in _TENSOR_CLASSES
    if not is_known or type(value).__module__.partition(".")[0] not in ("torch", "tensordict"):
        encoder.refuse(value, "store a plain tensor")
    if value.is_quantized:
        encoder.refuse(value, "it is quantized, store value.dequantize() or value.int_repr()")
    if value.layout is not torch.strided:
        encoder.refuse(value, f"its layout is {value.layout}, store value.to_dense()")
    if value.is_nested:
        encoder.refuse(value, "it is nested, store list(value.unbind())")
    if value.device.type == "meta":
        encoder.refuse(value, "it is on the meta device and has no values, store its shape")


def _dtype_name(encoder: StateEncoder, value: Any, dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _STORED_AS:
        encoder.refuse(value, f"dtype {name} cannot be stored, use one of {', '.join(_STORED_AS)}")
    return name


def _encode_generator(encoder: StateEncoder, value: Any) -> Any:
    return {"$torch.generator": {"device": str(value.device), "state": encoder.encode(value.get_state())}}


def _encode_tensordict(encoder: StateEncoder, value: Any) -> Any:
    items = list(value.items())
    children = encoder.children(value, items)
    return {
        "$tensordict": {
            "batch_size": list(value.batch_size),
            "names": list(value.names) if any(value.names) else None,
            "has_device": value.device is not None,
            "items": [[encoder.encode(key), child] for (key, _), child in zip(items, children, strict=True)],
        }
    }


def _decode_tensor(decoder: StateDecoder, payload: Any) -> Any:
    name = payload["dtype"]
    stored_as = _STORED_AS[name]
    array = decoder.stored(payload["key"], np.dtype(stored_as), payload["shape"]).copy(order="C")
    return _library("torch").from_numpy(array).view(_torch_dtype(name))


def _decode_size(decoder: StateDecoder, payload: Any) -> Any:
    if type(payload) is not list or any(type(n) is not int for n in payload):
        decoder.corrupt("a list of lengths is expected")
    return _library("torch").Size(payload)


def _decode_device(decoder: StateDecoder, payload: Any) -> Any:
    if _DEVICE.fullmatch(payload) is None:
        decoder.corrupt("no device has that name")
    try:
        return _library("torch").device(payload)
    except RuntimeError as error:
        decoder.corrupt(f"no device has that name ({error!s:.80})")


def _decode_generator(decoder: StateDecoder, payload: Any) -> Any:
    torch = _library("torch")
    device, state = _decode_device(decoder, payload["device"]), decoder.decode(payload["state"])
    try:
        generator = torch.Generator(device=device)
    except RuntimeError as error:
        raise UsageError(
            f"the state holds a torch.Generator of {device}, which this process lacks: read it where there is one"
        ) from error
    try:
        return generator.set_state(state)
    except RuntimeError as error:
        decoder.corrupt(f"it is no state of a generator ({error!s:.80})")


def _decode_tensordict(decoder: StateDecoder, payload: Any) -> Any:
    tensordict = _library("tensordict")
    options = {"batch_size": _decode_size(decoder, payload["batch_size"])}
    if payload["has_device"]:
        options["device"] = "cpu"
    source, names = dict(decoder.pairs(payload["items"])), payload["names"]
    try:
        return tensordict.TensorDict(source, names=names, **options)
    except (RuntimeError, AttributeError) as error:
        decoder.corrupt(f"it makes no TensorDict ({error!s:.80})")


def _decode_nontensor(decoder: StateDecoder, payload: Any) -> Any:
    batch_size = _decode_size(decoder, payload["batch_size"])
    return _library("tensordict").NonTensorData(decoder.decode(payload["data"]), batch_size=batch_size)


def _torch_dtype(name: Any) -> Any:
    if name not in _STORED_AS:
        raise ValueError(f"no dtype {name!r:.40}")
    dtype = getattr(_library("torch"), name, None)
    if dtype is None:
        raise UsageError(f"the state holds a tensor of dtype {name}, which this torch lacks: install a newer one")
    return dtype


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"the state holds values of {name}, which cannot be imported: install {name}") from error


DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "$tensor": _decode_tensor,
    "$torch.size": _decode_size,
    "$torch.dtype": lambda decoder, payload: _torch_dtype(payload),
    "$torch.device": _decode_device,
    "$torch.generator": _decode_generator,
    "$tensordict": _decode_tensordict,
    "$tensordict.nontensor": _decode_nontensor,
}
