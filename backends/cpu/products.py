"""One exact-to-contract product of two matrices: the meaning that the faster paths are held to.

float32 goes through NumPy, never through torch.mm: torch's global matmul precision may turn the
latter into bfloat16, and a switch that another thread flips cannot be guarded. 16-bit operands are
widened (exact) and accumulated in float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INT8_EXACT_K = 1024
"""Products of int8 are at most 2^14, so float32 sums of 2^10 of them are exact integers."""


def _matmul32(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device="cpu")
    with np.errstate(all="ignore"):
        np.matmul(a.contiguous().numpy(), b.contiguous().numpy(), out=out.numpy())
    return out


def _matmul8(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device="cpu")
    for k in range(0, a.shape[1], INT8_EXACT_K):
        part = _matmul32(a[:, k : k + INT8_EXACT_K].float(), b[k : k + INT8_EXACT_K].float())
        out.add_(part.to(torch.int32))
    return out


def product(a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
    """a @ b in the accumulator's precision, in a fresh tensor; zeros where K is 0."""
    if a.shape[1] == 0 or a.shape[0] == 0 or b.shape[1] == 0:
        return torch.zeros((a.shape[0], b.shape[1]), dtype=acc, device="cpu")
    if acc == torch.int32:
        return _matmul8(a, b)
    if acc == torch.float64:
        return torch.mm(a, b, out=torch.empty((a.shape[0], b.shape[1]), dtype=acc, device="cpu"))
    return _matmul32(a.float(), b.float())
