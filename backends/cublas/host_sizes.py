"""Calls whose sizes lie on the host and differ from call to call, without a bind for each.

`HostSizes` serves calls that differ in addresses, number of tokens and sizes alone. It makes the choice that a bind
makes and passes the library what a bind passes, so the bits of a result do not depend on whether its sizes came before.
What sizes do not change is made once; sizes and addresses are written into it by NumPy. Separate and batched calls are
bound: they serve few products, or products of one size.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backend import Bind
from multigemm.backends.cublas import library
from multigemm.backends.cublas.choice import GROUPED, GROUPED_MM, Work, fastest
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.grouped_mm import FromHost
from multigemm.backends.cublas.library import LONG, MIXED_GROUPS, Types
from multigemm.backends.cublas.products import TRANSPOSE, Bytes, Ints, Leading, Shape, packed_forms, shape_of
from multigemm.backends.cublas.run import FEW_ZEROS, Calls, zero_lines
from multigemm.cuda.device import STAGED_BYTES, Upload, index_of, to_device
from multigemm.planning.operands import Operands, Packed, packed

BYTES_EACH = 28
"""Bytes of device memory for each group: three addresses and an end."""
BOUND = Config("auto")
"""In place of what a bind chooses among separate and batched calls."""


class GroupedCut:
    """One cublasGemmGroupedBatchedEx of products that are cut from packed operands.

    Rows of positions are those of b, a and the result, in bytes from where they begin; rows of addresses likewise.
    """

    __slots__ = (
        "_addresses",
        "_bases",
        "_call",
        "_count",
        "_cuts",
        "_device",
        "_extents",
        "_members",
        "_positions",
        "_steps",
        "_upload",
        "_work_of_token",
    )  # fmt: skip

    def __init__(self, p: Packed, whole: Shape, size: Bytes, types: Types, device: torch.device) -> None:
        groups, rows = p.groups, p.jagged == "m"
        self._addresses, self._bases = np.zeros((3, groups), np.int64), np.zeros((3, 1), np.int64)
        self._device = torch.empty((3, groups), dtype=torch.int64, device=device)
        at, source = self._device.data_ptr(), self._addresses
        self._upload = Upload(at, source.ctypes.data, source.nbytes, index_of(device))
        pointers = [ctypes.c_void_p(at + row * 8 * groups) for row in range(3)]
        blas = library.cublas()
        batch = library.grouped_call(blas, [[x] * groups for x in whole], [1] * groups, pointers, types)
        ((_, arguments, _),) = batch.calls
        self._call, self._count = Calls(blas, batch), arguments[-3]
        self._extents = np.frombuffer(arguments[3 if rows else 4], np.int64)
        self._members = np.frombuffer(arguments[-2], np.int64)
        self._work_of_token = whole.m * (whole.k if rows else whole.n)
        group = p.b.group * size.operand if rows else p.out.group * size.out
        self._positions = np.tile(np.arange(groups, dtype=np.int64) * group, (3, 1))
        self._cuts = self._positions[1:] if rows else self._positions[:2]
        steps = (p.a.row, p.out.row) if rows else (p.b.row, p.a.col)
        self._steps = np.array(steps, np.int64)[:, None] * [[size.operand], [size.out if rows else size.operand]]

    def __call__(
        self, a: Tensor, b: Tensor, out: Tensor, starts: Ints, lengths: Ints, owned: Ints, tokens: int, stream: int
    ) -> None:
        """Multiplies the groups that have tokens: those at `owned`. Behind the lengths of all groups stands a 0."""
        bases = self._bases
        bases[0, 0], bases[1, 0], bases[2, 0] = b.data_ptr(), a.data_ptr(), out.data_ptr()
        np.multiply(starts, self._steps, out=self._cuts)
        order = self._arranged(lengths, owned, tokens)
        np.add(self._positions.take(order, axis=1), bases, out=self._addresses[:, : len(order)])
        self._upload(stream)
        self._call(stream)

    def _arranged(self, lengths: Ints, owned: Ints, tokens: int) -> Ints:
        """Writes the groups of the call, as `library.in_groups` makes them. Returns the products in their order."""
        count = len(owned)
        order = (-lengths).argsort(kind="stable")[: count + 1]
        falling = lengths[order]
        (last,) = (falling[1:] != falling[:-1]).nonzero()  # the last product of each length
        kinds = len(last)
        if kinds > 1 and count <= MIXED_GROUPS and self._work_of_token * tokens > LONG:
            self._extents[:count], self._members[:count], self._count.value = lengths[owned], 1, count
            return owned
        self._extents[:kinds], self._members[0], self._count.value = falling[last], last[0] + 1, kinds
        np.subtract(last[1:], last[:-1], out=self._members[1:kinds])
        return order[:count]


class HostSizes:
    """Calls of one layout, for any sizes (`multigemm.backend.WithSizes`). It serves one thread on one stream."""

    __slots__ = ("_alpha", "_bind", "_config", "_cut", "_device", "_ends", "_flags", "_from_host", "_grouped", "_index",
                 "_rows", "_shape", "_spec", "_strides", "_transposed", "_upload", "_whole")  # fmt: skip

    def __init__(
        self, ops: Operands, whole: Shape, config: Config, flags: tuple[bool, bool], grouped: GroupedCut | None,
        bind: Bind,
    ) -> None:  # fmt: skip
        self._spec, self._alpha, self._device, self._bind = ops.spec, ops.alpha, ops.device, bind
        self._config, self._flags, self._grouped, self._whole = config, flags, grouped, whole
        self._rows, self._transposed = ops.spec.form == "jagged_m", whole.op_first == TRANSPOSE
        out = cast(Tensor, ops.out)
        self._shape, self._strides = tuple(out.shape), out.stride()
        self._index, groups = index_of(ops.device), ops.spec.groups
        self._cut, self._ends = np.zeros(groups + 2, np.int64), np.zeros(groups, np.int32)
        on_device = torch.empty(groups, dtype=torch.int32, device=ops.device)
        self._upload = Upload(on_device.data_ptr(), self._ends.ctypes.data, self._ends.nbytes, self._index)
        self._from_host = FromHost(ops.spec, on_device, 0, 0, clears=True)

    def __call__(self, a: Tensor, b: Tensor, offsets: array[int]) -> Tensor:
        cut = self._cut
        cut[:-1], cut[-1] = offsets, offsets[-1]
        lengths = cut[1:] - cut[:-1]  # and a 0
        (owned,) = lengths.nonzero()
        tokens = offsets[-1] - offsets[0]
        chosen = self._chosen(lengths[owned], tokens)
        if chosen is GROUPED_MM:
            return self._by_grouped_mm(a, b, offsets)
        out = self._result(a)
        if chosen is BOUND:
            self._by_bind(a, b, offsets, out)
            return out
        assert self._grouped is not None, "the choice knows whether there is such a call"
        stream = torch_internals.current_raw_stream(self._index)
        self._grouped(a, b, out, cut[:-2], lengths, owned, tokens, stream)
        if self._rows:
            self._clear(out, stream, 0, offsets[0])
            self._clear(out, stream, offsets[-1], out.shape[0])
        else:
            for group in (lengths[:-1] == 0).nonzero()[0].tolist():
                self._clear(out, stream, group, group + 1)
        return out

    def workspace_bytes(self) -> int:
        return BYTES_EACH * self._spec.groups

    def _chosen(self, lengths: Ints, tokens: int) -> Config:
        """What a bind chooses for groups of these lengths, none of them empty, as `choice.choose` does."""
        count = len(lengths)
        if count < 2 or (lengths[0] == lengths[1] and bool((lengths == lengths[0]).all())):
            return BOUND
        config = self._config
        if config.variant == "auto":
            _, _, m, n, k, *_ = self._whole
            extents = (m, lengths, k) if self._rows else (m, n, lengths)
            work = Work(self._spec, count, extents, self._transposed, (lengths, tokens))
            config = fastest(self._spec, work, *self._flags)
        if config.variant == "grouped":
            return GROUPED if self._rows or self._spec.groups - count <= FEW_ZEROS else BOUND
        return GROUPED_MM if config.variant == "grouped_mm" else BOUND

    def _by_grouped_mm(self, a: Tensor, b: Tensor, offsets: array[int]) -> Tensor:
        call, start = self._from_host, offsets[0]
        call.start, call.end = start, offsets[-1]
        np.subtract(self._cut[1:-1], start, out=self._ends, casting="unsafe")
        self._upload(torch_internals.current_raw_stream(self._index))
        return call(a, b, None, None)

    def _by_bind(self, a: Tensor, b: Tensor, offsets: array[int], out: Tensor) -> None:
        ends, host = to_device(np.frombuffer(offsets, np.int32), self._device)[1:], self._cut[:-1].copy()
        alpha, device = self._alpha, self._device
        ops = Operands(self._spec, a, b, out, alpha=alpha, device=device, ends=ends, head=True, host_offsets=host)
        self._bind(ops)()

    def _result(self, a: Tensor) -> Tensor:
        """Memory for the result."""
        shape = (a.shape[0], self._shape[1]) if self._rows else self._shape
        return torch_internals.empty_cuda(shape, self._strides, self._spec.out.dtype)

    def _clear(self, out: Tensor, stream: int, first: int, end: int) -> None:
        """Zeroes some rows, or results."""
        if end > first:
            size = out.stride(0) * out.element_size()
            zero_lines(self._index, stream, out.data_ptr() + first * size, size, size, end - first)


def bind_sizes(
    ops: Operands,
    config: Config,
    flags: tuple[bool, bool],
    size: Bytes,
    compute: int,
    bind: Bind,
) -> HostSizes | None:
    """What serves any sizes on the host; None where a bind has to look at more than sizes and addresses, or where none
    of the two grouped calls may be chosen. `flags` are those of `choice.choose`."""
    spec = ops.spec
    flags = flags if config.variant == "auto" else (config.variant == "grouped", config.variant == "grouped_mm")
    plain = spec.bias is None and spec.c is None and spec.alpha != "zero" and spec.form in ("jagged_m", "jagged_k")
    if not plain or not any(flags):
        return None
    p = packed(ops)
    forms, per_group = packed_forms(p, size), p.b.group if p.jagged == "m" else p.out.group
    extents = (spec.groups, p.m, p.n, p.k)
    if min(extents) < 2 or per_group == 0 or 24 * spec.groups > STAGED_BYTES or None in forms:
        return None
    whole = shape_of(p.m, p.n, p.k, *cast(tuple[Leading, Leading, Leading], forms))
    types = library.types(spec.compute, compute, spec.out.dtype, ops.alpha, 0.0)
    grouped = GroupedCut(p, whole, size, types, ops.device) if flags[0] else None
    return HostSizes(ops, whole, config, flags, grouped, bind)
