// The epilogue that rounds once: it reads a wide intermediate result (or none, for K = 0) and writes
// act(alpha * acc + beta * c + bias) to every owned element, and zeros to the unowned ones if asked. With no intermediate
// it also lays c under a product that the library then adds to. Types are numbered as in elements.cuh and
// compiled in; extents, strides and addresses are arguments. Elements are read, rounded and stored one by one or eight at
// once; each is computed in `calc`, which is as wide as its widest source, and is rounded once, when it is stored.
//
// Defined by the compiler's options: ACC, C, BIAS, OUT (types), ACT (activation), SLAB (elements of a line that one block
// writes before another may take over), COLUMNS (of the table of a list).
typedef long long i64;
struct Matrix { i64 ptr, group, row, col; };
struct Task {
    Matrix acc, c, out, bias;
    i64 table, ends, valid;
    i64 groups, m, n, k, tiles, per_group, run;
    double alpha, beta;
    int jagged, head, wide_ends, masked, only_empty, rows_fast, lanes, owned, unowned, only_headed;
};

#if ACC == 4
typedef int calc;
#elif ACC == 3 || C == 3 || BIAS == 3
typedef double calc;
#define RESIDENT 2
#else
typedef float calc;
#endif
#ifndef RESIDENT  // blocks on a multiprocessor: many loads in flight, but few spilled registers
#define RESIDENT 3
#endif

#include "elements.cuh"

// Eight elements that follow each other; those of 16 and 32 bits come in words of 16 bytes, which must be aligned.
// Whether eight elements from here on, and all that follow in steps of eight, are whole aligned words (if any).
template <int TYPE> __device__ __forceinline__ bool aligned(i64 base, i64 at) {
    constexpr int size = TYPE <= 1 ? 2 : TYPE == 2 || TYPE == 4 ? 4 : 16;
    return (base + at * size) % 16 == 0 || size == 16;
}

template <int TYPE> __device__ __forceinline__ void load_eight(i64 base, i64 at, calc* values) {
    if constexpr (TYPE <= 1) {
        Words packed = *(const Words*)(base + at * 2);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = of_16_bits<TYPE>((unsigned short)(packed.word[i / 2] >> (i % 2 * 16)));
    } else if constexpr (TYPE == 2 || TYPE == 4) {
        Words packed[2] = {((const Words*)(base + at * 4))[0], ((const Words*)(base + at * 4))[1]};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            unsigned bits = packed[i / 4].word[i % 4];
            if constexpr (TYPE == 2) values[i] = (calc)__uint_as_float(bits); else values[i] = (calc)(int)bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = load<TYPE>(base, at + i);
    }
}

// Two at once: one instruction from compute capability 8.0 on.
template <int TYPE> __device__ __forceinline__ unsigned to_word(calc low, calc high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned word;
    if constexpr (TYPE == 0) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(narrow(high)), "f"(narrow(low)));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(narrow(high)), "f"(narrow(low)));
    return word;
#else
    return to_16_bits<TYPE>(low) | to_16_bits<TYPE>(high) << 16;
#endif
}

template <int TYPE> __device__ __forceinline__ void store_eight(i64 base, i64 at, const calc* values) {
    if constexpr (TYPE <= 1) {
        Words packed;
#pragma unroll
        for (int i = 0; i < 4; i++) packed.word[i] = to_word<TYPE>(values[2 * i], values[2 * i + 1]);
        *(Words*)(base + at * 2) = packed;
    } else if constexpr (TYPE == 2 || TYPE == 4) {
        Words packed[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if constexpr (TYPE == 2) packed[i / 4].word[i % 4] = __float_as_uint((float)values[i]);
            else packed[i / 4].word[i % 4] = (unsigned)(int)values[i];
        }
        ((Words*)(base + at * 4))[0] = packed[0];
        ((Words*)(base + at * 4))[1] = packed[1];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) store<TYPE>(base, at + i, values[i]);
    }
}

__device__ __forceinline__ float ratio(float a, float b) { return __fdividef(a, b); }  // within 2 ulp
__device__ __forceinline__ double ratio(double a, double b) { return a / b; }
__device__ __forceinline__ int ratio(int a, int b) { return a / b; }

__device__ __forceinline__ calc activate(calc v) {
#if ACT == 1
    return v < (calc)0 ? (calc)0 : v;
#elif ACT == 2
    return (calc)0.5 * v * erfc(v * (calc)-0.70710678118654752440);  // 1 + erf would cancel for negative v
#elif ACT == 3
    // 1 + tanh(u) = 2 / (1 + exp(-2u)), which does not cancel
    return ratio(v, (calc)1 + exp((calc)-1.59576912160573071176 * (v + (calc)0.044715 * v * v * v)));
#elif ACT == 4
    return ratio(v, (calc)1 + exp(-v));
#else
    return v;
#endif
}

__device__ __forceinline__ i64 end_at(const Task& t, i64 g) {
    return t.wide_ends ? ((const i64*)t.ends)[g] : (i64)((const int*)t.ends)[g];
}

__device__ __forceinline__ i64 start_of(const Task& t, i64 g, i64 extent) {
    return g > 0 || t.head ? clamp(end_at(t, g - 1), 0, extent) : 0;
}

// The stretch of the jagged direction that x lies in, [low, high), and the group that owns it, if any.
struct Stretch { i64 low, high, group; bool owned; };

__device__ Stretch locate(const Task& t, i64 x, i64 extent) {
    i64 first = 0, last = t.groups;  // the first group that ends behind x
    while (first < last) {
        i64 middle = (first + last) / 2;
        if (end_at(t, middle) > x) last = middle; else first = middle + 1;
    }
    if (first == t.groups) return {x, extent, 0, false};
    i64 low = start_of(t, first, extent);
    if (low <= x) return {low, clamp(end_at(t, first), low, extent), first, true};
    return {x, low, 0, false};
}

// Dividing numbers of 64 bits takes a hundred instructions; few need it.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
    return (a | b) >> 32 ? a / b : (i64)((unsigned)a / (unsigned)b);
}

__device__ __forceinline__ i64 tiles_of(i64 lines_there, i64 lines, i64 slabs) {
    return quotient(lines_there + lines - 1, lines) * slabs;
}

// Lanes run along the result's contiguous direction. A tile is a few lines of it, SLAB elements long at most;
// tiles are numbered through all groups, so that blocks share skewed groups evenly. A block takes `run` of
// them in a row, which as a rule belong to one group: it is looked up once.
extern "C" __global__ void __launch_bounds__(256, RESIDENT) finish(const Task t) {
    const int lane = threadIdx.x & (t.lanes - 1), line = threadIdx.x / t.lanes;
    const i64 lines = blockDim.x / t.lanes, extent = t.jagged == 1 ? t.m : t.n;
    const bool uneven = t.jagged == 1 || t.jagged == 2;
    const bool cut_fast = uneven && (t.jagged == 1) == (t.rows_fast != 0);
    const bool edges = uneven && !cut_fast && !t.owned;
    if (t.only_headed && start_of(t, 0, extent) == 0) return;
    i64 tiles = t.tiles, head = 0, tail = 0, head_tiles = 0;
    if (edges) {
        i64 slabs = ((t.rows_fast ? t.m : t.n) + SLAB - 1) / SLAB;
        head = t.groups ? start_of(t, 0, extent) : 0;
        tail = t.groups ? clamp(end_at(t, t.groups - 1), head, extent) : 0;
        head_tiles = tiles_of(head, lines, slabs);
        tiles = head_tiles + tiles_of(extent - tail, lines, slabs);
    }
    Stretch known = {0, 0, 0, false};
    i64 listed = 0, listed_from = 0, listed_to = 0;  // the product of a list that was looked up, and its tiles
    i64 run_end = (blockIdx.x + 1) * t.run;
    for (i64 tile = run_end - t.run; tile < tiles;) {
        const i64 now = tile++;
        if (tile == run_end) {
            tile += (gridDim.x - 1) * t.run;
            run_end = tile + t.run;
        }
        Matrix acc = t.acc, c = t.c, out = t.out, bias = t.bias;
        i64 rows = t.m, cols = t.n, k = t.k, g = 0, local = now, from = 0;
        if (t.table) {
            const i64* table = (const i64*)t.table;
            if (now < listed_from || now >= listed_to) {
                i64 last = t.groups;
                for (listed = 0; last - listed > 1;) {
                    i64 middle = (listed + last) / 2;
                    if (table[middle * COLUMNS + 20] <= now) listed = middle; else last = middle;
                }
                listed_from = table[listed * COLUMNS + 20];
                listed_to = last < t.groups ? table[last * COLUMNS + 20] : tiles;
            }
            g = listed;
            const i64* row = table + g * COLUMNS;
            local = now - row[20];
            rows = row[5]; cols = row[6]; k = row[7];
            c.ptr = t.c.ptr ? row[2] : 0; c.row = row[12]; c.col = row[13];
            out.ptr = row[3]; out.row = row[14]; out.col = row[15];
            bias.ptr = t.bias.ptr ? row[4] : 0; bias.col = row[16];
            acc.ptr = t.acc.ptr ? row[17] : 0; acc.row = row[18]; acc.col = row[19];
        } else if (!uneven) {
            g = quotient(now, t.per_group);
            local = now - g * t.per_group;
        }
        if (t.jagged == 3) {
            i64 low = start_of(t, g, t.k);
            k = clamp(end_at(t, g), low, t.k) - low;
        }
        if (t.only_empty && k != 0) continue;
        i64 slow_end = t.rows_fast ? cols : rows, fast_end = t.rows_fast ? rows : cols;
        if (edges) {
            from = now < head_tiles ? 0 : tail;
            local = now < head_tiles ? now : now - head_tiles;
            slow_end = now < head_tiles ? head : extent;
        }
        const i64 slabs = (fast_end + SLAB - 1) / SLAB, line_tile = quotient(local, slabs);
        i64 slow = from + line_tile * lines + line, begin = (local - line_tile * slabs) * SLAB;
        i64 end = begin + SLAB < fast_end ? begin + SLAB : fast_end, valid = t.m;
        if (slow >= slow_end) continue;
        Stretch here = {0, fast_end, g, !edges};
        if (cut_fast) here.high = 0;
        else if (uneven && !edges) {
            if (slow < known.low || slow >= known.high) known = locate(t, slow, extent);
            here.group = known.group;
            here.owned = known.owned;
        }
        if (t.masked) {
            valid = t.wide_ends ? ((const i64*)t.valid)[g] : (i64)((const int*)t.valid)[g];
            if (t.rows_fast) here.high = 0; else here.owned = slow < valid;
        }
        if (here.high && !(here.owned ? t.owned : t.unowned)) continue;
        i64 i0 = t.rows_fast ? 0 : slow, j0 = t.rows_fast ? slow : 0;
        i64 acc_at = i0 * acc.row + j0 * acc.col, c_at = i0 * c.row + j0 * c.col;
        i64 out_at = i0 * out.row + j0 * out.col, bias_at = here.group * bias.group + j0 * bias.col;
        if (!t.table) {
            acc_at += g * acc.group;
            c_at += g * c.group;
            out_at += g * out.group;
        } else {
            bias_at = j0 * bias.col;
        }
        const i64 acc_step = t.rows_fast ? acc.row : acc.col, c_step = t.rows_fast ? c.row : c.col;
        const i64 out_step = t.rows_fast ? out.row : out.col, bias_step = t.rows_fast ? 0 : bias.col;
        const bool use_acc = acc.ptr != 0 && k != 0, use_c = c.ptr != 0, use_bias = bias.ptr != 0;
        const calc alpha = (calc)t.alpha, beta = (calc)t.beta;
        if (here.high >= end && out_step == 1 && (!use_acc || acc_step == 1) && (!use_c || c_step == 1)
            && aligned<OUT>(out.ptr, out_at) && (!use_acc || aligned<ACC>(acc.ptr, acc_at))
            && (!use_c || aligned<C>(c.ptr, c_at))) {
            const i64 last = begin + (end - begin) / 8 * 8;
            const bool whole_bias = use_bias && bias_step == 1 && aligned<BIAS>(bias.ptr, bias_at + begin);
            for (i64 at = begin + lane * 8; at < last; at += t.lanes * 16) {
                const i64 both[2] = {at, at + t.lanes * 8};  // two at a time: more loads on their way
                const int count = both[1] < last ? 2 : 1;
                calc v[2][8] = {}, more[2][8];
                if (here.owned) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        if (h < count && use_acc) load_eight<ACC>(acc.ptr, acc_at + both[h], v[h]);
                        if (h < count && use_c) load_eight<C>(c.ptr, c_at + both[h], more[h]);
                    }
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        if (h >= count) break;
                        if (use_acc) {
#pragma unroll
                            for (int i = 0; i < 8; i++) v[h][i] *= alpha;
                        }
                        if (use_c) {
#pragma unroll
                            for (int i = 0; i < 8; i++) v[h][i] += beta * more[h][i];
                        }
                        if (use_bias) {
                            if (whole_bias) load_eight<BIAS>(bias.ptr, bias_at + both[h], more[h]);
                            else
                                for (int i = 0; i < 8; i++)
                                    more[h][i] = load<BIAS>(bias.ptr, bias_at + (both[h] + i) * bias_step);
#pragma unroll
                            for (int i = 0; i < 8; i++) v[h][i] += more[h][i];
                        }
#pragma unroll
                        for (int i = 0; i < 8; i++) v[h][i] = activate(v[h][i]);
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (h < count) store_eight<OUT>(out.ptr, out_at + both[h], v[h]);
            }
            begin = last;
        }
#pragma unroll 4
        for (i64 at = begin + lane; at < end; at += t.lanes) {
            if (at >= here.high) {  // who owns what changes along this line
                if (t.masked) here = at < valid ? Stretch{0, valid, g, true} : Stretch{valid, fast_end, g, false};
                else here = locate(t, at, extent);
                bias_at = here.group * bias.group + j0 * bias.col;
            }
            if (!(here.owned ? t.owned : t.unowned)) continue;
            calc v = (calc)0;
            if (here.owned) {
                if (use_acc) v = alpha * load<ACC>(acc.ptr, acc_at + at * acc_step);
                if (use_c) v += beta * load<C>(c.ptr, c_at + at * c_step);
                if (use_bias) v += load<BIAS>(bias.ptr, bias_at + at * bias_step);
                v = activate(v);
            }
            store<OUT>(out.ptr, out_at + at * out_step, v);
        }
    }
}
