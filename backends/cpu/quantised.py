"""Products of quantised operands: blocks of K in float64, in which every element times its scale is exact.

float32 would be twice as fast, but an element times its scale can overflow float32 where the product does not.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cpu.groups import Group, Index
from multigemm.backends.cpu.ordered import ordered_product
from multigemm.planning.operands import Operands
from multigemm.problem.scales import Scale
from multigemm.quantize import decode, decode_scale

STEP = 1024
"""K of one product, so that the copies of a large operand stay small; even, since bytes hold two of K."""


class QuantisedProducts:
    """The products of one bound problem, group by group. Scales are read anew each time."""

    def __init__(self, ops: Operands) -> None:
        self._ops, spec = ops, ops.spec
        self._a, self._b, self._zero = (
            None if grid is None or of is None else Scale(grid, grid, of)
            for grid, of in ((ops.scale_a, spec.a.scale), (ops.scale_b, spec.b.scale), (ops.zero_b, spec.b.scale))
        )

    def product(self, g: int, group: Group, start: Index | None, end: Index | None, ordered: bool = False) -> Tensor:
        """a @ b of group g, in float32; `ordered`: with bits that no neighbour of a row changes."""
        jagged = self._ops.spec.jagged
        span = (0, 0) if jagged is None else (int(cast(Index, start)[g]), int(cast(Index, end)[g]))
        (m, k), n = group.a.shape, group.b.shape[1]
        spans = {
            name: slice(*span) if name == jagged else slice(0, extent)
            for name, extent in (("m", m), ("n", n), ("k", k))
        }
        total = torch.zeros((m, n), dtype=torch.float64, device="cpu")
        if m and n and k and self._ops.spec.alpha != "zero":
            scales = [
                None if x is None else x.of_group(g, spans[rows], spans["k"], side, jagged == "k")
                for x, rows, side in ((self._a, "m", "a"), (self._b, "n", "b"), (self._zero, "n", "b"))
            ]
            for k0 in range(0, k, STEP):
                self._add(total, group, slice(k0, min(k0 + STEP, k)), scales, ordered)
        return total.to(torch.float32)

    def _add(self, total: Tensor, group: Group, ks: slice, scales: list[Tensor | None], ordered: bool) -> None:
        packed = self._ops.spec.b.packed
        of_a, of_b, zero = scales
        held = slice(ks.start // 2, ks.stop // 2) if packed else ks
        a, b = decode(group.a[:, ks]).double(), decode(group.b[held], packed).double()
        if zero is not None:
            b -= _along_k(zero, ks, 0).double()
        if of_a is not None:
            a *= decode_scale(_along_k(of_a, ks, 1)).double()
        if of_b is not None:
            b *= decode_scale(_along_k(of_b, ks, 0)).double()
        with np.errstate(all="ignore"):
            total += ordered_product(a, b, torch.float64) if ordered else torch.mm(a, b)


def _along_k(scale: Tensor, ks: slice, axis: int) -> Tensor:
    """The part of a scale for some of K, along which it may have one entry for all."""
    return scale if scale.shape[axis] == 1 else scale.narrow(axis, ks.start, ks.stop - ks.start)
