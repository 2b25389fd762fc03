"""Calls whose sizes lie on the host and differ from call to call, without a bind for each.

`HostSizes` serves calls that differ in addresses, number of tokens and sizes alone. It makes the choice that a bind
makes and passes the library what a bind passes, so the bits of a result do not depend on whether its sizes came before.
What sizes do not change is made once. What they change on the device, one launch writes there whose argument holds the
offsets (`kernels/place_groups.cu`); the extents of products, which the library reads on the host, NumPy writes.
Separate and batched calls are bound: they serve few products, or products of one size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backend import Bind
from multigemm.backends.cublas import library
from multigemm.backends.cublas.choice import GROUPED, GROUPED_MM, CutWork, fastest
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.grouped_mm import FromHost
from multigemm.backends.cublas.library import LONG, Types
from multigemm.backends.cublas.products import Bytes, Ints, Leading, Shape, packed_forms, shape_of
from multigemm.backends.cublas.run import Calls
from multigemm.cuda import nvrtc
from multigemm.cuda.device import index_of, to_device
from multigemm.planning.operands import Operands, Packed, packed
from multigemm.problem.spec import bucket

FEWEST, MOST_GROUPS = 64, 512
"""Groups that the argument of a launch has room for: powers of two. More would not fit in its 4 KiB. All are fewer than
`library.MIXED_GROUPS`, so that a long call leaves its products in their order."""
BYTES_EACH = 28
"""Bytes of device memory for each group: three addresses and an end."""
BOUND = Config("auto")
"""In place of what a bind chooses among separate and batched calls."""
THREADS, ZEROING_BLOCKS = 256, 263
"""Of `place_groups`: threads of a block, and the blocks that zero. With the block that places groups there are two for
each of an H100's 132 multiprocessors."""
SOURCE = nvrtc.source_of(Path(__file__).parent / "kernels" / "place_groups.cu")


@cache
def argument_of(most: int) -> Any:
    """The type of the argument of `place_groups`; the fields are those of `struct Groups`, in its order."""
    parts = [
        *((name, ctypes.c_int64) for name in ("table", "ends", "out")),
        *((name, ctypes.c_int64 * 3) for name in ("bases", "of_group", "of_token")),
        *((name, ctypes.c_int64) for name in ("line", "lines")),
        *((name, ctypes.c_int32) for name in ("groups", "count", "each")),
        ("offsets", ctypes.c_int32 * (most + 1)),
        ("order", ctypes.c_uint16 * most),
    ]
    return type("Groups", (ctypes.Structure,), {"_fields_": parts})


OUT, BASES, LINES = (getattr(argument_of(FEWEST), name).offset // 8 for name in ("out", "bases", "lines"))
"""The words of an argument that change from call to call."""


class PlacedGroups:
    """Launches that take `offsets` to the device: as `ends` from the first one on, and as addresses of products in the
    rows of `table`. They zero what no group owns of a result, if they are given one."""

    __slots__ = ("_launch", "_memory", "_order", "_task", "_words", "_zeroing", "ends", "offsets", "table")

    def __init__(self, p: Packed, size: Bytes, out: Tensor, device: torch.device) -> None:
        groups, rows, most = p.groups, p.jagged == "m", max(FEWEST, bucket(p.groups))
        memory = torch.empty(BYTES_EACH * groups, dtype=torch.uint8, device=device)
        self._memory, self.ends = memory, memory[24 * groups :].view(torch.int32)
        at = memory.data_ptr()
        self.table = [at + row * 8 * groups for row in range(3)]
        of_group = (p.b.group * size.operand, 0, 0) if rows else (0, 0, p.out.group * size.out)
        steps = (0, p.a.row, p.out.row) if rows else (p.b.row, p.a.col, 0)
        of_token = steps[0] * size.operand, steps[1] * size.operand, steps[2] * size.out
        line, kind = out.stride(0) * size.out, argument_of(most)
        self._task = kind(at, self.ends.data_ptr(), 0, (0, 0, 0), of_group, of_token, line, 0, groups, 0, not rows)
        argument, first = memoryview(self._task).cast("B"), kind.offsets.offset
        self._words = argument[: kind.groups.offset].cast("q")
        self.offsets = argument[first : first + 4 * (groups + 1)].cast("i")
        self._order = np.frombuffer(argument, np.uint16, groups, kind.order.offset)
        kernel = nvrtc.loaded(SOURCE, "place_groups", (f"-DMOST={most}",), index_of(device))
        grids = 1, 1 + ZEROING_BLOCKS
        self._launch, self._zeroing = (kernel.step(grid, THREADS, (self._task,), memory) for grid in grids)

    def take_products(self, a: Tensor, b: Tensor, out: Tensor, order: Ints) -> None:
        """The products of the next launch: those of the groups `order`."""
        self._order[: len(order)], self._task.count, words = order, len(order), self._words
        words[BASES], words[BASES + 1], words[BASES + 2] = b.data_ptr(), a.data_ptr(), out.data_ptr()

    def __call__(self, stream: int, zeroed: Tensor | None) -> None:
        if zeroed is None:
            self._launch(stream)
        else:
            self._words[OUT], self._words[LINES] = zeroed.data_ptr(), zeroed.shape[0]
            self._zeroing(stream)


class GroupedCut:
    """One cublasGemmGroupedBatchedEx of products that are cut from packed operands."""

    __slots__ = ("_count", "_extents", "_members", "_work_of_token", "call")

    def __init__(self, table: list[int], rows: bool, whole: Shape, groups: int, types: Types) -> None:
        blas, pointers = library.cublas(), [ctypes.c_void_p(row) for row in table]
        batch = library.grouped_call(blas, [[x] * groups for x in whole], [1] * groups, pointers, types)
        ((_, arguments, _),) = batch.calls
        self.call, self._count = Calls(blas, batch), arguments[-3]
        """Multiplies what was arranged last, on a raw stream."""
        self._extents = np.frombuffer(arguments[3 if rows else 4], np.int64)
        self._members = np.frombuffer(arguments[-2], np.int64)
        self._work_of_token = whole.m * (whole.k if rows else whole.n)

    def arrange(self, every: Ints, falling: Ints, order: Ints, first: Ints, tokens: int) -> Ints:
        """Writes the groups of the call, as `library.in_groups` makes them; returns the products in their order.

        `every`: the lengths of all groups, and `falling` in this `order`, where each length begins at `first` and 0 at
        the last of these.
        """
        if self._work_of_token * tokens > LONG:
            (owned,) = every.nonzero()
            self._count.value = count = len(owned)
            self._extents[:count], self._members[:count] = every.take(owned), 1
            return owned
        begin, end = first[:-1], first[1:]
        self._count.value = kinds = len(begin)
        falling.take(begin, 0, self._extents[:kinds], "clip")
        np.subtract(end, begin, self._members[:kinds])
        return order[: end.item(-1)]


class HostSizes:
    """Calls of one layout, for any sizes (`multigemm.backend.WithSizes`). It serves one thread on one stream."""

    __slots__ = (
        "_alpha", "_bind", "_config", "_cut", "_device", "_flags", "_from_host", "_grouped",
        "_index", "_placed", "_rows", "_shape", "_spec", "_strides", "_views", "_work", "offsets",
    )  # fmt: skip

    def __init__(
        self, ops: Operands, whole: Shape, config: Config, flags: tuple[bool, bool], placed: PlacedGroups,
        grouped: GroupedCut | None, bind: Bind,
    ) -> None:  # fmt: skip
        self._spec, self._alpha, self._device, self._bind = ops.spec, ops.alpha, ops.device, bind
        self._config, self._flags, self._grouped, self._rows = config, flags, grouped, ops.spec.form == "jagged_m"
        self._work = CutWork(ops.spec, whole, self._rows)
        out = cast(Tensor, ops.out)
        self._shape, self._strides, self._index = tuple(out.shape), out.stride(), index_of(ops.device)
        self._placed, self._from_host = placed, FromHost(ops.spec, placed.ends, 0, 0, clears=False)
        self.offsets, cut = placed.offsets, np.frombuffer(placed.offsets, np.int32)
        self._cut, lengths = cut, np.zeros(ops.spec.groups + 2, np.int64)
        lengths[0] = -1  # no length; a 0 lies behind them
        self._views = (cut[:-1], cut[1:]), (lengths[1:-1], lengths[1:], lengths[:-1])

    def __call__(self, a: Tensor, b: Tensor) -> Tensor | None:
        placed, offsets, (starts, ends), (falling, here, before) = self._placed, self.offsets, *self._views
        every = np.subtract(ends, starts, dtype=np.int64)  # in 32 bits a long fall would look like a rise
        order = (-every).argsort(kind="stable")
        every.take(order, 0, falling, "clip")
        if falling.item(-1) < 0:
            return None
        (first,) = (here != before).nonzero()
        if len(first) < 3:  # one length, or no tokens
            return self._by_bind(a, b)
        start, end, count = offsets[0], offsets[-1], first.item(-1)
        chosen = self._chosen(falling[:count], end - start)
        if chosen is BOUND:
            return self._by_bind(a, b)
        stream = torch_internals.current_raw_stream(self._index)
        unowned = start > 0 or end < a.shape[0] if self._rows else count < len(every)
        if chosen is GROUPED_MM:
            placed(stream, None)
            self._from_host.start = start
            out = self._from_host(a, b, None, None)
            if unowned and self._rows:  # results of groups without tokens are torch's zeros
                placed(stream, out)
            return out
        grouped, out = self._grouped, self._result(a)
        assert grouped is not None, "the choice knows whether there is such a call"
        order = grouped.arrange(every, falling, order, first, end - start)
        placed.take_products(a, b, out, order)
        placed(stream, out if unowned else None)
        grouped.call(stream)
        return out

    def workspace_bytes(self) -> int:
        return BYTES_EACH * self._spec.groups

    def _chosen(self, falling: Ints, tokens: int) -> Config:
        """What a bind chooses for groups of these lengths, which differ, and none of which is 0."""
        config = self._config
        if config.variant == "auto":
            config = fastest(self._spec, self._work.cut(falling, tokens), *self._flags)
        return GROUPED if config.variant == "grouped" else GROUPED_MM if config.variant == "grouped_mm" else BOUND

    def _by_bind(self, a: Tensor, b: Tensor) -> Tensor:
        on_host, out = self._cut.copy(), self._result(a)
        ends, host = to_device(on_host, self._device)[1:], on_host.astype(np.int64)
        alpha, device = self._alpha, self._device
        ops = Operands(self._spec, a, b, out, alpha=alpha, device=device, ends=ends, head=True, host_offsets=host)
        self._bind(ops)()
        return out

    def _result(self, a: Tensor) -> Tensor:
        """Memory for the result."""
        shape = (a.shape[0], self._shape[1]) if self._rows else self._shape
        return torch_internals.empty_cuda(shape, self._strides, self._spec.out.dtype)


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
    if min(extents) < 2 or per_group == 0 or spec.groups > MOST_GROUPS or None in forms:
        return None
    whole = shape_of(p.m, p.n, p.k, *cast(tuple[Leading, Leading, Leading], forms))
    types = library.types(spec.compute, compute, spec.out.dtype, ops.alpha, 0.0)
    placed = PlacedGroups(p, size, cast(Tensor, ops.out), ops.device)
    grouped = GroupedCut(placed.table, p.jagged == "m", whole, spec.groups, types) if flags[0] else None
    return HostSizes(ops, whole, config, flags, placed, grouped, bind)
