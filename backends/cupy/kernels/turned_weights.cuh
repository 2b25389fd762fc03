// Weights of 4 bytes or of one byte whose columns, not k, are contiguous. wgmma takes such operands from shared memory along k
// only, but its first one also from registers: the lanes of a warpgroup read a stage across k, in the order that it wants.
//
// Which of the tile's columns is which of wgmma's 64 lines is free, as long as whoever stores results knows it: so a thread's
// two columns are neighbours, which one load brings.
#pragma once
#include "fragments.cuh"
#include "pipeline.cuh"

constexpr int TURNED_WORDS = 16;            // registers of a thread for a stage: 64 columns, 128 bytes of k
constexpr int NEXT_COLUMN = 1;

#if TF32
// A thread holds lines m and m + 8 at k = c and c + 4 of each 8 (m and c: a quarter of its lane, and the rest). A box has 32
// columns, eight chunks of 16 bytes, which lie in each line of k as the swizzle wants: chunks four apart and lines of four
// neighbouring k are in banks of their own, so that half a warp is served at once.
__device__ __forceinline__ int own_column(int first, int warp, int lane) {
    const int m = lane >> 2;
    return first + (warp >> 1) * 32 + (m >> 1 & 1) * 16 + (warp & 1) * 8 + (m >> 2) * 4 + (m & 1) * 2;
}
__device__ __forceinline__ void load_pair(u32& low, u32& high, u32 address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}
__device__ __forceinline__ void read_turned(u32 (&w)[TURNED_WORDS], u32 stage, int half) {
    const int own = own_column(0, (threadIdx.x & 127) >> 5, threadIdx.x & 31), c = threadIdx.x & 3;
    const u32 box = stage + (half * 2 + own / 32) * ACROSS_BYTES + c * LINE_BYTES + (own & 3) * 4, chunk = own % 32 >> 2;
#pragma unroll
    for (int i = 0; i < TURNED_WORDS / 2; ++i) {        // four of k each
        const u32 swizzled = (chunk ^ (c + (i & 1) * 4)) << 4;
        load_pair(w[i * 2], w[i * 2 + 1], box + i * 4 * LINE_BYTES + swizzled);
    }
}
#else
// A thread holds lines m and m + 8 at k = 4c .. 4c + 3 and 16 more of each 32. A transposing load of 8 lines of k by 16 columns
// gives it two columns at two k: lines are picked so that two such loads hold four neighbouring k.
__device__ __forceinline__ int own_column(int first, int warp, int lane) { return first + warp * 16 + (lane >> 2) * 2; }
__device__ __forceinline__ void load_transposed(u32 (&v)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void read_turned(u32 (&w)[TURNED_WORDS], u32 stage, int half) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, line = lane & 7, block = lane >> 3;
    const int k = (block >> 1) * 16 + (line >> 1) * 4 + (block & 1) * 2 + (line & 1);
    const u32 from = stage + k * LINE_BYTES + (((half * 4 + warp) ^ (k & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {                       // 32 of k each
        u32 v[4];
        load_transposed(v, from + i * 32 * LINE_BYTES);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            w[i * 4 + h * 2] = __byte_perm(v[h * 2], v[h * 2 + 1], 0x6420);
            w[i * 4 + h * 2 + 1] = __byte_perm(v[h * 2], v[h * 2 + 1], 0x7531);
        }
    }
}
#endif
