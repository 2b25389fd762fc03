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
BILLION = gl.constexpr(1 << 30)


@gluon.jit
def finished(acc, tensors, strides, g, row, rows, owned, col, n,
             C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr):  # fmt: skip
    """act(alpha * acc + beta * C + bias) in the output's dtype; C is the order of C or None."""
    c, out, bias = tensors
    c_group, c_row, c_col, _, _, _, bias_group, bias_col, alpha_bits, beta_bits, _ = strides
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
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
                  ALPHA == "any", C is not None, BIAS is not None, ACTIVATION)  # fmt: skip


@gluon.jit
def owned_in(layout: gl.constexpr, COLUMNS: gl.constexpr, row, rows, low, col, n):
    """Which elements of a strip belong to the group and to the matrix."""
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return ((i < rows) & (row + i >= low))[:, None] & (j < n - col)[None, :]


@gluon.jit
def write(acc, out_desc, staging, tensors, strides, g, row, rows, low, bound, col, n,
          PART: gl.constexpr, STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr,
          ACTIVATION: gl.constexpr):  # fmt: skip
    """One strip, in parts of PART columns: by TMA through shared memory, or by plain stores."""
    WIDE: gl.constexpr = acc.shape[1]
    if WIDE > PART:
        left, right = acc.reshape([STRIP, 2, WIDE // 2]).permute(0, 2, 1).split()
        write(left, out_desc, staging, tensors, strides, g, row, rows, low, bound, col, n,
              PART, STORE, C, BIAS, ALPHA, ACTIVATION)  # fmt: skip
        write(right, out_desc, staging, tensors, strides, g, row, rows, low, bound, col + WIDE // 2, n,
              PART, STORE, C, BIAS, ALPHA, ACTIVATION)  # fmt: skip
    else:
        layout: gl.constexpr = acc.type.layout
        owned = owned_in(layout, WIDE, row, rows, low, col, n)
        result = finished(acc, tensors, strides, g, row, rows, owned, col, n, C, BIAS, ALPHA, ACTIVATION)
        if STORE == "tma":
            store_bounded(result, out_desc, staging, g * strides[10] + bound, BILLION - bound + row, col)
        else:
            store_plain(result, tensors[1], strides, g, row, rows, low, col, n, STORE)


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
    if STORE == "row":
        blocked: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    else:
        blocked: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    result = gl.convert_layout(result, blocked)
    i = gl.arange(0, STRIP, gl.SliceLayout(1, blocked))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, blocked))
    owned = owned_in(blocked, COLUMNS, row, rows, low, col, n)
    lines = out + g.to(gl.int64) * strides[3] + (row + i).to(gl.int64) * strides[4]
    if STORE == "row":
        gl.store((lines + col)[:, None] + j[None, :], result, mask=owned)
    else:
        gl.store(lines[:, None] + (col + j).to(gl.int64)[None, :] * strides[5], result, mask=owned)
