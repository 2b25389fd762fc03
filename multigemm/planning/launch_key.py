"""The keys of the launch cache: the key of a call, and the key of its class, which leaves out token counts and sizes.

A key holds everything that validation, choice and binding depend on: layouts, keywords, contents of sizes on the host,
the stream and the thread. A call has no key if no entry could serve it: freed memory, a wanted gradient or tangent, a
mode, a capture, a tensor subclass, several cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import countOf, sub
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from multigemm.cuda.device import STAGED_BYTES
from multigemm.problem.arrays import LOWEST
from multigemm.problem.overlap import same_view
from multigemm.problem.spec import half_octave
from multigemm.settings import settings
from multigemm.torch_internals import (
    any_requires_grad,
    current_raw_stream,
    dispatch_modes,
    forward_mode,
    grad_enabled,
    is_capturing,
)

GPU_BITS, CPU_BITS = 255, 15
"""Masks of the low bits of an address that binding may depend on: lines of the cache, boxes of the copy engine."""
COUNTED = 1 << 30
"""From this many rows or elements on, the number of rows may decide how a kernel or an offset counts."""
PLAIN = frozenset((Tensor, Parameter))
_INDEX_TYPES = frozenset((np.dtype(np.int32).char, np.dtype(np.int64).char))
HOST_SEQUENCES = frozenset((list, tuple, range))
_INDEX_DTYPES = (torch.int32, torch.int64)


Call = tuple[Any, ...]
"""The tensors of a call of the front door: jagged, a, b, kind, cut, valid_rows, c, bias, out; absent ones are None, and
`kind` names the keyword that holds `cut`. Quantised operands have scale_a, scale_b and zero_b behind them; fused
problems have these, which may be None, and then `FUSED_OPERANDS`. A plain tuple, since making one with names takes ten
times as long."""
PLAIN_LENGTH, QUANTISED_LENGTH = 9, 12
"""Of a call whose operands are not quantised, and of one that is not fused."""
NO_SCALES = (None, None, None)


def one_cut(offsets: Any, sizes: Any, ends: Any) -> tuple[str, Any, bool]:
    """The keyword that cuts the groups, its value, and whether another such keyword was given as well."""
    if offsets is not None:
        return "offsets", offsets, sizes is not None or ends is not None
    if sizes is not None:
        return "sizes", sizes, ends is not None
    return "ends", ends, False


Key = tuple[Any, ...]
_FUSED_NUMBERS = ("glu_layout", "glu_alpha", "glu_beta", "glu_limit", "rows")


def fused_call(given: Mapping[str, Any]) -> tuple[tuple[Any, ...], Key] | None:
    """The tensors of the fused keywords, in the order of a call after the scales, and their part of the key besides
    layouts. None if no entry may serve the call."""
    found, index, weights, sums = given.get, None, None, ""
    combine, out_rows = found("combine"), found("out_rows")
    if combine is not None:
        if out_rows is not None or type(combine) is not tuple or len(combine) != 2:
            return None
        (index, weights), sums = combine, "combine"
    elif out_rows is not None:
        index, sums = out_rows, "out_rows"
    tensors = (found("a_rows"), found("b_rows"), found("preact_out"), found("row_scale"), index, weights)
    numbers = tuple([(x, type(x)) for x in map(found, _FUSED_NUMBERS)])
    return (*NO_SCALES, *tensors), (sums, *numbers)


INDEX, KIND, GROUPS = 8, 9, 10
"""Where in a key the device, the keyword that cuts the groups, and the groups stand; before them stand the layouts of a
and of b, shape and strides first."""


def key_of(call: Call, options: Key) -> Key | None:
    """The key of a call; None for a call that no entry may serve."""
    scales = call[PLAIN_LENGTH:]
    _, a, b, kind, cut, valid_rows, c, bias, out = call[:PLAIN_LENGTH] if scales else call
    try:
        if type(a) not in PLAIN or type(b) not in PLAIN:
            return None
        index, a_at, b_at, stream, phase = a.get_device(), a.data_ptr(), b.data_ptr(), 0, CPU_BITS
        if a_at < LOWEST or b_at < LOWEST or b.get_device() != index:
            return None
        if index >= 0:
            if not a.is_cuda or is_capturing():
                return None
            phase, stream = GPU_BITS, current_raw_stream(index)
        differentiable = grad_enabled()
        if (differentiable and (a.requires_grad or b.requires_grad)) or a.is_neg() or b.is_neg():
            return None
        if forward_mode() or dispatch_modes():
            return None
        if index >= 0 and type(cut) is Tensor and cut.get_device() == index:  # as `_layout` has it, in less time
            cut_at = cut.data_ptr()
            if cut_at < LOWEST or cut.is_neg():
                return None
            groups: Key | None = (cut.shape, cut.stride(), cut.dtype, cut_at & phase)
        else:
            groups = None if cut is None else _index_key(cut, phase, index)
        rest = None
        if scales or bias is not None or c is not None or out is not None or valid_rows is not None:
            if differentiable and any_requires_grad(bias, c, out, *scales):
                return None
            rest = (
                None if bias is None else _layout(bias, phase, index), None if c is None else _layout(c, phase, index),
                None if out is None else (*_layout(out, phase, index), c is not None and same_view(c, out)),
                None if valid_rows is None else _index_key(valid_rows, phase, index),
                *(None if x is None else _layout(x, phase, index) for x in scales),
            )  # fmt: skip
        return (
            a.shape, a.stride(), a.dtype, a_at & phase, b.shape, b.stride(), b.dtype, b_at & phase, index, kind, groups,
            rest, options, stream, get_ident(), id(settings()),
        )  # fmt: skip
    except (_NotPlain, RuntimeError, TypeError, AttributeError):  # no memory, or no tensor
        return None


def config_key(config: Any) -> Key:
    """The part of a key that tells configs apart: their text, because 14 and 14.0 are equal but not the same config. If
    the text is an address, the key also holds the config, so that no other object gets that address."""
    return type(config), repr(config), config if getattr(type(config), "__repr__", None) is object.__repr__ else None


class _NotPlain(Exception):
    """Raised for an operand that no key can describe."""


def _layout(x: Tensor, phase: int, index: int) -> Key:
    """Everything about a tensor on this device except its values and its address."""
    at = x.data_ptr()
    if type(x) not in PLAIN or at < LOWEST or x.get_device() != index or x.is_neg():
        raise _NotPlain
    return x.shape, x.stride(), x.dtype, at & phase


def _index_key(cut: Any, phase: int, index: int) -> Key:
    """The key of group sizes: their layout if they are on the operands' GPU, their values if they are on the host."""
    if type(cut) in HOST_SEQUENCES:
        values = tuple(cut)
        if countOf(map(type, values), int) != len(values):  # 1.0 and True are equal to 1, and no sizes
            raise _NotPlain
        return ("host", values)
    if isinstance(cut, Tensor):
        if cut.is_cpu:
            return (*_layout(cut, phase, -1), tuple(cut.tolist()))
        return _layout(cut, phase, index)
    if type(cut) is np.ndarray and cut.ndim == 1 and cut.dtype.isnative and cut.dtype.char in _INDEX_TYPES:
        return (cut.dtype.str, cut.shape, cut.tobytes())
    raise _NotPlain


def class_key_of(key: Key, call: Call) -> Key | None:
    """The key of a class: calls that differ only in their number of tokens and in sizes on the host. Tokens are rows of
    `a`, or the inner extent of both operands."""
    jagged, _, _, kind, cut, valid_rows, c, _, out = call[:PLAIN_LENGTH]
    if len(call) > QUANTISED_LENGTH or cut is None or valid_rows is not None or out is not None or c is not None:
        return None
    a, a_strides, _, _, b, b_strides = key[:6]
    if key[INDEX] < 0 or len(a) != 2:
        return None
    groups = key[GROUPS] if isinstance(cut, Tensor) and not cut.is_cpu else _host_class(kind, cut)
    if groups is None:
        return None
    if jagged == "k":
        same = len(b) == 2 and b[0] == a[1] and _counts(a, a_strides, 1, 0) and _counts(b, b_strides, 0, 1)
        return _inner_class_key(key, groups) if same and len(call) == PLAIN_LENGTH else None
    rows, depth = a
    if jagged != "m" or len(b) != 3 or not b[0] or not _counts(a, a_strides, 0, 1) or rows * b[2] >= COUNTED:
        return None
    rest, options = key[GROUPS + 1], key[GROUPS + 2 :]
    if len(call) > PLAIN_LENGTH:  # scales
        rest = (*rest[:4], _of_tokens(rest[4], rows), *rest[5:])
    return ("tokens", depth, half_octave(rows), key[1:GROUPS], groups, rest, options)


def _inner_class_key(key: Key, groups: Key) -> Key:
    """The class key where tokens are summed over: a [M, T] and b [T, N], whose strides stay in the key."""
    (rows, tokens), columns = key[0], key[4][1]
    return ("inner tokens", rows, columns, half_octave(tokens), key[1:4], key[5:GROUPS], groups, key[GROUPS + 1 :])


def _counts(shape: Sequence[int], strides: Sequence[int], axis: int, other: int) -> bool:
    """Whether a class may leave out the token count along an axis: it decides neither whether elements are counted in
    64 bits nor whether the lines of the `other` axis overlap."""
    tokens, reach = shape[axis], (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1]
    return not tokens > strides[other] > 1 and tokens < COUNTED and reach + 1 < COUNTED


def _of_tokens(layout: Key | None, rows: int) -> Key | None:
    """The layout of a grid of scales, without its number of lines if there is one line per token."""
    if layout is None or len(layout[0]) != 2 or layout[0][0] != rows:
        return layout
    return ("tokens", layout[0][1], *layout[1:])


def _host_class(kind: str, cut: Any) -> Key | None:
    """The part of host sizes that belongs to a class: their number, and whether all are equal. Tensors and lists are
    told apart, because the torch operator takes tensors only: a class must not serve what its first call would have
    refused."""
    tensor = isinstance(cut, Tensor)
    if tensor and (cut.dtype not in _INDEX_DTYPES or cut.dim() != 1):
        return None
    values = cut if type(cut) in HOST_SEQUENCES else cut.tolist()
    if not 0 < 4 * len(values) < STAGED_BYTES:
        return None
    if kind == "sizes":
        equal = values[1:] == values[:-1]
    else:
        lengths = set(map(sub, values[1:], values))
        if kind == "ends":
            lengths.add(values[0])
        equal = len(lengths) == 1
    return ("host", tensor, len(values), equal)
