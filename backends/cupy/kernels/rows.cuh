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
