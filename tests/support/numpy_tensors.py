"""Tensors out of NumPy arrays of dtypes that torch cannot read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """A CPU tensor with the same bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
