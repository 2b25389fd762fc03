"""Programs that are right by construction, to find out what the memory checkers report of them.

    compute-sanitizer --tool racecheck python -m multigemm.testing.control hand_over
    compute-sanitizer --tool initcheck python -m multigemm.testing.control grouped_mm

`grouped_mm` is torch's own call over operands that kernels of torch have written whole. In `hand_over`, one warp
hands words to four others through shared memory, as the Hopper kernel of the triton backend hands over tile
numbers, and every step is ordered by the PTX memory model: the writers' stores, then `bar.warp.sync`, then one
lane's `mbarrier.arrive` (a release), which the readers' `try_wait` acquires; the readers' loads, then `bar.sync`
of the four warps, then one thread's arrival, which the writers acquire before they store again. The results prove
nothing (a race may end well); the order of the program does. A racecheck that reports this kernel does not follow
one arrival on behalf of many threads, and what it says of the same pattern elsewhere is worth nothing. NVIDIA's
release notes of Compute Sanitizer list false reports of this kind as mended in 2025.4, 2026.1 and 2026.3; CUDA 13.0
has 2025.3.
"""

from __future__ import annotations

import sys

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ u32 at(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ void init(u64* b) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(b)) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory"); }
__device__ void wait(u64* b, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\nbra again;\nover:\n}" ::"r"(at(b)), "r"(parity) : "memory");
}
extern "C" __global__ void hand_over(int* out, int rounds) {
    __shared__ __align__(8) u64 full[2], taken[2];
    __shared__ int words[2][8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) init(&full[i]), init(&taken[i]);
    __syncthreads();
    int sum = 0;
    for (int r = 0; r < rounds; ++r) {
        const int slot = r & 1, turn = r >> 1 & 1;
        if (warp == 4) {
            wait(&taken[slot], turn ^ 1);
            if (lane < 8) words[slot][lane] = r * 8 + lane;
            __syncwarp();
            if (lane == 0) arrive(&full[slot]);
        } else {
            wait(&full[slot], turn);
            sum += words[slot][lane & 7];
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (threadIdx.x == 0) arrive(&taken[slot]);
        }
    }
    if (warp < 4) out[threadIdx.x] = sum;
}
"""
ROUNDS = 50


SIZES = ((96, 64, 64, 3), (256, 128, 128, 4))
"""Rows, columns, depth and groups of the products."""


def hand_over() -> bool:
    """Runs the kernel once; whether the words came through."""
    import cupy

    out = cupy.zeros(128, dtype=cupy.int32)
    cupy.RawModule(code=SOURCE).get_function("hand_over")((1,), (160,), (out, ROUNDS))
    wanted = sum(range(0, 8 * ROUNDS, 8)) + ROUNDS * (cupy.arange(128) % 8)
    return bool((out == wanted).all())


def grouped_mm() -> bool:
    """Whether torch's call gives the sums of powers of two that it must."""
    import torch

    right = True
    for rows, columns, depth, groups in SIZES:
        a, b = (torch.full(shape, 0.5, dtype=torch.bfloat16, device="cuda") for shape in
                ((rows, depth), (groups, columns, depth)))  # fmt: skip
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * (rows // groups)
        out = torch._grouped_mm(a, b.transpose(1, 2), ends)
        right = right and bool((out == depth / 4).all())
    return right


CONTROLS = {"hand_over": hand_over, "grouped_mm": grouped_mm}


def main(arguments: list[str]) -> int:
    """Runs one of the programs. Returns 0 if its results are right."""
    right = CONTROLS[arguments[0]]()
    print("right" if right else "WRONG", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
