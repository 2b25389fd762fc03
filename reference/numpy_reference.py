"""The definition of the answer: a loop over groups in NumPy, written to be read, not to be fast.

Integers are exact. Floats of up to 32 bits are summed in float64; float64 in longdouble (64 bits
of significand on x86-64, 113 on aarch64), so the reference is better than what it judges. Where a
NaN or an infinity takes part, its spread is derived from masks and never from what a BLAS
happened to do. The epilogue follows, in the same precision, and then one rounding to the output's dtype.

`GroupSum` keeps, beside the value, the two sums of magnitudes that the error bound needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from multigemm.problem.no_dynamo import no_dynamo
from multigemm.problem.problem import GroupedGemmProblem, GroupView, checked
from multigemm.reference.dtypes import Array, numpy_dtype, round_once, to_numpy, widen


@dataclass(frozen=True, slots=True)
class GroupSum:
    """One group before its activation (or several, flat): `value` = alpha*A@B + beta*C + bias, all [m, n].

    `products` = |A|@|B| and `addends` = |beta*C| + |bias| over the finite entries; `integral` says
    that A, B, C, bias, alpha and beta hold whole numbers only; `entry` is the largest |a| or |b|.
    """

    value: Array
    products: Array
    addends: Array
    integral: bool = False
    entry: float = 0.0


def compute_dtype(problem: GroupedGemmProblem) -> torch.dtype:
    """The dtype that products are formed in."""
    return torch.promote_types(problem.spec.a.dtype, problem.spec.b.dtype)


def _finite_part(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _special_spread(a: Array, b: Array) -> Array:
    """[m, n] of 0, NaN, inf, -inf: what the special entries alone make of each sum."""

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
    """A@B of finite entries; longdouble only where float64 is asked for and its own sum would not be exact."""
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
    """One group's exact sum, before its activation and rounding."""
    compute = compute_dtype(problem)
    alpha, beta = float(problem.alpha), float(problem.beta)
    with np.errstate(all="ignore"):
        if compute == torch.int8:
            return _integer_sum(view, alpha, beta)
        return _float_sum(view, alpha, beta, compute == torch.float64)


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


def _gelu_tanh(x: Array) -> Array:
    # 0.5 * (1 + tanh(t)) = 1 / (1 + exp(-2t)), without cancellation.
    return np.asarray(x / (1 + np.exp(-tanh_exponent(x))))


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)  # NaN stays NaN


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}


def activate(value: Array, activation: str | None) -> Array:
    """The activation in the value's own precision; minus infinity gives NaN (but relu: 0), as in torch."""
    if activation is None:
        return value
    with np.errstate(all="ignore"):
        return _ACTIVATIONS[activation](value)


def blank(problem: GroupedGemmProblem) -> list[Array]:
    """The output before any group is written: zeros, or a copy of the user's `out`. One array per output."""
    listed = problem.form == "per_group"
    if problem.out is not None and not problem.zero_unowned:
        return [to_numpy(t).copy() for t in (problem.out if listed else [problem.out])]
    shapes = problem.out_shape if listed else [problem.out_shape]
    return [np.zeros(shape, numpy_dtype(problem.out_dtype)) for shape in shapes]


def place(problem: GroupedGemmProblem, blocks: list[Array], view: GroupView) -> tuple[Array, Any]:
    """The output array that holds a group, and the index of the group's elements in it."""
    if problem.form == "per_group":
        return blocks[view.index], ...
    return blocks[0], view.where


@no_dynamo
def expected(problem: GroupedGemmProblem) -> Any:
    """The answer in the output's dtype: one array, or a list of them for a list problem.

    Elements that no group owns are 0, or what the user's `out` holds now. For `c is out` call this
    before the problem runs.
    """
    blocks = blank(checked(problem))
    for view in problem.groups():
        value = activate(group_sum(problem, view).value, problem.activation)
        array, index = place(problem, blocks, view)
        array[index] = round_once(value, problem.out_dtype)
    if problem.form == "per_group":
        return blocks
    return blocks[0][0] if problem.squeezed else blocks[0]
