"""The differentiable product, and `backend` under the name by which the original's `ops` shows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from multigemm.integrations.gmm import backend

__all__ = ["backend", "gmm"]


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Any, trans_b: bool = False, *, trans_a: bool = False,
    batch_invariant: bool | None = None,
) -> Tensor:  # fmt: skip
    """`backend.gmm` with gradients for both operands, in both modes; the keywords go beyond the original."""
    return backend.multiply(a, b, batch_sizes, trans_a, trans_b, None, batch_invariant)
