"""The definition of the answer: a loop over groups in NumPy, written for clarity, not for speed.

Integers are exact. Floats of up to 32 bits are summed in float64; float64 in longdouble (64 bits
of significand on x86-64, 113 on aarch64), so the reference is better than what it judges. Where a
NaN or an infinity takes part, its spread is derived from masks and never from what a BLAS
happened to do. The epilogue follows, in the same precision, and then one rounding to the output's dtype.

`GroupSum` keeps, beside the value, the two sums of magnitudes that the error bound needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from multigemm.problem.problem import GroupedGemmProblem, GroupView
from multigemm.problem.spec import FLOAT8, ProblemSpec
from multigemm.reference.dtypes import Array, decode, decode_scale, numpy_dtype, round_once, to_numpy, widen

PROMOTION = 128
"""K that a tensor core may sum before its sum is added in float32."""


@dataclass(frozen=True, slots=True)
class GroupSum:
    """One group before its activation (or several, flat): `value` = alpha*A@B + beta*C + bias, all [m, n].

    `products` = |A|@|B| and `addends` = |beta*C| + |bias| over the finite entries; `integral` says
    that A, B, C, bias, alpha and beta hold whole numbers only; `entry` is the largest |a| or |b|.
    `quantised` is what the bound of quantised operands needs beside, else None.
    """

    value: Array
    products: Array
    addends: Array
    integral: bool = False
    entry: float = 0.0
    quantised: QuantisedSum | None = None


@dataclass(frozen=True, slots=True)
class QuantisedSum:
    """Of quantised operands: `grown` = sum |a^ s^a b^ s^b| with subnormal elements of float8 counted as the smallest
    normal number, `raw` = sum |a b| before the scales, `left` = sum |a|, all [m, n]. `block` is the root mean square of
    the sums over 128 of K. `free` marks what is not judged. `exact` says that no step rounds
    before the sums of the epilogue, where all terms are multiples of `quantum`.
    """

    grown: Array
    raw: Array
    left: Array
    block: Array
    free: Array
    exact: bool
    quantum: float


def compute_dtype(problem: GroupedGemmProblem) -> torch.dtype:
    """The dtype that products are formed in; of quantised operands that of a."""
    if problem.quantisation is not None:
        return problem.spec.compute
    return torch.promote_types(problem.spec.a.dtype, problem.spec.b.dtype)


def product_beta(problem: GroupedGemmProblem) -> float:
    """The factor of C in the products: 0 where C is added to sums of their rows instead."""
    return 0.0 if problem.fused is not None and problem.fused.scatters else float(problem.beta)


def _finite_part(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _special_spread(a: Array, b: Array) -> Array:
    """[m, n] of 0, NaN, inf, -inf: the contribution of the special entries alone to each sum."""

    def meets(left: Array, right: Array) -> Array:
        return (left.astype(np.float64) @ right.astype(np.float64)) > 0

    nan = np.isnan(a).any(axis=1, keepdims=True) | np.isnan(b).any(axis=0, keepdims=True)
    nan |= meets(np.isinf(a), b == 0) | meets(a == 0, np.isinf(b))
    plus = (
        meets(a == np.inf, b > 0) | meets(a == -np.inf, b < 0) | meets(a > 0, b == np.inf) | meets(a < 0, b == -np.inf)
    )
    minus = (
        meets(a == np.inf, b < 0) | meets(a == -np.inf, b > 0) | meets(a > 0, b == -np.inf) | meets(a < 0, b == np.inf)
    )
    spread = np.where(plus, np.inf, 0.0)
    spread[minus] = -np.inf
    spread[nan | (plus & minus)] = np.nan
    return spread


def _is_whole(x: Array) -> bool:
    return bool(np.isfinite(x).all() and (x == np.rint(x)).all())


def _product(a: Array, b: Array, products: Array, wide: bool) -> Array:
    """A @ B of finite entries; in longdouble if the result is float64 and float64 sums would not be exact."""
    if wide and not (_is_whole(a) and _is_whole(b) and products.max(initial=0.0) < 2.0**53):
        return a.astype(np.longdouble) @ b.astype(np.longdouble)
    return (a @ b).astype(np.longdouble if wide else np.float64)


def _float_sum(view: GroupView, alpha: float, beta: float, wide: bool) -> GroupSum:
    exact: Any = np.longdouble if wide else np.float64
    value = np.zeros((view.m, view.n), exact)
    products, addends = np.zeros((view.m, view.n)), np.zeros((view.m, view.n))
    whole, entry = float(alpha).is_integer() and float(beta).is_integer(), 0.0
    if view.k and alpha != 0:
        a, b = widen(view.a), widen(view.b)
        whole = whole and _is_whole(a) and _is_whole(b)
        fa, fb = _finite_part(a), _finite_part(b)
        entry = max(float(np.abs(fa).max(initial=0.0)), float(np.abs(fb).max(initial=0.0)))
        products = np.abs(fa) @ np.abs(fb)
        value = _product(fa, fb, products, wide)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            value = value + _special_spread(a, b)
        value = exact(alpha) * value
    if beta != 0 and view.c is not None:
        c = widen(view.c)
        whole, value = whole and _is_whole(c), value + exact(beta) * c.astype(exact)
        addends += np.abs(beta * _finite_part(c))
    if view.bias is not None:
        bias = widen(view.bias)
        whole, value = whole and _is_whole(bias), value + bias.astype(exact)
        addends += np.abs(_finite_part(bias))
    return GroupSum(value, products, addends, whole, entry)


def _wrap(x: Array) -> Array:
    return x.astype(np.int32).astype(np.int64)


def _integer_sum(view: GroupView, alpha: float, beta: float) -> GroupSum:
    """int8 in, int32 out, modulo 2^32. The float64 product is exact: K * 2^14 stays far below 2^53."""
    value = np.zeros((view.m, view.n), np.int64)
    if view.k and alpha != 0:
        value = _wrap((widen(view.a).astype(np.float64) @ widen(view.b).astype(np.float64)).astype(np.int64))
        value = _wrap(value * _wrap(np.array(int(alpha) % 2**32)))
    if beta != 0 and view.c is not None:
        value = value + _wrap(widen(view.c) * _wrap(np.array(int(beta) % 2**32)))
    if view.bias is not None:
        value = value + widen(view.bias)
    zeros = np.zeros((view.m, view.n))
    return GroupSum(_wrap(value), zeros, zeros, True)


def group_sum(problem: GroupedGemmProblem, view: GroupView) -> GroupSum:
    """One group's exact sum, before activation and rounding."""
    compute = compute_dtype(problem)
    alpha, beta = float(problem.alpha), product_beta(problem)
    with np.errstate(all="ignore"):
        if problem.quantisation is not None:
            return quantised_sum(problem, view)
        if compute == torch.int8:
            return _integer_sum(view, alpha, beta)
        return _float_sum(view, alpha, beta, compute == torch.float64)


# --- quantised operands -------------------------------------------------------------------------------


class _Elements:
    """One quantised operand: elements in float64 before and after their scales, and the scales."""

    def __init__(self, stored: Any, scale: Any, zero: Any, packed: str) -> None:
        self.raw = decode(stored, packed)
        if zero is not None:
            self.raw = self.raw - to_numpy(zero).astype(np.float64)
        self.scale = np.ones((1, 1)) if scale is None else decode_scale(scale)
        self.value = self.raw * self.scale
        self.finite = _finite_part(self.raw) * _finite_part(self.scale)

    def grown(self, dtype: torch.dtype) -> Array:
        """|a^ s^a|: no smaller than the smallest normal number of a format of 8 bits, to whose exponent a tensor core
        aligns subnormal elements."""
        if dtype not in FLOAT8:
            return np.asarray(np.abs(self.finite))
        size = np.abs(_finite_part(self.raw))
        least = torch.finfo(dtype).tiny
        return np.asarray(np.where(size > 0, np.maximum(size, least), 0.0) * np.abs(_finite_part(self.scale)))


def _quantum(*arrays: Array) -> float:
    """The largest power of two that divides every finite number of the arrays; infinity if all are 0."""
    found = math.inf
    for x in arrays:
        some = x[np.isfinite(x) & (x != 0)]
        if some.size:
            fraction, exponent = np.frexp(some)
            whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
            found = min(found, float(np.ldexp((whole & -whole).astype(np.float64), exponent - 53).min()))
    return found


def _span(x: Array) -> tuple[float, float]:
    """The least and the greatest magnitude among the finite numbers that are not 0; 1 and 1 if there are none."""
    some = np.abs(x[np.isfinite(x) & (x != 0)])
    return (float(some.min()), float(some.max())) if some.size else (1.0, 1.0)


def quantised_sum(problem: GroupedGemmProblem, view: GroupView) -> GroupSum:
    """Dequantise, then multiply: an element times its scale has at most 33 bits, so nothing rounds before the sum."""
    spec = problem.spec
    alpha, beta, shape = float(problem.alpha), product_beta(problem), (view.m, view.n)
    zeros = np.zeros(shape)
    value, products, extra = zeros, zeros, QuantisedSum(zeros, zeros, zeros, zeros, zeros > 0, True, math.inf)
    if view.k and alpha != 0:
        a = _Elements(view.a, view.scale_a, None, "")
        b = _Elements(view.b, view.scale_b, view.zero_b, spec.b.packed)
        products = np.abs(a.finite) @ np.abs(b.finite)
        value = a.finite @ b.finite
        if not (np.isfinite(a.value).all() and np.isfinite(b.value).all()):
            value = value + _special_spread(a.value, b.value)
        value, extra = alpha * value, _quantised_extra(problem, a, b)
    addends = zeros
    if beta != 0 and view.c is not None:
        c = widen(view.c)
        value, addends = value + beta * c, addends + np.abs(beta * _finite_part(c))
        extra = replace(extra, quantum=min(extra.quantum, _quantum(np.array([beta])) * _quantum(c)))
    if view.bias is not None:
        bias = widen(view.bias)
        value, addends = value + bias, addends + np.abs(_finite_part(bias))
        extra = replace(extra, quantum=min(extra.quantum, _quantum(bias)))
    whole = bool(np.isfinite(value).all())
    return GroupSum(value, products, addends, whole, quantised=extra)


def _quantised_extra(problem: GroupedGemmProblem, a: _Elements, b: _Elements) -> QuantisedSum:
    spec, k = problem.spec, a.raw.shape[1]
    raw_a, raw_b = np.abs(_finite_part(a.raw)), np.abs(_finite_part(b.raw))
    raw = raw_a @ raw_b
    grown = a.grown(spec.a.dtype) @ b.grown(spec.b.dtype)
    left = np.broadcast_to(raw_a.sum(axis=1, keepdims=True), raw.shape)
    blocks = range(0, k, PROMOTION)
    squares = sum((a.finite[:, i : i + PROMOTION] @ b.finite[i : i + PROMOTION]) ** 2 for i in blocks)
    block = np.sqrt(squares / len(blocks))
    (low_a, high_a), (low_b, high_b) = _span(a.scale), _span(b.scale)
    in_range = low_a * low_b >= 2.0**-126 and high_a * high_b < 2.0**127
    quantum = _quantum(a.finite) * _quantum(b.finite)
    raw_quantum = _quantum(raw_a) * _quantum(raw_b)
    fits = (
        float(raw.max(initial=0)) < 2.0**24 * raw_quantum
        and raw_a.max(initial=0) * high_a * raw_b.max(initial=0) * high_b < 2.0**127
    )
    if spec.quantised == "float8":
        depth = k if spec.accumulate == "fast" else min(k, PROMOTION)
        grown_a, grown_b = (_grown_raw(x.raw, s.dtype) for x, s in ((a, spec.a), (b, spec.b)))
        exact = grown_a * grown_b * depth < 2.0**14 * raw_quantum
    else:
        exact = bool((round_once(b.finite, spec.a.dtype).astype(np.float64) == b.finite).all())
    reach = float((np.abs(a.finite) @ np.abs(b.finite)).max(initial=0))
    exact = exact and in_range and fits and reach < 2.0**24 * quantum and quantum >= 2.0**-126
    alpha = _quantum(np.array([float(problem.alpha)]))
    return QuantisedSum(grown, raw, left, block, _not_judged(spec, a, b), exact, quantum * alpha)


def _grown_raw(x: Array, dtype: torch.dtype) -> float:
    """max |a^|."""
    size = float(np.abs(_finite_part(x)).max(initial=0))
    return max(size, torch.finfo(dtype).tiny) if size else 0.0


def _not_judged(spec: ProblemSpec, a: _Elements, b: _Elements) -> Array:
    """The elements that are not judged: an infinite scale, a product of two scales from 2^127 on, or a weight outside
    of float16's range."""
    shape = (a.raw.shape[0], b.raw.shape[1])
    left = np.abs(np.where(np.isnan(a.scale), 0, np.broadcast_to(a.scale, a.raw.shape)))
    right = np.abs(np.where(np.isnan(b.scale), 0, np.broadcast_to(b.scale, b.raw.shape)))
    free = np.isinf(left).any(axis=1, keepdims=True) | np.isinf(right).any(axis=0, keepdims=True)
    free = np.broadcast_to(free, shape).copy()
    if left.max(initial=0) * right.max(initial=0) >= 2.0**127:
        for i in range(shape[0]):  # rare, and then exact
            free[i] |= (left[i][:, None] * right >= 2.0**127).any(axis=0)
    if spec.a.dtype is torch.float16:
        free |= (np.abs(_finite_part(b.value)) > 65504).any(axis=0)
    return free


_erfc: Any = np.frompyfunc(math.erfc, 1, 1)
_PI, _CUBE = np.longdouble("3.14159265358979323846264338327950288"), np.longdouble("0.044715")


def _gelu(x: Array) -> Array:
    """0.5 x erfc(-x / sqrt(2)): 1 + erf would cancel for negative x.

    Where x is a longdouble, what its argument loses in float64 is made up for by the derivative of erfc.
    """
    wide = x.dtype == np.longdouble
    argument = -x * (np.sqrt(np.longdouble(0.5)) if wide else math.sqrt(0.5))
    near = argument.astype(np.float64)
    tail: Array = np.asarray(_erfc(near)).astype(np.float64)
    if wide:
        lost = np.where(np.isfinite(near), argument - near, 0)
        tail = tail - lost * np.exp(-argument * argument) * (2 / np.sqrt(_PI))
    return np.asarray(0.5 * x * tail)


def tanh_exponent(x: Array) -> Array:
    """2 sqrt(2/pi) (x + 0.044715 x^3): gelu_tanh(x) = x / (1 + exp(-this))."""
    scale, cube = (np.sqrt(8 / _PI), _CUBE) if x.dtype == np.longdouble else (math.sqrt(8 / math.pi), float(_CUBE))
    return np.asarray(scale * (x + cube * x * x * x))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),  # NaN stays NaN
    "gelu": _gelu,
    "gelu_tanh": lambda x: x / (1 + np.exp(-tanh_exponent(x))),  # 0.5 * (1 + tanh(t)) = 1 / (1 + exp(-2t))
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def activate(value: Array, activation: str | None) -> Array:
    """The activation in the value's own precision; minus infinity gives NaN (but relu: 0), as in torch."""
    if activation is None:
        return value
    with np.errstate(all="ignore"):
        return np.asarray(_ACTIVATIONS[activation](value))


def blank(problem: GroupedGemmProblem) -> list[Array]:
    """The output before any group is written: zeros, or a copy of the user's `out`. One array per output."""
    listed = problem.form == "per_group"
    if problem.out is not None and not problem.zero_unowned:
        return [to_numpy(t).copy() for t in (problem.out if listed else [problem.out])]
    shapes = problem.out_shape if listed else [problem.out_shape]
    return [np.zeros(shape, numpy_dtype(problem.out_dtype)) for shape in shapes]
