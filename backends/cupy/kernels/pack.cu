// Copies a 16-bit operand that TMA cannot read into one that it can: rows of `pitch` elements, a multiple
// of 8, contiguous in the direction that the main kernel wants. Costs one more pass over the operand.
//
// A thread block turns a 64 x 64 tile through shared memory, so that lanes run along the contiguous
// direction both when they read and when they write.
#include "common.cuh"

struct Copy {
    const u16* from;
    u16* to;
    i64 groups, outer, inner;                    // the copy: [groups, outer, inner], inner contiguous
    i64 from_group, from_outer, from_inner;      // strides in elements
    i64 to_group, to_outer;
};

constexpr int SIDE = 64, THREADS = 256, LINES = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Copy c) {
    __shared__ u16 tile[SIDE][SIDE + 2];
    const int lane = threadIdx.x & 31, line = threadIdx.x >> 5;
    const i64 across = ceil_div(c.inner, SIDE), down = ceil_div(c.outer, SIDE);
    const bool turned = c.from_inner != 1 && c.from_outer == 1;     // the source is contiguous along `outer`
    for (i64 t = blockIdx.x; t < across * down * c.groups; t += gridDim.x) {
        const i64 g = t / (across * down), i0 = t / across % down * SIDE, j0 = t % across * SIDE;
        const u16* from = c.from + g * c.from_group;
        u16* to = c.to + g * c.to_group;
        u16 v[SIDE / LINES * 2];
#pragma unroll
        for (int n = 0; n < SIDE / LINES * 2; ++n) {                // all loads first: they overlap
            const int along = lane + (n & 1) * 32, at = line + (n >> 1) * LINES, i = turned ? along : at, j = turned ? at : along;
            v[n] = 0;
            if (i0 + i < c.outer && j0 + j < c.inner) v[n] = from[(i0 + i) * c.from_outer + (j0 + j) * c.from_inner];
        }
#pragma unroll
        for (int n = 0; n < SIDE / LINES * 2; ++n) {
            const int along = lane + (n & 1) * 32, at = line + (n >> 1) * LINES;
            tile[turned ? along : at][turned ? at : along] = v[n];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < SIDE / LINES; ++n) {                    // two neighbours per lane; the pitch is padded
            const int i = line + n * LINES, j = lane * 2;
            if (i0 + i < c.outer && j0 + j < c.inner)
                *(u32*)(to + (i0 + i) * c.to_outer + j0 + j) = u32(tile[i][j]) | u32(tile[i][j + 1]) << 16;
        }
        __syncthreads();
    }
}
