"""The numbers of a case, from its value mode and its seed alone.

Each mode has a fault in mind. Whole numbers make every sum exact, so that one unit in the last place
is an error: `int` with small amplitudes, `ties` with the largest that stay exact, so that many results
fall between two numbers of the output format. `onehot` tells which element went where; `bitmask` tells
that each k was used exactly once (a lost one clears a bit, a doubled one carries). `precise` are odd
whole numbers that need the input format's last bit, so a narrower format on the way is seen at any K.
`beside` makes sums close to the middle between two numbers of the output format, which show rounding twice.
`cancel` makes every sum collapse, `rowscaled` and `pow2` spread magnitudes, `special` sprinkles NaN
and infinities, `tiny` stays near the smallest normal numbers.

Quantised operands: `int` has scales that are powers of two, so that the last bit is judged and a wrong entry of a scale
shows; `uniform` is positive, for sums in few bits; `edges` are codes at the ends of the formats (the largest,
subnormal, -0) under scales at theirs.

Indices of rows (`row_numbers`) that lie hold -1, one past the end, 2^31 - 1, 2^31, 2^32 and -2^63 among honest numbers;
all of those mean no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from multigemm.testing.case import INDICES, Case, RowNumbers, Scale, as_dtype

Array = npt.NDArray[Any]
Operand = Array | list[Array]

LAST_BIT = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


@dataclass(slots=True)
class Values:
    """The contents in float64 (int64 for int8); lists for per_group. Rows that no group owns are filled too."""

    a: Operand
    b: Operand
    c: Operand | None
    bias: Operand | None
    scale_a: Operand | None = None
    scale_b: Operand | None = None
    zero_b: Operand | None = None
    row_scale: Operand | None = None
    weights: Operand | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of operands as they are stored. `scale_a` and `scale_b` are None without a scale. `products` have the
    shape of the result, except for gates and sums of rows."""

    a: Any
    b: Any
    out: Any
    bias: Any
    products: Any
    scale_a: Any = None
    scale_b: Any = None


def shapes(case: Case) -> Shapes:
    """The operands' shapes; lists of shapes for per_group."""
    found = _element_shapes(case)
    if case.is_fused:
        found = replace(found, out=_fused_shape(case, found.products))
    if not case.quantised:
        return found
    scale_a, scale_b = _scale_shape(case, "a", found.a), _scale_shape(case, "b", found.b)
    b = found.b
    if case.b_format:
        b = [_in_bytes(each) for each in b] if isinstance(b, list) else _in_bytes(b)
    return replace(found, b=b, scale_a=scale_a, scale_b=scale_b)


def _fused_shape(case: Case, products: Any) -> Any:
    """The shape of the result: a gate halves the columns, and rows may be sums of rows."""
    if isinstance(products, list):
        return [_fused_shape(case, each) for each in products]
    *front, rows, columns = products
    columns = columns // 2 if case.gated else columns
    return (*front, rows if case.fused.rows is None else case.fused.rows, columns)


def row_scale_shape(case: Case) -> tuple[int, ...]:
    """The shape of `row_scale`: one number for each row of the products."""
    return (case.total,) if case.form == "jagged_m" else (case.groups, case.m)


def weights_shape(case: Case) -> tuple[int, int]:
    """The shape of combine's weights: one number for each term of each sum."""
    return case.fused.combine.rows, case.fused.terms


def _in_bytes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-2] // 2, shape[-1])


def _scale_shape(case: Case, side: str, shape: Any) -> Any:
    """The shape of an operand's scale, from the shape of its elements; None without a scale."""
    scale = case.scale_a if side == "a" else case.scale_b
    if scale.block is None:
        return {"": None, "tensor": (), "group": (case.groups,)}[scale.covers]
    if isinstance(shape, list):
        return [_grid_shape(case, scale, side, each) for each in shape]
    return _grid_shape(case, scale, side, shape)


def _grid_shape(case: Case, scale: Scale, side: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    assert scale.block is not None
    (per_lines, per_k), (lines, k) = scale.block, shape[-2:] if side == "a" else shape[:-3:-1]
    tall = -(-lines // per_lines) if per_lines else 1
    wide = case.groups if scale.covers == "group's row" else -(-k // per_k) if per_k else 1
    if case.form == "jagged_k" and per_k:
        wide = k // per_k + case.groups
    return (*shape[:-2], tall, wide) if side == "a" else (*shape[:-2], wide, tall)


def _element_shapes(case: Case) -> Shapes:
    m, n, k, g, t = case.m, case.n, case.k, case.groups, case.total
    if case.form == "per_group":
        dims = case.dims
        listed = [(m, n) for m, n, _ in dims]
        a, b, bias = ([(m, k) for m, _, k in dims], [(k, n) for _, n, k in dims], [(n,) for _, n, _ in dims])
        return Shapes(a, b, listed, bias, listed)
    of_bias = (g, n) if case.bias == "gn" else (t if case.form == "jagged_n" else n,)
    of_a, of_b = (index.rows if index.given else t for index in (case.fused.a_rows, case.fused.b_rows))
    shape_a, shape_b, out = {
        "jagged_m": ((of_a, k), (k, n) if case.shared else (g, k, n), (t, n)),
        "jagged_n": ((m, k) if case.shared else (g, m, k), (k, of_b), (m, t)),
        "jagged_k": ((m, of_a), (of_b, n), (g, m, n)),
    }.get(case.form, ((g, m, k), (g, k, n), (g, m, n)))
    return Shapes(shape_a, shape_b, out, of_bias, out)


FUSED_AMPLITUDE = 2
"""The amplitude of whole numbers under gates and weights: a limit of 2 or 7 then clamps some sums and not others."""


def amplitude(case: Case, rng: np.random.Generator) -> int:
    """The largest |a| and |b| for which every sum stays exact in the accumulator and finite in the output."""
    if case.is_fused:
        return FUSED_AMPLITUDE
    acc_bits = 53 if case.compute == torch.float64 else 24
    room = 2.0 ** (acc_bits - 2) / max(abs(case.alpha), 1.0)
    cap = math.isqrt(int(room / max(case.deepest, 1))) or 1
    formats = [LAST_BIT[as_dtype(d)] for d in (case.dtype, case.dtype_b or case.dtype)]
    cap = min(cap, 2 ** min(formats), 2**11 if case.compute == torch.float32 else 2**22)
    if case.result_dtype == torch.float16:
        cap = min(cap, max(1, math.isqrt(int(30000 / math.sqrt(max(case.deepest, 1))))))
    if case.mode == "ties":
        return int(cap)
    return int(rng.integers(1, cap, endpoint=True)) if rng.integers(2) else min(cap, int(rng.integers(2, 12)))


def _signed(rng: np.random.Generator, shape: tuple[int, ...], high: int) -> Array:
    """Whole numbers 1..high of either sign. Never 0, which would hide a lost element."""
    return rng.integers(1, high, shape, endpoint=True) * rng.choice((-1, 1), shape).astype(np.float64)


def _onehot(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    *front, rows, depth = shape
    found = np.zeros(shape)
    if depth:
        at = rng.integers(0, depth, (*front, rows, 1))
        np.put_along_axis(found, at, 1.0, axis=-1)
    return found


def _bitmask(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Row i holds consecutive powers of two in one window of k, so that its sum has every bit once."""
    rows, depth = shape[-2:]
    width = min(LAST_BIT[case.result_dtype], LAST_BIT[as_dtype(case.dtype)] + 9, 20)
    windows = max(1, -(-depth // width))
    window = (np.arange(rows) + int(rng.integers(windows))) % windows
    exponent = np.arange(depth)[None, :] - window[:, None] * width - width // 2
    inside = (exponent >= -(width // 2)) & (exponent < width - width // 2)
    pattern = np.where(inside, np.ldexp(1.0, np.clip(exponent, -20, 20)), 0.0)
    return np.broadcast_to(pattern, shape).copy()


def _precise(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    bits = min(LAST_BIT[as_dtype(case.dtype)], 11 if case.precision == "tf32" else 13)
    if as_dtype(case.dtype) == torch.float64:
        bits = 30
    top = 2**bits - 1
    low = 2 ** (bits - 2)
    odd: Array = rng.integers(low, top, shape) | 1
    return np.asarray(odd * rng.choice((-1.0, 1.0), shape))


def _beside(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Rows whose terms are a number of the output format, half of its last bit, and a small addend that a narrower sum
    would lose."""
    *front, rows, depth = shape
    count = math.prod(front) * rows
    found = np.zeros((count, depth))
    room = 53 if case.compute == torch.float64 else 24  # bits of an accumulator
    bits = min(LAST_BIT[case.result_dtype], LAST_BIT[as_dtype(case.dtype)], room - 4)
    most = 14 - bits if case.result_dtype == torch.float16 else 20 if room == 53 else room - bits - 2
    gap = rng.integers(1, room - bits - 2 if room == 53 else most, count, endpoint=True)
    half = np.full(count, most) if room == 53 else gap  # whole numbers where float32 sums have to be exact
    nudge = np.maximum(half - gap, -14)
    near = np.ldexp(rng.integers(2 ** (bits - 1), 2**bits, count) * 2.0, half)
    parts = near, np.ldexp(1.0, half), np.ldexp(rng.choice((-1.0, 1.0), count), nudge)
    at = np.argsort(rng.random((count, depth)), axis=1)
    for column, value in zip(at.T, parts, strict=False):
        found[np.arange(count), column] = value
    found *= rng.choice((-1.0, 1.0), (count, 1))
    return found.reshape(shape)


def _specials(rng: np.random.Generator, values: Array) -> Array:
    """Replaces a few entries by NaN, infinities or zero, so few that most of the result stays finite."""
    if values.size == 0:
        return values
    count = int(rng.integers(1, max(2, values.size // 100), endpoint=True))
    at = rng.integers(0, values.size, count)
    values.flat[at] = rng.choice((np.nan, np.inf, -np.inf, 0.0, -0.0, np.inf), count)
    return values


def _matrix(case: Case, rng: np.random.Generator, shape: tuple[int, ...], left: bool, high: int) -> Array:
    mode = case.mode
    if mode in ("int", "ties"):
        return _signed(rng, shape, high)
    if mode == "onehot":
        code = 2 ** min(LAST_BIT[as_dtype(case.dtype_b or case.dtype)], LAST_BIT[case.result_dtype], 20)
        return _onehot(rng, shape) if left else _signed(rng, shape, code - 1)
    if mode == "beside":
        return _beside(case, rng, shape) if left else np.ones(shape)
    if mode == "bitmask":
        return _bitmask(case, rng, shape) if left else np.ones(shape)
    if mode == "precise":
        return _precise(case, rng, shape) if left else rng.choice((-1.0, 1.0), shape)
    if mode == "uniform":
        return rng.random(shape)
    if mode == "pow2":
        return np.asarray(np.ldexp(rng.choice((-1.0, 1.0), shape), rng.integers(-6, 7, shape)))
    values = rng.standard_normal(shape)
    if mode == "special":
        return _specials(rng, values)
    if mode == "rowscaled":
        scale: Array = np.ldexp(
            1.0, rng.integers(-5, 6, (*shape[:-2], shape[-2], 1) if left else (*shape[:-2], 1, shape[-1]))
        )
        return values * scale
    if mode == "tiny":
        return values * (2.0**-14 if "float16" in (case.dtype, case.dtype_b) else 2.0**-50)
    return values


def _cancel(a: Array, b: Array) -> None:
    """The second half of k repeats the first with A negated; rounding A and B keeps the pairs equal."""
    half = a.shape[-1] // 2
    a[..., half : 2 * half] = -a[..., :half]
    b[..., half : 2 * half, :] = b[..., :half, :]


def _addend(case: Case, rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """C or a bias: whole numbers if the sums must stay whole."""
    if case.compute == torch.int8:
        return rng.integers(-(2**31), 2**31, shape) if rng.integers(2) else rng.integers(-99, 100, shape)
    if case.mode in ("normal", "uniform", "cancel", "pow2", "rowscaled", "special", "tiny", "bitmask"):
        return rng.standard_normal(shape) * (2.0**-14 if case.mode == "tiny" else 1.0)
    return _signed(rng, shape, FUSED_AMPLITUDE if case.is_fused else min(2 ** LAST_BIT[dtype], 2000) - 1)


CODES = {
    "int8": (-128, 127, -1, 0, 1),
    "float8_e4m3fn": (0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E, 0x38, 0xB8),
    "float8_e5m2": (0x00, 0x80, 0x01, 0x81, 0x03, 0x04, 0x7B, 0x3C, 0xBC),
}
"""Codes at the edges of formats: zeros, the smallest, the largest subnormal, the smallest normal, the largest, one."""


def _quantised_elements(case: Case, rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Numbers of a format, or bytes of a packed one, as stored."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.float64)
    if case.mode == "edges" and dtype in CODES:
        codes = rng.choice(CODES[dtype], shape)
        return codes if dtype == "int8" else codes.astype(np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    if case.mode == "normal":
        return rng.integers(-128, 128, shape) if dtype == "int8" else rng.standard_normal(shape)
    return rng.integers(1 if case.mode == "uniform" else -7, 8, shape).astype(np.float64)


def _scale_values(case: Case, rng: np.random.Generator, shape: tuple[int, ...], side: str) -> Array:
    """Positive scales; in the mode `edges` those of a are tiny, and those of b are as large."""
    powers = rng.integers(-3, 4, shape)
    if case.mode == "edges":
        ends = (-127, -126, -120) if side == "a" else (-127, -20, 0, 20) if case.weights else (100, 110, 119)
        powers = rng.choice(ends, shape)
    found: Array = np.ldexp(1.0, powers)
    if case.mode == "normal" and (case.scale_a if side == "a" else case.scale_b).dtype != "float8_e8m0fnu":
        found = found * (0.5 + rng.random(shape))
    return np.asarray(found)


def _scales(case: Case, rng: np.random.Generator, shape: Shapes) -> dict[str, Operand]:
    """The contents of scales and zero points, by the names of their keywords."""

    def each(shapes: Any, draw: Callable[[tuple[int, ...]], Array]) -> Operand:
        return [draw(one) for one in shapes] if isinstance(shapes, list) else draw(shapes)

    found = dict[str, Operand]()
    if shape.scale_a is not None:
        found["scale_a"] = each(shape.scale_a, lambda one: _scale_values(case, rng, one, "a"))
    if shape.scale_b is not None:
        found["scale_b"] = each(shape.scale_b, lambda one: _scale_values(case, rng, one, "b"))
    if case.zero_b:
        low = -8 if case.zero_b == "int8" else 0
        found["zero_b"] = each(shape.scale_b, lambda one: np.asarray(rng.integers(low, low + 16, one), np.float64))
    return found


LIES = (-1, 2**31 - 1, 2**31, 2**32, -(2**63), 2**63 - 1)
"""Numbers that are no valid row, besides the first two past the end."""


def row_numbers(case: Case) -> dict[str, Array]:
    """The contents of a case's row indices, by keyword."""
    tokens, fused = case.total, case.fused
    shapes_and_extents = {
        "a_rows": ((tokens,), fused.a_rows.rows), "b_rows": ((tokens,), fused.b_rows.rows),
        "combine": (weights_shape(case), tokens), "out_rows": ((tokens,), fused.out_rows.rows),
    }  # fmt: skip
    return {
        name: _numbers_of_rows(getattr(fused, name), *shapes_and_extents[name], np.random.default_rng((case.seed, at)))
        for at, name in enumerate(INDICES)
        if getattr(fused, name).given
    }


def _numbers_of_rows(index: RowNumbers, shape: tuple[int, ...], extent: int, rng: np.random.Generator) -> Array:
    if index.how == "every":
        return np.arange(shape[0])
    found = rng.integers(0, max(extent, 1), shape)
    if (index.how == "lies" or not extent) and found.size:
        least = np.iinfo(index.dtype)
        wrong = [x for x in (*LIES, extent, extent + 1) if least.min <= x <= least.max]
        at = rng.integers(0, found.size, 1 + found.size // 3)
        found.flat[at] = rng.choice(wrong, at.size)
        if not extent:
            found[...] = rng.choice(wrong, shape)
    return found


def _factors_of_rows(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Weights of rows: small whole numbers including 0, or ordinary ones, sometimes NaN or an infinity."""
    if case.mode == "int":
        return rng.integers(-2, 3, shape).astype(np.float64)
    found = rng.standard_normal(shape)
    return _specials(rng, found) if case.mode == "special" and rng.integers(2) else found


def _fused_values(case: Case) -> dict[str, Operand]:
    """The contents of row_scale and of weights, which are NaN where an index means no row."""
    rng, found = np.random.default_rng((case.seed, len(INDICES))), dict[str, Operand]()
    if case.fused.row_scale:
        found["row_scale"] = _factors_of_rows(case, rng, row_scale_shape(case))
    if case.fused.weights:
        weights = _factors_of_rows(case, rng, weights_shape(case))
        if case.mode == "special" or rng.integers(3) == 0:
            weights[rng.random(weights.shape) < 0.3] = 0
        numbers = row_numbers(case)["combine"]
        weights[(numbers < 0) | (numbers >= case.total)] = np.nan
        found["weights"] = weights
    return found


def _pair(
    case: Case, rng: np.random.Generator, a: tuple[int, ...], b: tuple[int, ...], high: int
) -> tuple[Array, Array]:
    if case.compute == torch.int8:
        low, top = (-128, 127) if rng.integers(2) else (-9, 9)
        return rng.integers(low, top, a, endpoint=True), rng.integers(low, top, b, endpoint=True)
    if case.quantised:
        y_dtype = case.dtype_b or case.dtype
        return _quantised_elements(case, rng, a, case.dtype), _quantised_elements(case, rng, b, y_dtype)
    x, y = _matrix(case, rng, a, True, high), _matrix(case, rng, b, False, high)
    if case.mode == "cancel" and case.form != "jagged_k":
        _cancel(x, y)
    return x, y


def draw_values(case: Case) -> Values:
    """The logical contents of a, b, c and bias, and of scales and zero points."""
    rng = np.random.default_rng(case.seed)
    shape = shapes(case)
    whole = case.mode in ("int", "ties") and case.compute != torch.int8 and not case.quantised
    high = amplitude(case, rng) if whole else 1

    def addend(shapes: Any, dtype: str) -> Operand | None:
        if not dtype:
            return None
        if isinstance(shapes, list):
            return [_addend(case, rng, each, as_dtype(dtype)) for each in shapes]
        return _addend(case, rng, shapes, as_dtype(dtype))

    a: Operand
    b: Operand
    if case.form == "per_group":
        pairs = [_pair(case, rng, x, y, high) for x, y in zip(shape.a, shape.b, strict=True)]
        a, b = [x for x, _ in pairs], [y for _, y in pairs]
    else:
        a, b = _pair(case, rng, shape.a, shape.b, high)
    c, bias = addend(shape.out, case.c_dtype), addend(shape.bias, case.bias_dtype)
    return Values(a, b, c, bias, **_scales(case, rng, shape), **_fused_values(case))
