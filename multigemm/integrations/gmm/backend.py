"""The product without gradients, for programs that write their own backward pass."""

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
    """`a` [T, K] times `b` [G, K, N] (with trans_b [G, N, K]), rows cut by `batch_sizes` -> [T, N].

    With trans_a, `a` [T, M] and `b` [T, N] are cut alike and a_g^T @ b_g is formed -> [G, M, N].
    `c` receives the result, if given. No gradient is recorded, as in the original. `batch_invariant` as in
    `multigemm.grouped_gemm`.
    """
    with torch.no_grad():
        return multiply(a, b, batch_sizes, trans_a, trans_b, c, batch_invariant)


def multiply(
    a: Tensor, b: Tensor, batch_sizes: Any, trans_a: bool, trans_b: bool, c: Tensor | None, batch_invariant: bool | None
) -> Tensor:
    """The product of `ops.gmm` and `backend.gmm`; records gradients where autograd is on."""
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
