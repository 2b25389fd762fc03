// KMajor float8 operands of a jagged k into ones that hopper_fp8.cu reads: k contiguous, each group from a multiple of 128 on,
// zeros behind its end. Block j of 128 of group g goes to block offsets[g] / 128 + g + j of the copy, as its scales do
// (scales.cuh): no two groups share a block, and the copy's extent follows from shapes alone. Blocks between groups stay as they are.
//
// Where lines of the operand are its contiguous direction, tiles of 128 x 128 turn in shared memory, four by four bytes at a time.
#include "common.cuh"

struct KMajor {
    u8 *a, *b;
    i64 blocks;                     // of 128 of k that a line of the copies has
};

constexpr int SIDE = 128, THREADS = 256;

struct Tile {
    const u8* from;                 // of the first line and k
    u8* to;
    i64 line, k, pitch;             // the operand's steps, in bytes, and from line to line of the copy
    int lines, left;                // of the tile: lines that exist, k of the group
};

// Rows of four by four bytes become columns.
__device__ __forceinline__ void turn(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140), ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410), b = __byte_perm(ab, cd, 0x7632), c = __byte_perm(ab2, cd2, 0x5410), d = __byte_perm(ab2, cd2, 0x7632);
}

// 16 bytes, the first `count` of which are read.
__device__ __forceinline__ uint4 first_bytes(const u8* from, i64 step, int count) {
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < count) w[i >> 2] |= u32(from[i * step]) << (8 * (i & 3));
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// 16 bytes from any address, of which 16 are there, or fewer: then they are read one by one.
__device__ __forceinline__ uint4 bytes_along(const u8* from, i64 step, int count) {
    if (step != 1 || count < 16) return first_bytes(from, step, count);
    const int past = int(u64(from) & 15);
    if (past == 0) return load_16_bytes(from);
    const u64 aligned = u64(from) - past;           // both pieces hold some of the 16 bytes, so they can be read
    return shifted(load_16_bytes((const void*)aligned), load_16_bytes((const void*)(aligned + 16)), past);
}

// Lines that are contiguous: k by k into shared memory, 16 bytes of k by 4 lines out of it. Words lie such that neither meets a bank twice.
__device__ __forceinline__ void copy_turned(const Tile& t, u32 (&tile)[SIDE][32]) {
    const int piece = threadIdx.x & 7;
    const bool whole = ((u64(t.from) | u64(t.k)) & 15) == 0;
    __syncthreads();                                // the tile before has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = (threadIdx.x >> 3) + i * 32, count = min(max(t.lines - piece * 16, 0), 16);
        const u8* from = t.from + k * t.k + piece * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (k < t.left) v = whole && count == 16 ? load_16_bytes(from) : first_bytes(from, 1, count);
        *(uint4*)&tile[k][(piece ^ (k >> 4)) * 4] = v;
    }
    __syncthreads();
    const int word = threadIdx.x >> 3;              // four lines
    u32 w[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) w[i] = tile[piece * 16 + i][word ^ piece * 4];
#pragma unroll
    for (int i = 0; i < 16; i += 4) turn(w[i], w[i + 1], w[i + 2], w[i + 3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = word * 4 + i;
        if (line < t.lines) *(uint4*)(t.to + line * t.pitch + piece * 16) = make_uint4(w[i], w[4 + i], w[8 + i], w[12 + i]);
    }
}

__device__ __forceinline__ void copy_along(const Tile& t) {
    const int piece = threadIdx.x & 7, count = min(max(t.left - piece * 16, 0), 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = (threadIdx.x >> 3) + i * 32;
        if (line < t.lines) *(uint4*)(t.to + line * t.pitch + piece * 16) = bytes_along(t.from + line * t.line + piece * 16 * t.k, t.k, count);
    }
}

// The last group whose first block of the copy is at or before `block`.
__device__ __forceinline__ int group_of(const Problem& p, i64 block) {
    int low = 0, high = p.groups;
    while (high - low > 1) {
        const int middle = (low + high) >> 1;
        i64 start, end;
        jagged_span(p, middle, start, end);
        if ((start >> 7) + middle <= block) low = middle;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) k_major(const __grid_constant__ Problem p, const __grid_constant__ KMajor to) {
    start_next_launch();      // the product may get ready; it waits for the copies itself
    __shared__ u32 tile[SIDE][32];
    const i64 of_a = ceil_div(p.m, SIDE), strips = of_a + ceil_div(p.n, SIDE), units = to.blocks * strips;
    const i64 each = ceil_div(units, gridDim.x), first = blockIdx.x * each, last = min64(first + each, units);
    i64 block = -1, start = 0, end = 0;
    int left = 0;
    for (i64 unit = first; unit < last; ++unit) {
        if (unit / strips != block) {
            block = unit / strips;
            const int group = group_of(p, block);
            jagged_span(p, group, start, end);
            start += (block - (start >> 7) - group) * SIDE;
            left = int(min64(max64(end - start, 0), SIDE));
        }
        if (left == 0 || !p.read_ab) continue;
        const i64 strip = unit % strips;
        const bool is_a = strip < of_a;
        const i64 line = (is_a ? strip : strip - of_a) * SIDE;
        Tile t;
        t.line = is_a ? p.a.row : p.b.col, t.k = is_a ? p.a.col : p.b.row, t.pitch = to.blocks * SIDE;
        t.from = (const u8*)(is_a ? p.a.ptr : p.b.ptr) + line * t.line + start * t.k;
        t.to = (is_a ? to.a : to.b) + line * t.pitch + block * SIDE;
        t.lines = int(min64((is_a ? p.m : p.n) - line, SIDE)), t.left = left;
        if (t.line == 1) copy_turned(t, tile);
        else copy_along(t);
    }
}
