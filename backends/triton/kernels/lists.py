# mypy: ignore-errors
"""Kernels for lists of a few groups: what a program has to know of them is its argument.

With a table in memory a cold launch asks memory twice in a row, for the table and then for operands, and small
lists are little more than such waits. Arguments are there when a program starts; picking a group among a few of
them is a handful of predicated reads of constants.

`few_kernel` takes whole tiles, one per program, and nothing is masked. `list_kernel` is warp-specialised, for sm_90: a
list has no whole-operand map, but every matrix of it has one of its own. One warp loads by TMA, one or two
warpgroups multiply. What lies beyond a matrix comes as zeros, by the maps' own bounds. A program has one tile, or
(DEALT) every so many: then the next tile's blocks arrive while results are stored.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from multigemm.backends.triton.kernels.epilogue import finish
from multigemm.backends.triton.kernels.generic import corner, dot, offsets
from multigemm.backends.triton.kernels.hopper import barriers, fetch, oriented, sum_layout
from multigemm.backends.triton.kernels.hopper_tiles import after

# a block of K is one swizzled row of 128 bytes
DEEP = gl.constexpr(64)


@triton.jit
def quotient(x, inverse):
    """x // d for inverse = 2^31 / d, rounded up: exact for x below 2^15 and any d up to 2^31, for what rounding adds,
    less than x / 2^31, is less than 1 / d up to d = 2^16, and any larger d is more than 2 * x."""
    return tl.umulhi(2 * x.to(tl.uint32), inverse.to(tl.uint32)).to(tl.int32)


@triton.jit
def place_few(local, down, across, by_band, by_low, WIDTH: tl.constexpr):
    """schedule.place without its divisions, which a program waits for: `by_band` is the inverse of the tiles in
    a band, `by_low` that of the height of the last band, where it is lower."""
    FULL: tl.constexpr = (2**31 + WIDTH - 1) // WIDTH
    band = quotient(local, by_band)
    inside = local - band * (WIDTH * across)
    height = tl.minimum(down - band * WIDTH, WIDTH)
    tile_n = quotient(inside, tl.where(height == WIDTH, FULL, by_low))
    return band * WIDTH + inside - tile_n * height, tile_n


@triton.jit
def few_kernel(groups, alpha_bits,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
               A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr, ALPHA: tl.constexpr,
               ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
               INTERPRETED: tl.constexpr):  # fmt: skip
    """One tile. A group: its first tile, blocks of k, tiles down and across, the inverses for `place_few`, then address
    and distance of lines (rows or columns, as they lie) of a, b and out, all of them aligned to 16 bytes."""
    tile = tl.program_id(0)
    found = groups[0]
    for g in tl.static_range(1, len(groups)):
        reached = tile >= groups[g][0]
        chosen = ()
        for i in tl.static_range(len(found)):
            chosen += (tl.where(reached, groups[g][i], found[i]),)
        found = chosen
    # not in a function: hints stick to the operation that they are given to
    first, steps, down, across, by_band, by_low, a, a_line, b, b_line, out, out_line = found
    PER_LINE: tl.constexpr = 128 // a.dtype.element_ty.primitive_bitwidth
    OUT_PER_LINE: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    a = tl.multiple_of(a, 16)
    a_line = tl.multiple_of(a_line, PER_LINE)
    b = tl.multiple_of(b, 16)
    b_line = tl.multiple_of(b_line, PER_LINE)
    out = tl.multiple_of(out, 16)
    out_line = tl.multiple_of(out_line, OUT_PER_LINE)
    tile_m, tile_n = place_few(tile - first, down, across, by_band, by_low, WIDTH)
    row = tile_m * BM
    col = tile_n * BN
    i = tl.arange(0, BM)
    j = tl.arange(0, BN)
    kk = tl.arange(0, BK)
    a_ptrs = corner(a, row, a_line, 0 * row, a_line, A_ORDER) + offsets(i, a_line, kk, a_line, A_ORDER, False)
    b_ptrs = corner(b, 0 * col, b_line, col, b_line, B_ORDER) + offsets(kk, b_line, j, b_line, B_ORDER, False)
    a_step = BK if A_ORDER == "row" else BK * a_line
    b_step = BK if B_ORDER == "col" else BK * b_line
    acc = tl.zeros((BM, BN), ACC)
    for _ in tl.range(0, steps, num_stages=STAGES):
        x = tl.load(a_ptrs)
        y = tl.load(b_ptrs)
        acc = dot(x, y, acc, PRECISION, ACC, INTERPRETED)
        a_ptrs += a_step
        b_ptrs += b_step
    result = finish(acc, alpha_bits, alpha_bits, out, None, out, None, out.dtype.element_ty, ALPHA == "any", False,
                    False, ACTIVATION, INTERPRETED)  # fmt: skip
    out_ptrs = corner(out, row, out_line, col, out_line, OUT_ORDER) + offsets(
        i, out_line, j, out_line, OUT_ORDER, False)  # fmt: skip
    tl.store(out_ptrs, result)


@gluon.jit
def pick(groups, tile, WIDTH: gl.constexpr, MULTIPLE: gl.constexpr):
    """A tile's group and place: (group, blocks of k, tile row, tile column, rows, columns, result, its lines)."""
    group = tile * 0
    found = groups[0]
    for g in gl.static_range(1, len(groups)):
        reached = tile >= groups[g][0]
        group = gl.where(reached, g, group)
        chosen = ()
        for i in gl.static_range(len(found)):
            chosen += (gl.where(reached, groups[g][i], found[i]),)
        found = chosen
    first, steps, down, across, by_band, by_low, rows, columns, out, out_line = found
    if MULTIPLE > 1:
        columns = gl.multiple_of(columns, MULTIPLE)
        out_line = gl.multiple_of(out_line, MULTIPLE)
        out = gl.multiple_of(out, 16)
    tile_m, tile_n = place_few(tile - first, down, across, by_band, by_low, WIDTH)
    return group, steps, tile_m, tile_n, rows, columns, out, out_line


@gluon.jit
def send(a_map, b_map, ring, stage, phase, row, col, steps, STAGES: gl.constexpr, BYTES: gl.constexpr,
         A_ORDER: gl.constexpr, B_ORDER: gl.constexpr, DEALT: gl.constexpr):  # fmt: skip
    """All blocks of a tile into the ring, as its stages become free."""
    a_smem, b_smem, full, empty = ring
    if not DEALT:
        stage = steps * 0
        phase = steps * 0 + 1
    for step in range(steps):
        mbarrier.wait(empty.index(stage), phase)
        there = full.index(stage)
        mbarrier.expect(there, BYTES)
        if A_ORDER == "row":
            fetch(a_map, [row, step * DEEP], there, a_smem.index(stage))
        else:
            fetch(a_map, [step * DEEP, row], there, a_smem.index(stage))
        if B_ORDER == "row":
            fetch(b_map, [step * DEEP, col], there, b_smem.index(stage))
        else:
            fetch(b_map, [col, step * DEEP], there, b_smem.index(stage))
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load_tile(maps, groups, tile, ring, stage, phase, BM: gl.constexpr, BN: gl.constexpr, WIDTH: gl.constexpr,
              STAGES: gl.constexpr, MULTIPLE: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
              DEALT: gl.constexpr):  # fmt: skip
    """By the maps of the tile's group, which no address can choose, so that each has its own loop."""
    group, steps, tile_m, tile_n, _, _, _, _ = pick(groups, tile, WIDTH, MULTIPLE)
    BYTES: gl.constexpr = (BM + BN) * DEEP * ring[0].dtype.primitive_bitwidth // 8
    for g in gl.static_range(len(maps)):
        if group == g:
            stage, phase = send(maps[g][0], maps[g][1], ring, stage, phase, tile_m * BM, tile_n * BN, steps, STAGES,
                                BYTES, A_ORDER, B_ORDER, DEALT)  # fmt: skip
    return stage, phase


@gluon.jit
def produce(maps, groups, total, ring, BM: gl.constexpr, BN: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
            MULTIPLE: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr, DEALT: gl.constexpr):  # fmt: skip
    """The loading warp."""
    stage = total * 0
    phase = total * 0 + 1
    if DEALT:
        for tile in range(gl.program_id(0), total, gl.num_programs(0)):
            stage, phase = load_tile(maps, groups, tile, ring, stage, phase, BM, BN, WIDTH, STAGES, MULTIPLE, A_ORDER,
                                     B_ORDER, DEALT)  # fmt: skip
    else:
        load_tile(maps, groups, gl.program_id(0), ring, stage, phase, BM, BN, WIDTH, STAGES, MULTIPLE, A_ORDER, B_ORDER,
                  DEALT)  # fmt: skip


@gluon.jit
def multiply_tile(groups, tile, ring, stage, phase, alpha_bits, BM: gl.constexpr, BN: gl.constexpr,
                  WIDTH: gl.constexpr, STAGES: gl.constexpr, MULTIPLE: gl.constexpr, A_ORDER: gl.constexpr,
                  B_ORDER: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr, DEALT: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """A block is handed back one step late, once the tensor cores have read it; the last one if more are to come."""
    _, steps, tile_m, tile_n, rows, columns, out, out_line = pick(groups, tile, WIDTH, MULTIPLE)
    a_smem, b_smem, full, empty = ring
    layout: gl.constexpr = sum_layout(BN, 16, WARPS)
    acc = warpgroup_mma_init(gl.zeros([BM, BN], gl.float32, layout))
    if not DEALT:
        stage = steps * 0
        phase = steps * 0
    # a value of its own: Triton would take `before = stage` for a name that the loop does not change
    before = (stage + STAGES) % STAGES
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a = oriented(a_smem.index(stage), A_ORDER == "col")
        b = oriented(b_smem.index(stage), B_ORDER == "col")
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[acc]))
        mbarrier.arrive(empty.index(before), pred=step > 0)
        before = stage
        stage, phase = after(stage, phase, STAGES)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    if DEALT:
        mbarrier.arrive(empty.index(before), pred=steps > 0)
    result = finish(acc, alpha_bits, alpha_bits, out, None, out, None, out.dtype.element_ty, ALPHA == "any", False,
                    False, ACTIVATION)  # fmt: skip
    PER_THREAD: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth if MULTIPLE > 1 else 1
    ACROSS: gl.constexpr = min(32, 64 // PER_THREAD)
    blocked: gl.constexpr = gl.BlockedLayout([1, PER_THREAD], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    result = gl.convert_layout(result, blocked)
    i = tile_m * BM + gl.arange(0, BM, gl.SliceLayout(1, blocked))
    j = gl.arange(0, BN, gl.SliceLayout(0, blocked))
    lines = out + i.to(gl.int64) * out_line + tile_n * BN
    gl.store(lines[:, None] + j[None, :], result, mask=(i < rows)[:, None] & (j < columns - tile_n * BN)[None, :])
    return stage, phase


@gluon.jit
def consume(groups, total, ring, alpha_bits, BM: gl.constexpr, BN: gl.constexpr, WIDTH: gl.constexpr,
            STAGES: gl.constexpr, MULTIPLE: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
            ALPHA: gl.constexpr, ACTIVATION: gl.constexpr, DEALT: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The warpgroups that multiply, all of them one tile."""
    stage = total * 0
    phase = total * 0
    if DEALT:
        for tile in range(gl.program_id(0), total, gl.num_programs(0)):
            stage, phase = multiply_tile(groups, tile, ring, stage, phase, alpha_bits, BM, BN, WIDTH, STAGES, MULTIPLE,
                                         A_ORDER, B_ORDER, ALPHA, ACTIVATION, DEALT, WARPS)  # fmt: skip
    else:
        multiply_tile(groups, gl.program_id(0), ring, stage, phase, alpha_bits, BM, BN, WIDTH, STAGES, MULTIPLE,
                      A_ORDER, B_ORDER, ALPHA, ACTIVATION, DEALT, WARPS)  # fmt: skip


@gluon.jit
def list_kernel(maps, groups, alpha_bits, total, BM: gl.constexpr, BN: gl.constexpr, WIDTH: gl.constexpr,
                STAGES: gl.constexpr, MULTIPLE: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
                ALPHA: gl.constexpr, ACTIVATION: gl.constexpr, DEALT: gl.constexpr):  # fmt: skip
    """`total` tiles. A group: maps of a and b, and its first tile, blocks of k, tiles down and across, the inverses for
    `place_few`, rows, columns, address and row distance of the result."""
    dtype: gl.constexpr = maps[0][0].dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    a_block: gl.constexpr = [STAGES, BM, DEEP] if A_ORDER == "row" else [STAGES, DEEP, BM]
    b_block: gl.constexpr = [STAGES, DEEP, BN] if B_ORDER == "row" else [STAGES, BN, DEEP]
    a_smem = gl.allocate_shared_memory(dtype, a_block, swizzled)
    b_smem = gl.allocate_shared_memory(dtype, b_block, swizzled)
    ring = (a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, 1))
    gl.warp_specialize(
        [
            (consume, (groups, total, ring, alpha_bits, BM, BN, WIDTH, STAGES, MULTIPLE, A_ORDER, B_ORDER, ALPHA,
                       ACTIVATION, DEALT, gl.num_warps())),
            (produce, (maps, groups, total, ring, BM, BN, WIDTH, STAGES, MULTIPLE, A_ORDER, B_ORDER, DEALT)),
        ],
        [1],
        [40],
    )  # fmt: skip
