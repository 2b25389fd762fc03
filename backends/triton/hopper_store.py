# mypy: ignore-errors
"""The end of a strip in the Hopper kernel: the epilogue, then a store that stops at the group's last row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from multigemm.backends.triton.epilogue import finish

# what Triton 3.6 calls otherwise than later versions: all warps of a role meet; a block goes to global memory
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
STRIP = gl.constexpr(64)
# of a role that stores
WARPS = gl.constexpr(4)
BILLION = gl.constexpr(1 << 30)


@gluon.jit
def moved(spot, down: gl.constexpr, right: gl.constexpr):
    """The place of a strip `down` rows below and `right` columns beside another."""
    g, row, rows, low, bound, col = spot
    return g, row + down, rows - down, low, bound, col + right


@gluon.jit
def nothing_yet(out, like, PIECE: gl.constexpr, BITS: gl.constexpr):
    """A strip without rows, whose store stores nothing, in the layout that products of BITS wide operands have."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 256 // BITS])  # fmt: skip
    none = like * 0
    return gl.zeros([STRIP, PIECE], out[2][1].dtype.element_ty, layout), (none, none, none, none, none, none)


@gluon.jit
def finished(acc, target, spot, END: gl.constexpr):
    """act(alpha * acc + beta * C + bias) in the output's dtype; END[1] is the order of C or None."""
    C: gl.constexpr = END[1]
    BIAS: gl.constexpr = END[2]
    g, row, rows, low, _, col = spot
    _, _, tensors, strides, n = target
    c, out, bias = tensors
    c_group, c_row, c_col, _, _, _, bias_group, bias_col, alpha_bits, beta_bits, _ = strides
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    owned = owned_in(layout, acc.shape[1], row, rows, low, col, n)
    wide = g.to(gl.int64)
    c_ptrs = out
    bias_ptrs = out
    bias_mask = (j < n - col)[None, :]
    if C is not None:
        c_rows = c + wide * c_group + (row + i).to(gl.int64) * c_row
        if C == "row":
            c_ptrs = (c_rows + col)[:, None] + j[None, :]
        else:
            c_ptrs = c_rows[:, None] + (col + j).to(gl.int64)[None, :] * c_col
    if BIAS == "down":
        bias_ptrs = bias + wide * bias_group + (row + i).to(gl.int64)[:, None] * bias_col
        bias_mask = (i < rows)[:, None]
    elif BIAS == "across":
        bias_ptrs = bias + wide * bias_group + (col + j).to(gl.int64)[None, :] * bias_col
    return finish(acc, alpha_bits, beta_bits, c_ptrs, owned, bias_ptrs, bias_mask, out.dtype.element_ty,
                  END[3] == "any", C is not None, BIAS is not None, END[4])  # fmt: skip


@gluon.jit
def owned_in(layout: gl.constexpr, COLUMNS: gl.constexpr, row, rows, low, col, n):
    """Which elements of a strip belong to the group and to the matrix."""
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return ((i < rows) & (row + i >= low))[:, None] & (j < n - col)[None, :]


@gluon.jit
def write(acc, target, spot, PART: gl.constexpr, END: gl.constexpr):
    """The epilogue and the store of a strip, part by part, which takes fewer registers than all at once."""
    WIDE: gl.constexpr = acc.shape[1]
    if WIDE > PART:
        left, right = acc.reshape([STRIP, 2, WIDE // 2]).permute(0, 2, 1).split()
        write(left, target, spot, PART, END)
        write(right, target, moved(spot, 0, WIDE // 2), PART, END)
    else:
        store((finished(acc, target, spot, END), spot), target, PART, END)


@gluon.jit
def store(late, target, PART: gl.constexpr, END: gl.constexpr):
    """One finished strip, in parts of PART columns: by TMA through shared memory, or by plain stores."""
    result, spot = late
    g, row, rows, low, bound, col = spot
    out_desc, staging, tensors, strides, n = target
    WIDE: gl.constexpr = result.shape[1]
    if WIDE > PART:
        left, right = result.reshape([STRIP, 2, WIDE // 2]).permute(0, 2, 1).split()
        store((left, spot), target, PART, END)
        store((right, moved(spot, 0, WIDE // 2)), target, PART, END)
    elif END[0] == "tma":
        store_bounded(result, out_desc, staging, g * strides[10] + bound, BILLION - bound + row, col)
    else:
        store_plain(result, tensors[1], strides, g, row, rows, low, col, n, END[0])


@gluon.jit
def store_bounded(result, out_desc, staging, end, at, col):
    """Through shared memory; the map drops rows from `end` on. Waits first for the store before to have been read."""
    tma.store_wait(0)
    barrier()
    staging.store(result)
    fence_async_shared()
    barrier()
    box = staging.reshape([1, 1, STRIP, result.shape[1]])
    send(out_desc, [BILLION, end, at, col], box)


@gluon.jit
def store_plain(result, out, strides, g, row, rows, low, col, n, STORE: gl.constexpr):
    """Element by element, neighbouring lanes at neighbouring addresses, for outputs that no map can express."""
    COLUMNS: gl.constexpr = result.shape[1]
    lines = out + g.to(gl.int64) * strides[3]
    if STORE == "row":
        blocked: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        i = gl.arange(0, WARPS, gl.SliceLayout(1, blocked))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, blocked))
        start = lines + row.to(gl.int64) * strides[4] + col
        at = start + (i.to(gl.int64) * strides[4])[:, None] + j[None, :]
        store_rows(gl.convert_layout(result, blocked), at, strides[4] * WARPS, low - row, rows, j < n - col, blocked)
    else:
        turned: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        i = gl.arange(0, STRIP, gl.SliceLayout(1, turned))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, turned))
        owned = owned_in(turned, COLUMNS, row, rows, low, col, n)
        places = (lines + (row + i).to(gl.int64) * strides[4])[:, None] + (col + j).to(gl.int64)[None, :] * strides[5]
        gl.store(places, gl.convert_layout(result, turned), mask=owned)


@gluon.jit
def store_rows(result, at, step, first, rows, within, LAYOUT: gl.constexpr):
    """The rows from `first` on and before `rows`: one by each warp, then the next ones.

    An address is one addition away from another: the product of each row's number and the stride would cost more
    instructions than the stores do.
    """
    ROWS: gl.constexpr = result.shape[0]
    if ROWS > WARPS:
        HALF: gl.constexpr = ROWS // 2
        upper, lower = result.reshape([2, HALF, result.shape[1]]).permute(1, 2, 0).split()
        at = store_rows(upper, at, step, first, rows, within, LAYOUT)
        return store_rows(lower, at, step, first - HALF, rows - HALF, within, LAYOUT)
    else:
        i = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
        owned = ((i >= first) & (i < rows))[:, None] & within[None, :]
        gl.store(at, gl.convert_layout(result, LAYOUT), mask=owned)
        return at + step
