"""The differentiable `gmm`, and `backend` under the name by which the original's `ops` exposes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from multigemm.integrations.gmm import backend

__all__ = ["backend", "gmm"]


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Any, trans_b: bool = False, *, trans_a: bool = False,
    batch_invariant: bool | None = None,
) -> Tensor:  # fmt: skip
    """`backend.gmm` with gradients for both operands, in both modes.

    Args:
        a, b, batch_sizes, trans_b: as the original takes them, and as `backend.gmm` does.
        trans_a, batch_invariant: keywords beyond the original, as in `backend.gmm`.

    Returns:
        [T, N], or [G, K, N] with `trans_a`.

    Example:
        >>> import torch
        >>> gmm(torch.ones(6, 4), torch.ones(3, 4, 2), torch.tensor([1, 0, 5])).shape
        torch.Size([6, 2])
    """
    return backend.multiply(a, b, batch_sizes, trans_a, trans_b, None, batch_invariant)
