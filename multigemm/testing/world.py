"""A case made real: its operands in poisoned memory on the host, its exact answer, copies on a device.

The answer is computed once and shared by every backend and every run. A `World` knows nothing of
backends; a `Stand` is one world on one device, ready to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference import Answer, answer
from multigemm.testing.case import PLAIN, Case, Layout, as_dtype
from multigemm.testing.memory import Arena, Bytes, Region, guard_bytes
from multigemm.testing.values import Operand, Shapes, Values, draw_values, shapes

Regions = Region | list[Region]


@dataclass(slots=True)
class Plot:
    """Where every operand of a case lies: `inputs` and `outputs` are two arenas."""

    inputs: Arena
    outputs: Arena
    a: Regions
    b: Regions
    c: Regions | None
    bias: Regions | None
    index: Region | None
    out: Regions


def bias_layout(case: Case) -> Layout:
    """A bias lies as its neighbours do: shifted like A, padded like B, and with a stride where A's shift is odd."""
    return Layout(pad=case.b.pad, shift=case.a.shift, step=2 if case.a.shift % 2 else case.b.step)


def _lay(arena: Arena, dtype: torch.dtype, shape: Any, layout: Layout, case: Case) -> Regions:
    if case.form == "per_group":
        gap = 4096 if case.groups <= 16 else 512
        return [arena.add(dtype, each, layout, guard=gap) for each in shape]
    return arena.add(dtype, shape, layout, guard=guard_bytes(shape, dtype.itemsize))


def _index_shape(case: Case) -> tuple[int, ...] | None:
    if case.form == "masked":
        return (case.groups,)
    if not case.jagged:
        return None
    return (case.groups + (case.kind == "offsets"),)


def plot(case: Case, shape: Shapes) -> Plot:
    """Lays out every operand of a case."""
    inputs, outputs = Arena(), Arena()
    a = _lay(inputs, as_dtype(case.dtype), shape.a, case.a, case)
    b = _lay(inputs, as_dtype(case.dtype_b or case.dtype), shape.b, case.b, case)
    out = _lay(outputs, case.result_dtype, shape.out, case.out if case.given else PLAIN, case)
    c = bias = index = None
    if case.c_dtype:
        c = out if case.alias else _lay(inputs, as_dtype(case.c_dtype), shape.out, case.c, case)
    if case.bias:
        bias = _lay(inputs, as_dtype(case.bias_dtype), shape.bias, bias_layout(case), case)
    vector = _index_shape(case)
    if vector is not None:
        index = inputs.add(as_dtype(case.index), vector, replace(PLAIN, shift=case.b.shift % 3))
    return Plot(inputs, outputs, a, b, c, bias, index, out)


def index_values(case: Case) -> list[int]:
    """The offsets, sizes, ends or valid rows."""
    lengths = list(case.lengths)
    if case.form == "masked" or case.kind == "sizes":
        return lengths
    offsets: list[int] = np.cumsum([case.head, *lengths]).tolist()
    return offsets if case.kind == "offsets" else offsets[1:]


def write_index(case: Case, place: Plot, inputs: Tensor) -> None:
    """Puts the offsets, sizes, ends or valid rows into their region."""
    if place.index is not None:
        place.index.view(inputs).copy_(torch.tensor(index_values(case), dtype=torch.int64))


def _each(regions: Regions) -> list[Region]:
    return regions if isinstance(regions, list) else [regions]


def _write(arena: Tensor, regions: Regions | None, values: Operand | None) -> None:
    if regions is None or values is None:
        return
    arrays = values if isinstance(values, list) else [values]
    for region, array in zip(_each(regions), arrays, strict=True):
        target = region.distinct(arena)
        cut = tuple(slice(0, n) for n in target.shape)
        target.copy_(torch.from_numpy(np.ascontiguousarray(array[cut])))


def _poison_unowned(case: Case, place: Plot, arena: Tensor) -> None:
    """NaN in the rows and columns of A and B that no group owns: they must not reach any result."""

    if not (case.head or case.tail or case.form == "masked"):
        return
    clean = place.inputs.poisoned()

    def spoil(regions: Regions, axis: int) -> None:
        region = _each(regions)[0]
        bits, spoiled = region.bits(arena), region.bits(clean)
        for begin, length in ((0, case.head), (case.total - case.tail, case.tail)):
            if length:
                bits.narrow(axis, begin, length).copy_(spoiled.narrow(axis, begin, length))

    if case.form in ("jagged_m", "jagged_k") and not _aliased(case.a):
        spoil(place.a, 0 if case.form == "jagged_m" else 1)
    if case.form in ("jagged_n", "jagged_k") and not _aliased(case.b):
        spoil(place.b, 1 if case.form == "jagged_n" else 0)
    if case.form == "masked" and not _aliased(case.a):
        bits, spoiled = _each(place.a)[0].bits(arena), _each(place.a)[0].bits(clean)
        for g, rows in enumerate(case.lengths):
            bits[g, rows:].copy_(spoiled[g, rows:])


def _aliased(layout: Layout) -> bool:
    return bool(layout.zero)


def make_problem(
    case: Case, place: Plot, inputs: Tensor, outputs: Tensor, at: Callable[[Region, Tensor], Tensor] = Region.view
) -> GroupedGemmProblem:
    """The problem over two arenas, on whichever device they lie; `at` may put inputs elsewhere."""

    def each(regions: Regions | None, make: Callable[[Region], Tensor]) -> Any:
        if regions is None:
            return None
        return [make(region) for region in regions] if isinstance(regions, list) else make(regions)

    def tensors(regions: Regions | None) -> Any:
        return each(regions, lambda region: at(region, inputs))

    out = each(place.out, lambda region: region.view(outputs)) if case.given else None
    more: dict[str, Any] = {
        "alpha": case.alpha, "beta": case.beta, "activation": case.activation, "precision": case.precision,
        "batch_invariant": case.batch_invariant,
        "bias": tensors(place.bias),
        "out": out,
        "c": out if case.alias else tensors(place.c),
        "out_dtype": as_dtype(case.out_dtype) if case.out_dtype else None,
    }  # fmt: skip
    if place.index is not None:
        live = at(place.index, inputs)
        plain = index_values(case)
        chosen = {"device": live, "host": torch.tensor(plain, dtype=live.dtype), "list": plain}[case.where]
        more["valid_rows" if case.form == "masked" else case.kind] = chosen
    if case.jagged:
        more["jagged"] = case.jagged
    if case.compute == torch.int8:
        more |= {"alpha": int(case.alpha), "beta": int(case.beta)}
    return GroupedGemmProblem(tensors(place.a), tensors(place.b), **more)


@dataclass(slots=True)
class World:
    """One case on the host. `prefills` are what the output's memory holds before the two runs."""

    case: Case
    values: Values
    place: Plot
    inputs: Tensor
    prefills: tuple[Tensor, Tensor]
    problem: GroupedGemmProblem
    answer: Answer
    writable: Bytes

    @staticmethod
    def build(case: Case, values: Values | None = None) -> World:
        """Lays out, fills, poisons, and computes the answer."""
        values = draw_values(case) if values is None else values
        place = plot(case, shapes(case))
        inputs = place.inputs.poisoned()
        if case.alpha != 0:  # otherwise neither is read: NaN throughout
            _write(inputs, place.a, values.a)
            _write(inputs, place.b, values.b)
        _poison_unowned(case, place, inputs)
        _write(inputs, place.bias, values.bias)
        prefills = (place.outputs.poisoned(), place.outputs.random_bytes(case.seed))
        if case.alias:
            for prefill in prefills:
                _write(prefill, place.c, values.c)
        else:
            _write(inputs, place.c, values.c)
        write_index(case, place, inputs)
        problem = make_problem(case, place, inputs, prefills[0])
        right = answer(problem)
        if case.given:
            for block in right.blocks:  # what no group owns is compared byte for byte, through `writable`
                block.free |= ~block.owned
        return World(case, values, place, inputs, prefills, problem, right, _writable(case, place, problem))

    def results(self, outputs: Tensor) -> list[Tensor]:
        """The output tensors over a host arena."""
        return [region.view(outputs) for region in _each(self.place.out)]

    @property
    def exact(self) -> bool:
        """Whether every element has one right value, so that any two right runs agree bit for bit."""
        return all(
            bool(((b.low == b.high) | ~b.owned).all() and not (b.free & b.owned).any()) for b in self.answer.blocks
        )


def _writable(case: Case, place: Plot, problem: GroupedGemmProblem) -> Bytes:
    """0xFF for every byte that a run may write: the owned elements, or the whole of a library-made output."""
    mask = torch.zeros(place.outputs.poisoned().shape, dtype=torch.uint8)
    regions = _each(place.out)
    if case.form == "per_group" or not case.given:
        for region in regions:
            region.bits(mask).fill_(-1)
    else:
        bits = regions[0].bits(mask)
        for view in problem.groups():
            bits[view.where] = -1
    return mask.numpy()


@dataclass(slots=True)
class Stand:
    """A world on one device. `out` is where the result goes, the caller's or the library's alike;
    `pristine` is a second copy of the inputs."""

    world: World
    device: torch.device
    inputs: Tensor
    prefills: tuple[Tensor, Tensor]
    outputs: Tensor
    problem: GroupedGemmProblem
    pristine: Tensor

    @staticmethod
    def build(world: World, device: torch.device) -> Stand:
        """Copies a world to a device, in one piece."""
        return Stand.build_all([world], device)[0]

    @staticmethod
    def build_all(worlds: Sequence[World], device: torch.device) -> list[Stand]:
        """Copies many worlds to a device, in one piece."""
        parts = [part for world in worlds for part in (world.inputs, *world.prefills)]
        there = torch.cat(parts).to(device).split_with_sizes([part.numel() for part in parts])
        stands = []
        for i, world in enumerate(worlds):
            pristine, first, second = there[3 * i : 3 * i + 3]
            inputs, outputs = pristine.clone(), first.clone()
            problem = make_problem(world.case, world.place, inputs, outputs)
            stands.append(Stand(world, device, inputs, (first, second), outputs, problem, pristine))
        return stands

    @property
    def out(self) -> Tensor | list[Tensor]:
        views = [region.view(self.outputs) for region in _each(self.world.place.out)]
        return views if self.world.case.form == "per_group" else views[0]

    def prefill(self, number: int) -> None:
        """Puts the output's memory into its state before a run."""
        self.outputs.copy_(self.prefills[number])
