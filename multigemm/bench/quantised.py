"""Workloads of quantised operands: the tensors of a recipe, the bytes that they move, and the check of results.

A recipe stands in the place of a dtype. Elements are drawn, not quantised: normal numbers in float8, any code of 4
bits, and scales between 0.5 and 1.5. Operands are contiguous along K. Scales of 128 of K in a row lie as all kernels
read them fastest, with tokens contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multigemm import quantize
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.scales import Scale, as_bytes
from multigemm.problem.spec import BYTE_FORMATS

if TYPE_CHECKING:
    from multigemm.bench.operands import Tensors
    from multigemm.bench.workloads import Workload

E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Recipe:
    """Formats by name ("" for bfloat16), and how much of K and of columns one number covers: 0 all, 1 one.

    `block` is that along K, of both sides that have scales; `columns` that of b along its columns.
    """

    a: str
    b: str
    block: int = 0
    columns: int = 1
    scale: torch.dtype = torch.float32

    def bytes(self, extents: tuple[int, int, int], with_b: bool = True) -> float:
        """The bytes of one group's operands and scales; b is left out if another group has already read it."""
        m, n, k = extents
        deep = -(-k // self.block) if self.block else 1
        moved = float(m * k * (1 if self.a else 2))
        if self.a:
            moved += m * deep * self.scale.itemsize
        if with_b:
            moved += k * n * (0.5 if self.b in BYTE_FORMATS else 1)
            moved += -(-n // self.columns) * deep * self.scale.itemsize
        return moved


RECIPES = {
    "fp8-rows": Recipe("e4m3", "e4m3"),
    "fp8-blocks": Recipe("e4m3", "e4m3", 128, 128),
    "fp8-1x128": Recipe("e4m3", "e4m3", 128),
    "mxfp8": Recipe("e4m3", "e4m3", 32, scale=E8M0),
    "fp8-weights": Recipe("", "e4m3"),
    "int8-weights": Recipe("", "int8"),
    "int4-weights": Recipe("", "int4", 128),
    "mxfp4-weights": Recipe("", "e2m1", 32, scale=E8M0),
}
"""By the word that a workload's `dtype` has. Results, and activations that are not float8, are bfloat16."""


class Source:
    """Draws elements and scales of one recipe from one seed."""

    def __init__(self, recipe: Recipe, device: torch.device, source: torch.Generator, drawn: bool) -> None:
        self.recipe, self.device, self.source, self.drawn = recipe, device, source, drawn

    def elements(self, format: str, *shape: int) -> Tensor:
        """Codes of a format [.., lines, K], with half as many bytes along K if one holds two; bfloat16 for ""."""
        if format in BYTE_FORMATS or format == "int8":
            shape = (*shape[:-1], shape[-1] // 2) if format in BYTE_FORMATS else shape
            codes = torch.empty(shape, dtype=torch.uint8, device=self.device)
            if self.drawn:
                codes = codes.random_(0, 256, generator=self.source)
            return codes.view(torch.int8) if format == "int8" else codes
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        if self.drawn:
            values = values.normal_(generator=self.source)
        return values.to(quantize.FLOATS[format]) if format else values

    def scale(self, *shape: int, tokens: bool = False) -> Tensor:
        """Scales [.., lines, entries along K]; scales of `tokens` are contiguous along the lines."""
        memory = (*shape[:-2], shape[-1], shape[-2]) if tokens else shape
        numbers = torch.ones(memory, device=self.device)
        if self.drawn:
            numbers = numbers.uniform_(0.5, 1.5, generator=self.source)
        if self.recipe.scale is E8M0:
            numbers = torch.exp2(numbers.log2().round()).to(E8M0)
        return numbers.mT if tokens else numbers


def problem(workload: Workload, source: Source, out: Tensor, cut: dict[str, Any]) -> GroupedGemmProblem:
    """The workload as a `GroupedGemmProblem` that writes into `out`. `cut` gives the groups' boundaries, or how many
    rows count."""
    w, r, form = workload, source.recipe, workload.form
    total, jagged_k = int(w.sizes.sum()), form == "jagged_k"
    k = total if jagged_k else w.k
    deep = 1 if not r.block else k // r.block + w.groups if jagged_k else -(-k // r.block)
    rows = (total,) if form == "jagged_m" else (w.m,) if jagged_k else (w.groups, w.m)
    columns = (w.n,) if jagged_k else (w.groups, w.n)
    if jagged_k:  # operands as a training step has them: tokens are rows
        a, b = source.elements(r.a, total, w.m).mT, source.elements(r.b, total, w.n)
    else:
        a, b = source.elements(r.a, *rows, k), source.elements(r.b, *columns, k).mT
    scale_a = source.scale(*rows, deep, tokens=True) if r.a else None
    per = columns if r.columns == 1 else (*columns[:-1], -(-w.n // r.columns))
    scale_b = source.scale(*per, deep, tokens=jagged_k).mT
    packed = r.b if r.b in BYTE_FORMATS else None
    return GroupedGemmProblem(a, b, scale_a=scale_a, scale_b=scale_b, b_format=packed, out=out, **cut)


def dequantised_groups(tensors: Tensors, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(A_g, B_g) of every group in float32."""
    given = tensors.own
    assert given is not None
    q = given.quantisation
    assert q is not None
    starts = [0, *tensors.workload.sizes.cumsum().tolist()[:-1]]
    found = []
    for g, (a, b) in enumerate(pairs):
        left, right = quantize.decode(a), quantize.decode(as_bytes(b), q.b_format)
        (m, k), n = left.shape, right.shape[1]
        first_row = starts[g] if given.form == "jagged_m" else 0
        first_k = starts[g] if given.form == "jagged_k" else 0
        rows, ks, columns = slice(first_row, first_row + m), slice(first_k, first_k + k), slice(0, n)
        if q.a is not None:
            left = left * _numbers(q.a, g, rows, ks, "a", given.form == "jagged_k")
        if q.b is not None:
            right = right * _numbers(q.b, g, columns, ks, "b", given.form == "jagged_k")
        found.append((left, right))
    return found


def _numbers(scale: Scale, g: int, rows: slice, ks: slice, side: str, jagged_k: bool) -> Tensor:
    return quantize.decode_scale(scale.of_group(g, rows, ks, side, jagged_k))


def error_unit(workload: Workload, k: int) -> float:
    """The error bound of a sum of k products, as a fraction of the sum of their magnitudes.

    Promoted sums of float8 keep 14 bits of at most 128 of K (docs/how-to/quantised-operands.md); weights may be rounded
    once to bfloat16 with their scale.
    """
    steps = -(-k // 32)
    rounded = 34 * 2.0**-13 * min(steps, 4) if RECIPES[workload.dtype].a else 2.0**-8
    return rounded + (4 * k + steps + 8) * 2.0**-24
