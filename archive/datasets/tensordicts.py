"""A batch's nest of tensors as a TensorDict."""

from __future__ import annotations

from typing import Any

import torch

from archive.base import package
from archive.fields import Ragged


def tensordict_of(nest: dict[str, Any], count: int) -> Any:
    tensordict = package("tensordict", "collate='tensordict'", "tensordict")
    return tensordict.TensorDict({k: _entry(v, count) for k, v in nest.items()}, batch_size=[count])


def _entry(value: Any, count: int) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(value, dict):
        return tensordict_of(value, count)
    if isinstance(value, Ragged):
        values: Any = value.values
        lengths: Any = value.lengths
        if isinstance(lengths, torch.Tensor) and lengths.ndim == 1:
            ends = torch.cumsum(lengths, 0)
            return torch.nested.nested_tensor_from_jagged(values, torch.cat([ends.new_zeros(1), ends]))
        return NonTensorData(value, batch_size=[count])
    if isinstance(value, list):
        return NonTensorStack(*[NonTensorData(v) for v in value])
    return value
