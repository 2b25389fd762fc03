// Which rows, columns and tiles belong to which group. Sizes live on the device and may lie: every
// bound is clamped here, so no later code can leave the operands.
#pragma once
#include "common.cuh"

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

// The packed forms follow one formula (multigemm.plan.operands); a list's groups come from its table.
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
