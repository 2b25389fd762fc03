// Copies operands that TMA cannot read into ones that it can, all in one launch: rows whose pitch is a multiple of 16 bytes,
// contiguous in the direction that the main kernel wants. Costs one more pass over the operand. ELEMENT: bytes of an element,
// 2 if it is not said; RAGGED: the rows of a jagged k.
//
// Where source and copy are contiguous in the same direction, each lane reads aligned words and shifts
// them into 16 bytes. Else a thread block turns a 64 x 64 tile through shared memory, so that lanes run
// along the contiguous direction both when they read and when they write.
#include "common.cuh"

#ifndef ELEMENT
#define ELEMENT 2
#endif
#if ELEMENT == 1
typedef u8 Element;
#elif ELEMENT == 2
typedef u16 Element;
#else
typedef u32 Element;
#endif

struct Copy {
    const Element* from;
    Element* to;
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

constexpr int SIDE = ELEMENT == 1 ? 128 : 64, THREADS = 256, LINES = THREADS / 32;

constexpr int IN_PIECE = 16 / ELEMENT;                  // elements of a lane's 16 bytes
constexpr int AHEAD = 4, BAND = AHEAD * LINES, PIECE = 32 * IN_PIECE;      // a unit of work: BAND rows by PIECE elements

// The first `count` elements, zeros after them.
__device__ __forceinline__ uint4 first_elements(uint4 v, int count) {
    if (ELEMENT == 2) return first_of(v, count);
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int bits = (count * ELEMENT - i * 4) * 8;
        w[i] = bits >= 32 ? w[i] : bits > 0 ? w[i] & ((1u << bits) - 1) : 0;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Rows as they are: a warp takes AHEAD rows, so that their loads overlap. Each lane reads the two aligned 16 bytes
// round its eight elements; where those reach past the ends of the group's operand, the elements one by one.
__device__ __forceinline__ void straight(const Copy& c, u32 unit) {
    const int lane = threadIdx.x & 31;
    const u32 pieces = u32(ceil_div(c.inner, PIECE)), bands = u32(ceil_div(c.outer, BAND));
    const u32 piece = unit % pieces, band = unit / pieces % bands, g = unit / pieces / bands;
    const i64 j = i64(piece) * PIECE + lane * IN_PIECE, first = i64(band) * BAND + (threadIdx.x >> 5) * AHEAD;
    const Element* const start = c.from + g * c.from_group;
    const u64 end = u64(start + (c.outer - 1) * c.from_outer + c.inner);
    const int rows = j < c.inner ? int(min64(c.outer - first, AHEAD)) : 0, left = int(min64(c.inner - j, IN_PIECE));
    uint4 low[AHEAD], high[AHEAD];
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) {
        const Element* from = start + (first + r) * c.from_outer + j;
        const u64 aligned = u64(from) & ~15ull;
        low[r] = high[r] = make_uint4(0, 0, 0, 0);
        if (r >= rows) continue;
        if (aligned >= u64(start) && aligned + 32 <= end) {
            low[r] = load_16_bytes((const void*)aligned), high[r] = load_16_bytes((const uint4*)aligned + 1);
        } else {
            u32 w[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < IN_PIECE; ++i)
                if (i < left) w[i * ELEMENT >> 2] |= u32(from[i]) << (8 * (i * ELEMENT & 3));
            low[r] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) {
        const Element* from = start + (first + r) * c.from_outer + j;
        const u64 aligned = u64(from) & ~15ull;
        if (r >= rows) continue;
        uint4 v = low[r];
        if (aligned >= u64(start) && aligned + 32 <= end) v = shifted(low[r], high[r], int(u64(from) & 15));
        if (left < IN_PIECE) v = first_elements(v, left);
        *(uint4*)(c.to + g * c.to_group + (first + r) * c.to_outer + j) = v;
    }
}

#if ELEMENT > 1
// A tile of SIDE x SIDE at row `i0` and column `j0` of a copy through shared memory, for sources that are contiguous in the
// other direction, or in none. WHOLE: what does not exist of its columns is written as zeros.
template <bool WHOLE> __device__ __forceinline__ void turn_tile(const Copy& c, const Element* from, Element* to, i64 i0, i64 j0) {
    __shared__ Element tile[SIDE][SIDE + 4 / ELEMENT];
    const int lane = threadIdx.x & 31, line = threadIdx.x >> 5;
    const bool turned = c.from_outer == 1;                      // the source is contiguous along `outer`
    Element v[SIDE / LINES * 2];
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
#if ELEMENT == 2
    for (int n = 0; n < SIDE / LINES; ++n) {                    // two neighbours per lane; the pitch is padded
        const int i = line + n * LINES, j = lane * 2;
        if (i0 + i < c.outer && (WHOLE || j0 + j < c.inner))
            *(u32*)(to + (i0 + i) * c.to_outer + j0 + j) = u32(tile[i][j]) | u32(tile[i][j + 1]) << 16;
    }
#else
    for (int n = 0; n < SIDE / LINES * 2; ++n) {
        const int i = line + (n >> 1) * LINES, j = lane + (n & 1) * 32;
        if (i0 + i < c.outer && (WHOLE || j0 + j < c.inner)) to[(i0 + i) * c.to_outer + j0 + j] = tile[i][j];
    }
#endif
}
#else
// The same of bytes: words of four neighbours, turned four by four in registers. Words lie in the tile as `place` says, so that
// lanes are in banks of their own whichever way they run.
__device__ __forceinline__ int place(int i, int word) { return i * (SIDE / 4) + (word ^ (i >> 2)); }
__device__ __forceinline__ u32 four_of(const u8* from, i64 step, i64 left) {
    if (step == 1 && left >= 4 && (u64(from) & 3) == 0) return *(const u32*)from;
    u32 v = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < left) v |= u32(from[e * step]) << (8 * e);
    return v;
}
template <bool WHOLE> __device__ __forceinline__ void turn_tile(const Copy& c, const Element* from, Element* to, i64 i0, i64 j0) {
    __shared__ u32 tile[SIDE * SIDE / 4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 v[SIDE / LINES];
#pragma unroll
    for (int n = 0; n < SIDE / LINES; ++n) {                    // four rows of the copy by one of its columns
        const i64 i = i0 + lane * 4, j = j0 + (warp + n / 4 * LINES) * 4 + n % 4;
        v[n] = j < c.inner ? four_of(from + i * c.from_outer + j * c.from_inner, c.from_outer, c.outer - i) : 0;
    }
    __syncthreads();                                            // the tile before has been read
#pragma unroll
    for (int n = 0; n < SIDE / LINES; n += 4) {
        const int word = warp + n / 4 * LINES;
        const u32 even = __byte_perm(v[n], v[n + 1], 0x5140), even2 = __byte_perm(v[n + 2], v[n + 3], 0x5140);
        const u32 odd = __byte_perm(v[n], v[n + 1], 0x7362), odd2 = __byte_perm(v[n + 2], v[n + 3], 0x7362);
        tile[place(lane * 4, word)] = __byte_perm(even, even2, 0x5410);
        tile[place(lane * 4 + 1, word)] = __byte_perm(even, even2, 0x7632);
        tile[place(lane * 4 + 2, word)] = __byte_perm(odd, odd2, 0x5410);
        tile[place(lane * 4 + 3, word)] = __byte_perm(odd, odd2, 0x7632);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < SIDE / LINES; ++n) {
        const int i = warp + n * LINES, j = lane * 4;
        if (i0 + i < c.outer && (WHOLE || j0 + j < c.inner)) *(u32*)(to + (i0 + i) * c.to_outer + j0 + j) = tile[place(i, lane)];
    }
}
#endif

__device__ __forceinline__ void turn(const Copy& c, u32 unit) {
    const u32 across = u32(ceil_div(c.inner, SIDE)), down = u32(ceil_div(c.outer, SIDE));
    const i64 g = unit / (across * down), i0 = i64(unit / across % down) * SIDE, j0 = i64(unit % across) * SIDE;
    turn_tile<false>(c, c.from + g * c.from_group, c.to + g * c.to_group, i0, j0);
}

#if RAGGED
// The rows of a jagged k, contiguous in the copy, where each group begins at a multiple of SIDE (`first_k` in
// pipeline.cuh) and is followed by zeros up to the next one: a stage may be loaded past its end.
extern "C" __global__ void __launch_bounds__(THREADS) pack_ragged(const __grid_constant__ Problem p, const __grid_constant__ Copy c) {
    start_next_launch();
    const u32 down = u32(ceil_div(c.outer, SIDE)), units = u32(c.inner / SIDE) * down, share = (units + gridDim.x - 1) / gridDim.x;
    i64 block = -1, start = 0, end = 0, first = 0;
    for (u32 unit = blockIdx.x * share; unit < min(units, (blockIdx.x + 1) * share); ++unit) {
        if (unit / down != block) {                             // the last group that begins at or before the next block of k
            block = unit / down;
            int before = 0;
            for (int base = 0; base < p.groups; base += 32) {
                const int g = base + (threadIdx.x & 31);
                if (g < p.groups) jagged_span(p, g, start, end);
                before += __popc(__ballot_sync(~0u, g < p.groups && start / SIDE + g <= block));
            }
            const int g = max(before - 1, 0);
            jagged_span(p, g, start, end);
            first = start + (block - (start / SIDE + g)) * SIDE;
        }
        if (first < start || first >= end) continue;            // between two groups, or offsets that lie
        const i64 i0 = i64(unit % down) * SIDE, j0 = block * SIDE;
        Copy group = c;
        group.inner = j0 + end - first;
        turn_tile<true>(group, c.from + (first - j0) * c.from_inner, c.to, i0, j0);
    }
}
#else
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
    start_next_launch();      // the product may get ready; it waits for the copies itself
    for (u32 unit = blockIdx.x; unit < job.units; unit += gridDim.x) {
        const Copy c = find_copy(job, unit);
        if (c.from_inner == 1) straight(c, unit - u32(c.first));
        else turn(c, unit - u32(c.first));
    }
}
#endif
