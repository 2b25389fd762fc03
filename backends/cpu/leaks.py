"""Keeps torch's bfloat16 product from mixing rows.

oneDNN reads A in steps of 32 columns. Where K is not a multiple of 32, the last step of a row-major
A reads on into the next row and multiplies what it finds by zeros: right for finite numbers, but an
infinity or NaN at the start of a row then turns the row above it into NaN. It reads nothing beyond
the last row of A, and a column-major A is rearranged first, so neither can leak.

So where K asks for it, A is made contiguous if it is not, and looked through before the product, in
the few columns that the row above may read; a launch that finds something there is computed by the
plain loop instead. Forms whose K differs from group to group are taken only if A is column-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multigemm.problem.spec import ProblemSpec

STEP = 32
_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80


def can_be_checked(spec: ProblemSpec) -> bool:
    """Whether the form is one whose rows are looked through, or needs no look."""
    if spec.form == "jagged_k":
        return spec.a.order == "col" and spec.out.order == "row"
    return spec.form != "per_group" or (spec.k is not None and spec.k % STEP == 0)


def reads_on(a: Tensor) -> bool:
    """Whether the last step over K is not full."""
    return a.shape[-1] % STEP != 0


def finite_heads(a: Tensor) -> bool:
    """Whether no row of this A (a matrix or a stack) starts with an infinity or a NaN that could be read."""
    width = min(a.shape[-1], -a.shape[-1] % STEP)
    bits = a.view(torch.int16)[..., :width]
    return not bits.numel() or int((bits & _MAGNITUDE).max()) < _INFINITY


class Rows:
    """A as torch's product may read it: itself, or a contiguous copy that is renewed at each launch."""

    def __init__(self, a: Tensor) -> None:
        self._given, self._reads_on = a, reads_on(a)
        column_major = a.stride(-2) == 1
        copied = self._reads_on and not a.is_contiguous() and not column_major
        self.matrix = torch.empty(a.shape, dtype=a.dtype, device="cpu") if copied else a

    def renew(self, lo: int, hi: int) -> bool:
        """Copies what has to be; whether rows lo..hi-1 (of the next to last dimension) cannot meet."""
        if self.matrix is not self._given:
            self.matrix.copy_(self._given)
        return not self._reads_on or finite_heads(self.matrix[..., lo:hi, :])
