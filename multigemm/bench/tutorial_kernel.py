# mypy: ignore-errors
"""A grouped GEMM as Triton's tutorial teaches it, written anew. Our own scheduler is compared with it.

Each program walks through all groups and takes every n-th tile of their concatenation. Operands come through
descriptors that a program makes on the device when it enters a group.
"""

import triton
import triton.language as tl


@triton.jit
def tutorial_kernel(
    a, b, out, ends, groups, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """out[rows of g] = a[rows of g] @ b[g].T for packed rows; b is [G, N, K]."""
    tile = tl.program_id(0)
    across = tl.cdiv(n, BN)
    before = 0
    start = 0
    for g in range(groups):
        end = tl.load(ends + g)
        rows = end - start
        count = tl.cdiv(rows, BM) * across
        if tile < before + count:
            x = tl.make_tensor_descriptor(a + start.to(tl.int64) * k, [rows, k], [k, 1], [BM, BK])
            y = tl.make_tensor_descriptor(b + g.to(tl.int64) * n * k, [n, k], [k, 1], [BN, BK])
            z = tl.make_tensor_descriptor(out + start.to(tl.int64) * n, [rows, n], [n, 1], [BM, BN])
            while tile < before + count:
                i = (tile - before) // across * BM
                j = (tile - before) % across * BN
                acc = tl.zeros((BM, BN), tl.float32)
                for step in tl.range(0, tl.cdiv(k, BK), num_stages=STAGES):
                    acc = tl.dot(x.load([i, step * BK]), y.load([j, step * BK]).T, acc)
                z.store([i, j], acc.to(out.dtype.element_ty))
                tile += tl.num_programs(0)
        before += count
        start = end
