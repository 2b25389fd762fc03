// Which number scales an element: scales and zero points as grids over the lines of an operand (rows of a, columns of b) and
// blocks of k. Like codes.cuh a test compiles it for the host.
#pragma once
#include "codes.cuh"

// A grid, field by field as `GRID` in quantised.py. Strides are in numbers, and 0 along an axis that one number covers.
struct Grid {
    const char* ptr;                // null: there is none
    i64 group, line, k;
    int code, line_shift, k_shift;  // a number covers 2^line_shift lines and 2^k_shift of k; k_shift is WHOLE_K where it is all of k
    int jagged;                     // blocks of k are counted from the start of a group, which lies anywhere
};
constexpr int WHOLE_K = 40;

struct Grids {
    Grid a, b, zero;
    const Grid* listed;             // of a list: those three for each group
};

// The part of a grid that belongs to one group. `first`: its first line and, of a jagged k, its first entry along k.
struct GroupGrid {
    const char* ptr;
    i64 line, k, first_line, first_block;
    int code, line_shift, k_shift;
};

// `start_line` and `start_k`: where the group begins along a jagged extent, else 0. Blocks of a jagged k: no two groups share
// an entry, since an end o + k gives (o + k) / q + 1 >= o / q + ceil(k / q).
__device__ __forceinline__ GroupGrid grid_of_group(const Grid& s, i64 group, i64 start_line, i64 start_k) {
    GroupGrid r;
    r.ptr = s.ptr ? s.ptr + group * s.group * bytes_of(s.code) : nullptr;
    r.line = s.line, r.k = s.k, r.first_line = start_line, r.first_block = s.jagged && s.k_shift < WHOLE_K ? (start_k >> s.k_shift) + group : 0;
    r.code = s.code, r.line_shift = s.line_shift, r.k_shift = s.k_shift;
    return r;
}

// Where the number for a line and a k of the group stands.
__device__ __forceinline__ const char* entry_of(const GroupGrid& s, i64 line, i64 k) {
    const i64 along = ((s.first_line + line) >> s.line_shift) * s.line, deep = (s.first_block + (k >> s.k_shift)) * s.k;
    return s.ptr + (along + deep) * bytes_of(s.code);
}

__device__ __forceinline__ float number_of(const GroupGrid& s, i64 line, i64 k, float absent) {
    return s.ptr ? load_number(entry_of(s, line, k), s.code) : absent;
}

// Where groups begin along lines of a, lines of b, and k.
struct Starts { i64 a, b, k; };

__device__ __forceinline__ Starts starts_of(const Problem& p, i64 group) {
    Starts r = {0, 0, 0};
    if (p.jagged == JAG_NONE) return r;
    i64 start, end;
    jagged_span(p, group, start, end);
    (p.jagged == JAG_M ? r.a : p.jagged == JAG_N ? r.b : r.k) = start;
    return r;
}
