"""What follows the products of a fused problem, exactly and as intervals: gate, row_scale, sums of rows.

The sum of a product and its bias lies in [S - e, S + e], as `error_bound` has it. From there, with u the accumulator's
unit roundoff and every step of a right kernel in the accumulator's precision:

* g and u are clamped at both ends, which is exact; by u * limit more where the accumulator cannot hold the limit.
* u' + beta: widened by 2 u (|u'| + |beta|).
* act over g's interval: as `error_bound` has it for gelu, gelu_tanh, silu and relu; swiglu with alpha is
  silu(alpha g) / alpha, whose exponent's argument has two roundings more, D = 4 |alpha g|; the sigmoid of glu is
  widened by 8 u (1 + |g|) * sigmoid(g).
* Their product, and that with row_scale: the four corners, widened by 3 u |x| and by what underflow may flush to zero.
* Each row y may be rounded once to the operands' dtype before rows are summed, or not: the hull of [lo, hi] and
  [R(lo), R(hi)]. The sum of k rows with weights w: widened by (k + 4) u (sum |w y| + |beta C|).

Where both ends are one whole number below 1/u, nothing has rounded and nothing is widened: whole numbers are judged bit
for bit through relu, a whole limit, and sums.

**Not judged**: what may overflow before another step, where 0 may meet an infinity, rows that leave the range of the
operands' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from multigemm.reference.dtypes import Array, largest, round_once, unit, widen
from multigemm.reference.error_bound import MINIMUM, Enclosed, accumulator, enclosed, image, smallest_normal, sum_error
from multigemm.reference.numpy_reference import compute_dtype, group_sum

if TYPE_CHECKING:
    from multigemm.problem.fused import Gate
    from multigemm.problem.problem import GroupedGemmProblem, GroupView

PLAIN = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""The activation that a gate applies to g; glu takes its sigmoid."""


def exactly(x: Array) -> Enclosed:
    """Known numbers as intervals of one value."""
    return Enclosed(x, x, x, np.zeros(x.shape, bool))


def widened(x: Enclosed, amount: Array, acc: torch.dtype) -> Enclosed:
    """The interval widened at both ends, unless it is one whole number that the accumulator holds exactly."""
    exact = (x.low == x.high) & (x.low == np.rint(x.low)) & (np.abs(x.low) < 1 / unit(acc))
    grown = np.where(exact | ~np.isfinite(amount), 0, amount)
    return Enclosed(x.value, x.low - grown, x.high + grown, x.free)


def times(x: Enclosed, y: Enclosed, acc: torch.dtype) -> Enclosed:
    """The product of two intervals. Not judged where 0 may meet an infinity, or a factor may have overflowed."""
    corners = np.stack([x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high])
    found = Enclosed(x.value * y.value, corners.min(axis=0), corners.max(axis=0), x.free | y.free)
    nan = np.isnan(found.value) & np.isnan(found.low) & np.isnan(found.high)

    def meets(p: Enclosed, q: Enclosed) -> Array:
        return np.asarray(~np.isfinite(p.reach) & ~((q.low > 0) | (q.high < 0)))

    free = found.free | ((meets(x, y) | meets(y, x)) & ~nan)
    for factor in (x, y):
        free |= np.isfinite(factor.value) & (factor.reach >= largest(acc))
    found = Enclosed(found.value, found.low, found.high, free)
    return widened(found, 3 * unit(acc) * found.reach + smallest_normal(acc), acc)


# --- one group ----------------------------------------------------------------------------------------


def product(problem: GroupedGemmProblem, view: GroupView) -> Enclosed:
    """alpha * A @ B + beta * C + bias of one group."""
    total = group_sum(problem, view)
    return enclosed(problem, total, sum_error(problem, total, view.k))


def finished(problem: GroupedGemmProblem, view: GroupView, sums: Enclosed) -> Enclosed:
    """The rows of one group after activation or gate and row_scale."""
    fused, acc = problem.fused, accumulator(compute_dtype(problem))
    assert fused is not None
    with np.errstate(all="ignore"):
        if fused.gate is not None:
            rows = gated(sums, fused.gate, acc)
        else:
            rows = image(sums, problem.activation, acc)
        if fused.row_scale is not None:
            scale = widen(fused.row_scale)[view.where[:-1]].astype(rows.value.dtype)[:, None]
            rows = times(rows, exactly(np.broadcast_to(scale, rows.value.shape)), acc)
        return rows


def gated(sums: Enclosed, gate: Gate, acc: torch.dtype) -> Enclosed:
    """act(min(g, limit)) * (u within the limits + beta)."""
    g, u = (sums.map(lambda x, i=i: gate.split(x)[i]) for i in (0, 1))  # type: ignore[misc]
    if gate.limit is not None:
        edge = 0.0 if _holds(gate.limit, acc) else unit(acc) * gate.limit
        g, u = _at_most(g, gate.limit, edge), _at_most(u, gate.limit, edge)
        u = _negative(_at_most(_negative(u), gate.limit, edge))
    if gate.beta != 0:
        reach = u.reach + abs(gate.beta)
        u = Enclosed(u.value + gate.beta, u.low + gate.beta, u.high + gate.beta, u.free)
        u = widened(u, 2 * unit(acc) * reach, acc)
    return times(_act(g, gate, acc), u, acc)


def _holds(x: float, acc: torch.dtype) -> bool:
    return acc is torch.float64 or float(np.float32(x)) == x


def _at_most(x: Enclosed, limit: float, edge: float) -> Enclosed:
    low, high = np.minimum(x.low, limit - edge), np.minimum(x.high, limit + edge)
    return Enclosed(np.minimum(x.value, limit), low, high, x.free)  # NaN stays NaN


def _negative(x: Enclosed) -> Enclosed:
    return Enclosed(-x.value, -x.high, -x.low, x.free)


def _act(g: Enclosed, gate: Gate, acc: torch.dtype) -> Enclosed:
    if gate.kind == "glu":
        value, *ends = (1 / (1 + np.exp(-x)) for x in (g.value, g.low, g.high))
        low, high = (
            8 * unit(acc) * (1 + np.where(np.isfinite(x), np.abs(x), 0)) * end + 2.0**8 * smallest_normal(acc)
            for x, end in zip((g.low, g.high), ends, strict=True)
        )
        return Enclosed(value, ends[0] - low, ends[1] + high, g.free)
    if gate.alpha == 1 or gate.kind != "swiglu":
        return image(g, PLAIN[gate.kind], acc)
    if gate.alpha < 0:  # f(x; -alpha) = -f(-x; alpha)
        return _negative(_swish(_negative(g), -gate.alpha, acc))
    return _swish(g, gate.alpha, acc)


def _swish(g: Enclosed, alpha: float, acc: torch.dtype) -> Enclosed:
    """x * sigmoid(alpha * x) for alpha of 0 or more: it falls to one minimum and rises after it."""

    def swish(x: Array) -> Array:
        return np.asarray(x / (1 + np.exp(-alpha * x)))

    def error(x: Array) -> Array:
        y, tail = np.abs(swish(x)), 4 * alpha * np.abs(np.minimum(x, 0))
        found = unit(acc) * np.minimum(8 * np.abs(x), np.where(y > 0, (16 + tail) * y, 0))
        return np.where(np.isfinite(x), found + 2.0**8 * smallest_normal(acc) * max(1.0, 1 / (alpha or 1.0)), 0)

    ends = [(swish(x), error(x)) for x in (g.low, g.high)]
    low = np.minimum(*(y - e for y, e in ends))
    high = np.maximum(*(y + e for y, e in ends))
    if alpha > 0:
        valley = np.array(MINIMUM["silu"] / alpha, g.low.dtype)
        low = np.where((g.low <= valley) & (valley <= g.high), swish(valley) - error(valley), low)
    return Enclosed(swish(g.value), low, high, g.free)


# --- sums of rows -------------------------------------------------------------------------------------


class Rows:
    """The rows of all groups [T, N] before they are summed. `there` is False for rows that no group owns."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        assert problem.fused is not None and problem.extents is not None
        self._problem, self._fused = problem, problem.fused
        self._acc = accumulator(compute_dtype(problem))
        self.count, self._columns = problem.extents.m, problem.out_shape[1]
        self._kept: dict[int, tuple[Enclosed, int]] = {}

    def add(self, view: GroupView, rows: Enclosed) -> None:
        """The rows of one group."""
        for i in range(view.m):
            self._kept[view.where[0].start + i] = rows, i

    def contributions(self) -> list[list[tuple[int, float]]]:
        """(row, weight) of each sum, in the order in which they are added."""
        problem = self._fused
        found: list[list[tuple[int, float]]] = [[] for _ in range(self._problem.out_shape[0])]
        if problem.combine is not None:
            index = problem.combine.on_host().tolist()
            weights = None if problem.weights is None else widen(problem.weights)
            for r, row in enumerate(index):
                found[r] = [
                    (s, 1.0 if weights is None else weights[r, j]) for j, s in enumerate(row) if s in self._kept
                ]
            return found
        assert problem.out_rows is not None
        for s, r in enumerate(problem.out_rows.on_host().tolist()):
            if 0 <= r < len(found) and s in self._kept:
                found[r].append((s, 1.0))
        return found

    def summed(self) -> Enclosed:
        """Every row of the result, before it is rounded."""
        exact: Any = np.longdouble if self._acc is torch.float64 else np.float64
        problem = self._problem
        c = None
        if problem.c is not None and problem.beta != 0:
            c = exact(problem.beta) * widen(problem.c).astype(exact)
        terms = 0 if self._fused.combine is None else self._fused.combine.values.shape[1]
        made = [
            self._row(parts, np.zeros(self._columns, exact) if c is None else c[r], terms or len(parts))
            for r, parts in enumerate(self.contributions())
        ]
        shape = (len(made), self._columns)
        if not made:
            return exactly(np.zeros(shape, exact))
        return Enclosed(*(np.stack([getattr(x, n) for x in made]) for n in ("value", "low", "high", "free")))

    def _row(self, parts: list[tuple[int, float]], c: Array, terms: int) -> Enclosed:
        with np.errstate(all="ignore"):
            whole, size = c == np.rint(c), np.abs(c)
            total = exactly(np.zeros_like(c))
            for s, weight in parts:
                rows, i = self._kept[s]
                term = _scaled(self._rounded(rows.map(lambda x, i=i: x[i])), weight)  # type: ignore[misc]
                whole &= (term.low == term.high) & (term.low == np.rint(term.low))
                size = size + term.reach
                total = _plus(total, term)
            total = _plus(total, exactly(c)) if self._problem.c is not None else total
            amount = (terms + 4) * (unit(self._acc) * size + smallest_normal(self._acc))
            amount = np.where((whole & (size < 1 / unit(self._acc))) | ~np.isfinite(amount), 0, amount)
            free = total.free | (np.isfinite(total.value) & ~(size < largest(self._acc)))
            free |= (np.isnan(total.value) != np.isnan(total.low)) | (np.isnan(total.value) != np.isnan(total.high))
            return Enclosed(total.value, total.low - amount, total.high + amount, free)

    def _rounded(self, y: Enclosed) -> Enclosed:
        """The hull of a row with and without rounding to the operands' dtype."""
        narrow = compute_dtype(self._problem)
        if narrow.itemsize == 1:
            narrow = torch.bfloat16
        low, high = (round_once(x, narrow).astype(x.dtype) for x in (y.low, y.high))
        lost = np.isfinite(y.value) & ~(np.isfinite(low) & np.isfinite(high))
        return Enclosed(y.value, np.minimum(y.low, low), np.maximum(y.high, high), y.free | lost)


def _scaled(y: Enclosed, weight: float) -> Enclosed:
    ends = y.low * weight, y.high * weight
    signless = (y.low < y.high) & (y.low <= 0) & (y.high >= 0)
    free = y.free | (signless & (not np.isfinite(weight)))
    return Enclosed(y.value * weight, np.minimum(*ends), np.maximum(*ends), free)


def _plus(x: Enclosed, y: Enclosed) -> Enclosed:
    return Enclosed(x.value + y.value, x.low + y.low, x.high + y.high, x.free | y.free)
