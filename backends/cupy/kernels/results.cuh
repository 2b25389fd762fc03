// Where the results of a tile go, and results that no tile has.
#pragma once
#include "pipeline.cuh"

// Rows at the start of a piece that belong to the group before (see Shape::lead).
__device__ __forceinline__ int rows_to_skip(const Problem& p, const Tile& t) {
    return !X_K && !LISTED && !RAGGED_K && !JAGGED_W && t.row0 == 0 ? t.extra : 0;
}

constexpr bool ALONG_ROWS = PLAIN == 2;       // neighbouring rows, not columns, are neighbours in memory

// Where a warpgroup's columns of a tile go.
struct Target {
    char* out;          // first row of the piece, first column
    i64 row_step;       // bytes; from column to column if ALONG_ROWS
    int cols;           // columns left, at most as many as were asked for
};

__device__ __forceinline__ Target target_of(const Problem& p, const Launch& l, const Tile& t, i64 col, int most = 64) {
    Target r;
    i64 cols;
    if (LISTED) {
        const i64* g = p.table + i64(t.group) * T_COLUMNS;
        r.out = (char*)__ldg(g + T_OUT), r.row_step = __ldg(g + (l.swapped ? T_OUT_COL : T_OUT_ROW)) * RESULT, cols = __ldg(g + (l.swapped ? T_M : T_N));
        r.out += t.row0 * r.row_step;
    } else {
        r.row_step = (l.swapped != ALONG_ROWS ? p.out.col : p.out.row) * RESULT, cols = l.swapped ? p.m : p.n;
        const bool jagged_rows = p.jagged == JAG_M || p.jagged == JAG_N;
        r.out = p.out.ptr + i64(t.group) * p.out.group * RESULT + i64(jagged_rows ? t.x_row : t.row0) * (ALONG_ROWS ? RESULT : r.row_step);
#if JAGGED_W
        i64 start, end;
        jagged_span(p, t.group, start, end);
        cols = end - start, r.out += start * (ALONG_ROWS ? r.row_step : RESULT);
#endif
    }
    r.out += col * (ALONG_ROWS ? r.row_step : RESULT), r.cols = int(min64(cols - col, most));
    return r;
}

#if PLAIN
// Jagged k: results of groups without any k are alpha * 0, which a warp with nothing else to do writes. Its lanes look for such
// groups in the schedule: one after the other, from memory, took longer than the products of many short ones.
__device__ __forceinline__ void zero_idle_groups(const Problem& p, const Launch& l, const Schedule& s) {
    const int lane = threadIdx.x & 31;
    const i64 rows = l.swapped ? p.n : p.m, cols = l.swapped ? p.m : p.n, step = (l.swapped ? p.out.col : p.out.row) * RESULT;
    const u32 high = p.alpha < 0.0 ? INT8 ? 0u : RESULT > 2 ? 0x80000000u : 0x80008000u : 0u, low = DOUBLE ? 0u : high;
    constexpr int PIECE = 16 / RESULT;
#pragma unroll 1
    for (int base = 0; base < p.groups; base += 32) {
        u32 idle = __ballot_sync(~0u, base + lane < p.groups && s.length[base + lane] == 0);
#pragma unroll 1
        for (; idle; idle &= idle - 1) {
            const int g = base + __ffs(idle) - 1;
#pragma unroll 1
            for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
                char* line = p.out.ptr + g * p.out.group * RESULT + row * step;
                const i64 whole = l.vector_out ? cols & ~(PIECE - 1) : 0;
#pragma unroll 4
                for (i64 c = lane * PIECE; c < whole; c += 32 * PIECE) *(uint4*)(line + c * RESULT) = make_uint4(low, high, low, high);
                for (i64 c = whole + lane; c < cols; c += 32) {
                    if (DOUBLE) *(u64*)(line + c * RESULT) = u64(high) << 32;
                    else if (WORD_RESULTS) *(u32*)(line + c * RESULT) = high;
                    else *(u16*)(line + c * RESULT) = u16(high);
                }
            }
        }
    }
}
#endif
