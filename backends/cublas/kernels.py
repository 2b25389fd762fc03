"""The two small device kernels that the libraries lack; device code only.

`finish` is the epilogue that rounds once: it reads a wide intermediate result (or none, for K = 0)
and writes act(alpha*acc + beta*c + bias) to every owned element, and zeros to the unowned ones if
asked. With no intermediate it also lays c under a product that the library then adds to.
`cut` turns offsets that may lie into ends that torch's grouped_mm can be trusted with: int32,
between 0 and T, never falling. Its other blocks, if there are any, zero the rows behind the last
group; launched again `after` grouped_mm it zeroes the rows before the first. Where the caller's rows
before the first group must be kept, it deals the groups out to one of two calls: to the one that writes
in place if there are no such rows, else to the one that writes aside; the other call gets empty groups.

Element types are compiled in; extents, strides and addresses are arguments.
"""

from __future__ import annotations

from multigemm.backends.cublas.elements import ELEMENTS

THREADS = 256
CUT_THREADS = 1024
TABLE_COLUMNS = 21
"""Of the table of a list: those of layouts.TABLE, the intermediate result's three, and the first tile."""
SLAB = 8192
"""Elements of a line that one block writes before another may take over."""

FINISH = (
    f"#define SLAB {SLAB}LL\n#define COLUMNS {TABLE_COLUMNS}\n"
    + r"""
typedef long long i64;
struct Matrix { i64 ptr, group, row, col; };
struct Task {
    Matrix acc, c, out, bias;
    i64 table, ends, valid;
    i64 groups, m, n, k, tiles, per_group, run;
    double alpha, beta;
    int jagged, head, wide_ends, masked, only_empty, rows_fast, lanes, owned, unowned, only_headed;
};
"""
    + ELEMENTS
    + r"""
__device__ __forceinline__ i64 clamp(i64 v, i64 low, i64 high) { return v < low ? low : v > high ? high : v; }

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
"""
)

CUT = r"""
typedef long long i64;
struct Bounds {
    const void* ends;
    int *result, *first_two, *aside;
    char* out;
    i64 row_bytes, width, extent;
    int groups, wide, head, after;
};

__device__ i64 end_at(const Bounds& t, int g) {
    i64 v = t.wide ? ((const i64*)t.ends)[g] : (i64)((const int*)t.ends)[g];
    return v < 0 ? 0 : v > t.extent ? t.extent : v;
}

// Rows from `row` on, every `step`th, up to `end`: in aligned words of eight elements.
__device__ void zero_rows(const Bounds& t, i64 row, i64 end, i64 step) {
    for (; row < end; row += step) {
        char* line = t.out + row * t.row_bytes;
        for (i64 at = threadIdx.x; at < t.width / 8; at += blockDim.x) ((int4*)line)[at] = make_int4(0, 0, 0, 0);
        for (i64 at = t.width / 8 * 8 + threadIdx.x; at < t.width; at += blockDim.x) ((short*)line)[at] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(1024) cut(const Bounds t) {
    __shared__ int scan[2][1024];
    int g = threadIdx.x, now = 0, start = t.head ? (int)end_at(t, -1) : 0;
    if (t.after) return zero_rows(t, blockIdx.x, start, gridDim.x);
    if (blockIdx.x) return zero_rows(t, end_at(t, t.groups - 1) + (i64)blockIdx.x - 1, t.extent, gridDim.x - 1);
    scan[0][g] = g < t.groups ? max((int)end_at(t, g), start) : 0;
    __syncthreads();
    for (int step = 1; step < t.groups; step *= 2) {
        scan[now ^ 1][g] = g >= step ? max(scan[now][g], scan[now][g - step]) : scan[now][g];
        now ^= 1;
        __syncthreads();
    }
    bool apart = t.aside && start > 0;
    if (g < t.groups) t.result[g] = apart ? 0 : scan[now][g];
    if (g < t.groups && t.aside) t.aside[g] = apart ? scan[now][g] : 0;
    if (g == 0) { t.first_two[0] = start; t.first_two[1] = scan[now][0]; }
}
"""
