"""Pure, no I/O: state trees as a JSON skeleton and arrays, and back; never pickle.

A tree is made of dicts, lists, tuples, strings, bytes, numbers, None, numpy arrays, scalars and dtypes, torch tensors,
sizes, dtypes and devices, TensorDicts, and the random generators of Python, numpy and torch. The skeleton follows the
rules of `treecodec`, with more tags in `statearrays`, `statetorch` and `staterandom`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from archive.base import CorruptStateError, UpgradeError
from archive.fields.state import random, torch
from archive.fields.state.arrays import Array, ArrayDecoder, ArrayEncoder

_FORMAT = 1
_PLAIN = (int, float, str, list, tuple, dict)
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple, bytes)}


def flatten(tree: Any, *, where: str = "state", copy: bool = True) -> tuple[dict[str, Any], dict[str, Array]]:
    """A JSON-able skeleton of `tree`, and its arrays by key ("a0", "a1", ...), of dtypes that zarr has.

    With `copy` the arrays are a snapshot: later changes of the source don't reach them. An object that is in the tree
    in several places is stored once. What cannot be stored raises StateError that names its place.
    """
    encoder = _StateEncoder(where, copy=copy)
    skeleton = {"format": _FORMAT, "tree": encoder.encode(tree)}
    return skeleton, encoder.arrays


def unflatten(skeleton: Any, arrays: Mapping[str, Array], *, where: str = "state") -> Any:
    """The tree that was flattened, types and bits included, sharing no memory with `arrays`.

    Tensors and TensorDicts come back on the CPU. Anything that `flatten` does not write is a CorruptStateError; a
    library or device that the values need and that is not here is a UsageError.
    """
    if type(skeleton) is not dict or set(skeleton) != {"format", "tree"} or type(skeleton["format"]) is not int:
        raise CorruptStateError(f"{where}: the skeleton of a state is expected: it is damaged, read another checkpoint")
    if skeleton["format"] != _FORMAT:
        raise UpgradeError(f"{where}: its format is {skeleton['format']}, known is {_FORMAT}: upgrade this library")
    return _StateDecoder(where, arrays).decode_root(skeleton["tree"])


class _StateEncoder(ArrayEncoder):
    def other(self, value: Any) -> Any:
        for encode in (torch.encode, random.encode):
            encoded = encode(self, value)
            if encoded is not NotImplemented:
                return encoded
        return super().other(value)

    def remedy(self, value: Any) -> str:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"namedtuple {type(value).__name__}: turn it into a dict, value._asdict()"
        if hasattr(value, "state_dict") and not isinstance(value, type):
            return "store value.state_dict()"
        if isinstance(value, int | float | str | list | tuple | dict):
            return f"store a plain {next(kind for kind in type(value).__mro__ if kind in _PLAIN).__name__}"
        return super().remedy(value)

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        return {"$ordereddict": self.pairs(value)}

    def _default(self, value: defaultdict[Any, Any]) -> Any:
        name = getattr(value.default_factory, "__name__", None) if value.default_factory else None
        if value.default_factory is not None and _FACTORIES.get(str(name)) is not value.default_factory:
            self.refuse(value, f"its factory is none of {', '.join(_FACTORIES)}, store dict(value)")
        return {"$defaultdict": [name, self.pairs(value)]}

    encoders: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        **ArrayEncoder.encoders,
        OrderedDict: _ordered,
        defaultdict: _default,
    }


class _StateDecoder(ArrayDecoder):
    def _default(self, payload: Any) -> defaultdict[Any, Any]:
        name, pairs = payload
        factory = _FACTORIES[name] if name is not None else None
        return defaultdict(factory, self.pairs(pairs))

    decoders: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        **ArrayDecoder.decoders,
        **torch.DECODERS,
        **random.DECODERS,
        "$ordereddict": lambda self, payload: OrderedDict(self.pairs(payload)),
        "$defaultdict": _default,
    }
