"""A problem as its constructor leaves it: operands that fit each other, and what may be asked of them.

Nothing is checked here, that is done before (see `problem`). What reads problems, such as specs and texts,
is written for this class. The host's questions about sizes and products may wait for the device, where
the sizes or the operands live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.arrays import Kind, Step
from multigemm.forms import Extents
from multigemm.grouping import Grouping
from multigemm.intake import Operand
from multigemm.spec import Form, ProblemSpec
from multigemm.untraced import untraced


@dataclass(frozen=True, slots=True)
class GroupView:
    """One product on the host: C = act(alpha * a @ b + beta * c + bias).

    `where` indexes this group's block in the result: a tuple of slices and integers for packed
    forms, the position in the list for per_group.
    """

    index: int
    m: int
    n: int
    k: int
    a: Tensor
    b: Tensor
    c: Tensor | None
    bias: Tensor | None
    where: Any


class AcceptedProblem:
    """The operands as tensors over the caller's memory, the grouping, the epilogue and the spec."""

    __slots__ = (
        "a", "activation", "alpha", "b", "beta", "bias", "c", "deterministic", "device", "extents", "form", "given_out",
        "grouping", "kind", "out", "out_dtype", "out_shape", "precision", "refreshes", "spec", "squeezed", "valid_rows",
    )  # fmt: skip
    a: Operand
    b: Operand
    c: Operand | None
    bias: Operand | None
    out: Operand | None
    form: Form
    extents: Extents | None
    grouping: Grouping | None
    valid_rows: Grouping | None
    alpha: float
    beta: float
    activation: Any
    precision: Any
    deterministic: bool
    device: torch.device
    kind: Kind
    given_out: Any
    out_dtype: torch.dtype
    out_shape: Any
    refreshes: list[Step]
    spec: ProblemSpec
    squeezed: bool

    def each(self, name: str) -> list[Tensor]:
        """The tensors of one operand: none if it is absent, one if it is packed."""
        x: Operand | None = getattr(self, name)
        if x is None:
            return []
        return [x] if isinstance(x, Tensor) else x

    @property
    def cut(self) -> Grouping | None:
        """What says where groups begin and end, or how many rows of them count; None if their shapes do."""
        return self.grouping or self.valid_rows

    @property
    def zero_unowned(self) -> bool:
        """Whether rows that no group owns become zero (multigemm allocates) or stay (the caller's `out`)."""
        return self.out is None

    @property
    def requires_grad(self) -> bool:
        """Whether any input asks for a gradient."""
        for operand in (self.a, self.b, self.c, self.bias):
            if isinstance(operand, Tensor):
                if operand.requires_grad:
                    return True
            elif operand is not None and any(x.requires_grad for x in operand):
                return True
        return False

    @untraced
    def sizes(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of every group; waits for the device if the sizes live there."""
        if self.extents is None:
            pairs = zip(self.each("a"), self.each("b"), strict=True)
            return [(x.shape[0], y.shape[1], x.shape[1]) for x, y in pairs]
        _, _, m, n, k = self.extents
        if self.valid_rows is not None:
            return [(min(max(rows, 0), m), n, k) for rows in np.diff(self.valid_rows.read()).tolist()]
        if self.grouping is None:
            return [(m, n, k)] * self.spec.groups
        lengths = [end - start for start, end in self._bounds(self.grouping, self.extents)]
        jagged = self.form[-1]
        return [tuple(length if d == jagged else e for d, e in zip("mnk", (m, n, k))) for length in lengths]  # type: ignore[misc]

    @untraced
    def groups(self) -> Iterator[GroupView]:
        """Every product as views on the host, one after the other; waits for the device."""
        for refresh in self.refreshes:
            refresh()
        a, b, c, bias = (_on_host(x) for x in (self.a, self.b, self.c, self.bias))
        cuts = [(0, 0)] * self.spec.groups
        if self.grouping is not None and self.extents is not None:
            cuts = self._bounds(self.grouping, self.extents)
        for g, (m, n, k) in enumerate(self.sizes()):
            spans = {d: slice(0, extent) for d, extent in zip("mnk", (m, n, k))}
            if self.spec.jagged:
                spans[self.spec.jagged] = slice(*cuts[g])
            where = _where(self.form, g, spans["m"], spans["n"])
            x, y = _pick(a, g)[spans["m"], spans["k"]], _pick(b, g)[spans["k"], spans["n"]]
            yield GroupView(g, m, n, k, x, y, None if c is None else c[where], _bias(bias, g, spans["n"]), where)

    def _bounds(self, grouping: Grouping, extents: Extents) -> list[tuple[int, int]]:
        """(start, end) of every group along the jagged direction, clamped as the kernels clamp."""
        total = extents.along(self.form[-1])
        offsets = grouping.read().tolist()
        starts = [min(max(s, 0), total) for s in offsets[:-1]]
        return [(s, min(max(e, s), total)) for s, e in zip(starts, offsets[1:], strict=True)]

    @property
    def flops(self) -> int:
        """2*m*n*k summed over the groups; waits for the device if the sizes live there."""
        return sum(2 * m * n * k for m, n, k in self.sizes())

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: operands of non-empty groups, C if it is read, the result."""
        used = [s for s in self.sizes() if s[0] and s[1]]
        if not used:
            return 0
        spec = self.spec
        a = [m * k * spec.a.dtype.itemsize for m, _, k in used]
        b = [k * n * spec.b.dtype.itemsize for _, n, k in used]
        c_size = spec.c.dtype.itemsize if spec.c is not None else 0
        results = sum(m * n * (self.out_dtype.itemsize + c_size) for m, n, _ in used)
        return results + (a[0] if spec.a.shared else sum(a)) + (b[0] if spec.b.shared else sum(b))


def _where(form: str, g: int, rows: slice, cols: slice) -> Any:
    if form == "per_group":
        return g
    return (rows, cols) if form in ("jagged_m", "jagged_n") else (g, rows, cols)


def _pick(x: Any, g: int) -> Any:
    return x if isinstance(x, Tensor) and x.dim() == 2 else x[g]


def _bias(bias: Any, g: int, cols: slice) -> Any:
    if bias is None:
        return None
    return bias[cols] if isinstance(bias, Tensor) and bias.dim() == 1 else bias[g]


def _on_host(x: Any) -> Any:
    if x is None:
        return None
    return x.detach().cpu() if isinstance(x, Tensor) else [t.detach().cpu() for t in x]
