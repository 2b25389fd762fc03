// The steps round a plain grouped product that together make a fused one: `gather_rows` copies rows by index, `finish_rows`
// applies an activation or gate and weights of rows to products, `sum_rows` adds rows in a fixed order. No kernel has a
// barrier, and each element is written by one thread.
//
// Defined by the compiler's options: INDEX and ENDS (bytes of an index, of an end), UNIT (bytes that gather_rows moves at
// once), EACH (1 or 8 elements at once), and as elements.cuh numbers them the types SUM, OUT, PREACT, SCALE (row_scale,
// or the weights of sum_rows), ADDED (c), ROWS (what sum_rows adds); ACT, LAYOUT; TERMS of a sum, -1 for places.
typedef long long i64;
#if SUM == 3
typedef double calc;
#else
typedef float calc;
#endif
#if INDEX == 8
typedef long long index_t;
#else
typedef int index_t;
#endif
#if ENDS == 8
typedef long long end_t;
#else
typedef int end_t;
#endif

#include "elements.cuh"

#if UNIT == 16
typedef Words unit;
#elif UNIT == 8
typedef long long unit;
#elif UNIT == 4
typedef int unit;
#elif UNIT == 2
typedef short unit;
#else
typedef char unit;
#endif

// to[s] = x[rows[s]], zeros where there is no such row; `row`, `col`, `width` and `to_row` count units.
struct Gather { i64 x, rows, to, tokens, extent, row, col, width; };

// A block copies LINES rows at once, so that as many loads are on their way.
extern "C" __global__ void __launch_bounds__(256) gather_rows(const Gather t) {
    constexpr int LINES = 4;
    for (i64 s = (i64)blockIdx.x * LINES; s < t.tokens; s += (i64)gridDim.x * LINES) {
        i64 from[LINES];
#pragma unroll
        for (int i = 0; i < LINES; ++i) from[i] = s + i < t.tokens ? (i64)((const index_t*)t.rows)[s + i] : -1;
        unit* const to = (unit*)t.to + s * t.width;
        for (i64 j = threadIdx.x; j < t.width; j += blockDim.x) {
            unit held[LINES];
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                held[i] = from[i] >= 0 && from[i] < t.extent ? ((const unit*)t.x)[from[i] * t.row + j * t.col] : unit{};
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                if (s + i < t.tokens) to[i * t.width + j] = held[i];
        }
    }
}

// COUNT elements from `at` on, `step` apart; eight side by side come in words of 16 bytes, which must be aligned.
template <int TYPE, int COUNT> __device__ __forceinline__ void load_some(i64 base, i64 at, i64 step, calc* values) {
    if constexpr (COUNT == 8 && TYPE <= 1) {
        const Words packed = *(const Words*)(base + at * 2);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = of_16_bits<TYPE>((unsigned short)(packed.word[i / 2] >> (i % 2 * 16)));
    } else if constexpr (COUNT == 8 && TYPE == 2) {
        const Words packed[2] = {((const Words*)(base + at * 4))[0], ((const Words*)(base + at * 4))[1]};
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = (calc)__uint_as_float(packed[i / 4].word[i % 4]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] = load<TYPE>(base, at + i * step);
    }
}

template <int TYPE, int COUNT> __device__ __forceinline__ void store_some(i64 base, i64 at, i64 step, const calc* values) {
    if constexpr (COUNT == 8 && TYPE <= 1) {
        Words packed;
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed.word[i] = to_16_bits<TYPE>(values[2 * i]) | (unsigned)to_16_bits<TYPE>(values[2 * i + 1]) << 16;
        *(Words*)(base + at * 2) = packed;
    } else if constexpr (COUNT == 8 && TYPE == 2) {
        Words packed[2];
#pragma unroll
        for (int i = 0; i < 8; i++) packed[i / 4].word[i % 4] = __float_as_uint((float)values[i]);
        ((Words*)(base + at * 4))[0] = packed[0];
        ((Words*)(base + at * 4))[1] = packed[1];
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) store<TYPE>(base, at + i * step, values[i]);
    }
}

// Where the first group starts and the last one ends.
struct Range { i64 low, high; };
__device__ __forceinline__ Range owned_range(i64 ends, i64 groups, i64 head, i64 total) {
    if (groups == 0) return {0, 0};
    const end_t* at = (const end_t*)ends;
    return {head ? clamp((i64)at[-1], 0, total) : 0, clamp((i64)at[groups - 1], 0, total)};
}

#if defined(ACT)

__device__ __forceinline__ calc over_sigmoid(calc v, calc x) { return v / ((calc)1 + exp(-x)); }

__device__ __forceinline__ calc activate(calc v, calc alpha) {
#if ACT == 1
    return v < (calc)0 ? (calc)0 : v;
#elif ACT == 2
    return (calc)0.5 * v * erfc(v * (calc)-0.70710678118654752440);  // 1 + erf would cancel for negative v
#elif ACT == 3
    // 1 + tanh(u) = 2 / (1 + exp(-2u)), which does not cancel
    return v / ((calc)1 + exp((calc)-1.59576912160573071176 * (v + (calc)0.044715 * v * v * v)));
#elif ACT == 4
    return over_sigmoid(v, alpha * v);
#elif ACT == 5
    return over_sigmoid((calc)1, v);
#else
    return v;
#endif
}

// A result [groups, rows, columns] of products that lie without gaps, `joined` columns of which make one of the result.
// `cut`: 0 nothing, 1 rows, 2 columns are cut by `ends`; 3 `ends` are the rows of each group that count.
// `unowned`: what no group owns is written, as zeros.
struct Finish {
    i64 sums, out, preact, scale, ends;
    i64 groups, rows, columns, count, head, cut, unowned;
    i64 out_group, out_row, out_col, preact_group, preact_row, preact_col, scale_group;
    double alpha, beta, limit;
    i64 limited;
};

extern "C" __global__ void __launch_bounds__(256) finish_rows(const Finish t) {
    constexpr int JOINED = LAYOUT ? 2 : 1;
    const i64 wide = JOINED * t.columns, chunks = (t.columns + EACH - 1) / EACH;
    Range owned = {0, t.cut == 2 ? t.columns : t.rows};
    if (t.cut == 1 || t.cut == 2) owned = owned_range(t.ends, t.count, t.head, owned.high);
    for (i64 line = blockIdx.x; line < t.groups * t.rows; line += gridDim.x) {
        const i64 g = line / t.rows, i = line - g * t.rows;
        if (t.cut == 3) owned.high = clamp((i64)((const end_t*)t.ends)[g], 0, t.rows);
        const bool row_there = t.cut == 2 || (i >= owned.low && i < owned.high);
        if (!row_there && !t.unowned) continue;
        const calc scale = t.scale && row_there ? load<SCALE>(t.scale, g * t.scale_group + i) : (calc)1;
        for (i64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
            const i64 j = chunk * EACH;
            const bool there = row_there && (t.cut != 2 || (j >= owned.low && j < owned.high));
            if (!there && !t.unowned) continue;
            calc values[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) values[e] = (calc)0;
            if (there) {
                const i64 from = line * wide, to = g * t.preact_group + i * t.preact_row;
                calc x[EACH * JOINED], *g_values = values, u_values[EACH];
#if LAYOUT == 3
                load_some<SUM, EACH>(t.sums, from + 2 * j, 1, x);
                load_some<SUM, EACH>(t.sums, from + 2 * j + EACH, 1, x + EACH);
                if (t.preact) {
                    store_some<PREACT, EACH>(t.preact, to + 2 * j * t.preact_col, t.preact_col, x);
                    store_some<PREACT, EACH>(t.preact, to + (2 * j + EACH) * t.preact_col, t.preact_col, x + EACH);
                }
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    g_values[e] = x[2 * e];
                    u_values[e] = x[2 * e + 1];
                }
#elif LAYOUT
                const i64 g_at = LAYOUT == 1 ? j : t.columns + j, u_at = LAYOUT == 1 ? t.columns + j : j;
                load_some<SUM, EACH>(t.sums, from + g_at, 1, g_values);
                load_some<SUM, EACH>(t.sums, from + u_at, 1, u_values);
                if (t.preact) {
                    store_some<PREACT, EACH>(t.preact, to + g_at * t.preact_col, t.preact_col, g_values);
                    store_some<PREACT, EACH>(t.preact, to + u_at * t.preact_col, t.preact_col, u_values);
                }
#else
                load_some<SUM, EACH>(t.sums, from + j, 1, g_values);
                if (t.preact) store_some<PREACT, EACH>(t.preact, to + j * t.preact_col, t.preact_col, g_values);
#endif
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    calc v = g_values[e];
#if LAYOUT
                    calc u = u_values[e];
                    const calc limit = (calc)t.limit;
                    if (t.limited) {  // NaN stays
                        v = v > limit ? limit : v;
                        u = u > limit ? limit : u < -limit ? -limit : u;
                    }
                    v = activate(v, (calc)t.alpha) * (u + (calc)t.beta);
#else
                    v = activate(v, (calc)t.alpha);
#endif
                    values[e] = t.scale ? v * scale : v;
                }
            }
            store_some<OUT, EACH>(t.out, g * t.out_group + i * t.out_row + j * t.out_col, t.out_col, values);
        }
    }
}
#endif

#if defined(TERMS)
// out[r] = sum of weights[r, j] * y[index[r, j]], j ascending, + beta * c[r]; y [tokens, columns] lies without gaps. With
// TERMS == -1 `index` are sorted places and `order` the rows that go there.
struct Sum {
    i64 y, out, c, ends, index, weights, order;
    i64 tokens, columns, rows, count, head;
    i64 out_row, out_col, c_row, c_col;
    double beta;
};

__device__ i64 first_from(const index_t* places, i64 tokens, i64 row) {
    i64 low = 0, high = tokens;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if ((i64)places[middle] < row) low = middle + 1; else high = middle;
    }
    return low;
}

// A thread loads LINES terms before it adds them, so that their loads overlap. A term that is missing is loaded from the
// first owned row and not added.
extern "C" __global__ void __launch_bounds__(256) sum_rows(const Sum t) {
    constexpr int LINES = TERMS > 0 && TERMS < 8 ? TERMS : 8;
    const i64 chunks = (t.columns + EACH - 1) / EACH;
    const Range owned = owned_range(t.ends, t.count, t.head, t.tokens);
    const index_t* index = (const index_t*)t.index;
    for (i64 r = blockIdx.x; r < t.rows; r += gridDim.x) {
        i64 first = r * TERMS, last = first + TERMS;
        if (TERMS < 0) {
            first = first_from(index, t.tokens, r);
            last = first_from(index, t.tokens, r + 1);
        }
        for (i64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
            const i64 j = chunk * EACH;
            calc total[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) total[e] = (calc)0;
            for (i64 at = first; at < last && owned.low < owned.high; at += LINES) {
                calc term[LINES][EACH], weight[LINES];
                bool there[LINES];
#pragma unroll
                for (int i = 0; i < LINES; i++) {
                    const i64 from = at + i < last ? at + i : at;
                    const i64 s = TERMS < 0 ? ((const i64*)t.order)[from] : (i64)index[from];
                    there[i] = at + i < last && s >= owned.low && s < owned.high;
                    load_some<ROWS, EACH>(t.y, (there[i] ? s : owned.low) * t.columns + j, 1, term[i]);
                    weight[i] = (calc)1;
                }
                if (t.weights) {
#pragma unroll
                    for (int i = 0; i < LINES; i++) weight[i] = load<SCALE>(t.weights, at + i < last ? at + i : at);
                }
#pragma unroll
                for (int i = 0; i < LINES; i++) {
#pragma unroll
                    for (int e = 0; e < EACH; e++) {
                        const calc sum = total[e] + term[i][e] * weight[i];
                        total[e] = there[i] ? sum : total[e];
                    }
                }
            }
            if (t.c) {
                calc given[EACH];
                load_some<ADDED, EACH>(t.c, r * t.c_row + j * t.c_col, t.c_col, given);
#pragma unroll
                for (int e = 0; e < EACH; e++) total[e] += (calc)t.beta * given[e];
            }
            store_some<OUT, EACH>(t.out, r * t.out_row + j * t.out_col, t.out_col, total);
        }
    }
}
#endif
