// out = act(alpha * acc + beta * C + bias), in the accumulator's precision, rounded once.
//
// The kinds of C, bias, result and activation are run-time values: they are uniform over a launch,
// cost a predictable branch per element, and keep the number of compiled kernels small.
#pragma once
#include "common.cuh"

template <class Acc> __device__ __forceinline__ Acc load_as(const char* p, int type);

template <> __device__ __forceinline__ float load_as<float>(const char* p, int type) {
    if (type == F16) return to_float(*(const f16*)p);
    if (type == BF16) return to_float(*(const bf16*)p);
    return type == F64 ? (float)*(const double*)p : *(const float*)p;
}
template <> __device__ __forceinline__ double load_as<double>(const char* p, int type) {
    if (type == F64) return *(const double*)p;
    return load_as<float>(p, type);
}
template <> __device__ __forceinline__ int load_as<int>(const char* p, int) { return *(const int*)p; }

template <class Acc> __device__ __forceinline__ void store_as(char* p, int type, Acc v) {
    if (type == F16) *(u16*)p = f16_bits(v);
    else if (type == BF16) *(u16*)p = bf16_bits(v);
    else if (type == F32) *(float*)p = (float)v;
    else if (type == F64) *(double*)p = (double)v;
    else *(int*)p = (int)v;
}

// Infinities and NaN come out as torch's do. Its sums 1 + erf and 1 + tanh cancel for negative x; erfc and
// 1 + tanh(u) = 2 / (1 + exp(-2u)) keep the relative precision of the tail.
__device__ __forceinline__ float activate(float x, int kind) {
    if (kind == RELU) return x < 0.0f ? 0.0f : x;
    if (kind == GELU) return 0.5f * x * erfcf(-0.70710678118654752440f * x);
    if (kind == GELU_TANH) return x / (1.0f + expf(-1.59576912160573071176f * (x + 0.044715f * x * x * x)));
    if (kind == SILU) return x / (1.0f + expf(-x));
    return x;
}
__device__ __forceinline__ double activate(double x, int kind) {
    if (kind == RELU) return x < 0.0 ? 0.0 : x;
    if (kind == GELU) return 0.5 * x * erfc(-0.70710678118654752440 * x);
    if (kind == GELU_TANH) return x / (1.0 + exp(-1.59576912160573071176 * (x + 0.044715 * x * x * x)));
    if (kind == SILU) return x / (1.0 + exp(-x));
    return x;
}
__device__ __forceinline__ int activate(int x, int kind) { return kind == RELU && x < 0 ? 0 : x; }

template <class Acc> __device__ __forceinline__ Acc scalar(double x) { return (Acc)x; }
template <> __device__ __forceinline__ int scalar<int>(double x) { return (int)(u32)(u64)(i64)x; }  // wraps as the sums do

// acc -> element (i, j) of group g before the activation.
template <class Acc>
__device__ __forceinline__ Acc linear(const Problem& p, const Group& g, i64 i, i64 j, Acc acc) {
    Acc v = p.alpha == 1.0 ? acc : scalar<Acc>(p.alpha) * acc;
    if (!p.read_ab) v = 0;
    if (g.c) v += scalar<Acc>(p.beta) * load_as<Acc>(g.c + (i * g.c_row + j * g.c_col) * size_of(p.c_type), p.c_type);
    if (g.bias) v += load_as<Acc>(g.bias + j * g.bias_col * size_of(p.bias_type), p.bias_type);
    return v;
}

// acc -> result of element (i, j) of group g, before the rounding.
template <class Acc>
__device__ __forceinline__ Acc finish(const Problem& p, const Group& g, i64 i, i64 j, Acc acc) {
    return activate(linear<Acc>(p, g, i, j, acc), p.activation);
}

// Whether there is more to do than that (fused.cuh).
__device__ __forceinline__ constexpr bool is_fused(const Problem&) { return false; }

// One warp writes a staged block of accumulators, its lanes along the result's contiguous direction.
// Not inlined: the unrolled callers would multiply the activations' code.
template <class Acc>
__device__ __noinline__ void emit(const Problem& p, const Group& g, const Acc* staged, int rows, int cols, int pitch,
                                  i64 i0, i64 j0) {
    const int lane = threadIdx.x & 31, size = size_of(p.out_type);
    const bool along_rows = g.out_row == 1 && g.out_col != 1;
    for (int e = lane; e < rows * cols; e += 32) {
        const int r = along_rows ? e % rows : e / cols, c = along_rows ? e / rows : e % cols;
        const i64 i = i0 + r, j = j0 + c;
        if (i < g.m && j < g.n)
            store_as<Acc>(g.out + (i * g.out_row + j * g.out_col) * size, p.out_type, finish<Acc>(p, g, i, j, staged[r * pitch + c]));
    }
}

__device__ __forceinline__ void zero_block(char* out, i64 rows, i64 cols, i64 row, i64 col, int size, i64 worker, i64 workers) {
    const bool swap = row == 1 && col != 1;   // walk along the contiguous direction
    const i64 outer = swap ? cols : rows, inner = swap ? rows : cols, so = (swap ? col : row) * size, si = (swap ? row : col) * size;
    const int lane = threadIdx.x & 31;
    const i64 pieces = ceil_div(inner, 1024);
    for (i64 w = worker; w < outer * pieces; w += workers) {
        const i64 o = w / pieces, from = (w % pieces) * 1024, to = min64(from + 1024, inner);
        char* line = out + o * so;
        for (i64 e = from + lane; e < to; e += 32) {
            if (size == 2) *(u16*)(line + e * si) = 0;
            else if (size == 4) *(u32*)(line + e * si) = 0;
            else *(u64*)(line + e * si) = 0;
        }
    }
}

// Zeroes what no group owns: the head and tail of a jagged extent, the rows past `valid` of a mask. Whole warps, whose lanes
// look at the masks side by side: one after the other, those of many small groups took longer than their products.
__device__ inline void zero_unowned(const Problem& p, i64 warp, i64 warps) {
    const int size = size_of(p.out_type);
    if (p.valid) {
        const int lane = threadIdx.x & 31;
        for (int base = 0; base < p.groups; base += 32) {
            u32 some = __ballot_sync(~0u, base + lane < p.groups && valid_rows(p, base + lane) < p.m);
            for (; some; some &= some - 1) {
                const i64 g = base + __ffs(some) - 1, rows = valid_rows(p, g);
                zero_block(p.out.ptr + (g * p.out.group + rows * p.out.row) * size, p.m - rows, p.n, p.out.row, p.out.col, size, warp, warps);
            }
        }
    } else if (p.jagged == JAG_M || p.jagged == JAG_N) {
        i64 first = jagged_extent(p), last = first, unused;
        if (p.groups > 0) jagged_span(p, 0, first, unused), jagged_span(p, p.groups - 1, unused, last);
        const i64 step = (p.jagged == JAG_M ? p.out.row : p.out.col) * size, tail = jagged_extent(p) - last;
        const bool m = p.jagged == JAG_M;
        zero_block(p.out.ptr, m ? first : p.m, m ? p.n : first, p.out.row, p.out.col, size, warp, warps);
        zero_block(p.out.ptr + last * step, m ? tail : p.m, m ? p.n : tail, p.out.row, p.out.col, size, warp, warps);
    }
}
