"""`float8_grouped_mm`: training in float8 from 16-bit operands, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from multigemm import api, quantize
from multigemm.errors import InvalidProblem
from multigemm.integrations.gradients import live_cut
from multigemm.problem.epilogue import one_of
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.rebuild import cut_keywords
from multigemm.problem.spec import HALVES
from multigemm.quantize import Format, Quantized
from multigemm.torch_internals import no_dynamo

Recipe = Literal["rows", "blocks"]
WeightGradient = Literal["bfloat16", "float8"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Granularity(NamedTuple):
    """What a recipe quantises with: the coverage of a scale of tokens and of weights, and the format of incoming
    gradients."""

    tokens: str
    weights: str
    gradient: Format


RECIPES = {"rows": Granularity("row", "row", "e5m2"), "blocks": Granularity("1x128", "128x128", "e4m3")}


def float8_grouped_mm(
    x: Tensor,
    w: Tensor,
    *,
    offsets: Any = None,
    sizes: Any = None,
    ends: Any = None,
    recipe: Recipe = "blocks",
    wgrad: WeightGradient = "bfloat16",
    scale_dtype: torch.dtype = torch.float32,
    backend: str | Sequence[str] = "auto",
) -> Tensor:
    """`x[rows of g] @ w[g]` in float8, for training. Quantises x, w and, in the backward pass, the incoming gradient.

    Gradients are straight-through: the gradients of the unquantised product, each computed in float8.

    ========  =====================  =================  ===========================================================
    recipe    x                      w                  dX = dY @ W^T
    ========  =====================  =================  ===========================================================
    rows      e4m3, a scale per row  e4m3, per column   dY in e5m2, a scale per row; W^T quantised anew, per column
    blocks    e4m3, 1x128            e4m3, 128x128      dY in e4m3, 1x128; W as it is, with its scales transposed
    ========  =====================  =================  ===========================================================

    dW = X^T @ dY is a product in bfloat16 (float16 where x is), or in float8 of operands that are quantised along the
    tokens of each group, by its recipe: no token is padded, and no scale spans two groups.

    Args:
        x: [T, K], bfloat16, float16 or float32.
        w: [G, K, N], of the dtype of x, of any strides; K-contiguous is fastest ([G, N, K] transposed).
        offsets, sizes, ends: one of them cuts the rows of x into groups, as in `grouped_gemm`.
        recipe: "rows" or "blocks".
        wgrad: "bfloat16" or "float8".
        scale_dtype: float32, or float8_e8m0fnu for scales that are powers of two.
        backend: as in `grouped_gemm`.

    Returns:
        [T, N] in the dtype of x; rows that no group owns are zero. Differentiable once.

    Raises:
        InvalidProblem: an argument has no meaning; the text names the value and the remedy.

    Example:
        >>> import torch
        >>> from multigemm.nn import float8_grouped_mm
        >>> x, w = (torch.randn(*shape, requires_grad=True) for shape in ((6, 256), (3, 256, 128)))
        >>> y = float8_grouped_mm(x, w, sizes=[1, 0, 5])
        >>> [tuple(g.shape) for g in torch.autograd.grad(y.sum(), (x, w))]
        [(6, 256), (3, 256, 128)]
    """
    one_of(recipe, "recipe", tuple(RECIPES))
    one_of(wgrad, "wgrad", ("bfloat16", "float8"))
    if scale_dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise InvalidProblem(f"scale_dtype={scale_dtype}: use torch.float32 or torch.float8_e8m0fnu")
    for name, tensor, dim, shape in (("x", x, 2, "[T, K]"), ("w", w, 3, "[G, K, N]")):
        if not isinstance(tensor, Tensor) or tensor.dim() != dim:
            seen = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidProblem(f"{name} is {seen}: float8_grouped_mm takes a tensor {shape}")
    if x.dtype not in DTYPES or w.dtype is not x.dtype:
        raise InvalidProblem(
            f"x is {x.dtype} and w is {w.dtype}: both must be bfloat16, both float16 or both float32 (for operands "
            "that are quantised already, use multigemm.grouped_gemm)"
        )
    if offsets is sizes is ends is None:
        raise InvalidProblem("nothing cuts the rows of x: pass one of offsets, sizes and ends")
    cut = {"offsets": offsets, "sizes": sizes, "ends": ends}
    return _product(x, w, cut, Choices(RECIPES[recipe], wgrad, scale_dtype, backend))


class Choices(NamedTuple):
    """The arguments of a call that are no tensors."""

    recipe: Granularity
    wgrad: WeightGradient
    scale_dtype: torch.dtype
    backend: str | Sequence[str]


@no_dynamo
def _product(x: Tensor, w: Tensor, cut: dict[str, Any], how: Choices) -> Tensor:
    result: Tensor = _Float8.apply(x, w, cut, how)  # type: ignore[no-untyped-call]
    return result


class _Float8(torch.autograd.Function):
    """x @ w by groups. Keeps x for dW, and the form of w by which the recipe multiplies dY."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cut: dict[str, Any], how: Choices) -> Tensor:
        problem = GroupedGemmProblem(x.detach(), w.detach(), **cut)  # refuses, and reads what lies on the host once
        cut = cut_keywords(problem)
        a, b = _quantised(x, "e4m3", how.recipe.tokens, how), _quantised(w, "e4m3", how.recipe.weights, how, side="b")
        y = _multiply(a, b, x.dtype, how, cut)
        kept: tuple[Tensor | None, ...] = (w, None) if how.recipe.weights == "row" else (b.data, b.scale)
        kept = kept if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *kept, live_cut(problem))
        ctx.cut, ctx.how, ctx.dtypes = cut, how, (x.dtype, w.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, w_scale, _ = ctx.saved_tensors
        how: Choices = ctx.how
        dx = dw = None
        if w is not None:
            a = _quantised(dy, how.recipe.gradient, how.recipe.tokens, how)
            if w_scale is None:
                b = _quantised(w.mT, "e4m3", "row", how, side="b")
            else:
                b = Quantized(w.mT, w_scale.mT)
            dx = _multiply(a, b, ctx.dtypes[0], how, ctx.cut)
        if x is not None:
            dw = _weight_gradient(x, dy, ctx.dtypes[1], how, {**ctx.cut, "jagged": "k"})
        return dx, dw, None, None


def _weight_gradient(x: Tensor, dy: Tensor, dtype: torch.dtype, how: Choices, cut: dict[str, Any]) -> Tensor:
    """X^T @ dY over the tokens of each group."""
    if how.wgrad == "float8":
        a = _quantised(x.mT, "e4m3", how.recipe.tokens, how, **cut)
        b = _quantised(dy, how.recipe.gradient, how.recipe.tokens, how, side="b", **cut)
        return _multiply(a, b, dtype, how, cut)
    half = dtype if dtype in HALVES else torch.bfloat16
    found: Tensor = api.grouped_gemm(x.to(half).mT, dy.to(half), out_dtype=dtype, backend=how.backend, **cut)
    return found


def _quantised(x: Tensor, format: Format, scale: str, how: Choices, side: Literal["a", "b"] = "a", **cut: Any) -> Any:
    return quantize.quantize(x, format, scale, side=side, scale_dtype=how.scale_dtype, **cut)


def _multiply(a: Quantized, b: Quantized, dtype: torch.dtype, how: Choices, cut: dict[str, Any]) -> Tensor:
    result: Tensor = api.grouped_gemm(
        a.data, b.data, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, backend=how.backend, **cut
    )
    return result
