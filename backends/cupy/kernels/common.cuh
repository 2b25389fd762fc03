// What every kernel of this folder is handed, the arithmetic types that it is handed in, and the extents of groups.
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

// Column order of the per-group table, as multigemm.planning.operands.TABLE.
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

// Mirrors `PROBLEM` in arguments.py, field by field.
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
#ifdef BFLOAT
// In the operands' type, of a kernel that names one of 16 bits.
__device__ __forceinline__ u32 pack_pair(float low, float high) { return BFLOAT ? pack_bf16(low, high) : pack_f16(low, high); }
#endif

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
// All of them if `flags` have this one, else zeros, and nothing is read.
__device__ __forceinline__ void copy_async_if(u32 flags, u32 one, u32 to, const void* from) {
    asm volatile("{.reg .pred absent;\n.reg .b32 flag;\nand.b32 flag, %2, %3;\nsetp.eq.u32 absent, flag, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;}" ::"r"(to), "l"(from), "r"(flags), "r"(one) : "memory");
}
// 4 or 8 bytes, or 16; the first `bytes` of them, the others become zero.
template <int WIDTH> __device__ __forceinline__ void copy_part(u32 to, const char* from, int bytes) {
    if (WIDTH == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(WIDTH), "r"(bytes) : "memory");
}
template <int WIDTH> __device__ __forceinline__ void copy_all(u32 to, const char* from) {
    if (WIDTH == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(WIDTH) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- programmatic launches, from sm_90 on: set up while the launch before still runs, then wait until it is over ----

__device__ __forceinline__ void start_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Groups: which rows, columns and tiles belong to which one ----
//
// Sizes live on the device and may lie: every bound is clamped here, so no later code can leave the operands.

__device__ __forceinline__ i64 read_index(const void* p, int is64, i64 i) {
    return is64 ? __ldg((const i64*)p + i) : (i64)__ldg((const int*)p + i);
}

__device__ __forceinline__ i64 jagged_extent(const Problem& p) {
    return p.jagged == JAG_M ? p.m : p.jagged == JAG_N ? p.n : p.k;
}

// [start, end) of group g along the jagged extent, within [0, T] whatever the offsets say.
__device__ __forceinline__ void jagged_span(const Problem& p, i64 g, i64& start, i64& end) {
    const i64 total = jagged_extent(p);
    const i64 raw = (g == 0 && !p.head) ? 0 : read_index(p.ends, p.ends64, g - 1);
    start = min64(max64(raw, 0), total);
    end = min64(max64(read_index(p.ends, p.ends64, g), start), total);
}

__device__ __forceinline__ i64 valid_rows(const Problem& p, i64 g) {
    return min64(max64(read_index(p.valid, p.valid64, g), 0), p.m);
}

// Rows and columns of group g's result.
__device__ __forceinline__ void group_shape(const Problem& p, i64 g, i64& m, i64& n) {
    m = p.m, n = p.n;
    if (p.table) {
        m = __ldg(p.table + g * T_COLUMNS + T_M), n = __ldg(p.table + g * T_COLUMNS + T_N);
    } else if (p.jagged == JAG_M || p.jagged == JAG_N) {
        i64 start, end;
        jagged_span(p, g, start, end);
        (p.jagged == JAG_M ? m : n) = end - start;
    } else if (p.valid) {
        m = valid_rows(p, g);
    }
}

__device__ __forceinline__ char* advance(const Strided& s, i64 elements, int size) {
    return s.ptr ? s.ptr + elements * size : nullptr;
}

// The packed forms follow one formula (multigemm.planning.operands); a list's groups come from its table.
__device__ inline Group resolve(const Problem& p, i64 g, int input_size) {
    Group r;
    const int out_size = size_of(p.out_type), c_size = size_of(p.c_type), bias_size = size_of(p.bias_type);
    if (p.table) {
        const i64* t = p.table + g * T_COLUMNS;
        r.a = (char*)t[T_A], r.b = (char*)t[T_B], r.c = (char*)t[T_C], r.out = (char*)t[T_OUT], r.bias = (char*)t[T_BIAS];
        r.m = t[T_M], r.n = t[T_N], r.k = t[T_K];
        r.a_row = t[T_A_ROW], r.a_col = t[T_A_COL], r.b_row = t[T_B_ROW], r.b_col = t[T_B_COL];
        r.c_row = t[T_C_ROW], r.c_col = t[T_C_COL], r.out_row = t[T_OUT_ROW], r.out_col = t[T_OUT_COL];
        r.bias_col = t[T_BIAS_COL];
    } else {
        i64 start = 0, end = 0;
        if (p.jagged != JAG_NONE) jagged_span(p, g, start, end);
        const i64 sm = p.jagged == JAG_M ? start : 0, sn = p.jagged == JAG_N ? start : 0, sk = p.jagged == JAG_K ? start : 0;
        r.m = p.jagged == JAG_M ? end - start : p.valid ? valid_rows(p, g) : p.m;
        r.n = p.jagged == JAG_N ? end - start : p.n;
        r.k = p.jagged == JAG_K ? end - start : p.k;
        r.a = advance(p.a, g * p.a.group + sm * p.a.row + sk * p.a.col, input_size);
        r.b = advance(p.b, g * p.b.group + sk * p.b.row + sn * p.b.col, input_size);
        r.out = advance(p.out, g * p.out.group + sm * p.out.row + sn * p.out.col, out_size);
        r.c = advance(p.c, g * p.c.group + sm * p.c.row + sn * p.c.col, c_size);
        r.bias = advance(p.bias, g * p.bias.group + sn * p.bias.col, bias_size);
        r.a_row = p.a.row, r.a_col = p.a.col, r.b_row = p.b.row, r.b_col = p.b.col;
        r.c_row = p.c.row, r.c_col = p.c.col, r.out_row = p.out.row, r.out_col = p.out.col;
        r.bias_col = p.bias.col;
    }
    if (!p.read_ab || r.k < 0) r.k = 0;
    return r;
}

// Finds the group of a tile number that only grows. A warp looks at 32 groups at a time, so the walk
// costs O(G / 32) loads per thread block in all, not O(G) per tile. Every lane must call `find`.
template <int BM, int BN>
struct TileWalk {
    i64 base = 0;        // tiles of all groups before `first`
    i64 upto = 0;        // this lane: tiles of groups first .. first + lane
    int first = -32;

    __device__ __forceinline__ void load(const Problem& p) {
        const int lane = threadIdx.x & 31, g = first + lane;
        upto = 0;
        if (g < p.groups) {
            i64 m, n;
            group_shape(p, g, m, n);
            upto = ceil_div(max64(m, 0), BM) * ceil_div(max64(n, 0), BN);
        }
        for (int d = 1; d < 32; d <<= 1) {
            const i64 other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
    }

    // False when the tile lies past the last one; else the group and the tile's number within it.
    __device__ __forceinline__ bool find(const Problem& p, i64 tile, int& group, i64& local) {
        while (true) {
            const i64 all = first < 0 ? 0 : __shfl_sync(~0u, upto, 31);
            if (first >= 0 && tile < base + all) break;
            base += all, first += 32;
            if (first >= p.groups) return false;
            load(p);
        }
        const int lane = __ffs(__ballot_sync(~0u, tile < base + upto)) - 1;
        group = first + lane;
        const i64 before = __shfl_sync(~0u, upto, max(lane - 1, 0));
        local = tile - base - (lane > 0 ? before : 0);
        return true;
    }
};
