// Rows of results that no 16-byte store can reach: odd pitches, addresses that are no multiple of 16.
#pragma once
#include "ptx.cuh"

constexpr int AT_ONCE = 8;

// 32 rows of at most 64 results each by four warps, which name them by `row`: a multiple of 32 and their number. A warp
// shifts four rows at once into aligned pieces of 16 bytes; then the results at both ends leave, one by one. Stores are
// predicated by hand: branches round them took longer than all the rest. Rows before `skip` and from `rows` on are left
// alone, and so are results before `begin` (at most 8) and from `cols` on.
__device__ __forceinline__ void store_rows(char* out, i64 pitch, u32 staging, int row, int skip, int rows, int cols, int begin = 0) {
    const int c = threadIdx.x & 7, first = (row & ~31) + (row & 3) * AT_ONCE + ((threadIdx.x & 31) >> 3);
#pragma unroll
    for (int i = 0; i < AT_ONCE / 4; ++i) {
        const int r = first + i * 4;
        const bool exists = r >= skip && r < rows;
        char* const line = out + r * pitch;
        const int past = int(u64(line) & 15), ahead = past >> 1;       // aligned pieces begin so many results before the row does
        const int whole = (begin + ahead + 7) / 8, end = (cols + ahead) >> 3;       // the first piece that is whole, and the one past the last
        const u32 from = staging + r * 128;
        const auto piece = [&](int n) { return load_shared16(from + (((n & 7) ^ (r & 7)) << 4)); };
        const auto one = [&](int e, bool wanted) {
            u16 v;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from + ((((e >> 3) & 7) ^ (r & 7)) << 4) + (e & 7) * 2));
            asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u16 [%1], %2;\n}" ::"r"(u32(wanted && exists && e < cols)), "l"(line + e * 2), "h"(v) : "memory");
        };
        const uint4 own = piece(c), before = piece(c - 1), v = past ? shifted(before, own, 16 - past) : own;
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}"
                     ::"r"(u32(exists && c >= whole && c < end)), "l"(line + c * 16 - past), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        const int body = whole * 8 - ahead;                             // the first result of a whole piece
        one(begin + c, begin + c < body);
        one(end * 8 - ahead + c, end >= whole);
    }
}

// 32 rows of at most 128 results each by four warps. A warp stores two rows at once, as aligned pieces of 16 bytes; then the
// results at both ends of four. Half as many rows begin and end within a sector of 32 bytes as with 64 columns: a part of one
// whose rest comes too late is read back from memory. Rows before `skip` and from `rows` on are left alone.
__device__ __forceinline__ void store_wide_rows(char* out, i64 pitch, u32 staging, int warp, int skip, int rows, int cols) {
    const int lane = threadIdx.x & 31, first = warp * AT_ONCE;
    const auto line_of = [&](int r) { return out + r * pitch; };
    const auto ahead_of = [&](int r) { return -int(u64(line_of(r)) >> 1) & 7; };       // results before the first aligned piece
    const auto place = [&](int r, int n) { return staging + r * 256 + (n >> 3 & 1) * 128 + (((n & 7) ^ (r & 7)) << 4); };
#pragma unroll
    for (int i = 0; i < AT_ONCE; i += 2) {
        const int r = first + i + (lane >> 4), n = lane & 15, ahead = ahead_of(r), e = ahead + n * 8;
        const uint4 v = shifted(load_shared16(place(r, n)), load_shared16(place(r, n + 1)), ahead * 2);
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}"
                     ::"r"(u32(r >= skip && r < rows && e + 8 <= cols)), "l"(line_of(r) + e * 2), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i += 4) {
        const int r = first + i + (lane >> 3), k = lane & 7, ahead = ahead_of(r);
        const auto one = [&](int e, bool wanted) {
            u16 v;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(place(r, e >> 3) + (e & 7) * 2));
            asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u16 [%1], %2;\n}" ::"r"(u32(wanted && r >= skip && r < rows && e < cols)), "l"(line_of(r) + e * 2), "h"(v) : "memory");
        };
        one(k, k < ahead);
        one(ahead + (max(cols - ahead, 0) & ~7) + k, true);
    }
}
