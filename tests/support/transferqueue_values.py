"""Values of any kind as what `==` compares, bits and types included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and bytes; containers with their types."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(raw.tolist()))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(one) for one in value])
    return plain(vars(value)) if type(value).__name__ == "FieldMeta" else value
