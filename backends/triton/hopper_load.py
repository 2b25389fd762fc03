# mypy: ignore-errors
"""The loading warp of the Hopper kernel: tiles picked well before their turn, blocks of A and B by TMA.

It is one warp that issues in order, so whatever it waits for, the ring runs dry behind it. Hence the
answers of memory (the next tile, its record) are asked for some blocks before they are needed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from multigemm.backends.triton.hopper_tiles import draw, following, publish, record_of, retire, rows_up_to, tile_from

# Triton 3.6 calls it otherwise than later versions
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STRIP = gl.constexpr(64)
BILLION = gl.constexpr(1 << 30)
# a block of K is one swizzled row: 64 elements of 16 bits, or 32 of tf32
ROW_BYTES = gl.constexpr(128)


@gluon.jit
def load_strip(desc, row, k0, k_start, k_length, barrier, smem, pred, FORM: gl.constexpr, ORDER: gl.constexpr):
    """One strip of A, as deep as a block of K."""
    if FORM == "k":
        at = [BILLION, k_start + k_length, BILLION - k_length + k0, row]
        fetch(desc, at, barrier, smem.reshape([1, 1, STRIP, 64]), pred)
    elif ORDER == "row":
        fetch(desc, [row, k0], barrier, smem, pred)
    else:
        fetch(desc, [k0, row], barrier, smem, pred)


@gluon.jit
def load_piece(desc, g, col, k0, k_start, k_length, barrier, smem, FORM: gl.constexpr, ORDER: gl.constexpr,
               PIECE: gl.constexpr):  # fmt: skip
    """One block of B, PIECE columns wide."""
    if FORM == "k":
        at = [BILLION, k_start + k_length, BILLION - k_length + k0, col]
        fetch(desc, at, barrier, smem.reshape([1, 1, 64, PIECE]))
    elif ORDER == "row":
        fetch(desc, [g, k0, col], barrier, smem.reshape([1, 64, PIECE]))
    else:
        fetch(desc, [g, col, k0], barrier, smem.reshape([1, PIECE, smem.shape[1]]))


@gluon.jit
def fill(descs, ring, block, blocks, stage, phase, work, a_rows, b_step, FORM: gl.constexpr, PIECES: gl.constexpr,
         PIECE: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, A_ORDER: gl.constexpr,
         B_ORDER: gl.constexpr):  # fmt: skip
    """Sends the blocks [block, blocks) of a tile's A and B into the ring, as its stages become free.

    B is PIECES boxes of PIECE columns; none where other warps carry it (hopper_carry).
    """
    a_smem, b_smem, full, empty = ring
    g, row, rows, col, _, k_start, k_length = work
    A_BYTES: gl.constexpr = STRIP * ROW_BYTES
    B_BYTES: gl.constexpr = PIECES * PIECE * ROW_BYTES
    DEEP: gl.constexpr = 8 * ROW_BYTES // a_smem.dtype.primitive_bitwidth
    strips = (rows + STRIP - 1) // STRIP
    at = g * a_rows + row
    # an empty K is one block from beyond the maps' bounds: zeros, without a word to memory
    beyond = gl.where(k_length == 0, BILLION, 0)
    for number in range(block, blocks):
        k0 = beyond + number * DEEP
        mbarrier.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        for count in gl.static_range(1, MOST + 1):
            mbarrier.expect(barrier, B_BYTES + count * A_BYTES, pred=strips == count)
        for strip in gl.static_range(MOST):
            if MOST == 4:
                # consumer 0 holds the upper half of the strips, consumer 1 the lower half
                skip = strip % 2 + strip // 2 * ((strips + 1) // 2)
                wanted = strips > (strip % 2) * 2 + strip // 2
            else:
                skip = strip
                wanted = strips > strip
            load_strip(descs[0], at + skip * STRIP, k0, k_start, k_length, barrier,
                       a_smem.index(stage * MOST + strip), wanted, FORM, A_ORDER)  # fmt: skip
        for piece in gl.static_range(PIECES):
            load_piece(descs[1], g * b_step, col + piece * PIECE, k0, k_start, k_length, barrier,
                       b_smem.index(stage * PIECES + piece), FORM, B_ORDER, PIECE)  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def produce(descs, ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step,
            FORM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, MOST: gl.constexpr,
            STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr, MASKED: gl.constexpr,
            A_ORDER: gl.constexpr, B_ORDER: gl.constexpr):  # fmt: skip
    """The loading warp: picks the tiles, and keeps STAGES blocks of A and B in flight across tile borders.

    Tiles of jagged groups differ in cost, so they are drawn from a counter unless ORDER is "dealt". A tile is
    drawn, and its record read, while the last blocks of the tile before it are on their way: the answers
    take longer to come than the ring lasts.
    """
    DEEP: gl.constexpr = 8 * ROW_BYTES // ring[0].dtype.primitive_bitwidth
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    tile = gl.program_id(0)
    found = total
    if FORM == "search":
        found = rows_up_to(ends, extents, MOST, ALIGN, MASKED)
        total = gl.max(found, 0) * tiles_n
    record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED)
    while tile < total:
        work = tile_from(record, tile, extents, tiles_n, FORM, BN, MOST, WIDTH, ALIGN)
        publish(mail, slot, turn, work)
        slot ^= 1
        if slot == 0:
            turn ^= 1
        blocks = gl.maximum((work[6] + DEEP - 1) // DEEP, 1)
        drawing = gl.maximum(blocks - 4, 0)
        reading = gl.maximum(blocks - 2, 0)
        stage, phase = fill(descs, ring, 0, drawing, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE, MOST,
                            STAGES, A_ORDER, B_ORDER)  # fmt: skip
        drawn = draw(records, ORDER)
        stage, phase = fill(descs, ring, drawing, reading, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE,
                            MOST, STAGES, A_ORDER, B_ORDER)  # fmt: skip
        tile = following(tile, drawn, ORDER)
        record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED)
        stage, phase = fill(descs, ring, reading, blocks, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE, MOST,
                            STAGES, A_ORDER, B_ORDER)  # fmt: skip
    if ORDER == "drawn":
        retire(records)
    nothing = total * 0
    publish(mail, slot, turn, (nothing, nothing, nothing, nothing, nothing, nothing, nothing))
