"""Stand-ins for `torch.nn.functional.grouped_mm` and `scaled_grouped_mm`, with the same meaning.

The names are those of the public functions. `torch._grouped_mm` takes all by position, and so does `grouped_mm` here.

    from multigemm.integrations.torch_grouped_mm import grouped_mm, scaled_grouped_mm

What they do not share are the limits: any float dtype and int8 instead of a few, any strides and any
alignment, K = 0, biases, gradients also with another `out_dtype`, and zeros where torch leaves memory
as it was (rows at and past `offs[-1]`). `scaled_grouped_mm` takes both formats of float8, mixed freely, and scales that
cover everything, 1 x 128 or 128 x 128, for which torch has no grouped kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.quantize import turned


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Multiplies groups that `offs` cuts out of the two-dimensional operands, as torch's `grouped_mm` does.

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
    jagged = _jagged(mat_a, mat_b, offs)
    return grouped_gemm(
        mat_a, mat_b, ends=offs, bias=bias, out_dtype=out_dtype, jagged=jagged, batch_invariant=batch_invariant
    )


def _jagged(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> str:
    """The direction that `offs` cuts, by the dimensions of the operands."""
    ranks = (mat_a.dim(), mat_b.dim())
    if ranks not in {(2, 2), (2, 3), (3, 2), (3, 3)}:
        raise InvalidProblem(f"mat_a has {ranks[0]} dimensions and mat_b {ranks[1]}: each must have 2 or 3")
    if (offs is None) != (ranks == (3, 3)):
        need = "leave offs out" if offs is not None else "pass offs"
        raise InvalidProblem(f"mat_a has {ranks[0]} dimensions and mat_b {ranks[1]}: {need}")
    return {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): "m"}[ranks]


# --- scaled_grouped_mm ------------------------------------------------------------------------------

RECIPES = {"TensorWise": 0, "RowWise": 1, "BlockWise1x32": 32, "BlockWise1x128": 128, "BlockWise128x128": 128}
"""torch's `ScalingType`s that are taken, and how much of K one number covers: 0 everything, 1 a row's whole K."""
SCALED_ROWS = 128
"""How many rows one number of BlockWise128x128 covers."""
SWIZZLED_ROWS, SWIZZLED_COLUMNS = 128, 4
"""What SWIZZLE_32_4_4 pads the rows and the columns of a scale to multiples of."""


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Multiplies groups of float8 operands with scales, which `offs` cuts as in `grouped_mm`.

    A scale of b is laid out as b's transpose, the stack [G, N, K] in which weights are stored: [G, N] of RowWise,
    [G, N, K / 32] and [G, N, K / 128] of BlockWise1x32 and 1x128, [G, N / 128, K / 128] of BlockWise128x128, rounded
    up. torch's documentation does not name the layout of blocks; this is the one that its RowWise scales have. Below,
    rows are those of a, or the columns of b:

    ==================  ==============================  =====================================================
    recipe              of a matrix [rows, K]           of a stack [G, rows, K]
    ==================  ==============================  =====================================================
    TensorWise          one number                      one number, or [G]
    RowWise             [rows]; of a jagged K [G*rows]  [G, rows]
    BlockWise1x32       [rows, ceil(K / 32)]            [G, rows, ceil(K / 32)], swizzled also [G, ...] flattened
    BlockWise1x128      [rows, ceil(K / 128)]           [G, rows, ceil(K / 128)]
    BlockWise128x128                                    [G, ceil(rows / 128), ceil(K / 128)]
    ==================  ==============================  =====================================================

    Blocks of a jagged K are counted from the start of each group, and lie where `multigemm.grouped_gemm` has them:
    block j of group g is entry start[g] // block + g + j of K // block + G. A swizzled scale of rows that `offs` cuts
    holds each group's rows padded to 128, as torch has them; of a jagged K none is taken.

    Args:
        mat_a, mat_b: the operands in float8_e4m3fn or float8_e5m2, of any strides.
        scale_a, scale_b: float32 or float8_e8m0fnu; a list may hold one tensor.
        scale_recipe_a, scale_recipe_b: torch's `ScalingType`; a list may hold one.
        swizzle_a, swizzle_b: torch's `SwizzleType`: none, or SWIZZLE_32_4_4 of BlockWise1x32.
        bias: one value per column: [N] or [G, N].
        offs: [G], where each group ends; no leading 0.
        output_dtype: of the result.
        contraction_dim: must be empty, or (-1, -2).
        use_fast_accum: `accumulate="fast"` of `multigemm.grouped_gemm`.
        batch_invariant: as in `multigemm.grouped_gemm`; a keyword beyond torch's.

    Returns:
        The result; rows at and past `offs[-1]` are zero.

    Raises:
        InvalidProblem: dimensions, scales and recipes do not go together; the text names the value.

    Example:
        >>> import torch
        >>> from torch.nn.functional import ScalingType
        >>> a, b = torch.ones(6, 16).to(torch.float8_e4m3fn), torch.ones(3, 16, 2).to(torch.float8_e4m3fn)
        >>> offs, rows = torch.tensor([1, 1, 6], dtype=torch.int32), ScalingType.RowWise
        >>> scaled_grouped_mm(a, b, torch.ones(6), rows, torch.ones(3, 2), rows, offs=offs).shape
        torch.Size([6, 2])
    """
    jagged = _jagged(mat_a, mat_b, offs)
    if tuple(contraction_dim) not in ((), (-1, -2)):
        raise InvalidProblem(f"contraction_dim={tuple(contraction_dim)}: it must be empty or (-1, -2)")
    groups = 0 if offs is None or jagged != "k" else offs.shape[0]
    read_a = _Scale("a", mat_a, scale_a, scale_recipe_a, swizzle_a, groups).read(offs)
    read_b = _Scale("b", mat_b.mT, scale_b, scale_recipe_b, swizzle_b, groups).read(offs)
    return grouped_gemm(
        mat_a, mat_b, ends=offs, bias=bias, out_dtype=output_dtype or torch.bfloat16, jagged=jagged,
        batch_invariant=batch_invariant, scale_a=read_a, scale_b=turned(read_b),
        accumulate="fast" if use_fast_accum else "promoted",
    )  # fmt: skip


def _only(x: Any, name: str) -> Any:
    """The only element of a list; an argument that is no list is returned."""
    if not isinstance(x, list | tuple):
        return x
    if len(x) != 1:
        raise InvalidProblem(f"{name} is a list of {len(x)}: two levels of scales (nvfp4) come later, pass one")
    return x[0]


class _Scale:
    """A scale of an operand [rows, K] or [G, rows, K] by torch's recipe. `groups` is the number of groups that cut K, 0
    for none."""

    def __init__(self, side: str, operand: Tensor, scale: Any, recipe: Any, swizzle: Any, groups: int) -> None:
        self.name, self.operand, self.groups = f"scale_{side}", operand, groups
        self.lines = "rows" if side == "a" else "columns"
        self.scale: Tensor = _only(scale, self.name)
        recipe, swizzle = _only(recipe, f"scale_recipe_{side}"), _only(swizzle, f"swizzle_{side}")
        self.recipe, self.swizzle = getattr(recipe, "name", str(recipe)), getattr(swizzle, "name", "NO_SWIZZLE")
        if self.recipe not in RECIPES:
            raise InvalidProblem(f"scale_recipe_{side}={self.recipe}: use one of {', '.join(RECIPES)}")
        if self.swizzle != "NO_SWIZZLE" and (self.recipe != "BlockWise1x32" or groups):
            raise InvalidProblem(
                f"swizzle_{side}={self.swizzle}: it belongs to BlockWise1x32 of a K that is not jagged: pass the scale "
                "unswizzled"
            )

    def read(self, ends: Tensor | None) -> Tensor:
        """The scale in the layout that `multigemm.grouped_gemm` takes for a: a number, a vector, or a grid [.., rows,
        K]."""
        if self.recipe == "TensorWise":
            return self._fit(self.scale.reshape(()) if self.scale.numel() == 1 else self.scale, (0, 1))
        if self.recipe == "RowWise":
            return self._rows()
        if self.swizzle != "NO_SWIZZLE":
            return self._unswizzled(ends)
        return self._blocks()

    def _blocks(self) -> Tensor:
        rows, k, block = *self.operand.shape[-2:], RECIPES[self.recipe]
        tall = SCALED_ROWS if self.recipe == "BlockWise128x128" else 1
        if tall > 1 and rows > tall and self.operand.dim() == 2 and not self.groups:
            raise InvalidProblem(f"{self.name} is {self.recipe}, and offs cuts its {self.lines}: use BlockWise1x128")
        along_k = k // block + self.groups if self.groups else -(-k // block)
        wanted = (*self.operand.shape[:-2], -(-rows // tall), along_k)
        if tuple(self.scale.shape) != wanted:
            raise InvalidProblem(
                f"{self.name} has shape {tuple(self.scale.shape)} for {self.recipe} of {self.name[-1]} with {rows} "
                f"{self.lines} and K = {k}: it must be {wanted}, {self.lines} before K"
            )
        return self.scale

    def _fit(self, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
        if scale.dim() not in dims:
            raise InvalidProblem(
                f"{self.name} has shape {tuple(scale.shape)} for {self.recipe} of an operand with "
                f"{self.operand.dim()} dimensions: it must have {' or '.join(map(str, dims))}"
            )
        return scale

    def _rows(self) -> Tensor:
        rows = self.operand.shape[-2]
        wanted = (self.groups * rows,) if self.groups else tuple(self.operand.shape[:-1])
        if tuple(self.scale.shape) != wanted:
            raise InvalidProblem(f"{self.name} has shape {tuple(self.scale.shape)} for RowWise: it must be {wanted}")
        return self.scale.view(self.groups, rows).t() if self.groups else self.scale.unsqueeze(-1)

    def _unswizzled(self, ends: Tensor | None) -> Tensor:
        """Undoes the swizzle, on bytes: torch cannot concatenate float8_e8m0fnu on a GPU."""
        if self.scale.dtype.itemsize != 1:
            return self._in_order(self.scale, ends)
        return self._in_order(self.scale.view(torch.uint8), ends).view(self.scale.dtype)

    def _in_order(self, codes: Tensor, ends: Tensor | None) -> Tensor:
        rows, blocks = self.operand.shape[-2], -(-self.operand.shape[-1] // RECIPES[self.recipe])
        if self.operand.dim() == 3:
            return torch.stack([unswizzle(one, rows, blocks) for one in codes])
        wide = -(-blocks // SWIZZLED_COLUMNS) * SWIZZLED_COLUMNS
        whole = unswizzle(codes, codes.numel() // wide, blocks)
        return whole[:rows] if ends is None else whole[_padded_rows(ends, rows, whole.shape[0])]


def _padded_rows(ends: Tensor, rows: int, padded: int) -> Tensor:
    """The position of each row if every group's rows are padded to a multiple of 128; 0 for rows of no group."""
    ends = ends.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    steps = (ends - starts + SWIZZLED_ROWS - 1) // SWIZZLED_ROWS * SWIZZLED_ROWS
    first = steps.cumsum(0) - steps
    at = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, at, right=True)
    owned = group.clamp(max=max(len(ends) - 1, 0))
    return torch.where(group < len(ends), first[owned] + at - starts[owned], 0).clamp(0, max(padded - 1, 0))


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """A scale [rows, columns] out of the memory order SWIZZLE_32_4_4, which tensor cores of Blackwell read.

    There 128 x 4 numbers lie together: of rows i, i + 32, i + 64 and i + 96 one after the other.

    Args:
        scale: the numbers of one matrix, rows padded to a multiple of 128 and columns to one of 4; of any shape.
        rows, columns: of the result.

    Returns:
        [rows, columns], in the dtype of `scale`.

    Raises:
        InvalidProblem: `scale` holds another number of elements.

    Example:
        >>> import torch
        >>> unswizzle(torch.zeros(2 * 128 * 4), 130, 3).shape
        torch.Size([130, 3])
    """
    tall, wide = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    wanted = tall * SWIZZLED_ROWS * wide * SWIZZLED_COLUMNS
    if scale.numel() != wanted:
        raise InvalidProblem(
            f"a swizzled scale of {rows} x {columns} holds {wanted} numbers, in blocks of 128 x 4, and this one holds "
            f"{scale.numel()}"
        )
    blocks = scale.reshape(tall, wide, 32, 4, SWIZZLED_COLUMNS)
    whole = blocks.permute(0, 3, 2, 1, 4).reshape(tall * SWIZZLED_ROWS, wide * SWIZZLED_COLUMNS)
    return whole[:rows, :columns]
