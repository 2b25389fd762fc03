"""A stand-in for `torch.nn.functional.grouped_mm` and `torch._grouped_mm`, with the same meaning.

The names are those of the public function, which takes the last three by keyword alone; the private one takes all by
position, and so does this.

    from multigemm.integrations.torch_grouped_mm import grouped_mm

What it does not share are the limits: any float dtype and int8 instead of a few, any strides and any
alignment, K = 0, biases, gradients also with another `out_dtype`, and zeros where torch leaves memory
as it was (rows at and past `offs[-1]`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.torch_op import grouped_gemm


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Products of groups that `offs` cuts from whatever is a matrix.

    2-D x 3-D: rows of mat_a; 3-D x 2-D: columns of mat_b; 2-D x 2-D: the inner extent, which gives [G, M, N];
    3-D x 3-D: one product for each pair, without `offs`.

    Args:
        mat_a, mat_b: the operands, of any strides.
        offs: [G], where each group ends; no leading 0.
        bias: one value per column: [N] or [G, N].
        out_dtype: of the result.
        batch_invariant: as in `multigemm.grouped_gemm`; a keyword beyond torch's.

    Returns:
        The result; rows at and past `offs[-1]` are zero. Differentiable.

    Raises:
        InvalidProblem: the dimensions and `offs` do not go together.

    Example:
        >>> import torch
        >>> grouped_mm(torch.ones(6, 4), torch.ones(3, 4, 2), offs=torch.tensor([1, 1, 6], dtype=torch.int32)).shape
        torch.Size([6, 2])
    """
    ranks = (mat_a.dim(), mat_b.dim())
    if ranks not in {(2, 2), (2, 3), (3, 2), (3, 3)}:
        raise InvalidProblem(f"mat_a has {ranks[0]} dimensions and mat_b {ranks[1]}: each must have 2 or 3")
    if (offs is None) != (ranks == (3, 3)):
        need = "leave offs out" if offs is not None else "pass offs"
        raise InvalidProblem(f"mat_a has {ranks[0]} dimensions and mat_b {ranks[1]}: {need}")
    jagged = {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): "m"}[ranks]
    return grouped_gemm(
        mat_a, mat_b, ends=offs, bias=bias, out_dtype=out_dtype, jagged=jagged, batch_invariant=batch_invariant
    )
