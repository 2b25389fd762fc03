// What a fused problem has beside its products: rows picked by index, a gate, preact_out, row_scale.
#pragma once
#include "epilogue.cuh"

// Where the columns of g and u lie: side by side, or in halves of the product's columns.
enum Layout { NO_GATE = 0, PAIRS = 1, IN_HALVES = 2 };
constexpr int SIGMOID = 5;      // the gate glu; the other gates are named by their activation

// Field by field as `FUSED` in fused.py.
struct Fused {
    const void *a_rows, *b_rows;        // which row of an operand (jagged k: which of its k) a token is, else null
    char* preact;
    const char* row_scale;
    i64 a_extent, b_extent;             // rows that there are to be picked
    i64 preact_group, preact_row, preact_col, scale_group;
    double alpha, beta, limit;          // of the gate
    int a64, b64, preact_type, scale_type, layout, up_first, gate, limited;
};
struct FusedProblem : Problem { Fused fused; };

// Columns of a list's table that products leave free.
enum FusedColumn { T_PREACT = 17, T_PREACT_ROW = 18, T_PREACT_COL = 19 };

struct FusedGroup : Group {
    char* preact;
    const char* scale;                  // of the group's first row
    i64 preact_row, preact_col, start_m, start_n, start_k;
};

__device__ __forceinline__ constexpr bool is_fused(const FusedProblem&) { return true; }

// The number of a row, or -1 where the index means none: whatever it holds, no address comes of it.
__device__ __forceinline__ i64 picked_row(const void* rows, int is64, i64 token, i64 extent) {
    const i64 number = read_index(rows, is64, token);
    return number >= 0 && number < extent ? number : -1;
}

// As `resolve`; an operand whose rows are picked begins where it begins for all groups.
__device__ inline FusedGroup resolve_fused(const FusedProblem& p, i64 number, int input_size) {
    const Fused& f = p.fused;
    FusedGroup r;
    (Group&)r = resolve(p, number, input_size);
    i64 start = 0, end = 0;
    if (!p.table && p.jagged != JAG_NONE) jagged_span(p, number, start, end);
    r.start_m = p.jagged == JAG_M ? start : 0, r.start_n = p.jagged == JAG_N ? start : 0, r.start_k = p.jagged == JAG_K ? start : 0;
    if (f.a_rows) r.a = p.a.ptr;
    if (f.b_rows) r.b = p.b.ptr;
    r.scale = f.row_scale ? f.row_scale + (number * f.scale_group + r.start_m) * size_of(f.scale_type) : nullptr;
    if (p.table) {
        const i64* const t = p.table + number * T_COLUMNS;
        r.preact = (char*)t[T_PREACT], r.preact_row = t[T_PREACT_ROW], r.preact_col = t[T_PREACT_COL];
    } else {
        r.preact_row = f.preact_row, r.preact_col = f.preact_col;
        r.preact = f.preact ? f.preact + (number * f.preact_group + r.start_m * f.preact_row + r.start_n * f.preact_col) * size_of(f.preact_type) : nullptr;
    }
    return r;
}

// act(min(g, limit)) * (clamp(u, -limit, limit) + beta); comparisons, rather than min and max, keep NaN.
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
template <class Acc> __device__ __forceinline__ Acc gated(const Fused& f, Acc g, Acc u) {
    if (f.limited) {
        const Acc limit = Acc(f.limit);
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    u += Acc(f.beta);
    if (f.gate == SIGMOID) g = Acc(1) / (Acc(1) + exponential(-g));
    else if (f.gate == SILU) g = g / (Acc(1) + exponential(-Acc(f.alpha) * g));
    else g = activate(g, f.gate);
    return g * u;
}
template <> __device__ __forceinline__ int gated<int>(const Fused&, int, int) { return 0; }     // int8 has no gates

template <class Acc> __device__ __forceinline__ void put_preact(const Fused& f, const FusedGroup& g, i64 i, i64 j, Acc v) {
    if (g.preact) store_as<Acc>(g.preact + (i * g.preact_row + j * g.preact_col) * size_of(f.preact_type), f.preact_type, v);
}

template <class Acc> __device__ __forceinline__ Acc times_row_scale(const Fused& f, const FusedGroup& g, i64 i, Acc v) {
    return g.scale ? v * load_as<Acc>(g.scale + i * size_of(f.scale_type), f.scale_type) : v;
}

// acc -> result of element (i, j) of group g without a gate, before the rounding; as `finish` of a plain problem.
template <class Acc>
__device__ __forceinline__ Acc finish(const FusedProblem& p, const FusedGroup& g, i64 i, i64 j, Acc acc) {
    const Acc v = linear<Acc>(p, g, i, j, acc);
    put_preact<Acc>(p.fused, g, i, j, v);
    return times_row_scale<Acc>(p.fused, g, i, activate(v, p.activation));
}

// As `emit` of a plain problem. With a gate 16 columns of the result come of 32 of the products: g and u side by side, or
// eight of g and eight of u in turn.
template <class Acc>
__device__ __noinline__ void emit(const FusedProblem& p, const FusedGroup& g, const Acc* staged, int rows, int cols, int pitch,
                                  i64 i0, i64 j0) {
    const Fused& f = p.fused;
    const int lane = threadIdx.x & 31, size = size_of(p.out_type), joined = f.layout ? 2 : 1, across = cols / joined;
    const bool along_rows = g.out_row == 1 && g.out_col != 1;
    const i64 columns = g.n / joined;
    for (int e = lane; e < rows * across; e += 32) {
        const int r = along_rows ? e % rows : e / across, c = along_rows ? e / rows : e % across;
        const i64 i = i0 + r, j = j0 / joined + c;
        if (i >= g.m || j >= columns) continue;
        const Acc* const line = staged + r * pitch;
        Acc v;
        if (f.layout == NO_GATE) {
            v = finish<Acc>(p, g, i, j, line[c]);
        } else {
            const bool pairs = f.layout == PAIRS;
            const int first = pairs ? 2 * c : (c >> 3) * 16 + (c & 7), second = first + (pairs ? 1 : 8);
            const i64 j_gate = pairs ? 2 * j : f.up_first ? columns + j : j, j_up = pairs ? 2 * j + 1 : f.up_first ? j : columns + j;
            const Acc gate = linear<Acc>(p, g, i, j_gate, line[first]), up = linear<Acc>(p, g, i, j_up, line[second]);
            put_preact<Acc>(f, g, i, j_gate, gate), put_preact<Acc>(f, g, i, j_up, up);
            v = times_row_scale<Acc>(f, g, i, gated<Acc>(f, gate, up));
        }
        store_as<Acc>(g.out + (i * g.out_row + j * g.out_col) * size, p.out_type, v);
    }
}
