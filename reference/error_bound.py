"""How far a right kernel may be from the exact answer: the only place where a tolerance exists.

For one element, with inputs taken as they are in memory (exact), let
    S = alpha * sum_k a_k b_k + beta * c + bias        the exact sum,
    P = sum_k |a_k b_k|,   G = |alpha| P,   H = |beta c| + |bias|,
    u = the accumulator's unit roundoff (2^-24; 2^-53 for float64).
A right kernel's accumulator lies in [S - e, S + e], with

    e = c G + 5 u (G + H) [an alpha, beta or bias is used] + r (G + H) + tiny
    c = c_in + c_acc (1 + c_in)

* c_acc = g(kappa K u), g(x) = x / (1 - x). In any order of summation, fused or not, every product
  passes through at most K roundings of relative size u: (1+u)^K - 1 <= g(K u) (Higham, ch. 3), so
  kappa = 1 for IEEE arithmetic. Tensor cores align a block of b+1 addends to the largest exponent,
  truncate at 2^-(23+n), then truncate the sum: per block at most ((b+1) 2^-n + 1) 2u, over K/b
  blocks kappa = 2((b+1) 2^-n + 1)/b. The worst known kind, b = 2 and n = 0, gives 4.
  Linear in K, not its root: truncation is biased, and root-K bounds accuse right kernels.
* c_in is what rounding the inputs costs: 0 but for tf32, which keeps 11 significant bits; hardware
  may cut instead of round, so |da| <= 2^-10 |a|, and 2 * 2^-10 + 2^-20 for a product.
* The epilogue rounds a product's share at most 5 times: alpha itself, alpha * acc, two sums, and the
  conversion of a float64 operand to float32; beta * c likewise.
* r = (K + 4) v is the reference's own error, v its unit roundoff (2^-53, or longdouble's).
* tiny = |alpha| K m + 4 m, with m the smallest normal number: underflow may flush to zero.

The kernel rounds once, monotonically, so it must give a value in [R(S - e), R(S + e)], R the
reference's rounding. Rounding the *ends* is tighter than adding an ulp and makes overflow,
subnormals and ties need no special case.

**Exactness.** If all entries, alpha and beta are whole numbers and P, G + H < 1/u, then every partial sum,
in any order and on any tensor core, is exact: e = 0 and the check is bit for bit. Integers always are.

**Activations.** relu is exact and monotone. gelu, gelu_tanh and silu are f(x) = x * gate(x), the gate
between 0 and 1: Phi(x), 1 / (1 + exp(-t)) with t = 2 sqrt(2/pi) (x + 0.044715 x^3), and 1 / (1 + exp(-x)).
A right kernel evaluates f(x) with an error of at most

    d = u min(8 |x|, (16 + D) |f(x)|) + m',    D = 0 for x >= 0, else 2 x^2, 9 |t| or 2 |x|

* 8 u: exp, erfc and the quotient are off by a few ulp, and the gate is at most 1.
* 16 u: up to 5 ulp (10 u) of erfc, or 2 ulp (4 u) each of exp and of the quotient; up to 4 u of the erfc
  in the C library that the reference calls; the rest rounds.
* D u: the gate falls like exp(-E), with E = x^2 / 2, |t| or |x|, so a relative error of E's argument comes
  out E times as large. x / sqrt(2) takes two roundings, and erfc amplifies each by x^2; t takes at most
  seven, and two more where exp(y) is 2^(y log2 e); for x, only those two.
  So 0.5 x (1 + erf) and 0.5 x (1 + tanh) are wrong for negative x: their sum cancels to an absolute error u.
* m' = 2^8 m: exp(-x) overflows (a fast quotient of float32 a factor 4 earlier) before the true quotient
  underflows, at most 88 * 2^-126 or 710 * 2^-1024; and subnormal numbers may be flushed.

f falls to its single minimum x* and rises after it: the image of [lo, hi] is
[f(x*) or min f(ends), max f(ends)], widened by d.

**Gates, row_scale and sums of rows** follow these sums by intervals: see `reference/fused.py`.

**Quantised operands.** S, P, G and H are those of elements times their scales, which are exact here. The tensor core of
Hopper aligns 32 products of float8 and the sum so far to the largest exponent, truncates each at 2^-13 of it, and then
the sum: it loses at most 34 * 2^-13 of the magnitudes so far. Subnormal elements align as the smallest normal number,
and G^ counts them as that. With at most 128 of K before a sum is added in float32 ("promoted"), or all of K ("fast"),

    e = c_t G^ + c_p (1 + c_t) G^ + 5 u (G^ + H) [as above] + r (G + H) + tiny
    c_t = 34 * 2^-13 * min(ceil(K / 32), 4 or all),    c_p = g((4 K + ceil(K / 32) + 4) u)

* c_p has float32 sums of promoted parts, one rounding of s^a s^b, and kernels that convert to 16 bits first.
* Quantised weights under 16 bits: c_t = 0, and c = c_in + c_p (1 + c_in) in place of both. A weight times its scale
  may be rounded once to bfloat16, c_in = 2^-8, unless the scale is a power of two in e8m0 and the weight less its zero
  point fits (c_in = 0); to float16 where the scale is float16, c_in = 2^-11 and 2^-25 sum |a| for subnormal ones.
* tiny = |alpha| 2^-126 (sum |a b| + K, and sum |a| for weights) + 4 m: s^a s^b, or w s, may underflow.
* Exact: as above, with the largest power of two that divides every term in place of 1, no scale out of range, sums
  before the scales exact as well, and max |a^| max |b^| min(K, 128) < 2^14 times the largest power of two that divides
  all products (K in place of min for "fast"); for weights each one times its scale is exact in a's dtype.
* Not judged beside what follows: an infinite scale, |s^a s^b| >= 2^127 in some block, |w s| > 65504 for float16, and
  sums before the scales that overflow.

**Not judged** (`free`): elements whose magnitudes P or G + H + e reach the accumulator's largest
number, where the order of summation decides about overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from multigemm.reference.dtypes import Array, largest, unit
from multigemm.reference.numpy_reference import (
    GroupSum,
    QuantisedSum,
    activate,
    compute_dtype,
    product_beta,
    tanh_exponent,
)

if TYPE_CHECKING:
    from multigemm.problem.problem import GroupedGemmProblem

MINIMUM = {"gelu": -0.7517915246935645, "gelu_tanh": -0.7524614220710162, "silu": -1.2784645427610738}
"""Where each activation that is not monotone is smallest."""

TF32_INPUT = 2 * 2.0**-10 + 2.0**-20
TENSOR_CORE_KAPPA = 4.0
GATE_ERROR = 16
"""The relative error in units of u; see D in the module docstring for what is added in the tail."""
_SMALLEST_NORMAL = {torch.float64: 2.0**-1022}


@dataclass(frozen=True, slots=True)
class Enclosed:
    """Exact values, the intervals of right values, and where nothing is judged."""

    value: Array
    low: Array
    high: Array
    free: Array

    def map(self, function: Callable[[Array], Array]) -> Enclosed:
        """Applies a function to all four arrays: a selection, or another shape."""
        return Enclosed(function(self.value), function(self.low), function(self.high), function(self.free))

    @property
    def reach(self) -> Array:
        """The largest magnitude in each interval."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


def accumulator(compute: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(compute, torch.float32)


def smallest_normal(acc: torch.dtype) -> float:
    """m of the module docstring."""
    return _SMALLEST_NORMAL.get(acc, 2.0**-126)


def _g(x: float) -> float:
    return x / (1 - x) if x < 0.5 else 1.0


def sum_coefficient(compute: torch.dtype, tf32: bool, k: int) -> float:
    """c of the module docstring: the accumulated relative error of a product's share."""
    ieee = compute == torch.float64 or (compute == torch.float32 and not tf32)
    kappa = 1.0 if ieee else TENSOR_CORE_KAPPA
    c_acc = _g(kappa * k * unit(accumulator(compute)))
    c_in = TF32_INPUT if tf32 and compute == torch.float32 else 0.0
    return c_in + c_acc * (1 + c_in)


def _reference_unit(compute: torch.dtype) -> float:
    return float(np.finfo(np.longdouble).eps) if compute == torch.float64 else 2.0**-53


def _is_exact(problem: GroupedGemmProblem, total: GroupSum, compute: torch.dtype) -> bool:
    """Whether all values are whole numbers whose partial sums fit the accumulator's significand (for tf32 also the
    11-bit inputs)."""
    if compute == torch.int8:
        return True
    if not total.integral:
        return False
    reach = float(total.products.max(initial=0.0)) * max(1.0, abs(float(problem.alpha))) + float(
        total.addends.max(initial=0.0)
    )
    rounded = compute == torch.float32 and problem.precision == "tf32" and total.entry > 2.0**11
    return reach < 1 / unit(accumulator(compute)) and not rounded


def _promoted(k: int) -> float:
    """c_p of the module docstring."""
    return _g((4 * k + -(-k // 32) + 4) * 2.0**-24)


def tensor_core_coefficient(k: int, fast: bool) -> float:
    """c_t of the module docstring."""
    steps = -(-k // 32)
    return 34 * 2.0**-13 * (steps if fast else min(steps, 4))


def _weight_rounding(problem: GroupedGemmProblem) -> float:
    """c_in of the module docstring, for quantised weights."""
    a, b = problem.spec.a.dtype, problem.spec.b
    if b.scale is None:
        return 0.0
    if a is torch.float16:
        return 2.0**-11 if b.scale.dtype is torch.float16 else 0.0
    wide = b.scale.zero is torch.uint8 and b.packed != "uint4"  # -8 - 255 and -128 - 255 have nine bits
    return 0.0 if b.scale.dtype is torch.float8_e8m0fnu and not wide else 2.0**-8


def _is_exact_quantised(problem: GroupedGemmProblem, total: GroupSum, more: QuantisedSum) -> bool:
    if not (more.exact and total.integral):
        return False
    reach = abs(float(problem.alpha)) * float(total.products.max(initial=0.0)) + float(total.addends.max(initial=0.0))
    return reach == 0 or (reach < 2.0**24 * more.quantum and more.quantum >= 2.0**-126)


def _quantised_error(problem: GroupedGemmProblem, total: GroupSum, more: QuantisedSum, k: int) -> Array:
    if _is_exact_quantised(problem, total, more):
        return np.zeros(total.value.shape)
    scale, small = abs(float(problem.alpha)), 2.0**-126
    gauge, grown = scale * total.products, scale * more.grown
    plain = problem.alpha == 1 and product_beta(problem) == 0 and problem.spec.bias is None
    error = (k + 4) * 2.0**-53 * (gauge + total.addends) + (0.0 if plain else 5 * 2.0**-24) * (grown + total.addends)
    error = error + scale * small * (more.raw + k) + 4 * small
    if problem.spec.quantised == "float8":
        c_t = tensor_core_coefficient(k, problem.spec.accumulate == "fast")
        return error + (c_t + _promoted(k) * (1 + c_t)) * grown
    c_in = _weight_rounding(problem)
    subnormal = 2.0**-25 if problem.spec.a.dtype is torch.float16 and c_in else 0.0
    return error + (c_in + _promoted(k) * (1 + c_in)) * gauge + scale * (small + subnormal) * more.left


def sum_error(problem: GroupedGemmProblem, total: GroupSum, k: int) -> Array:
    """e of the module docstring, [m, n]; zero where the sum is exact in every order."""
    if total.quantised is not None:
        return _quantised_error(problem, total, total.quantised, k)
    compute = compute_dtype(problem)
    if _is_exact(problem, total, compute):
        return np.zeros(total.value.shape)
    acc, tf32 = accumulator(compute), problem.precision == "tf32"
    small = smallest_normal(acc)
    scale = abs(float(problem.alpha))
    gauge = scale * total.products
    both = gauge + total.addends
    plain = problem.alpha == 1 and product_beta(problem) == 0 and problem.spec.bias is None
    error = sum_coefficient(compute, tf32, k) * gauge + (k + 4) * _reference_unit(compute) * both
    error += (0.0 if plain else 5 * unit(acc)) * both + (scale * k + 4) * small
    return error


def unjudged(problem: GroupedGemmProblem, total: GroupSum, error: Array) -> Array:
    """The elements whose magnitudes reach the accumulator's largest number."""
    compute = compute_dtype(problem)
    if compute == torch.int8:
        return np.zeros(total.value.shape, bool)
    limit = largest(accumulator(compute))
    gauge = abs(float(problem.alpha)) * total.products
    free = ~(gauge + total.addends + error < limit) | ~(total.products < limit)
    if total.quantised is not None:
        free |= total.quantised.free | ~(total.quantised.raw < limit)
    return np.asarray(free)


def _exponent_error(x: Array, activation: str) -> Array:
    """D of the module docstring."""
    below = np.minimum(x, 0)
    if activation == "gelu":
        return np.asarray(2 * below * below)
    return np.asarray(9 * np.abs(tanh_exponent(below)) if activation == "gelu_tanh" else 2 * np.abs(below))


def _widened(x: Array, activation: str, acc: torch.dtype) -> tuple[Array, Array]:
    """f(x) - d and f(x) + d of the module docstring."""
    y = activate(x, activation)
    size = np.abs(y)
    relative = np.where(size > 0, (GATE_ERROR + _exponent_error(x, activation)) * size, 0)
    error = unit(acc) * np.minimum(8 * np.abs(x), relative) + 2.0**8 * smallest_normal(acc)
    error = np.where(np.isfinite(x), error, 0)
    return y - error, y + error


def enclosed(problem: GroupedGemmProblem, total: GroupSum, error: Array) -> Enclosed:
    """Sums of products that a right kernel forms with these errors."""
    with np.errstate(all="ignore"):
        free, wide = unjudged(problem, total, error), error.astype(total.value.dtype)
        return Enclosed(total.value, total.value - wide, total.value + wide, free)


def image(x: Enclosed, activation: str | None, acc: torch.dtype) -> Enclosed:
    """The activation of intervals, widened by the error of its evaluation."""
    value = activate(x.value, activation)
    if activation is None or activation == "relu":
        return Enclosed(value, activate(x.low, activation), activate(x.high, activation), x.free)
    valley = np.array(MINIMUM[activation], x.low.dtype)
    (lowest, _), *ends = (_widened(point, activation, acc) for point in (valley, x.low, x.high))
    bottom = np.where((x.low <= valley) & (valley <= x.high), lowest, np.minimum(ends[0][0], ends[1][0]))
    return Enclosed(value, bottom, np.maximum(ends[0][1], ends[1][1]), x.free)
