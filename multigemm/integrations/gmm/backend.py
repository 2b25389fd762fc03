"""`gmm` without gradients, for programs that write their own backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm import api
from multigemm.errors import InvalidProblem


def gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Any,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
    *,
    batch_invariant: bool | None = None,
) -> Tensor:
    """The product of each group, without gradients, as in the original.

    Args:
        a: [T, K]; with `trans_a` [T, M].
        b: [G, K, N]; with `trans_b` [G, N, K], with `trans_a` [T, N].
        batch_sizes: rows of each group, on either device.
        trans_a: `a` and `b` are cut alike, and a_g^T @ b_g is formed.
        trans_b: the matrices of `b` lie transposed.
        c: receives the result, if given.
        batch_invariant: as in `multigemm.grouped_gemm`.

    Returns:
        [T, N], or [G, M, N] with `trans_a`.

    Raises:
        InvalidProblem: the operands do not have the dimensions that the modes ask for.

    Example:
        >>> import torch
        >>> gmm(torch.ones(6, 4), torch.ones(6, 2), torch.tensor([1, 0, 5]), trans_a=True).shape
        torch.Size([3, 4, 2])
    """
    with torch.no_grad():
        return multiply(a, b, batch_sizes, trans_a, trans_b, c, batch_invariant)


def multiply(
    a: Tensor, b: Tensor, batch_sizes: Any, trans_a: bool, trans_b: bool, c: Tensor | None, batch_invariant: bool | None
) -> Tensor:
    """The product of `ops.gmm` and `backend.gmm`. Records gradients if autograd is on."""
    if trans_a and trans_b:
        raise InvalidProblem("trans_a and trans_b were given together: transpose one operand with .T instead")
    wanted = 2 if trans_a else 3
    if a.dim() != 2 or b.dim() != wanted:
        raise InvalidProblem(
            f"a has {a.dim()} dimensions and b {b.dim()}; with trans_a={trans_a} they must have 2 and {wanted}"
        )
    x, y = (a.T, b) if trans_a else (a, b.transpose(1, 2) if trans_b else b)
    result: Tensor = api.grouped_gemm(
        x, y, sizes=batch_sizes, jagged="k" if trans_a else "m", out=c, batch_invariant=batch_invariant
    )
    return result
