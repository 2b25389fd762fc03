# mypy: ignore-errors
"""Zeros for what no group owns, where the kernel before writes only what groups own."""

import triton
import triton.language as tl

from multigemm.backends.triton.kernels import write_outside


@triton.jit
def zero_kernel(out, ends, m, n, groups, head, out_group, out_row, out_col,
                FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """What no group owns, as a launch of its own: for kernels that only write what groups own."""
    if FORM == "masked":
        across = (n + BN - 1) // BN
        per_group = ((m + BM - 1) // BM) * across
        for tile in range(tl.program_id(0), groups * per_group, tl.num_programs(0)):
            g = tile // per_group
            valid = tl.minimum(tl.maximum(tl.load(ends + g).to(tl.int64), 0), m).to(tl.int32)
            i = tile % per_group // across * BM + tl.arange(0, BM)
            j = tile % across * BN + tl.arange(0, BN)
            outside = (i >= valid) & (i < m)
            ptrs = (
                out + g.to(tl.int64) * out_group + i[:, None].to(tl.int64) * out_row + j[None, :].to(tl.int64) * out_col
            )
            tl.store(ptrs, tl.zeros((BM, BN), out.dtype.element_ty), mask=outside[:, None] & (j < n)[None, :])
    else:
        write_outside(out, ends, m, n, groups, head, out_group, out_row, out_col, FORM, BM, BN)
