// Rows of results that no 16-byte store can reach: odd pitches, addresses that are no multiple of 16.
#pragma once
#include "common.cuh"

constexpr int AT_ONCE = 8;

// `row` and every fourth one after it, AT_ONCE in all, of at most 64 results each, by one warp: as aligned pairs, from
// swizzled rows of the staging. Four pitches are a whole number of pairs, so all of these rows begin with one, or none
// does. Stores are predicated by hand: branches round them took longer than all the rest. Rows before `skip` and from
// `rows` on are left alone, and so are results before `begin` (at most 8) and from `cols` on.
__device__ __forceinline__ void store_rows(char* out, i64 pitch, u32 staging, int row, int skip, int rows, int cols, int begin = 0) {
    const int lane = threadIdx.x & 31;
    char* at = out + row * pitch + lane * 4;
    const bool odd = (u64(at) & 2) != 0;
    const int first = lane * 2 - int(odd);                // of this lane's pair; at the ends of a row one may be left alone
    const bool inside = first >= begin, head = first + 1 == begin, last = odd && lane == 31 && cols == 64;
    const bool both = inside && first + 1 < cols, alone = head ? begin < cols : last || (inside && first + 1 == cols);
    const int to = head ? 2 : last ? 4 : 0;
    at -= odd ? 2 : 0;
    u32 own[AT_ONCE], pair[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int r = row + i * 4;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(own[i]) : "r"(staging + r * 128 + (((lane >> 2) ^ (r & 7)) << 4) + (lane & 3) * 4));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) pair[i] = __byte_perm(__shfl_up_sync(~0u, own[i], 1), own[i], odd ? 0x5432 : 0x7654);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, at += 4 * pitch) {
        const bool exists = row + i * 4 >= skip && row + i * 4 < rows;
        const u16 one = u16((last ? own[i] : pair[i]) >> (head || last ? 16 : 0));
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u32 [%1], %2;\n}" ::"r"(u32(both && exists)), "l"(at), "r"(pair[i]) : "memory");
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u16 [%1], %2;\n}" ::"r"(u32(alone && exists)), "l"(at + to), "h"(one) : "memory");
    }
}
