// Rows of results that no 16-byte store can reach: odd pitches, addresses that are no multiple of 16.
#pragma once
#include "common.cuh"

// Rows of at most 64 results at any even addresses, a warp each: aligned pairs, from swizzled rows of the staging. AT_ONCE
// rows of every fourth, from `row` on, so that their trips through shared memory overlap.
constexpr int AT_ONCE = 8;
__device__ __forceinline__ void store_rows(char* out, i64 pitch, u32 staging, int row, int rows, int cols) {
    const int lane = threadIdx.x & 31;
    u32 own[AT_ONCE], before[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int r = row + i * 4;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(own[i]) : "r"(staging + r * 128 + (((lane >> 2) ^ (r & 7)) << 4) + (lane & 3) * 4));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) before[i] = __shfl_up_sync(~0u, own[i], 1);
    char* at = out + row * pitch + lane * 4;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, at += 4 * pitch) {
        const int r = row + i * 4, left = cols - lane * 2;      // results from this lane's own first one on
        if (r >= rows) continue;
        if (u64(at) & 2) {
            if (lane == 0) { if (left > 0) *(u16*)at = u16(own[i]); }
            else if (left > 0) *(u32*)(at - 2) = __funnelshift_l(before[i], own[i], 16);
            else if (left > -1) *(u16*)(at - 2) = u16(before[i] >> 16);
            if (lane == 31 && left > 1) *(u16*)(at + 2) = u16(own[i] >> 16);
        } else if (left > 1) {
            *(u32*)at = own[i];
        } else if (left > 0) {
            *(u16*)at = u16(own[i]);
        }
    }
}
