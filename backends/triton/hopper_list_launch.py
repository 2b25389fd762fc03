"""Lists for the warp-specialised kernel: its source, the maps and numbers of each group, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.compile import Cubin, KernelSource, cubin
from multigemm.backends.triton.config import Config, depth_of, list_registers, list_warps
from multigemm.backends.triton.driver import index_of, launcher
from multigemm.backends.triton.hopper_forms import aligned_stride
from multigemm.backends.triton.hopper_sources import descriptor
from multigemm.backends.triton.launch import bits_of, is_empty, never, nothing, processors, programs
from multigemm.backends.triton.pointer_sources import TYPES
from multigemm.backends.triton.pointer_tiles import inverses
from multigemm.backends.triton.tensormap import encode
from multigemm.planning.operands import Operands, strides_of
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import Order, ProblemSpec

MOST_TILES = 8192
"""Beyond, `few.quotient` would not be exact; so many tiles are the pointer kernel's."""
MAP_RANK = 2
SLOTS = (4, 8, 16)
"""Groups of a kernel: all of them are read, 16 in about a microsecond."""


def slots_of(spec: ProblemSpec) -> int:
    """The slots of the kernel: enough for the groups."""
    return next(slots for slots in SLOTS if spec.groups <= slots)


def _boxes(spec: ProblemSpec, config: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """The blocks of a and b as they lie in memory."""
    deep = depth_of(spec)
    a, b = (config.block_m, deep), (deep, config.block_n)
    return a if spec.a.order == "row" else a[::-1], b if spec.b.order == "row" else b[::-1]


def multiples(spec: ProblemSpec) -> tuple[int, ...]:
    """What may divide the columns of all results: 16 bytes, which are then stored at once, or nothing."""
    return (16 // spec.out.dtype.itemsize, 1) if spec.out.align == 16 else (1,)


def list_source(spec: ProblemSpec, config: Config, multiple: int) -> KernelSource:
    maps = tuple(descriptor(spec.compute, box) for box in _boxes(spec, config))
    group = ("i32",) * 8 + ("*" + TYPES[spec.out.dtype], "i64")
    slots = slots_of(spec)
    constants = {"BM": config.block_m, "BN": config.block_n, "WIDTH": config.width, "STAGES": config.stages,
                 "MULTIPLE": multiple, "A_ORDER": spec.a.order, "B_ORDER": spec.b.order, "ALPHA": spec.alpha,
                 "ACTIVATION": spec.activation, "DEALT": config.programs > 0}  # fmt: skip
    signature = (("maps", (maps,) * slots), ("groups", (group,) * slots), ("alpha_bits", "i64"), ("total", "i32"))
    return KernelSource("multigemm.backends.triton.hopper_list", "list_kernel", signature, tuple(constants.items()),
                        warps=list_warps(config), gluon=True, registers=list_registers(config))  # fmt: skip


def list_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    return {f"main {multiple}": list_source(spec, config, multiple) for multiple in multiples(spec)}


def _map(matrix: Tensor, order: Order, box: tuple[int, int], unread: int) -> bytes:
    """The map of one matrix; without elements it borrows an address, unread."""
    at, rows, columns = strides_of(matrix), matrix.shape[0], matrix.shape[1]
    extents, line = ((rows, columns), at.row) if order == "row" else ((columns, rows), at.col)
    if not matrix.numel():
        at, line = at._replace(ptr=unread), 0
    return encode(at.ptr, matrix.dtype, extents, (line or aligned_stride(extents[1]), 1), box)


def list_groups(ops: Operands, config: Config) -> tuple[list[tuple[bytes, bytes, tuple[int, ...]]], int]:
    """Maps and numbers of each group that has results, a long K first, and the number of tiles."""
    spec, boxes = ops.spec, _boxes(ops.spec, config)
    products = [product for product in zip(ops.a, ops.b, ops.out, strict=True) if product[2].numel()]
    groups: list[tuple[bytes, bytes, tuple[int, ...]]] = []
    tiles = 0
    for a, b, out in sorted(products, key=lambda product: -product[0].shape[1]):
        (m, k), n = a.shape, b.shape[1]
        down, across = tiles_of(m, config.block_m), tiles_of(n, config.block_n)
        steps = 0 if spec.alpha == "zero" else tiles_of(k, depth_of(spec))
        unread = out.data_ptr() // 16 * 16
        numbers = (
            tiles,
            steps,
            down,
            across,
            *inverses(down, across, config.width),
            m,
            n,
            out.data_ptr(),
            out.stride(0),
        )
        maps = _map(a, spec.a.order, boxes[0], unread), _map(b, spec.b.order, boxes[1], unread)
        groups.append((*maps, numbers))
        tiles += down * across
    return groups, tiles


def values_of(groups: list[tuple[bytes, bytes, tuple[int, ...]]], slots: int) -> list[int | bytes]:
    """The arguments: the maps of all slots, then the numbers; no tile reaches the slots behind the last group."""
    last = groups[-1]
    groups = [*groups, *[(last[0], last[1], never(last[2]))] * (slots - len(groups))]
    found: list[int | bytes] = []
    for a, b, _ in groups:
        # a descriptor's extents and strides travel beside its map; the kernel reads neither
        beside = [0] * (2 * MAP_RANK)
        found += [a, *beside, b, *beside]
    return [*found, *(value for _, _, numbers in groups for value in numbers)]


def _bind(
    ops: Operands, spec: ProblemSpec, config: Config, kernels: dict[str, Cubin], instead: Callable[[], Recipe]
) -> Launch:
    if is_empty(ops):
        return nothing
    groups, tiles = list_groups(ops, config)
    if tiles > MOST_TILES:
        return instead().bind(ops)
    multiple = next(x for x in multiples(spec) if all(numbers[7] % x == 0 for _, _, numbers in groups))
    values = [*values_of(groups, slots_of(spec)), bits_of(ops.alpha, spec), tiles]
    index = index_of(ops.device)
    return launcher(kernels[f"main {multiple}"], index, programs(tiles, config, processors(index)), values, (ops,))


def plan_list(
    spec: ProblemSpec, config: Config, device: torch.device, why: str, instead: Callable[[], Recipe]
) -> Recipe:
    """Compiles (or loads) the kernels; `instead` plans the pointer kernel for too many tiles."""
    major, minor = torch.cuda.get_device_capability(device)
    kernels = {name: cubin(source, 10 * major + minor) for name, source in list_sources(spec, config).items()}
    return Recipe("hopper, a map per group", config, lambda ops: _bind(ops, spec, config, kernels, instead), why)
