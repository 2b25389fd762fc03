"""The two small device kernels that the libraries lack; device code only.

`finish` is the epilogue that rounds once: it reads a wide intermediate result (or none, for K = 0)
and writes act(alpha*acc + beta*c + bias) to every owned element, and zeros to the unowned ones if
asked. With no intermediate it also lays c under a product that the library then adds to.
`cut` turns offsets that may lie into ends that torch's grouped_mm can be trusted with: int32,
between 0 and T, never falling.

Types are numbered as in TYPE_CODES and compiled in; extents, strides and addresses are arguments.
"""

from __future__ import annotations

import torch

TYPE_CODES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int8: 5,
}
ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
THREADS = 256
CUT_THREADS = 1024
SLAB = 4096
"""Elements of a line that one block writes before another may take over."""

FINISH = (
    f"#define SLAB {SLAB}LL\n"
    + r"""
typedef long long i64;
struct Matrix { i64 ptr, group, row, col; };
struct Task {
    Matrix acc, c, out, bias;
    i64 table, ends, valid;
    i64 groups, first, last, m, n, k;
    double alpha, beta;
    int jagged, head, wide_ends, masked, only_empty, rows_fast, lanes;
};

#if ACC == 4
typedef int calc;
#elif ACC == 3 || C == 3 || BIAS == 3
typedef double calc;
#else
typedef float calc;
#endif

template <int TYPE> __device__ __forceinline__ calc load(i64 base, i64 at) {
    if constexpr (TYPE == 0) {
        float wide;
        unsigned short half = ((const unsigned short*)base)[at];
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
        return (calc)wide;
    }
    if constexpr (TYPE == 1) return (calc)__uint_as_float((unsigned)((const unsigned short*)base)[at] << 16);
    if constexpr (TYPE == 2) return (calc)((const float*)base)[at];
    if constexpr (TYPE == 3) return (calc)((const double*)base)[at];
    if constexpr (TYPE == 4) return (calc)((const int*)base)[at];
    if constexpr (TYPE == 5) return (calc)((const signed char*)base)[at];
}

// A float that rounds on to 16 bits as the double itself would: truncated, with the lost part kept as a last odd bit.
__device__ __forceinline__ float narrow(float value) { return value; }
__device__ __forceinline__ float narrow(double value) {
    float cut = __double2float_rz(value);
    return (double)cut == value ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}
__device__ __forceinline__ float narrow(int value) { return (float)value; }

template <int TYPE> __device__ __forceinline__ void store(i64 base, i64 at, calc value) {
    if constexpr (TYPE == 0) {
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(narrow(value)));
        ((unsigned short*)base)[at] = half;
    }
    if constexpr (TYPE == 1) {
        float wide = narrow(value);
        unsigned bits = __float_as_uint(wide);
        unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        ((unsigned short*)base)[at] = (unsigned short)(wide != wide ? 0x7fffu : rounded);
    }
    if constexpr (TYPE == 2) ((float*)base)[at] = (float)value;
    if constexpr (TYPE == 3) ((double*)base)[at] = (double)value;
    if constexpr (TYPE == 4) ((int*)base)[at] = (int)value;
}

__device__ __forceinline__ calc activate(calc v) {
#if ACT == 1
    return v < (calc)0 ? (calc)0 : v;
#elif ACT == 2
    return (calc)0.5 * v * ((calc)1 + erf(v * (calc)0.70710678118654752440));
#elif ACT == 3
    return (calc)0.5 * v * ((calc)1 + tanh((calc)0.79788456080286535588 * (v + (calc)0.044715 * v * v * v)));
#elif ACT == 4
    return v / ((calc)1 + exp(-v));
#else
    return v;
#endif
}

__device__ __forceinline__ i64 clamp(i64 v, i64 low, i64 high) { return v < low ? low : v > high ? high : v; }

__device__ __forceinline__ i64 end_at(const Task& t, i64 g) {
    return t.wide_ends ? ((const i64*)t.ends)[g] : (i64)((const int*)t.ends)[g];
}

__device__ __forceinline__ i64 start_of(const Task& t, i64 g, i64 extent) {
    return g > 0 || t.head ? clamp(end_at(t, g - 1), 0, extent) : 0;
}

extern "C" __global__ void __launch_bounds__(256) finish(const Task t) {
    for (i64 index = t.first + blockIdx.y; index < t.last; index += gridDim.y) {
        bool owned = index < t.groups;
        i64 g = owned ? index : t.masked ? index - t.groups : 0;
        i64 r0 = 0, r1 = t.m, c0 = 0, c1 = t.n, k = t.k;
        Matrix acc = t.acc, c = t.c, out = t.out, bias = t.bias;
        if (t.table) {
            const i64* row = (const i64*)t.table + g * 20;
            r1 = row[5]; c1 = row[6]; k = row[7];
            c.ptr = t.c.ptr ? row[2] : 0; c.row = row[12]; c.col = row[13];
            out.ptr = row[3]; out.row = row[14]; out.col = row[15];
            bias.ptr = t.bias.ptr ? row[4] : 0; bias.col = row[16];
            acc.ptr = t.acc.ptr ? row[17] : 0; acc.row = row[18]; acc.col = row[19];
        }
        if (t.jagged) {
            i64 extent = t.jagged == 1 ? t.m : t.jagged == 2 ? t.n : t.k;
            i64 low, high;
            if (owned) {
                low = start_of(t, g, extent);
                high = clamp(end_at(t, g), low, extent);
            } else if (index == t.groups) {
                low = 0;
                high = t.groups ? start_of(t, 0, extent) : 0;
            } else {
                high = extent;
                low = t.groups ? clamp(end_at(t, t.groups - 1), 0, extent) : 0;
            }
            if (t.jagged == 1) { r0 = low; r1 = high; }
            else if (t.jagged == 2) { c0 = low; c1 = high; }
            else k = high - low;
        }
        if (t.masked) {
            i64 valid = clamp(t.wide_ends ? ((const i64*)t.valid)[g] : (i64)((const int*)t.valid)[g], 0, t.m);
            if (owned) r1 = valid; else r0 = valid;
        }
        if (owned && t.only_empty && k != 0) continue;
        i64 rows = r1 - r0, cols = c1 - c0;
        if (rows <= 0 || cols <= 0) continue;
        bool use_acc = acc.ptr != 0 && k != 0, use_c = c.ptr != 0, use_bias = bias.ptr != 0;
        // Lanes run along the result's contiguous direction; the base of each line is formed once.
        int lane = threadIdx.x & (t.lanes - 1), line = threadIdx.x / t.lanes, lines = blockDim.x / t.lanes;
        i64 slow_end = t.rows_fast ? cols : rows, fast_end = t.rows_fast ? rows : cols;
        i64 acc_step = t.rows_fast ? acc.row : acc.col, c_step = t.rows_fast ? c.row : c.col;
        i64 out_step = t.rows_fast ? out.row : out.col, bias_step = t.rows_fast ? 0 : bias.col;
        i64 slabs = (fast_end + SLAB - 1) / SLAB, slow_blocks = (slow_end + lines - 1) / lines;
        for (i64 tile = blockIdx.x; tile < slow_blocks * slabs; tile += gridDim.x) {
            i64 slow = (slabs == 1 ? tile : tile / slabs) * lines + line;
            i64 begin = slabs == 1 ? 0 : (tile % slabs) * SLAB;
            i64 end = begin + SLAB < fast_end ? begin + SLAB : fast_end;
            if (slow >= slow_end) continue;
            i64 i0 = r0 + (t.rows_fast ? 0 : slow), j0 = c0 + (t.rows_fast ? slow : 0);
            i64 acc_at = g * acc.group + i0 * acc.row + j0 * acc.col, c_at = g * c.group + i0 * c.row + j0 * c.col;
            i64 out_at = g * out.group + i0 * out.row + j0 * out.col, bias_at = g * bias.group + j0 * bias.col;
            if (!owned) {
                for (i64 at = begin + lane; at < end; at += t.lanes)
                    store<OUT>(out.ptr, out_at + at * out_step, (calc)0);
                continue;
            }
#pragma unroll 4
            for (i64 at = begin + lane; at < end; at += t.lanes) {
                calc v = (calc)0;
                if (use_acc) v = (calc)t.alpha * load<ACC>(acc.ptr, acc_at + at * acc_step);
                if (use_c) v += (calc)t.beta * load<C>(c.ptr, c_at + at * c_step);
                if (use_bias) v += load<BIAS>(bias.ptr, bias_at + at * bias_step);
                store<OUT>(out.ptr, out_at + at * out_step, activate(v));
            }
        }
    }
}
"""
)

CUT = r"""
typedef long long i64;
extern "C" __global__ void __launch_bounds__(1024) cut(
    const void* ends, int* result, int* first_two, int groups, i64 extent, int wide, int head) {
    __shared__ int scan[2][1024];
    int g = threadIdx.x, now = 0;
    auto read = [&](int at) {
        i64 v = wide ? ((const i64*)ends)[at] : (i64)((const int*)ends)[at];
        return (int)(v < 0 ? 0 : v > extent ? extent : v);
    };
    int start = head ? read(-1) : 0;
    scan[0][g] = g < groups ? max(read(g), start) : 0;
    __syncthreads();
    for (int step = 1; step < groups; step *= 2) {
        scan[now ^ 1][g] = g >= step ? max(scan[now][g], scan[now][g - step]) : scan[now][g];
        now ^= 1;
        __syncthreads();
    }
    if (g < groups) result[g] = scan[now][g];
    if (first_two && g == 0) { first_two[0] = start; first_two[1] = scan[now][0]; }
}
"""
