// Copies a 16-bit operand that TMA cannot read into one that it can: rows of `pitch` elements, a multiple
// of 8, contiguous in the direction that the main kernel wants. Costs one more pass over the operand.
//
// Where source and copy are contiguous in the same direction, each lane reads aligned words and shifts
// them into 16 bytes. Else a thread block turns a 64 x 64 tile through shared memory, so that lanes run
// along the contiguous direction both when they read and when they write.
#include "common.cuh"

struct Copy {
    const u16* from;
    u16* to;
    i64 groups, outer, inner;                    // the copy: [groups, outer, inner], inner contiguous
    i64 from_group, from_outer, from_inner;      // strides in elements
    i64 to_group, to_outer;
};

constexpr int SIDE = 64, THREADS = 256, LINES = THREADS / 32;

// Eight elements from an address that is even but no more: aligned words, shifted where it is odd.
__device__ __forceinline__ uint4 read8(const u16* from) {
    const u32* words = (const u32*)(u64(from) & ~3ull);
    u32 w[5];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __ldg(words + i);
    if (!(u64(from) & 2)) return make_uint4(w[0], w[1], w[2], w[3]);
    w[4] = __ldg(words + 4);
    return make_uint4(__funnelshift_r(w[0], w[1], 16), __funnelshift_r(w[1], w[2], 16), __funnelshift_r(w[2], w[3], 16), __funnelshift_r(w[3], w[4], 16));
}

constexpr int AHEAD = 4;        // rows per warp and step, so that their loads overlap

// Rows as they are: a warp takes 256 elements of AHEAD rows at a time. The first and the last eight of a
// row are read one by one, for a word there could reach past the operand.
__device__ __forceinline__ void straight(const Copy& c) {
    const int lane = threadIdx.x & 31;
    const i64 warp = i64(blockIdx.x) * LINES + (threadIdx.x >> 5), warps = i64(gridDim.x) * LINES;
    const i64 pieces = ceil_div(c.inner, 256), bands = ceil_div(c.outer, AHEAD);
    for (i64 t = warp; t < c.groups * bands * pieces; t += warps) {
        const i64 piece = t % pieces, band = t / pieces % bands, g = t / pieces / bands, j = piece * 256 + lane * 8;
        uint4 v[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) {
            const i64 row = band * AHEAD + r;
            const u16* from = c.from + g * c.from_group + row * c.from_outer + j;
            v[r] = make_uint4(0, 0, 0, 0);
            if (row >= c.outer || j >= c.inner) continue;
            if (j > 0 && j + 9 <= c.inner) {
                v[r] = read8(from);
            } else {
                u32 w[4] = {0, 0, 0, 0};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (j + i < c.inner) w[i >> 1] |= u32(from[i]) << (16 * (i & 1));
                v[r] = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) {
            const i64 row = band * AHEAD + r;
            if (row < c.outer && j < c.inner) *(uint4*)(c.to + g * c.to_group + row * c.to_outer + j) = v[r];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Copy c) {
    if (c.from_inner == 1) return straight(c);
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
