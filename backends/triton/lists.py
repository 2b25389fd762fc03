"""Lists: the host knows every extent, so it works out the tiles, and no program has to look for its own.

Few groups of whole tiles are arguments of a kernel. Up to LIST_GROUPS groups are arguments of the warp-specialised
kernel, with a tensor map for each operand. For any other list the generic kernel reads a row of a table for each tile:
one trip to memory instead of two with a count in between. Groups with a long K come first, so that the launch does not
end on its longest tiles.

A bound list is a plain callable: its addresses are those of many matrices, which no later call would move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, compile_all, load
from multigemm.backends.triton.config import Config, depth_of, list_registers, list_warps
from multigemm.backends.triton.generic import (
    CHUNK,
    LISTED,
    TYPES,
    WHOLE,
    bind_pointer,
    bits_of,
    multiple_of,
    pointer_constants,
    pointer_source,
    pointer_types,
    prefix_source,
    programs,
)
from multigemm.backends.triton.hopper import BESIDE, Box, aligned_stride, descriptor, inner_box
from multigemm.cuda.counters import SLOTS as POOLED
from multigemm.cuda.counters import ready
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import without_move
from multigemm.cuda.tensor_map import encode_together
from multigemm.planning.operands import NO_VIEW, TABLE, Operands, group_table
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import Order, ProblemSpec

TILE_M, TILE_N = 17, 18
"""Columns of the table that the groups' own rows leave free."""
MOST_LISTED = 2048
"""Tiles in a table; above that, copying the table to the device would cost more than it saves."""
SLOTS = 4
"""Groups of a list that are arguments of the kernel for few: more of them take longer to read than a table."""
MOST_TILES = 8192
"""Tiles by maps; beyond, `quotient` would not be exact."""
MAP_SLOTS = (4, 8, 16)
"""Groups of a kernel with maps: all of them are read, 16 in about a microsecond."""
Numbers = tuple[int, ...]


def tile_table(ops: Operands, config: Config) -> npt.NDArray[np.int64] | None:
    """[tiles, TABLE.COLUMNS]: one row per tile of a list's products; None if there are too many."""
    groups = group_table(ops)
    down = -(-groups[:, TABLE.M] // config.block_m)
    across = -(-groups[:, TABLE.N] // config.block_n)
    total = int((down * across).sum())
    if total > MOST_LISTED:
        return None
    order = np.argsort(-groups[:, TABLE.K], kind="stable")
    counts = (down * across)[order]
    group = np.repeat(order, counts)
    local = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = groups[group]
    rows[:, TILE_M], rows[:, TILE_N] = _places(local, down[group], across[group], config.width)
    return rows


def _places(
    local: npt.NDArray[np.int64], down: npt.NDArray[np.int64], across: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """multigemm.planning.tiles.place for many tiles at once."""
    band = width * across
    first = local // band * width
    height = np.minimum(down - first, width)
    inside = local % band
    return first + inside % height, inside // height


def whole(tiles: npt.NDArray[np.int64], config: Config) -> bool:
    """Whether every listed tile covers its block in all three extents."""
    extents, blocks = tiles[:, [TABLE.M, TABLE.N, TABLE.K]], (config.block_m, config.block_n, config.block_k)
    return not (extents % blocks).any()


def whole_worthwhile(spec: ProblemSpec) -> bool:
    """Whether a list of aligned matrices should use the kernel for whole tiles."""
    return spec.form == "per_group" and min(spec.a.align, spec.b.align, spec.out.align) == 16


def few_slots(spec: ProblemSpec, config: Config) -> int:
    """The slots of the kernel that takes lists of whole tiles as arguments; 0 if it cannot run."""
    plain = whole_worthwhile(spec) and spec.c is None and spec.bias is None
    lines = "strided" not in (spec.a.order, spec.b.order, spec.out.order)
    lines = lines and not (spec.a.wide or spec.b.wide or spec.out.wide)
    few = spec.groups <= SLOTS and (config.programs, config.splits) == (0, 1)
    return SLOTS if plain and lines and few else 0


def few_source(spec: ProblemSpec, config: Config) -> KernelSource:
    types, every = pointer_types(spec), pointer_constants(spec, config)
    group = ("i32",) * 6 + (types["a"], "i32", types["b"], "i32", types["out"], "i32")
    names = ("BM", "BN", "BK", "WIDTH", "STAGES", "A_ORDER", "B_ORDER", "OUT_ORDER", "ALPHA", "ACTIVATION", "PRECISION",
             "ACC", "INTERPRETED")  # fmt: skip
    return KernelSource(
        module="multigemm.backends.triton.kernels.lists",
        name="few_kernel",
        signature=(("groups", (group,) * few_slots(spec, config)), ("alpha_bits", "i64")),
        constants=tuple((name, every[name]) for name in names),
        warps=config.warps,
        stages=config.stages,
    )


def few_groups(ops: Operands, config: Config) -> tuple[list[tuple[int, ...]], int] | None:
    """The values of `few_kernel` for each group that has results, and the number of tiles; None if a tile is not whole,
    or there are too many."""
    blocks, spec = (config.block_m, config.block_n, config.block_k), ops.spec
    products = [((a.shape[0], b.shape[1], a.shape[1]), (a, b, out))
                for a, b, out in zip(ops.a, ops.b, ops.out, strict=True) if out.numel()]  # fmt: skip
    if any(extent % block for extents, _ in products for extent, block in zip(extents, blocks, strict=True)):
        return None
    orders = (spec.a.order, spec.b.order, spec.out.order)
    groups: list[tuple[int, ...]] = []
    tiles = 0
    for (m, n, k), matrices in sorted(products, key=lambda product: -product[0][2]):
        down, across = m // config.block_m, n // config.block_n
        steps = 0 if spec.alpha == "zero" else k // config.block_k
        lines = [_line(matrix, order) for matrix, order in zip(matrices, orders, strict=True)]
        groups.append(
            (tiles, steps, down, across, *inverses(down, across, config.width), *(x for line in lines for x in line))
        )
        tiles += down * across
    return (groups, tiles) if tiles <= MOST_LISTED else None


def inverses(down: int, across: int, width: int) -> tuple[int, int]:
    """The factors by which `place_few` multiplies instead of dividing by a band's tiles and the last band's height."""
    return -(-(2**31) // (width * across)), -(-(2**31) // (down % width or 1))


def _line(matrix: Tensor, order: Order) -> tuple[int, int]:
    """The address of a matrix, and the distance of its lines, which are rows or columns."""
    return matrix.data_ptr(), matrix.stride(0 if order == "row" else 1)


def extents_multiple(ops: Operands) -> int:
    """The number if it divides every extent of a list that runs along memory, else 1. Masks then split no access."""
    spec = ops.spec
    along = {0: "col" in (spec.a.order, spec.out.order), 1: "row" in (spec.b.order, spec.out.order),
             2: spec.a.order == "row" or spec.b.order == "col"}  # fmt: skip
    whole = multiple_of(spec)
    shapes = ((*a.shape, b.shape[1]) for a, b in zip(ops.a, ops.b, strict=True))
    wanted = ((m, n, k) for m, k, n in shapes)
    return whole if all(x % whole == 0 for extents in wanted for i, x in enumerate(extents) if along[i]) else 1


def list_chunks(spec: ProblemSpec, config: Config) -> tuple[int, ...]:
    """The chunk sizes (number of groups counted at once) that a list of this spec may need."""
    return (LISTED, CHUNK, WHOLE) if whole_worthwhile(spec) and not few_slots(spec, config) else (LISTED, CHUNK)


def list_chunk(spec: ProblemSpec, config: Config, tiles: npt.NDArray[np.int64] | None) -> int:
    """The chunk size that this list needs."""
    if tiles is None:
        return CHUNK
    return WHOLE if WHOLE in list_chunks(spec, config) and whole(tiles, config) else LISTED


def never(group: Numbers) -> Numbers:
    """The values of an unused slot: its first tile is beyond all tiles."""
    return (2**31 - 1, *group[1:])


def few_values(groups: list[Numbers], slots: int) -> list[Numbers]:
    """The arguments for all slots; no tile reaches the unused ones."""
    return [*groups, *[never(groups[-1])] * (slots - len(groups))]


def generic_list_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels for lists by the generic kernel: by arguments, by a table of tiles, or by a table of groups."""
    usual = multiple_of(spec) if spec.a.align == spec.b.align == 16 else 1
    found = {f"main {chunk}": pointer_source(spec, config, usual, chunk) for chunk in list_chunks(spec, config)}
    if few_slots(spec, config):
        found["few"] = few_source(spec, config)
    return {**found, "prefix": prefix_source(spec, config)}


class GenericListPlan:
    """The kernels for lists by the generic kernel, loaded on one device."""

    __slots__ = ("_config", "_few", "_index", "_spec")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        sources = generic_list_sources(spec, config)
        compile_all(sources, index)
        self._spec, self._config, self._index = spec, config, index
        self._few = load(sources["few"], index) if "few" in sources else None
        if config.splits > 1:
            ready(index, max(POOLED))

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one list."""
        if self._few is not None and (found := few_groups(ops, self._config)):
            groups, tiles = found
            slots = few_values(groups, few_slots(self._spec, self._config))
            values = [value for group in slots for value in group]
            return without_move(self._few.bound([*values, bits_of(ops.alpha, self._spec)], tiles))
        return self._bind_table(ops)

    def _bind_table(self, ops: Operands) -> Launch:
        spec, config, index, listed = self._spec, self._config, self._index, tile_table(ops, self._config)
        table = to_device(group_table(ops) if listed is None else listed, ops.device)
        main = load(pointer_source(spec, config, extents_multiple(ops), list_chunk(spec, config, listed)), index)
        counts = listed is None and spec.groups > CHUNK
        count = load(prefix_source(spec, config), index) if counts else None
        return without_move(bind_pointer(main, count, ops, NO_VIEW, config, table))


def plan_generic_list(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Compiles (or loads) the kernels for lists by the generic kernel."""
    return Recipe("pointer", config, GenericListPlan(spec, config, index).bind, why)


def map_slots(spec: ProblemSpec) -> int:
    """The slots of the kernel: enough for the groups."""
    return next(slots for slots in MAP_SLOTS if spec.groups <= slots)


def _boxes(spec: ProblemSpec, config: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """The blocks of a and b as they lie in memory."""
    deep = depth_of(spec)
    a, b = (config.block_m, deep), (deep, config.block_n)
    return a if spec.a.order == "row" else a[::-1], b if spec.b.order == "row" else b[::-1]


def multiples(spec: ProblemSpec) -> tuple[int, ...]:
    """What divides the columns of all results: 16 bytes, so that they are stored at once, or nothing."""
    return (16 // spec.out.dtype.itemsize, 1) if spec.out.align == 16 else (1,)


def list_source(spec: ProblemSpec, config: Config, multiple: int) -> KernelSource:
    maps = tuple(descriptor(spec.compute, box) for box in _boxes(spec, config))
    group = ("i32",) * 8 + ("*" + TYPES[spec.out.dtype], "i64")
    slots = map_slots(spec)
    constants = {"BM": config.block_m, "BN": config.block_n, "WIDTH": config.width, "STAGES": config.stages,
                 "MULTIPLE": multiple, "A_ORDER": spec.a.order, "B_ORDER": spec.b.order, "ALPHA": spec.alpha,
                 "ACTIVATION": spec.activation, "DEALT": config.programs > 0}  # fmt: skip
    signature = (("maps", (maps,) * slots), ("groups", (group,) * slots), ("alpha_bits", "i64"), ("total", "i32"))
    module = "multigemm.backends.triton.kernels.lists"
    return KernelSource(module, "list_kernel", signature, tuple(constants.items()),
                        warps=list_warps(config), gluon=True, registers=list_registers(config))  # fmt: skip


def _map(matrix: Tensor, order: Order, box: Box, unread: int) -> bytes:
    """The map of one matrix. One without elements uses another address, which is not read."""
    outer, inner = (0, 1) if order == "row" else (1, 0)
    dtype, lines, columns = matrix.dtype, matrix.shape[outer], matrix.shape[inner]
    if not (lines and columns):
        line = aligned_stride(columns) * dtype.itemsize
        return encode_together(dtype, unread, (max(1, columns), max(1, lines)), (line,), box)
    line = matrix.stride(outer) if lines > 1 else aligned_stride(columns)
    return encode_together(dtype, matrix.data_ptr(), (columns, lines), (line * dtype.itemsize,), box)


def list_groups(ops: Operands, config: Config) -> tuple[list[tuple[bytes, bytes, Numbers]], int]:
    """The maps and numbers of each group that has results, long K first, and the number of tiles."""
    spec, deep = ops.spec, depth_of(ops.spec)
    a_box, b_box = (inner_box(box, spec.compute) for box in _boxes(spec, config))
    products = [product for product in zip(ops.a, ops.b, ops.out, strict=True) if product[2].numel()]
    groups: list[tuple[bytes, bytes, Numbers]] = []
    tiles = 0
    for a, b, out in sorted(products, key=lambda product: -product[0].shape[1]):
        (m, k), n, address = a.shape, b.shape[1], out.data_ptr()
        down, across = tiles_of(m, config.block_m), tiles_of(n, config.block_n)
        steps = 0 if spec.alpha == "zero" else tiles_of(k, deep)
        unread = address // 16 * 16
        numbers = (tiles, steps, down, across, *inverses(down, across, config.width), m, n, address, out.stride(0))
        groups.append((_map(a, spec.a.order, a_box, unread), _map(b, spec.b.order, b_box, unread), numbers))
        tiles += down * across
    return groups, tiles


def values_of(groups: list[tuple[bytes, bytes, Numbers]], slots: int) -> list[int | bytes]:
    """The arguments: the maps of all slots, then the numbers; no tile reaches the unused slots."""
    last = groups[-1]
    groups = [*groups, *[(last[0], last[1], never(last[2]))] * (slots - len(groups))]
    found: list[int | bytes] = []
    for a, b, _ in groups:
        found += [a, *BESIDE[2], b, *BESIDE[2]]
    for _, _, numbers in groups:
        found += numbers
    return found


class HopperListPlan:
    """The warp-specialised kernels of lists of one spec, loaded on one device."""

    __slots__ = ("_config", "_index", "_instead", "_kernels", "_spec")

    def __init__(self, spec: ProblemSpec, config: Config, index: int, instead: Callable[[], Recipe]) -> None:
        self._spec, self._config, self._index, self._instead = spec, config, index, cache(instead)
        self._kernels = {multiple: load(list_source(spec, config, multiple), index) for multiple in multiples(spec)}

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one list. The generic kernel runs one with too many tiles."""
        spec, config = self._spec, self._config
        with on_device(self._index):
            groups, tiles = list_groups(ops, config)
        if tiles > MOST_TILES:
            return self._instead().bind(ops)
        multiple = next(x for x in multiples(spec) if all(numbers[7] % x == 0 for _, _, numbers in groups))
        values = [*values_of(groups, map_slots(spec)), bits_of(ops.alpha, spec), tiles]
        return without_move(self._kernels[multiple].bound(values, programs(tiles, config, processors(self._index))))


def plan_hopper_list(spec: ProblemSpec, config: Config, index: int, why: str, instead: Callable[[], Recipe]) -> Recipe:
    """Compiles (or loads) the kernels. `instead` plans the generic kernel for too many tiles."""
    return Recipe("hopper, a map per group", config, HopperListPlan(spec, config, index, instead).bind, why)
