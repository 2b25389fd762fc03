// Copies 16-bit operands that TMA cannot read into ones that it can, all in one launch: rows of `pitch` elements, a multiple
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
    i64 first;                                   // units of work in the copies before it
};

struct Job {
    const Copy* listed;                          // a list's copies, else null and `two` holds them
    u32 count, units;
    Copy two[2];
};

constexpr int SIDE = 64, THREADS = 256, LINES = THREADS / 32;

constexpr int AHEAD = 4, BAND = AHEAD * LINES, PIECE = 256;      // a unit of work: BAND rows by PIECE elements

// Rows as they are: a warp takes AHEAD rows, so that their loads overlap. Each lane reads the two aligned 16 bytes
// round its eight elements; where those reach past the ends of the group's operand, the elements one by one.
__device__ __forceinline__ void straight(const Copy& c, u32 unit) {
    const int lane = threadIdx.x & 31;
    const u32 pieces = u32(ceil_div(c.inner, PIECE)), bands = u32(ceil_div(c.outer, BAND));
    const u32 piece = unit % pieces, band = unit / pieces % bands, g = unit / pieces / bands;
    const i64 j = i64(piece) * PIECE + lane * 8, first = i64(band) * BAND + (threadIdx.x >> 5) * AHEAD;
    const u16* const start = c.from + g * c.from_group;
    const u64 end = u64(start + (c.outer - 1) * c.from_outer + c.inner);
    const int rows = j < c.inner ? int(min64(c.outer - first, AHEAD)) : 0, left = int(min64(c.inner - j, 8));
    uint4 low[AHEAD], high[AHEAD];
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) {
        const u16* from = start + (first + r) * c.from_outer + j;
        const u64 aligned = u64(from) & ~15ull;
        low[r] = high[r] = make_uint4(0, 0, 0, 0);
        if (r >= rows) continue;
        if (aligned >= u64(start) && aligned + 32 <= end) {
            low[r] = load_16_bytes((const void*)aligned), high[r] = load_16_bytes((const uint4*)aligned + 1);
        } else {
            u32 w[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < left) w[i >> 1] |= u32(from[i]) << (16 * (i & 1));
            low[r] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) {
        const u16* from = start + (first + r) * c.from_outer + j;
        const u64 aligned = u64(from) & ~15ull;
        if (r >= rows) continue;
        uint4 v = low[r];
        if (aligned >= u64(start) && aligned + 32 <= end) v = shifted(low[r], high[r], int(u64(from) & 15));
        if (left < 8) v = first_of(v, left);
        *(uint4*)(c.to + g * c.to_group + (first + r) * c.to_outer + j) = v;
    }
}

// A tile of SIDE x SIDE through shared memory, for sources that are contiguous in the other direction, or in none.
__device__ __forceinline__ void turn(const Copy& c, u32 unit) {
    __shared__ u16 tile[SIDE][SIDE + 2];
    const int lane = threadIdx.x & 31, line = threadIdx.x >> 5;
    const u32 across = u32(ceil_div(c.inner, SIDE)), down = u32(ceil_div(c.outer, SIDE));
    const bool turned = c.from_outer == 1;                      // the source is contiguous along `outer`
    const i64 g = unit / (across * down), i0 = i64(unit / across % down) * SIDE, j0 = i64(unit % across) * SIDE;
    const u16* from = c.from + g * c.from_group;
    u16* to = c.to + g * c.to_group;
    u16 v[SIDE / LINES * 2];
#pragma unroll
    for (int n = 0; n < SIDE / LINES * 2; ++n) {                // all loads first: they overlap
        const int along = lane + (n & 1) * 32, at = line + (n >> 1) * LINES, i = turned ? along : at, j = turned ? at : along;
        v[n] = 0;
        if (i0 + i < c.outer && j0 + j < c.inner) v[n] = from[(i0 + i) * c.from_outer + (j0 + j) * c.from_inner];
    }
    __syncthreads();                                            // the tile before has been read
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
}

// The last copy whose first unit is at or before `unit`.
__device__ __forceinline__ Copy find_copy(const Job& job, u32 unit) {
    if (!job.listed) return job.count > 1 && unit >= job.two[1].first ? job.two[1] : job.two[0];
    u32 low = 0, high = job.count;
    while (high - low > 1) {
        const u32 middle = (low + high) >> 1;
        if (__ldg(&job.listed[middle].first) <= unit) low = middle;
        else high = middle;
    }
    return job.listed[low];
}

extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Job job) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");      // the product may get ready; it waits for the copies itself
#endif
    for (u32 unit = blockIdx.x; unit < job.units; unit += gridDim.x) {
        const Copy c = find_copy(job, unit);
        if (c.from_inner == 1) straight(c, unit - u32(c.first));
        else turn(c, unit - u32(c.first));
    }
}
