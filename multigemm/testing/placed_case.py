"""A case in memory: operands in poisoned memory on the host, the exact answer, copies on a device.

All operands of one side (inputs, or outputs) live in one arena of bytes, with guard bands round each and poison in
every byte that nobody may read, at offsets that are the same on the host and on a device. So one copy moves a whole
problem, one comparison finds every byte that was written and should not have been, and a failing case has the same
addresses, modulo 512, everywhere.

The answer is computed once and shared by every backend and every run. A `PlacedCase` knows nothing of backends; a
`DeviceCase` is one placed case on one device, ready to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.reference import Answer, answer
from multigemm.testing.case import PLAIN, Case, Layout, as_dtype
from multigemm.testing.values import (
    Operand,
    Shapes,
    Values,
    draw_values,
    row_numbers,
    row_scale_shape,
    shapes,
    weights_shape,
)

ALIGN = 512
Bytes = npt.NDArray[np.uint8]

# NaN with a payload that no arithmetic makes, so that an unwritten element differs from a computed NaN.
POISON = {
    torch.float16: 0x7DB1,
    torch.bfloat16: 0x7FB1,
    torch.float32: 0x7FBADBAD,
    torch.float64: 0x7FFBADBADBADBADB,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e8m0fnu: 0xFF,
    torch.int8: 0x7D,
    torch.uint8: 0x7D,
    torch.int32: 0x7BADBADB,
    torch.int64: 0x7BADBADBADBADBAD,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The elements of a tensor as integers of the same width, in memory without gaps."""
    return x.contiguous().view(_SIGNED[x.element_size()])


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor inside an arena: `offset` is the byte of its first element, strides are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, arena: Tensor) -> Tensor:
        """The tensor over an arena on any device."""
        return self._over(arena.view(self.dtype))

    def bits(self, arena: Tensor) -> Tensor:
        """The same elements as integers of the same width."""
        return self._over(arena.view(_SIGNED[self.dtype.itemsize]))

    def _over(self, typed: Tensor) -> Tensor:
        # as_strided counts from the start of the storage, and the arena may be a slice of a larger one
        first = typed.storage_offset() + self.offset // self.dtype.itemsize
        return typed.as_strided(self.shape, self.strides, first)

    def distinct(self, arena: Tensor) -> Tensor:
        """The view with each stride-0 direction cut to its first element, so that it can be written."""
        view = self.view(arena)
        for axis, stride in enumerate(self.strides):
            if stride == 0 and self.shape[axis] > 1:
                view = view.narrow(axis, 0, 1)
        return view


def strides_for(shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], int]:
    """The strides in elements, and the number of elements that the tensor spans."""
    if not shape:
        return (), 1
    *front, rows, cols = shape if len(shape) > 1 else (1, *shape)
    inner, outer = (cols, rows) if layout.order == "row" else (rows, cols)
    near = 0 if ("c" if layout.order == "row" else "r") in layout.zero else layout.step
    line = max(inner, 1) * layout.step
    lead = line + (layout.pad if layout.pad >= 0 else -line % -layout.pad)
    far = 0 if ("r" if layout.order == "row" else "c") in layout.zero else lead
    strides = [far, near] if layout.order == "row" else [near, far]
    whole = lead * max(outer, 1)
    if front:
        strides.insert(0, 0 if "g" in layout.zero else whole)
        whole *= max(front[0], 1)
    return (tuple(strides) if len(shape) > 1 else (layout.step,)), whole


class Arena:
    """Collects regions, then makes the bytes."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._fills: list[tuple[int, int, torch.dtype]] = []
        self._size = 0

    def add(self, dtype: torch.dtype, shape: Sequence[int], layout: Layout = PLAIN, *, guard: int = 4096) -> Region:
        """Reserves room for one tensor, with at least `guard` bytes on each side. Its first element is `layout.shift`
        elements past a 512-byte boundary."""
        strides, reach = strides_for(shape, layout)
        start = self._size
        first = _aligned(start + guard) + layout.shift * dtype.itemsize
        stop = _aligned(first + reach * dtype.itemsize + guard)
        region = Region(dtype, tuple(shape), strides, first)
        self.regions.append(region)
        self._fills.append((start, stop, dtype))
        self._size = stop
        return region

    def poisoned(self) -> Tensor:
        """Fresh bytes on the host: every region and its surroundings hold its dtype's poison."""
        data = np.empty(max(self._size, ALIGN), np.uint8)
        data[self._size :] = 0
        for start, stop, dtype in self._fills:
            data[start:stop].view(_UNSIGNED[dtype.itemsize])[:] = POISON[dtype]
        return torch.from_numpy(data)

    def blank(self) -> Tensor:
        """Uninitialised bytes on the host."""
        return torch.empty(max(self._size, ALIGN), dtype=torch.uint8)

    def random_bytes(self, seed: int) -> Tensor:
        """Random bytes on the host that are finite numbers in every format: the second prefill."""
        size = max(self._size, ALIGN)
        pattern = np.random.default_rng(seed).integers(0x11, 0x3B, 4099, np.uint8)  # a prime: no row repeats another
        return torch.from_numpy(np.resize(pattern, size))


def _aligned(address: int) -> int:
    return -(-address // ALIGN) * ALIGN


def guard_bytes(shape: Sequence[int], itemsize: int) -> int:
    """The size of a guard band: about one tile of rows, 4 KiB to 64 KiB."""
    return min(max(256 * itemsize * (shape[-1] if shape else 1), 4096), 65536)


def foreign_writes(got: Bytes, before: Bytes, mask: Bytes) -> int:
    """The number of changed bytes that `mask` (0xFF for writable) does not allow."""
    changed = (got.view(np.uint64) ^ before.view(np.uint64)) & ~mask.view(np.uint64)
    if not changed.any():
        return 0
    return int(np.count_nonzero(changed.view(np.uint8)))


Regions = Region | list[Region]


@dataclass(slots=True)
class MemoryLayout:
    """The position of every operand of a case in two arenas, `inputs` and `outputs`.

    `operands` and `rows` (the indices of rows on the device) go by keyword; `index` holds offsets, sizes, ends or valid
    rows. Where c is the result itself, it is no operand.
    """

    inputs: Arena
    outputs: Arena
    operands: dict[str, Regions]
    index: Region | None
    rows: dict[str, Region]
    out: Regions
    preact: Regions | None


def bias_layout(case: Case) -> Layout:
    """The layout of a bias: shifted like A, padded like B, and strided if A's shift is odd."""
    return Layout(pad=case.b.pad, shift=case.a.shift, step=2 if case.a.shift % 2 else case.b.step)


def _lay(arena: Arena, dtype: torch.dtype, shape: Any, layout: Layout, case: Case) -> Regions:
    if isinstance(shape, list):
        gap = 4096 if case.groups <= 16 else 512
        return [arena.add(dtype, each, layout, guard=gap) for each in shape]
    return arena.add(dtype, shape, layout, guard=guard_bytes(shape, dtype.itemsize))


def _index_shape(case: Case) -> tuple[int, ...] | None:
    if case.form == "masked":
        return (case.groups,)
    if not case.jagged:
        return None
    return (case.groups + (case.kind == "offsets"),)


def lay_out(case: Case, shape: Shapes) -> MemoryLayout:
    """The memory layout of every operand of a case. Vectors of rows have gaps where c and the bias have a stride."""
    inputs, outputs, fused = Arena(), Arena(), case.fused
    line = Layout(shift=case.a.shift % 3, step=case.b.step)
    operands = [
        ("a", case.dtype, shape.a, case.a),
        ("b", case.dtype_b or case.dtype, shape.b, case.b),
        ("c", "" if case.alias else case.c_dtype, shape.out, case.c),
        ("bias", case.bias_dtype, shape.bias, bias_layout(case)),
        ("scale_a", case.scale_a.covers and case.scale_a.dtype, shape.scale_a, case.scale_a.layout),
        ("scale_b", case.scale_b.covers and case.scale_b.dtype, shape.scale_b, case.scale_b.layout),
        ("zero_b", case.zero_b, shape.scale_b, zero_layout(case)),
        ("row_scale", fused.row_scale, row_scale_shape(case), line),
        ("weights", fused.weights, weights_shape(case), line),
    ]
    found = {name: _lay(inputs, as_dtype(dtype), each, layout, case) for name, dtype, each, layout in operands if dtype}
    index, vector = None, _index_shape(case)
    if vector is not None:
        index = inputs.add(as_dtype(case.index), vector, Layout(shift=case.b.shift % 3))
    rows = {name: inputs.add(as_dtype(given.dtype), numbers.shape, line)
            for name, numbers in row_numbers(case).items() if not (given := getattr(fused, name)).host}  # fmt: skip
    of_out = case.out if case.given else PLAIN
    out = _lay(outputs, case.result_dtype, shape.out, of_out, case)
    preact = _lay(outputs, case.result_dtype, shape.products, of_out, case) if fused.preact else None
    return MemoryLayout(inputs, outputs, found, index, rows, out, preact)


def zero_layout(case: Case) -> Layout:
    """The layout of zero points: the other order than their scales, without zero strides."""
    return replace(case.scale_b.layout.turned, zero="")


def index_values(case: Case) -> list[int]:
    """The contents of offsets, sizes, ends or valid rows."""
    lengths = list(case.lengths)
    if case.form == "masked" or case.kind == "sizes":
        return lengths
    offsets: list[int] = np.cumsum([case.head, *lengths]).tolist()
    return offsets if case.kind == "offsets" else offsets[1:]


def write_index(case: Case, layout: MemoryLayout, inputs: Tensor) -> None:
    """Writes the offsets, sizes, ends or valid rows, and the row numbers, into their regions."""
    if layout.index is not None:
        layout.index.view(inputs).copy_(torch.tensor(index_values(case), dtype=torch.int64))
    numbers = row_numbers(case)
    for name, region in layout.rows.items():
        region.view(inputs).copy_(torch.from_numpy(numbers[name]))


def _each(regions: Regions) -> list[Region]:
    return regions if isinstance(regions, list) else [regions]


def _write(arena: Tensor, regions: Regions, values: Operand | None) -> None:
    assert values is not None
    arrays = values if isinstance(values, list) else [values]
    for region, array in zip(_each(regions), arrays, strict=True):
        target = region.distinct(arena)
        distinct = array[tuple(slice(0, extent) for extent in target.shape)]
        target.copy_(torch.from_numpy(np.array(distinct)))


def _poison_unowned(case: Case, layout: MemoryLayout, arena: Tensor) -> None:
    """Poisons the elements of A and B, and the entries of their scales and zero points, that belong to no group; they
    must not reach any result."""
    clean = layout.inputs.poisoned()
    blocks = {"a": (1, 1), "b": (1, 1), "scale_a": case.scale_a.block}
    blocks |= dict.fromkeys(("scale_b", "zero_b"), case.scale_b.block)
    for name, block in blocks.items():
        region = layout.operands.get(name)
        picked = case.fused.a_rows if name[-1] == "a" else case.fused.b_rows  # then any row may be
        if isinstance(region, Region) and block is not None and 0 not in region.strides and not picked.given:
            bits, spoiled = region.bits(arena), region.bits(clean)
            if name[-1] == "b":
                bits, spoiled = bits.mT, spoiled.mT
            for place in _unowned(case, name, *block, bits.shape[-1]):
                bits[place] = spoiled[place]


def _unowned(case: Case, name: str, lines: int, k: int, wide: int) -> list[Any]:
    """The places in an operand, or in a grid whose entries cover so many lines and so much of K, that belong to no
    group; of b's in the transposed one."""
    ends: list[Any] = [slice(0, case.head), slice(case.total - case.tail, case.total)]
    if case.form == "jagged_k" and k:
        if name in "ab":
            return [(..., end) for end in ends]
        return [(..., sorted(set(range(wide)) - used_blocks(case, k)))]
    if case.form == ("jagged_m" if name[-1] == "a" else "jagged_n") and lines == 1:
        return [(..., end, slice(None)) for end in ends]
    if case.form == "masked" and name[-1] == "a" and lines:
        return [(g, slice(-(-rows // lines), None)) for g, rows in enumerate(case.lengths)]
    return []


def used_blocks(case: Case, k: int) -> set[int]:
    """The entries along a jagged K that blocks of k elements use."""
    found, start = set[int](), case.head
    for g, length in enumerate(case.lengths):
        found |= {start // k + g + j for j in range(-(-length // k))}
        start += length
    return found


def make_problem(
    case: Case,
    layout: MemoryLayout,
    inputs: Tensor,
    outputs: Tensor,
    at: Callable[[Region, Tensor], Tensor] = Region.view,
) -> GroupedGemmProblem:
    """The problem over two arenas on one device; `at` may place inputs elsewhere."""
    a, b, keywords = arguments(case, layout, inputs, outputs, at)
    return GroupedGemmProblem(a, b, **keywords)


def arguments(
    case: Case,
    layout: MemoryLayout,
    inputs: Tensor,
    outputs: Tensor,
    at: Callable[[Region, Tensor], Tensor] = Region.view,
) -> tuple[Any, Any, dict[str, Any]]:
    """The arguments of a `grouped_gemm` call: a, b and the keywords."""

    def each(regions: Regions | None, make: Callable[[Region], Tensor]) -> Any:
        if regions is None:
            return None
        return [make(region) for region in regions] if isinstance(regions, list) else make(regions)

    def tensors(regions: Regions | None) -> Any:
        return each(regions, lambda region: at(region, inputs))

    out = each(layout.out, lambda region: region.view(outputs)) if case.given else None
    given = {name: tensors(regions) for name, regions in layout.operands.items()}
    a, b, weights = given.pop("a"), given.pop("b"), given.pop("weights", None)
    number = int if case.compute == torch.int8 else float
    more: dict[str, Any] = {
        "alpha": number(case.alpha), "beta": number(case.beta), "activation": case.activation,
        "precision": case.precision, "batch_invariant": case.batch_invariant,
        "out": out, "out_dtype": as_dtype(case.out_dtype) if case.out_dtype else None, **given,
    }  # fmt: skip
    if case.alias:
        more["c"] = out
    if layout.index is not None:
        live = at(layout.index, inputs)
        plain = index_values(case)
        chosen = {"device": live, "host": torch.tensor(plain, dtype=live.dtype), "list": plain}[case.where]
        more["valid_rows" if case.form == "masked" else case.kind] = chosen
    if case.jagged:
        more["jagged"] = case.jagged
    if case.quantised:
        more |= {"b_format": case.b_format or None, "accumulate": case.accumulate}
    if case.is_fused:
        more |= _fused_keywords(case, {name: tensors(region) for name, region in layout.rows.items()})
        more["preact_out"] = each(layout.preact, lambda region: region.view(outputs))
        if "combine" in more:
            more["combine"] = (more["combine"], weights)
    return a, b, more


def _fused_keywords(case: Case, live: dict[str, Tensor]) -> dict[str, Any]:
    """Numbers of rows, from the device or told by the host, and the numbers of a gate."""
    fused, found = case.fused, dict[str, Any](live)
    for name, numbers in row_numbers(case).items():
        if name not in live:
            found[name] = numbers.tolist() if case.seed % 2 and numbers.size else numbers
    if fused.out_rows.given:
        found["rows"] = fused.out_rows.rows
    if case.gated:
        found |= {name: getattr(fused, name) for name in ("glu_layout", "glu_alpha", "glu_beta", "glu_limit")}
    return found


@dataclass(slots=True)
class PlacedCase:
    """One case on the host. `prefills` are the contents of the output's memory before the two runs."""

    case: Case
    values: Values
    layout: MemoryLayout
    inputs: Tensor
    prefills: tuple[Tensor, Tensor]
    problem: GroupedGemmProblem
    answer: Answer
    writable: Bytes

    @staticmethod
    def build(case: Case, values: Values | None = None) -> PlacedCase:
        """Lays out, fills, poisons, and computes the answer."""
        values = draw_values(case) if values is None else values
        layout = lay_out(case, shapes(case))
        inputs = layout.inputs.poisoned()
        for name, regions in layout.operands.items():
            if case.alpha != 0 or name not in "ab":  # otherwise neither is read: NaN throughout
                _write(inputs, regions, getattr(values, name))
        _poison_unowned(case, layout, inputs)
        prefills = (layout.outputs.poisoned(), layout.outputs.random_bytes(case.seed))
        for prefill in prefills if case.alias else ():
            _write(prefill, layout.out, values.c)
        write_index(case, layout, inputs)
        problem = make_problem(case, layout, inputs, prefills[0])
        right = answer(problem)
        if case.given:
            for block in right.blocks:  # what no group owns is compared byte for byte, through `writable`
                block.free |= ~block.owned
        return PlacedCase(case, values, layout, inputs, prefills, problem, right, _writable(case, layout, right))

    def results(self, outputs: Tensor) -> list[Tensor]:
        """The output tensors over a host arena."""
        return [region.view(outputs) for region in _each(self.layout.out)]

    def preacts(self, outputs: Tensor) -> list[Tensor]:
        """The tensors of `preact_out` over a host arena."""
        return [] if self.layout.preact is None else [region.view(outputs) for region in _each(self.layout.preact)]

    @property
    def exact(self) -> bool:
        """Whether every element has exactly one right value, so that any two right runs agree bit for bit."""
        return all(
            bool(((b.low == b.high) | ~b.owned).all() and not (b.free & b.owned).any()) for b in self.answer.blocks
        )


def _writable(case: Case, layout: MemoryLayout, right: Answer) -> Bytes:
    """0xFF for every byte that a run may write: the owned elements, or all of a result that the library allocates."""
    mask = torch.zeros(layout.outputs.poisoned().shape, dtype=torch.uint8)
    listed = case.form == "per_group"
    for region, block in zip(_each(layout.out), right.blocks, strict=True):
        _mark(region.bits(mask), None if listed or not case.given else block.owned)
    if layout.preact is not None and right.preact is not None:
        for region, block in zip(_each(layout.preact), right.preact.blocks, strict=True):
            _mark(region.bits(mask), None if listed else block.owned)
    return mask.numpy()


def _mark(bits: Tensor, owned: Bytes | None) -> None:
    bits.fill_(-1) if owned is None else bits.masked_fill_(torch.from_numpy(owned), -1)


@dataclass(slots=True)
class DeviceCase:
    """A placed case on one device. `out` is where the result goes, the caller's or the library's alike;
    `pristine` is a second copy of the inputs."""

    placed: PlacedCase
    device: torch.device
    inputs: Tensor
    prefills: tuple[Tensor, Tensor]
    outputs: Tensor
    problem: GroupedGemmProblem
    pristine: Tensor

    @staticmethod
    def build(placed: PlacedCase, device: torch.device) -> DeviceCase:
        """Copies a placed case to a device, in one piece."""
        return DeviceCase.build_all([placed], device)[0]

    @staticmethod
    def from_case(case: Case, device: torch.device) -> DeviceCase:
        """Places a case and copies it to a device."""
        return DeviceCase.build(PlacedCase.build(case), device)

    @staticmethod
    def build_all(placed_cases: Sequence[PlacedCase], device: torch.device) -> list[DeviceCase]:
        """Copies many placed_cases to a device, in one piece."""
        parts = [part for placed in placed_cases for part in (placed.inputs, *placed.prefills)]
        there = torch.cat(parts).to(device).split_with_sizes([part.numel() for part in parts])
        device_cases = []
        for i, placed in enumerate(placed_cases):
            pristine, first, second = there[3 * i : 3 * i + 3]
            inputs, outputs = pristine.clone(), first.clone()
            problem = make_problem(placed.case, placed.layout, inputs, outputs)
            device_cases.append(DeviceCase(placed, device, inputs, (first, second), outputs, problem, pristine))
        return device_cases

    @property
    def out(self) -> Tensor | list[Tensor]:
        views = [region.view(self.outputs) for region in _each(self.placed.layout.out)]
        return views if self.placed.case.form == "per_group" else views[0]

    def prefill(self, number: int) -> None:
        """Puts the output's memory into its state before a run."""
        self.outputs.copy_(self.prefills[number])


def spec_of(case: Case) -> ProblemSpec:
    """The spec of a case, without its values."""
    layout = lay_out(case, shapes(case))
    inputs = layout.inputs.blank()
    write_index(case, layout, inputs)
    return staged_spec(make_problem(case, layout, inputs, layout.outputs.blank()))
