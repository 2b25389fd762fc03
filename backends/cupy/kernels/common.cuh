// What every kernel of this folder is handed, and the arithmetic types that it is handed in.
//
// Free of CUDA headers on purpose: conversions are one PTX instruction each, so NVRTC parses a few
// hundred lines instead of tens of thousands and needs no include path.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

enum Type { NONE = 0, F16 = 1, BF16 = 2, F32 = 3, F64 = 4, I32 = 5 };
enum Activation { IDENTITY = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };
enum Jagged { JAG_NONE = 0, JAG_M = 1, JAG_N = 2, JAG_K = 3 };

// Column order of the per-group table, as multigemm.plan.operands.TABLE.
enum Column { T_A, T_B, T_C, T_OUT, T_BIAS, T_M, T_N, T_K, T_A_ROW, T_A_COL, T_B_ROW, T_B_COL, T_C_ROW, T_C_COL,
              T_OUT_ROW, T_OUT_COL, T_BIAS_COL, T_COLUMNS = 20 };

// Sixteen bytes that nothing else writes meanwhile. Volatile, so that no compiler moves the load out of the branch that
// makes its address a valid one: __ldg may be moved, and then reads past the end of an operand.
__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

struct Strided { char* ptr; i64 group, row, col; };  // strides in elements

// Mirrors `params.PROBLEM` in params.py, field by field.
struct Problem {
    Strided a, b, out, c, bias;
    const void* ends;        // [groups], end of each group along the jagged extent
    const void* valid;       // [groups], rows that count (masked form)
    const i64* table;        // [groups, T_COLUMNS] (per_group form), else null
    double alpha, beta;
    i64 m, n, k;             // the jagged one holds the whole extent T
    int groups, jagged, ends64, head, valid64, zero_unowned;
    int activation, out_type, c_type, bias_type, read_ab, batched;
};

// One group, resolved: addresses of its first elements, extents, strides.
struct Group {
    char *a, *b, *out, *c, *bias;
    i64 a_row, a_col, b_row, b_col, out_row, out_col, c_row, c_col, bias_col;
    i64 m, n, k;
};

__host__ __device__ constexpr int size_of(int type) { return type == F64 ? 8 : type >= F32 ? 4 : 2; }
__device__ __forceinline__ i64 min64(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 max64(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

__device__ __forceinline__ u16 f16_bits(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u16 bf16_bits(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u16 f16_bits(double x) {
    u16 y;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y) : "d"(x));
    return y;
}
// float64 to bfloat16 with one rounding: truncate to float32 and make an inexact result odd, so that
// the second rounding sees on which side of a tie the exact value lies.
__device__ __forceinline__ u16 bf16_bits(double x) {
    float f = __double2float_rz(x);
    if ((double)f != x) f = __uint_as_float(__float_as_uint(f) | 1u);
    return bf16_bits(f);
}
__device__ __forceinline__ u16 f16_bits(int) { return 0; }   // int8 problems have int32 results only
__device__ __forceinline__ u16 bf16_bits(int) { return 0; }

// Low half first, as two neighbours lie in memory.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// 16 bytes from `bytes` (0 to 15) past the start of `low`, of which `high` is the continuation.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, int bytes) {
    u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    const u32 bits = (bytes & 3) * 8;
    return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

// The first `count` of eight 16-bit values, zeros after them.
__device__ __forceinline__ uint4 first_of(uint4 v, int count) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = count >= i * 2 + 2 ? w[i] : count == i * 2 + 1 ? w[i] & 0xFFFF : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// The first `count` of eight 16-bit values, at the ragged right edge of a result.
__device__ __forceinline__ void store_first(char* at, uint4 v, int count) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 7; ++i)
        if (i < count) *(u16*)(at + 2 * i) = u16(word[i >> 1] >> (16 * (i & 1)));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- sm_80's copies of 16 bytes from global to shared memory, which pass through no register ----

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The first `bytes` of them; the others become zero.
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
