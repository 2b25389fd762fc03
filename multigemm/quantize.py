"""Quantise operands, and turn quantised ones back into float32, on any device.

    qa = quantize(x, "e4m3", "1x128")
    qb = quantize(w, "e4m3", "128x128", side="b")
    y = multigemm.grouped_gemm(qa.data, qb.data, sizes=sizes, scale_a=qa.scale, scale_b=qb.scale)

A scale is the largest finite magnitude of its block divided by the largest number of the format, in float32, and at
least 2^-126; that of a block of zeros is 1. In e8m0 it is rounded up to a power of two, so that nothing saturates. Data
are the float32 quotients x / scale, rounded to nearest, ties to even, and clamped. NaN and infinities become NaN; a
format without NaN gives their block a scale that is NaN. Data are contiguous along K, as kernels read them fastest.
A block whose largest magnitude is below 2^-126 times that of the format has the scale 2^-126. It uses fewer steps of
the format then, and elements of at most half a step times 2^-126 become 0.

Torch operations do it. On a GPU with Triton one kernel quantises to float8 by blocks and rows that no group cuts
(quantize_kernels.py): the same bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem import scales
from multigemm.problem.arrays import OperandReader, adopt, dtype_name, dtype_of, give_back, is_list
from multigemm.problem.epilogue import one_of
from multigemm.problem.grouping import Grouping, make_grouping
from multigemm.problem.spec import BYTE_FORMATS, HALVES, Form

Format = Literal["e4m3", "e5m2", "int8", "int4", "uint4", "e2m1"]
INTEGERS = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}
"""The least and the greatest code of the formats that take zero points."""
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "uint4": 15.0, "e2m1": 6.0}
HOLDS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float8_e4m3fn: ("e4m3",), torch.float8_e5m2: ("e5m2",), torch.int8: ("int8", *BYTE_FORMATS),
    torch.uint8: BYTE_FORMATS, scales.FLOAT4: ("e2m1",),
}  # fmt: skip
"""The formats that data of a dtype may hold; the first one is meant where none is named."""
E8M0 = torch.float8_e8m0fnu
GRANULARITIES = ("tensor", "group", "row", "1x32", "1x64", "1x128", "128x128")
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)
SMALLEST = 2.0**-126
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN8 = 0x7F
"""A NaN in both formats of 8 bits."""


class Quantized(NamedTuple):
    """An operand as a grouped GEMM takes it.

    Args:
        data: the elements, or bytes that hold two of them along K.
        scale: what an element is multiplied by.
        zero: what is subtracted before, for integers with zero points.
    """

    data: Any
    scale: Any
    zero: Any = None


# --- formats ------------------------------------------------------------------------------------------


def decode(x: Tensor, packed: str = "") -> Tensor:
    """Elements as float32, before any scale. A `packed` byte holds two elements along the second last dimension."""
    if not packed:
        return x.to(torch.float32)
    codes = x.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-2)  # [.., K/2, 2, N]
    nibbles = pairs.reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1])
    if packed == "e2m1":
        values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32, device=x.device)
        return values[nibbles.long()]
    whole = nibbles.to(torch.float32)
    return whole - 16 * (whole > 7) if packed == "int4" else whole


def decode_scale(x: Tensor) -> Tensor:
    """Scales as float32. In e8m0, code 0 is 2^-127 and code 255 is NaN, which shifting the bits alone would get
    wrong."""
    if x.dtype is not torch.float8_e8m0fnu:
        return x.to(torch.float32)
    codes = x.view(torch.uint8).to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, torch.where(codes == 255, 0x7FC00000, codes << 23))
    return bits.view(torch.float32)


def _encode(quotients: Tensor, format: str, zero: Tensor | None) -> Tensor:
    """Converts elements to the format: to its dtype, or to four-bit codes in bytes."""
    top = LARGEST[format]
    if format in FLOATS:
        bits = quotients.clamp(-top, top).to(FLOATS[format]).view(torch.uint8)
        return torch.where(quotients.isnan(), NAN8, bits).view(FLOATS[format])
    quotients = quotients.nan_to_num(nan=0.0)
    if format == "e2m1":
        m = quotients.abs()
        above: Sequence[Tensor] = (m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5)  # ties to even
        code = torch.stack(tuple(above)).sum(0, dtype=torch.uint8)
        return code | (torch.signbit(quotients).to(torch.uint8) << 3)
    whole = quotients.round()
    whole = whole.clamp(-top, top) if zero is None else (whole + zero).clamp(*INTEGERS[format])
    return whole.to(torch.int8) if format == "int8" else whole.to(torch.int8).view(torch.uint8) & 15


# --- where an entry lies ------------------------------------------------------------------------------


def _offsets(cut: Grouping, device: torch.device) -> Tensor:
    """Offsets [G+1] on the operand's device, without reading sizes back."""
    if cut.live is None:
        return torch.from_numpy(cut.read()).to(device)
    live = cut.live.to(torch.int64)
    if cut.kind == "offsets":
        return live
    return torch.cat([live.new_zeros(1), live.cumsum(0) if cut.kind == "sizes" else live])


def _group_of(offsets: Tensor, extent: int) -> Tensor:
    """The group of each position along the jagged direction; G where no group owns it."""
    at = torch.arange(extent, device=offsets.device)
    group = torch.searchsorted(offsets[1:].contiguous(), at, right=True)
    return torch.where(at < offsets[0], len(offsets) - 1, group)


def _block_of(offsets: Tensor, extent: int, block: int) -> Tensor:
    """The grid entry of each position of a jagged K: offsets[g] // block + g + j. Positions that no group owns get the
    entry past the last."""
    groups, at = len(offsets) - 1, torch.arange(extent, device=offsets.device)
    group = _group_of(offsets, extent)
    start = offsets[group.clamp(max=max(groups - 1, 0))]
    return torch.where(group < groups, start // block + group + (at - start) // block, extent // block + groups)


class _Entries(NamedTuple):
    """Which grid entry each line and each column (of K) has, and how many entries count. One more entry, for positions
    that no group owns, is dropped. `merged`: all groups share the entries. `vector`: one entry per group."""

    row: Tensor
    rows: int
    column: Tensor
    columns: int
    merged: bool = False
    vector: bool = False


def _entries(x: Tensor, scale: str, jagged: str, offsets: Tensor | None) -> _Entries:
    """The entries for x [groups or 1, lines, K]; `jagged` names the axis of it that offsets cut: "rows", "k" or ""."""
    lines, k = x.shape[1:]
    zeros, each = torch.zeros(max(lines, k), dtype=torch.int64, device=x.device), torch.arange(lines, device=x.device)
    if scale == "tensor":
        return _Entries(zeros[:lines], 1, zeros[:k], 1, merged=True)
    groups = 0 if offsets is None else len(offsets) - 1
    if scale == "group":
        if jagged == "rows" and offsets is not None:
            return _Entries(_group_of(offsets, lines), groups, zeros[:k], 1, vector=True)
        if jagged == "k" and offsets is not None:
            return _Entries(zeros[:lines], 1, _group_of(offsets, k), groups, vector=True)
        return _Entries(zeros[:lines], 1, zeros[:k], 1, vector=True)
    if scale == "row":
        if jagged == "k" and offsets is not None:
            return _Entries(each, lines, _group_of(offsets, k), groups)
        return _Entries(each, lines, zeros[:k], 1)
    block = int(scale.partition("x")[2])
    if scale == "128x128":
        each, lines = each // block, -(-lines // block)
    if jagged == "k" and offsets is not None:
        return _Entries(each, lines, _block_of(offsets, k, block), k // block + groups)
    return _Entries(each, lines, torch.arange(k, device=x.device) // block, -(-k // block))


def _reduced(x: Tensor, at: _Entries, how: Literal["amax", "amin"]) -> Tensor:
    """The largest or smallest of 0 and the elements of each grid entry."""
    kept = x.new_zeros((x.shape[0], x.shape[1], at.columns + 1))
    kept.scatter_reduce_(2, at.column.expand(x.shape), x, how)
    found = x.new_zeros((x.shape[0], at.rows + 1, at.columns + 1))
    found.scatter_reduce_(1, at.row[:, None].expand(kept.shape), kept, how)
    if at.merged:
        found = torch.cat([found.new_zeros((1, *found.shape[1:])), found])
        found = found.amax(0, keepdim=True) if how == "amax" else found.amin(0, keepdim=True)
    return found


def _spread(entries: Tensor, at: _Entries) -> Tensor:
    """Broadcasts one number per grid entry to its elements."""
    return entries[:, at.row][:, :, at.column]


# --- quantise -----------------------------------------------------------------------------------------


def quantize(
    x: Any, format: Format, scale: str, *, side: Literal["a", "b"] = "a", scale_dtype: Any = torch.float32,
    zero: bool = False, offsets: Any = None, sizes: Any = None, ends: Any = None, jagged: str = "m",
) -> Quantized:  # fmt: skip
    """Quantise an operand of a grouped GEMM.

    Args:
        x: the operand, in bfloat16, float16 or float32 (float64 is rounded to float32 first).
        format: "e4m3", "e5m2", "int8", or "int4", "uint4" (with `zero`) and "e2m1", two of K in a byte. Products take
            the last four as b only.
        scale: what one number covers: "tensor", "group", "row" (of b: a column), "1x32", "1x64", "1x128" (so many of K
            in a row or column) or "128x128".
        side: which operand it is: "a" [.., rows, K] or "b" [.., K, columns].
        scale_dtype: float32, float8_e8m0fnu, or for side "b" the dtype of 16-bit activations.
        zero: of "int8", "int4" and "uint4" (which needs it): scales span the range from the least to the greatest
            element, 0 included. Zero points are int8, of "uint4" uint8.
        offsets, sizes, ends, jagged: how a packed operand is cut, as for `grouped_gemm`. A jagged K needs them for each
            `scale` but "tensor" and "row"; jagged rows for "group" only. Without them a matrix is that of one product.

    Returns:
        Data, scale and zero points, which `grouped_gemm` takes as they are. Elements that no group owns have scale 1.
        Scales are at least 2^-126: smaller elements lose steps of the format, or become 0.

    Raises:
        InvalidProblem: an argument has no meaning; the text names the value and the remedy.

    Example:
        >>> import torch
        >>> q = quantize(torch.ones(6, 256), "e4m3", "1x128")
        >>> q.data.dtype, tuple(q.scale.shape)
        (torch.float8_e4m3fn, (6, 2))
    """
    dtype = _check_words(format, scale, side, scale_dtype, zero)
    taken = adopt(x, "x")
    given = taken.tensor.detach()
    lines = _as_lines(given, side)
    axis = _jagged_axis(side, jagged, given.dim())
    if format in BYTE_FORMATS:
        _check_packing(format, axis, lines.shape[-1])
    cut = _cut(offsets, sizes, ends, jagged, given, axis, side)
    is_shared = cut is None and not (offsets is sizes is ends is None) and given.dim() == 2
    _check_coverage(scale, jagged, axis, cut is not None, is_shared)
    stack = lines if lines.dim() == 3 else lines.unsqueeze(0)
    uncut = cut is None or axis == "rows"
    if uncut and format in FLOATS and (found := _by_kernel(stack, format, scale, side, dtype)) is not None:
        return Quantized(*(give_back(_outward(t, given.dim(), side), taken.kind) for t in found))
    stack = stack.to(torch.float32)
    at = _entries(stack, scale, axis if cut is not None else "", None if cut is None else _offsets(cut, given.device))
    numbers, used, zeros = _scales(stack, at, format, dtype, zero)
    quotients = torch.where(stack.isinf(), torch.nan, stack / _spread(used, at))
    codes = _encode(quotients, format, None if zeros is None else _spread(zeros, at))
    if format in BYTE_FORMATS:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    data = _outward(codes.contiguous(), given.dim(), side)
    grids = (None if t is None else _grid(t, at, given.dim(), side) for t in (numbers, zeros))
    return Quantized(*(None if t is None else give_back(t, taken.kind) for t in (data, *grids)))


def _check_words(format: Any, scale: Any, side: Any, scale_dtype: Any, zero: Any) -> torch.dtype:
    """Checks the keywords that do not depend on the operand. Returns the dtype of the scales."""
    one_of(format, "format", tuple(LARGEST))
    one_of(scale, "scale", GRANULARITIES)
    one_of(side, "side", ("a", "b"))
    if format == "uint4" and not zero:
        raise InvalidProblem(f"format='uint4' with zero={zero!r}: its codes need zero points: pass zero=True")
    if zero and format not in INTEGERS:
        raise InvalidProblem(
            f"format={format!r} with zero={zero!r}: zero points belong to integers: leave zero out, or use 'uint4'"
        )
    dtype = dtype_of(scale_dtype, "scale_dtype")
    if side == "a" and dtype in HALVES:
        raise InvalidProblem(
            f"scale_dtype is {dtype_name(dtype)} with side='a': scales of 16 bits are for weights: use float32 or "
            "float8_e8m0fnu"
        )
    if dtype not in SCALE_DTYPES:
        raise InvalidProblem(f"scale_dtype is {dtype_name(dtype)}: use float32, float8_e8m0fnu, bfloat16 or float16")
    return dtype


def _as_lines(x: Tensor, side: str) -> Tensor:
    """Reshapes an operand to [.., lines, K]."""
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise InvalidProblem(f"x has dtype {dtype_name(x.dtype)}: quantize takes floats of 16 bits or more")
    if x.dim() not in (2, 3):
        raise InvalidProblem(f"x has shape {tuple(x.shape)}: it must be a matrix or a stack of matrices")
    return x if side == "a" else x.mT


@cache  # finding a package takes as long as a launch
def _kernels() -> Any:
    """The module of Triton kernels, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from multigemm import quantize_kernels

    return quantize_kernels


def _by_kernel(x: Tensor, format: Format, scale: str, side: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Data and scales of a stack [groups, lines, K] of floats, computed by the Triton kernel. None if the kernel
    cannot."""
    if x.device.type != "cuda" or type(x) is not Tensor or torch.compiler.is_compiling():
        return None
    if dtype not in (torch.float32, E8M0) or (kernels := _kernels()) is None or not kernels.takes(x, scale):
        return None
    with torch.cuda.device(x.device):
        return blockwise(x, format, scale, side, dtype, kernels)


def blockwise(
    x: Tensor, format: Format, scale: str, side: str, dtype: torch.dtype, kernels: Any
) -> tuple[Tensor, Tensor]:
    """Like `quantize`, by the Triton kernel: data [groups, lines, K] and scales [groups, entries, blocks]."""
    groups, lines, k = x.shape
    block = k if scale == "row" else int(scale.partition("x")[2])
    entries = -(-lines // block) if scale == "128x128" else lines
    along_k = -(-k // block)
    shape = (groups, entries, along_k) if side == "a" else (groups, along_k, entries)
    grid = torch.empty(shape, dtype=dtype, device=x.device)
    grid = grid if side == "a" else grid.mT
    whole = x if x.dtype in (*HALVES, torch.float32) else x.to(torch.float32)
    return kernels.quantised(whole, FLOATS[format], LARGEST[format], scale, dtype is E8M0, grid), grid


def _check_packing(format: str, axis: str, k: int) -> None:
    if axis != "k" and k % 2 == 0:
        return
    why = "jagged='k' cuts K, where bytes hold two" if axis == "k" else f"K = {k} is odd"
    raise InvalidProblem(f"format={format!r} packs two of K in a byte, and {why}: use a format of 8 bits")


def _check_coverage(scale: str, jagged: str, axis: str, is_cut: bool, is_shared: bool) -> None:
    """Refuses a `scale` that does not go with the cut: a jagged K without boundaries, a scale per group of a shared
    operand, 128 rows across groups."""
    if axis == "k" and not is_cut and scale not in ("tensor", "row"):
        raise InvalidProblem(f"scale={scale!r} of a jagged K: pass offsets, sizes or ends")
    if scale == "group" and is_shared:
        raise InvalidProblem("scale='group' of an operand that all groups share: use 'tensor'")
    if scale == "128x128" and axis == "rows" and is_cut:
        raise InvalidProblem(f"scale='128x128' of rows that jagged={jagged!r} cuts: use '1x128'")


def _jagged_axis(side: str, jagged: Any, dim: int) -> str:
    """Which axis of an operand [.., lines, K] a cut along `jagged` divides: "rows", "k" or "" for neither."""
    one_of(jagged, "jagged", ("m", "n", "k"))
    if dim == 3:
        return ""
    return "k" if jagged == "k" else "rows" if jagged == ("m" if side == "a" else "n") else ""


def _cut(offsets: Any, sizes: Any, ends: Any, jagged: str, x: Tensor, axis: str, side: str) -> Grouping | None:
    """The group boundaries along an axis of x; None if no group cuts that axis."""
    if not axis or (offsets is None and sizes is None and ends is None):
        return None
    along = x.shape[-1] if (axis == "k") == (side == "a") else x.shape[-2]
    return make_grouping(offsets, sizes, ends, groups=None, total=along, device=x.device, full=False, others={})


def _scales(
    x: Tensor, at: _Entries, format: str, dtype: torch.dtype, zero: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The scales in their dtype and in float32, and the zero points in bytes, one per grid entry."""
    low_code, high_code = INTEGERS[format] if zero else (0, LARGEST[format])
    top = high_code - low_code
    finite = torch.where(x.isfinite(), x, 0)
    high = _reduced(finite if zero else finite.abs(), at, "amax")
    low = _reduced(finite, at, "amin") if zero else torch.zeros_like(high)
    # of halves: the range of float32 overflows; by a tensor: to divide by a number a GPU multiplies by its reciprocal
    span = (high * 0.5 - low * 0.5) / torch.full_like(high, top * 0.5)
    number = torch.where(high == low, 1.0, span.clamp(min=SMALLEST))
    if format not in FLOATS:
        bad = _reduced((~x.isfinite()).to(torch.float32), at, "amax") > 0
        number = torch.where(bad, torch.nan, number)
    for beyond in (number[:, at.rows :], number[:, :, at.columns :]):  # what no group owns
        beyond.fill_(1)
    if dtype is torch.float8_e8m0fnu:
        bits = number.view(torch.int32)
        codes = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=255).to(torch.uint8)
        kept = codes.view(dtype)
    elif dtype is torch.float32:
        kept = number
    else:
        info = torch.finfo(dtype)
        kept = number.clamp(min=info.tiny, max=info.max).to(dtype)
    used = decode_scale(kept)
    if not zero:
        return kept, used, None
    zeros = ((-low / used).round().clamp(0, top) + low_code).nan_to_num(nan=0.0)
    for beyond in (zeros[:, at.rows :], zeros[:, :, at.columns :]):
        beyond.fill_(0)
    return kept, used, zeros.to(torch.int8 if low_code else torch.uint8)


def _outward(x: Tensor, dim: int, side: str) -> Tensor:
    """Reshapes [groups or 1, lines, K] to the shape of the given operand."""
    x = x if dim == 3 else x[0]
    return x if side == "a" else x.mT


def _grid(entries: Tensor, at: _Entries, dim: int, side: str) -> Tensor:
    """The entries that count, in the shape in which `GroupedGemmProblem` takes them."""
    kept = entries[:, : at.rows, : at.columns]
    if at.merged:
        return kept.reshape(())
    if at.vector:
        return kept.reshape(-1).contiguous()
    return _outward(kept, dim, side).contiguous()


# --- and back -----------------------------------------------------------------------------------------


def dequantize(
    q: Sequence[Any], *, side: Literal["a", "b"], format: Format | None = None, offsets: Any = None, sizes: Any = None,
    ends: Any = None, jagged: str = "m",
) -> Any:  # fmt: skip
    """The operand that quantised data, scale and zero points stand for, in float32.

    Args:
        q: what `quantize` returned, or data, a scale or None, and zero points or None, that `grouped_gemm` would take.
        side: which operand it is.
        format: what bytes hold: needed for "int4", "uint4" and "e2m1".
        offsets, sizes, ends, jagged: how the operand is cut, where scales are by group or K is jagged. Elements that no
            group owns come back unscaled.

    Returns:
        float32 of the operand's shape in elements.

    Raises:
        InvalidProblem: data, scale, zero points and format do not go together.

    Example:
        >>> import torch
        >>> x = torch.randn(6, 256)
        >>> q = quantize(x, "e4m3", "1x128")
        >>> bool((dequantize(q, side="a") - x).abs().max() < 0.2)
        True
    """
    one_of(side, "side", ("a", "b"))
    if format is not None:
        one_of(format, "format", tuple(LARGEST))
    if not is_list(q) or len(q) not in (2, 3):
        raise InvalidProblem(f"q is a {type(q).__name__}: pass what quantize returned, or (data, scale, zero or None)")
    reader = OperandReader()
    data, *given = reader.first(q[0], "data"), *q[1:]
    numbers = [
        None if x is None else reader.extra(x, f"{name}_{side}")
        for x, name in zip(given, ("scale", "zero"), strict=False)
    ]
    packed = _packed_format(data.dtype, format)
    cut = {"offsets": offsets, "sizes": sizes, "ends": ends, "jagged": jagged}
    return give_back(dequantized(Quantized(data, *numbers), side, packed, **cut), reader.kind)


def _packed_format(dtype: torch.dtype, format: str | None) -> str:
    """The format of packed bytes, "" for data that are not packed. Raises if dtype and format contradict each other."""
    held = HOLDS.get(dtype, ())
    if not held:
        raise InvalidProblem(f"data has dtype {dtype_name(dtype)}; it must be float8, int8 or bytes: quantize it")
    names = " or ".join(map(repr, held))
    if format is None and dtype is torch.uint8:
        raise InvalidProblem(f"data has dtype uint8: say what it holds with format= {names}")
    format = held[0] if format is None else format
    if format not in held:
        raise InvalidProblem(
            f"data has dtype {dtype_name(dtype)}, which can hold {names}, and format={format!r}: say what it holds"
        )
    return format if format in BYTE_FORMATS else ""


def dequantized(
    q: Quantized, side: str, packed: str, *, offsets: Any = None, sizes: Any = None, ends: Any = None, jagged: str = "m"
) -> Tensor:
    """`dequantize` on tensors alone. Without a cut it works on tensors without memory, so that a trace can hold it."""
    data, scale, zero = q
    values = decode(_lines_last(scales.as_bytes(data), side), packed)
    values = _lines_last(values, side)
    if values.dim() not in (2, 3):
        raise InvalidProblem(f"data has shape {tuple(data.shape)}: it must be a matrix or a stack of matrices")
    axis = _jagged_axis(side, jagged, values.dim())
    cut = _cut(offsets, sizes, ends, jagged, values, axis, side)
    form: Form = "batched" if cut is None else "jagged_k" if axis == "k" else "jagged_m" if side == "a" else "jagged_n"
    shape = tuple(values.shape) if cut is not None or values.dim() == 3 else (1, *values.shape)
    groups = cut.groups if cut is not None else shape[0]
    weights_in = torch.float16 if _is_half(scale) else torch.bfloat16  # the dtype of a beside scales of 16 bits
    other = torch.float8_e4m3fn if side == "a" else weights_in
    squeezed = len(shape) > values.dim()
    operands = scales.Operands(form, groups, other, data.dtype, shape, shape, squeezed, in_memory=False)
    given = scales.Given(scale) if side == "a" else scales.Given(None, scale, zero)
    if packed and side == "a":
        _check_packing(packed, axis, values.shape[-1])
    found = scales.read(lambda x, _: x, operands, given, packed)
    scale_read, zero_read = (found.a, None) if side == "a" else (found.b, found.zero)
    if side == "a":
        scales.check_zero("zero_a", zero, scale, data.dtype, packed)
        zero_read = scales.read_zero(lambda x, _: x, operands, zero, "zero_a", scale_read)
    where = None if cut is None else _offsets(cut, values.device)
    for read in (zero_read, scale_read):
        if read is None:
            continue
        spread = _of_elements(read, operands, side, axis, where)
        spread = spread if spread.dim() == values.dim() else spread[0]
        values = values - spread.nan_to_num(nan=0.0) if read is zero_read else values * spread.to(torch.float32)
    return values


def _lines_last(x: Tensor, side: str) -> Tensor:
    """Bytes of a with K where `decode` unpacks it, as b has it; and back."""
    return x.mT if side == "a" and x.dim() > 1 else x


def _is_half(x: Tensor | None) -> bool:
    return x is not None and x.dtype is torch.float16


def _of_elements(read: scales.Scale, operands: scales.Operands, side: str, axis: str, offsets: Tensor | None) -> Tensor:
    """A scale that broadcasts against the operand, or one number per element. Elements that no group owns get 1."""
    assert isinstance(read.grid, Tensor)
    grid = decode_scale(read.grid) if side == "a" else decode_scale(read.grid).mT  # [groups or 1, lines, K]
    shape = operands.a_shape if side == "a" else operands.b_shape
    lines, k = (shape[-2], shape[-1]) if side == "a" else (shape[-1], shape[-2])
    each = torch.arange(lines, device=grid.device)
    if read.spec.rows:
        grid = grid.index_select(1, each // read.spec.rows)
    if read.spec.k and axis == "k" and offsets is not None:
        grid = torch.cat([grid, torch.ones_like(grid[..., :1])], dim=2)  # the entry of what no group owns
        grid = grid.index_select(2, _block_of(offsets, k, read.spec.k))
    elif read.spec.k:
        grid = grid.index_select(2, torch.arange(k, device=grid.device) // read.spec.k)
    if read.spec.by_group and offsets is not None:
        grid = torch.cat([grid, torch.ones_like(grid[:1])])
        if axis == "k":
            grid = grid.index_select(0, _group_of(offsets, k))[:, :, 0].t().unsqueeze(0)
        else:
            group = _group_of(offsets, lines)
            row = each if grid.shape[1] > 1 else torch.zeros_like(each)
            grid = grid[group, row].unsqueeze(0)
    return grid if side == "a" else grid.mT


def turned(scale: Tensor) -> Tensor:
    """A grid with its last two axes exchanged. Numbers and vectors are returned as they are."""
    return scale.mT if scale.dim() > 1 else scale
