"""Binds the two kernels for what the library lacks: kernels/finish.cu and kernels/clamp_offsets.cu.

`Finish` writes whatever the library cannot write itself. It serves four needs: bias, activation and output types after
a wide intermediate; groups with K = 0; elements that no group owns; c laid into out before a product is added to it.
`ClampedEnds` makes the device's numbers, which may lie, into ends for torch's grouped_mm.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cublas.run import MovableStep, Steps
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import ACTIVATION_CODES, JAGGED_CODES, OPERANDS, Addresses
from multigemm.cuda.device import to_device
from multigemm.cuda.launch import Step
from multigemm.planning.operands import TABLE, Operands, Strided, group_table, packed, strides_of
from multigemm.problem.spec import ProblemSpec

KERNELS = Path(__file__).parent / "kernels"
FINISH, CLAMP_OFFSETS = (nvrtc.source_of(KERNELS / f"{name}.cu") for name in ("finish", "clamp_offsets"))
TYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.int32: 4, torch.int8: 5}
THREADS, CLAMP_THREADS = 256, 1024
"""Of a block of each kernel; the second kernel has a thread for each group."""
TABLE_COLUMNS = 21
"""The columns of a list's table: those of `TABLE`, three of the intermediate result, and the first tile."""
SLAB = 8192
"""Elements of a line that one block writes before another may take over."""
ACC_COLUMNS = (17, 18, 19)
FIRST_TILE = 20
EIGHT = 8
"""The elements that a thread of the kernel handles at once if they are aligned words."""
MOST_BLOCKS = 3168
"""24 blocks for each of an H100's multiprocessors, of which three are resident: eight rounds, so the last one is
short."""
ZEROING_BLOCKS = 131
"""The blocks that zero rows besides the one that clamps, on an H100's 132 multiprocessors."""


LAYOUT = f"-DSLAB={SLAB}LL", f"-DCOLUMNS={TABLE_COLUMNS}"


class _Matrix(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("ptr", "group", "row", "col")]


class _Task(ctypes.Structure):
    """The kernel's argument; the fields are those of `struct Task`, in its order."""

    _fields_ = [
        *((name, _Matrix) for name in ("acc", "c", "out", "bias")),
        *((name, ctypes.c_int64) for name in ("table", "ends", "valid", "groups", "m", "n", "k", "tiles")),
        *((name, ctypes.c_int64) for name in ("per_group", "run")),
        *((name, ctypes.c_double) for name in ("alpha", "beta")),
        *((name, ctypes.c_int32) for name in ("jagged", "head", "wide_ends", "masked", "only_empty", "rows_fast")),
        *((name, ctypes.c_int32) for name in ("lanes", "owned", "unowned", "only_headed")),
    ]


@dataclass(frozen=True, slots=True)
class Need:
    """Which elements to write, and from what. `bare` leaves out bias and activation: c alone, times 1.

    `only_headed`: write only if there are rows before the first group.
    """

    acc: Tensor | list[Tensor] | None = None
    owned: bool = True
    only_empty: bool = False
    unowned: bool = False
    bare: bool = False
    only_headed: bool = False


class Finish(MovableStep):
    """One bound launch of the kernel. It follows its operands, except those of a list, which are in a table."""

    __slots__ = ("_fields", "_launch")

    def __init__(self, ops: Operands, need: Need) -> None:
        task, table = _task(ops, need)
        kernel = nvrtc.loaded(FINISH, "finish", _defines(ops.spec, need), ops.device.index or 0)
        self._launch = kernel.step(_blocks(task), THREADS, [task], (table, need))
        self.movable = table is None
        given = ((task.out, "ptr", "out"), (task.c, "ptr", "c"), (task.bias, "ptr", "bias"), (task, "ends", "ends"),
                 (task, "valid", "valid_rows"))  # fmt: skip
        self._fields = [(part, name, OPERANDS.index(of)) for part, name, of in given if getattr(part, name)]

    def __call__(self, stream: int) -> None:
        self._launch(stream)

    def move(self, addresses: Addresses) -> None:
        """Sets other addresses. The driver copies the argument at each launch, so its fields may change between two."""
        for part, name, operand in self._fields:
            setattr(part, name, addresses[operand])


def without_products(ops: Operands) -> Steps:
    """The launch of a problem that multiplies nothing."""
    return Steps(ops.device, [Finish(ops, Need(unowned=ops.spec.zero_unowned))])


def _blocks(task: _Task) -> int:
    """The number of blocks: few if only the edges of a packed result are written, which are usually empty."""
    runs: int = -(-task.tiles // task.run)
    return max(1, min(runs, MOST_BLOCKS // 8 if _only_edges(task) else MOST_BLOCKS))


def _only_edges(task: _Task) -> bool:
    return not task.owned and task.jagged in (1, 2)


def _defines(spec: ProblemSpec, need: Need) -> tuple[str, ...]:
    acc = need.acc[0] if isinstance(need.acc, list) and need.acc else need.acc
    kind = acc.dtype if isinstance(acc, Tensor) else spec.acc
    c = spec.c.dtype if spec.c is not None else spec.acc
    bias = spec.bias if spec.bias is not None and not need.bare else spec.acc
    codes = {"ACC": TYPE_CODES[kind], "C": TYPE_CODES[c], "BIAS": TYPE_CODES[bias], "OUT": TYPE_CODES[spec.out.dtype],
             "ACT": ACTIVATION_CODES[None if need.bare else spec.activation]}  # fmt: skip
    return tuple(f"-D{name}={code}" for name, code in codes.items()) + LAYOUT


def _matrix(s: Strided | None) -> _Matrix:
    return _Matrix(0, 0, 0, 0) if s is None else _Matrix(*s)


def _task(ops: Operands, need: Need) -> tuple[Any, Tensor | None]:
    spec, task, table = ops.spec, _Task(), None
    if spec.form == "per_group":
        table = _list_task(ops, need, task)
    else:
        p = packed(ops)
        task.m, task.n, task.k, task.out = p.m, p.n, p.k, _matrix(p.out)
        task.c, task.bias = _matrix(p.c), _matrix(None if need.bare else p.bias)
        task.acc = _matrix(None if need.acc is None else strides_of(cast(Tensor, need.acc)))
        task.rows_fast = int(p.out.row == 1 and p.out.col != 1)
    if spec.alpha == "zero" or need.bare:
        task.acc = _matrix(None)
    task.groups, task.masked, task.jagged = spec.groups, int(spec.form == "masked"), JAGGED_CODES[spec.jagged]
    task.alpha, task.beta = ops.alpha, 1.0 if need.bare else ops.beta
    task.head, task.only_empty = int(ops.head), int(need.only_empty)
    sizes = ops.valid_rows if task.masked else ops.ends
    if sizes is not None:
        task.wide_ends = int(sizes.dtype is torch.int64)
        task.ends, task.valid = (0, sizes.data_ptr()) if task.masked else (sizes.data_ptr(), 0)
    task.owned, task.unowned, task.only_headed = int(need.owned), int(need.unowned), int(need.only_headed)
    if spec.form != "per_group":
        _number_tiles(task, spec)
    task.run = 1 if _only_edges(task) else max(1, -(-task.tiles // MOST_BLOCKS))
    return task, table


def _lanes(fast: int) -> int:
    """The threads along a line of `fast` elements, eight elements each: a power of two, at least a warp."""
    return min(THREADS, max(32, 1 << max(0, -(-fast // EIGHT) - 1).bit_length()))


def _tiles(slow: Any, fast: Any, lanes: int) -> Any:
    """The tiles of a matrix with `slow` lines of `fast` elements (numbers or arrays)."""
    return -(-slow // (THREADS // lanes)) * -(-fast // SLAB)


def _number_tiles(task: Any, spec: ProblemSpec) -> None:
    slow, fast = (task.n, task.m) if task.rows_fast else (task.m, task.n)
    task.lanes = _lanes(fast)
    task.per_group = _tiles(slow, fast, task.lanes)
    task.tiles = task.per_group * (1 if spec.jagged in ("m", "n") else spec.groups)


def _list_task(ops: Operands, need: Need, task: Any) -> Tensor:
    """Fills the fields of a list problem and returns its table on the device, with each product's first tile."""
    host = np.zeros((ops.spec.groups, TABLE_COLUMNS), dtype=np.int64)
    host[:, : TABLE.COLUMNS] = group_table(ops)
    for g, acc in enumerate(need.acc or ()):
        s = strides_of(acc)
        host[g, list(ACC_COLUMNS)] = s.ptr, s.row, s.col
    m, n = host[:, TABLE.M], host[:, TABLE.N]
    task.rows_fast = int(host[0, TABLE.OUT_ROW] == 1 and host[0, TABLE.OUT_COL] != 1)
    slow, fast = (n, m) if task.rows_fast else (m, n)
    task.lanes = _lanes(int(fast.max()))
    tiles = _tiles(slow, fast, task.lanes)
    task.tiles, host[1:, FIRST_TILE] = tiles.sum(), np.cumsum(tiles)[:-1]
    table = to_device(host, ops.device)
    present = _Matrix(1, 0, 0, 0)
    task.table, task.out = table.data_ptr(), present
    task.acc = _matrix(None) if need.acc is None else present
    task.c = _matrix(None) if ops.c is None else present
    task.bias = _matrix(None) if ops.bias is None or need.bare else present
    return table


class Bounds(ctypes.Structure):
    """The argument of `clamp_offsets`; the fields are those of `struct Bounds`, in its order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ends", "result", "first_two", "aside", "out")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "width", "extent")),
        *((name, ctypes.c_int32) for name in ("groups", "wide", "head", "sums", "after")),
    ]


class ClampedEnds:
    """Turns the device's numbers into ends for grouped_mm: `ends`, `first_two`, and with `apart` also `aside`.

    `before` does it, of numbers of the given one's dtype and device: ends; sizes if `sums`; with a first offset in
    front if `head`. The rows that no group owns become zeros: those behind the last group by `before`, if it is given
    the result, those in front of the first by `after`, since grouped_mm writes them; or both by `after`.
    """

    __slots__ = ("_after", "_before", "_first", "_kernel", "_launches", "_memory", "aside", "ends", "first_two")

    def __init__(self, numbers: Tensor, groups: int, *, head: bool, sums: bool = False, apart: bool = False) -> None:
        wide, device = numbers.dtype is torch.int64, numbers.device
        memory = torch.empty(2 * groups + 2, dtype=torch.int32, device=device)
        self.ends, self.first_two = memory[:groups], memory[2 * groups :]
        self.aside = memory[groups : 2 * groups] if apart else None
        at = memory.data_ptr()
        fields = (0, at, at + 8 * groups, at + 4 * groups if apart else 0, 0, 0, 0, 0, groups, wide, head, sums, 0)
        self._before, self._after = Bounds(*fields), Bounds(*fields)
        self._kernel, self._memory = nvrtc.loaded(CLAMP_OFFSETS, "clamp_offsets", (), device.index or 0), memory
        self._launches: dict[int, Step] = {}
        self._first = (8 if wide else 4) * head

    def before(self, stream: int, numbers: Tensor, extent: int, zeroed: Tensor | None = None) -> None:
        """`numbers` [G], or [G + 1] if `head`; `extent` is what they cut. Zeroes rows of `zeroed` behind the last."""
        bounds = self._before
        bounds.ends, bounds.extent = numbers.data_ptr() + self._first, extent
        blocks = 1
        if zeroed is not None:
            _name_rows(bounds, zeroed)
            blocks += ZEROING_BLOCKS
        (self._launches.get(blocks) or self._bound(blocks, bounds))(stream)

    def after(self, stream: int, zeroed: Tensor, behind: bool) -> None:
        """Zeroes the rows of `zeroed` before the first group and, if so wanted, those `behind` the last."""
        bounds = self._after
        _name_rows(bounds, zeroed)
        bounds.extent, bounds.after = zeroed.shape[0], 2 if behind else 1
        (self._launches.get(ZEROING_BLOCKS) or self._bound(ZEROING_BLOCKS, bounds))(stream)

    def _bound(self, blocks: int, bounds: Bounds) -> Step:
        """The launch of this many blocks, which know whether it comes before or after. Its argument may change."""
        made = self._kernel.step(blocks, CLAMP_THREADS, (bounds,), self._memory, overlap=True)
        self._launches[blocks] = made
        return made


def _name_rows(bounds: Any, rows: Tensor) -> None:
    """Writes the address of the rows. Their length and distance are the same in all calls and written once."""
    if not bounds.width:
        bounds.row_bytes, bounds.width = rows.stride(0) * rows.element_size(), rows.shape[1]
    bounds.out = rows.data_ptr()
