"""The definition of `multigemm.quantize` in NumPy, as a loop over blocks: to be read, not to be fast. The torch
operations and the kernel of `multigemm.quantize` give the same bits.

What stored numbers mean is in `multigemm.reference.dtypes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from multigemm.reference.dtypes import Array

LARGEST = {"e4m3": 448, "e5m2": 57344, "int8": 127, "int4": 7, "uint4": 15, "e2m1": 6}
INTEGERS = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}
"""The least and the greatest code of the formats that take zero points."""
FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
SMALLEST = np.float32(2.0**-126)
NAN8 = 0x7F


class Quantized(NamedTuple):
    """Data (packed ones two of K in a byte), scales and zero points."""

    data: Array
    scale: Array
    zero: Array | None = None


def quantize(
    x: Array, format: str, scale: str, *, side: str = "a", scale_dtype: Any = np.float32,
    zero: bool = False, offsets: Sequence[int] | None = None, axis: str = "",
) -> Quantized:  # fmt: skip
    """One operand [.., lines, K] (side "b": [.., K, columns]), whose `axis` "rows" or "k" may be cut by `offsets`."""
    codes_of = INTEGERS[format] if zero else None
    given = x.astype(np.float32)
    given = given if side == "a" else np.swapaxes(given, -1, -2)
    stack = np.ascontiguousarray(given if given.ndim == 3 else given[None])
    shape, entry = _grid(stack.shape, given.ndim, scale, offsets, axis)
    numbers, zeros = np.ones(shape, np.float32), np.zeros(shape, np.uint8 if format == "uint4" else np.int8)
    codes = _encoded(stack, format, np.float32(1), 0, codes_of)  # of what no group owns
    values, filled = stack.ravel(), codes.reshape(-1)
    order = np.argsort(entry, axis=None, kind="stable")
    ends = np.searchsorted(entry.ravel()[order], np.arange(numbers.size + 1))
    for e, (start, end) in enumerate(pairwise(ends)):
        block = order[start:end]
        number, point = _scale_of(values[block], format, scale_dtype, codes_of)
        numbers.flat[e], zeros.flat[e] = number, point
        filled[block] = _encoded(values[block], format, number, point, codes_of)
    if format in ("int4", "uint4", "e2m1"):
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    data = codes.view({**FLOATS, "e2m1": np.uint8, "int8": np.int8}.get(format, np.uint8))
    data = data if given.ndim == 3 else data[0]
    turned = side == "b" and numbers.ndim > 1
    grids = [np.swapaxes(g, -1, -2) if turned else g for g in (numbers, zeros)]
    kept = _stored(grids[0], scale_dtype)
    return Quantized(np.swapaxes(data, -1, -2) if side == "b" else data, kept, grids[1] if zero else None)


def _grid(
    shape: tuple[int, ...], ndim: int, scale: str, offsets: Sequence[int] | None, axis: str
) -> tuple[tuple[int, ...], Array]:
    """The shape of a grid as [.., lines, K], and for each element of [groups, lines, K] the number of its entry in the
    flattened grid; -1 for what no group owns."""
    count, lines, k = shape
    stack, line, at = np.ogrid[:count, :lines, :k]
    if scale == "tensor":
        return (), np.zeros(shape, int)
    cut = np.asarray([] if offsets is None else offsets)
    along = line if axis == "rows" else at
    group = np.searchsorted(cut, along, side="right") - 1
    owned = (group >= 0) & (group < len(cut) - 1)
    if scale == "group":
        numbers = np.where(owned, group, -1) if len(cut) else stack
        return (len(cut) - 1 if len(cut) else count,), np.broadcast_to(numbers, shape)
    tall = 128 if scale == "128x128" else 1
    wide = max(k, 1) if scale == "row" else int(scale.partition("x")[2])
    j, entries = at // wide, -(-k // wide) if scale != "row" else 1
    if axis == "k" and len(cut):  # blocks begin with their group
        start = cut[group]
        j = group if scale == "row" else start // wide + group + (at - start) // wide
        j, entries = np.where(owned, j, -1), len(cut) - 1 + (0 if scale == "row" else k // wide)
    rows = -(-lines // tall)
    numbers = np.where(j < 0, -1, (stack * rows + line // tall) * entries + j)
    return (*(() if ndim == 2 else (count,)), rows, entries), np.broadcast_to(numbers, shape)


def _stored(numbers: Array, scale_dtype: Any) -> Array:
    """Scales in their dtype, to which they were rounded already."""
    if np.dtype(scale_dtype) != np.dtype(ml_dtypes.float8_e8m0fnu):
        return numbers.astype(scale_dtype)
    codes = np.where(np.isnan(numbers), 255, np.frexp(np.where(np.isnan(numbers), 1, numbers))[1] + 126)
    return codes.astype(np.uint8).view(scale_dtype)


def _scale_of(x: Array, format: str, scale_dtype: Any, codes: tuple[int, int] | None) -> tuple[np.float32, int]:
    """The scale of one block, rounded to its dtype, and its zero point where `codes` has the range of codes."""
    finite = x[np.isfinite(x)]
    high, low, least, steps = np.float32(np.abs(finite).max(initial=0)), np.float32(0), 0, LARGEST[format]
    if codes is not None:
        high, low = np.float32(finite.max(initial=0)), np.float32(finite.min(initial=0))
        least, steps = codes[0], codes[1] - codes[0]
    number = np.float32(1)
    if high != low:
        half = np.float32(0.5)
        number = max((high * half - low * half) / np.float32(steps * 0.5), SMALLEST)
    if format not in ("e4m3", "e5m2") and finite.size < x.size:
        return np.float32(np.nan), 0
    number = _rounded_scale(np.float32(number), np.dtype(scale_dtype))
    return number, 0 if codes is None else least + int(np.clip(np.rint(-low / number), 0, steps))


def _rounded_scale(number: np.float32, dtype: np.dtype[Any]) -> np.float32:
    if dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        fraction, exponent = np.frexp(number)
        return np.float32(np.ldexp(1.0, int(exponent) - (fraction == 0.5)))  # up to a power of two
    if dtype == np.float32:
        return number
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return np.float32(np.clip(number, np.float32(info.tiny), np.float32(info.max)).astype(dtype))


def _encoded(x: Array, format: str, number: np.float32, zero: int, codes: tuple[int, int] | None) -> Array:
    """The codes of one block."""
    top = np.float32(LARGEST[format])
    with np.errstate(invalid="ignore", over="ignore"):
        quotients = np.where(np.isinf(x), np.float32(np.nan), x / number).astype(np.float32)
        if format in ("e4m3", "e5m2"):
            bits = np.clip(quotients, -top, top).astype(FLOATS[format]).view(np.uint8)
            return np.where(np.isnan(quotients), np.uint8(NAN8), bits)
    quotients = np.where(np.isnan(quotients), np.float32(0), quotients)
    if format == "e2m1":
        return np.clip(quotients, -top, top).astype(FLOATS["e2m1"]).view(np.uint8)
    whole = np.rint(quotients).astype(np.float64)
    whole = np.clip(whole, -top, top) if codes is None else np.clip(whole + zero, *codes)
    found = whole.astype(np.int8).view(np.uint8)
    return found if format == "int8" else found & 15
