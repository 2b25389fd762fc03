// What the two consumer warpgroups do with a tile, however its operands came into shared memory.
#pragma once
#include "mma.cuh"
#include "pipeline.cuh"
#include "results.cuh"
#include "rows.cuh"
#if WORD_RESULTS && !W_K
#include "turned_weights.cuh"
#endif

// ---- The way out: accumulators turn in shared memory, from columns per thread to rows of the result ----

// Of a warpgroup's 64 columns those of a thread, as wgmma takes them from shared memory: this one, counted from `first`, and
// one eight further on.
#if !WORD_RESULTS || W_K
constexpr int NEXT_COLUMN = 8;
__device__ __forceinline__ int own_column(int first, int warp, int lane) { return first + warp * 16 + (lane >> 2); }
#endif

#if BIASED
// alpha * acc + bias, of the columns that a thread holds: two, or with PINGPONG two in either half of its registers. They are
// asked for before the products, which take longer than the answer.
struct Bias {
    static constexpr int PARTS = PINGPONG ? 2 : 1;
    float of[PARTS][2];

    __device__ __forceinline__ void load(const Problem& p, const Tile& t, u32 rank, int half) {
        const int tid = threadIdx.x & 127;
        const i64 first = first_column(t, rank, PINGPONG ? 0 : half) + own_column(0, tid >> 5, tid & 31);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const i64 column = first + part * 64 + i * NEXT_COLUMN;
                const i64 at = t.group * p.bias.group + column * p.bias.col;
                of[part][i] = column < p.n ? load_as<float>(p.bias.ptr + at * size_of(p.bias_type), p.bias_type) : 0.0f;
            }
    }
    __device__ __forceinline__ void add(const Problem& p, const Tile& t, float (&d)[ACCUMULATORS]) const {
        const float alpha = float(p.alpha);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < ROWS / 8; ++i) {
                if (i * 8 >= t.rows) continue;
                float* const v = d + part * (ROWS / 2) + i * 4;
#pragma unroll
                for (int e = 0; e < 4; ++e) v[e] = __fadd_rn(__fmul_rn(v[e], alpha), of[part][e >> 1]);     // rounded twice, as `linear` does
            }
    }
};
#endif

// What plain sums are still to be multiplied with.
__device__ __forceinline__ float factor(const Problem& p) { return BIASED ? 1.0f : float(p.alpha); }

#if WIDE_ROWS
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 4, 256;" ::: "memory"); }
#endif

#if PLAIN
#if SEND && WORD_RESULTS
// alpha * acc: 32 rows at a time lie in the staging as two boxes of 32 columns, which the copy engine stores. The map counts
// rows back from the end of a group and drops what would lie behind it (arguments.py), as it drops columns that do not exist.
__device__ __forceinline__ void send_tile(const Problem& p, const Maps& maps, const Tile& t, u32 rank, int half, u32 staging, const Sum (&d)[ACCUMULATORS]) {
    constexpr int BOX_ROWS = 32, BOX_COLUMNS = 32, BOX = BOX_ROWS * LINE_BYTES;
    const int tid = threadIdx.x & 127, own = own_column(0, tid >> 5, tid & 31), first = (tid & 3) * 2;
    const bool along_rows = p.jagged == JAG_M || p.jagged == JAG_N;
    const int end = (along_rows ? t.x_row : t.row0) + t.rows, group = along_rows ? 0 : t.group;
    const i64 col = first_column(t, rank, PINGPONG ? 0 : half);
    const Sum alpha = scalar<Sum>(p.alpha);
#pragma unroll
    for (int q = 0; q < ACCUMULATORS / 16; ++q) {   // 16 registers each: 32 rows of 64 columns
        const int r0 = q % (ROWS / 32) * 32, right = q >= ROWS / 32 ? 64 : 0;
        if (r0 >= t.rows) continue;
        if (tid < 32) wait_until_read();            // the staging of the round before
        warpgroup_sync(half);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int row = (i >> 2) * 8 + first + (i & 1), c = own + (i >> 1 & 1) * NEXT_COLUMN;
            store_shared(staging + c / BOX_COLUMNS * BOX + row * LINE_BYTES + (((c % BOX_COLUMNS >> 2) ^ (row & 7)) << 4) + (c & 3) * 4, d[q * 16 + i] * alpha);
        }
        show_to_copy_engine();
        warpgroup_sync(half);
#pragma unroll
        for (int b = 0; b < 2; ++b) send_box(tid == 0, staging + b * BOX, &maps.out, int(col) + right + b * BOX_COLUMNS, int(FAR) - (t.rows - r0), end, int(FAR), group);
    }
}
#elif SEND
// alpha * acc of 64 rows in the operands' type, two neighbouring rows of a column in each word.
__device__ __forceinline__ void pack_rows(u32* pair, const float* v, float alpha) {
#pragma unroll
    for (int i = 0; i < 16; ++i) pair[i] = pack_pair(v[i * 2] * alpha, v[i * 2 + 1] * alpha);
}

// They turn in the staging, from columns per thread to rows.
__device__ __forceinline__ void turn_rows(u32 staging, const u32* pair) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) store_transposed(turn + j * 16 * 128, pair[j * 4], pair[j * 4 + 1], pair[j * 4 + 2], pair[j * 4 + 3]);
}

// Results that the copy engine stores: the `rows` rows before row `end` of a group, 64 columns from `col` on. The map counts
// rows back from `end` and drops what would lie behind it (arguments.py), as it drops columns that do not exist.
struct Results {
    int col, end, group, rows = 0;

    // The first 64 of the rows leave.
    __device__ __forceinline__ void send(const Maps& maps, int half, u32 staging, const u32* pair) {
        const int tid = threadIdx.x & 127;
        if (tid < 32) wait_until_read();            // the staging of the round before
        warpgroup_sync(half);
        turn_rows(staging, pair);
        show_to_copy_engine();
        warpgroup_sync(half);
        send_box(tid == 0, staging, &maps.out, col, int(FAR) - rows, end, int(FAR), group);
        rows -= 64;
    }
};

__device__ __forceinline__ Results results_of(const Problem& p, const Tile& t, i64 col) {
    const bool along_rows = p.jagged == JAG_M || p.jagged == JAG_N;
    Results r;
    r.col = int(col), r.end = (along_rows ? t.x_row : t.row0) + t.rows, r.group = along_rows ? 0 : t.group, r.rows = t.rows;
    return r;
}

// Packed results of a tile that are still to be stored: they leave while the first blocks of the next tile are multiplied.
struct Late {
    u32 pair[ACCUMULATORS / 2];                     // the next 64 rows first
    Results to;

    __device__ __forceinline__ void keep(const Problem& p, const Tile& t, i64 col, const float (&d)[ACCUMULATORS]) {
#pragma unroll
        for (int q = 0; q < ACCUMULATORS / 32; ++q) pack_rows(pair + q * 16, d + q * 32, factor(p));
        to = results_of(p, t, col);
    }
    __device__ __forceinline__ void send(const Maps& maps, int half, u32 staging) {
        to.send(maps, half, staging, pair);
#pragma unroll
        for (int i = 0; i + 16 < ACCUMULATORS / 2; ++i) pair[i] = pair[i + 16];
    }
};

__device__ __forceinline__ void send_tile(const Problem& p, const Maps& maps, const Tile& t, u32 rank, int half, u32 staging, const float (&d)[ACCUMULATORS]) {
#pragma unroll
    for (int q = 0; q < ACCUMULATORS / 32; ++q) {   // 32 registers each: 64 rows of 64 columns
        const int r0 = q % (ROWS / 64) * 64, right = q >= ROWS / 64 ? 64 : 0;
        if (r0 >= t.rows) continue;
        u32 pair[16];
        pack_rows(pair, d + q * 32, factor(p));
        Results to = results_of(p, t, first_column(t, rank, PINGPONG ? 0 : half) + right);
        to.rows -= r0;
        to.send(maps, half, staging, pair);
    }
}
#endif

#if !WORD_RESULTS
// alpha * acc in the operands' type: 64 rows at a time turn in shared memory and leave as 16-byte pieces. ALONG_ROWS: they
// need not turn, but where a row begins is no multiple of anything, so lines of 64 leave as pairs.
__device__ __forceinline__ void finish_tile(const Problem& p, const Launch& l, const Tile& t, u32 rank, int half, u32 staging, float (&d)[ACCUMULATORS]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const float alpha = factor(p);
    const int skip = rows_to_skip(p, t);
    const i64 col = first_column(t, rank, PINGPONG ? 0 : half);
    const int low = (lane >> 3) & 1, high = lane >> 4, line = lane & 7;      // of the 8 x 8 blocks, and the line in one
    const u32 turn = staging + (high * 8 + line) * 128 + (((warp * 2 + low) ^ line) << 4), straight = staging + (warp * 16 + low * 8 + line) * 128;
#if WIDE_ROWS
    // Of all columns of the tile: 32 rows of a warpgroup's own, or 64 of both warpgroups, which store 32 each.
    constexpr int TOGETHER = PINGPONG ? 32 : 64;
    const int own = PINGPONG ? 0 : half;
    const u32 shared = staging - own * STAGING_BYTES;
    const Target to = target_of(p, l, t, col - own * 64, COLUMNS);
    const auto sync = [&] {
        if (PINGPONG) warpgroup_sync(half);
        else sync_consumers();
    };
#pragma unroll
    for (int r0 = 0; r0 < ROWS; r0 += TOGETHER) {
        if (r0 >= t.rows) continue;
        sync();
#pragma unroll
        for (int j = 0; j < 4; ++j) {               // 16 rows of 64 columns each
            const int rows16 = PINGPONG ? j >> 1 : j, right = PINGPONG ? j & 1 : own;
            const float* v = d + (PINGPONG ? right * (ROWS / 2) : 0) + r0 / 2 + rows16 * 8;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pair[i] = pack_pair(v[i * 2] * alpha, v[i * 2 + 1] * alpha);
            store_transposed(turn - staging + shared + (high * 8 + line) * 128 + rows16 * 16 * 256 + right * 128, pair[0], pair[1], pair[2], pair[3]);
        }
        sync();
        const int first = r0 + own * 32;
        store_wide_rows(to.out + first * to.row_step, to.row_step, shared + own * 32 * 256, warp, skip - first, t.rows - first, to.cols);
    }
    return;
#endif
#pragma unroll
    for (int q = 0; q < ACCUMULATORS / 32; ++q) {   // 32 registers each: 64 rows of 64 columns
        const int r0 = q % (ROWS / 64) * 64, right = q >= ROWS / 64 ? 64 : 0;
        if (r0 >= t.rows) continue;
        const Target to = target_of(p, l, t, col + right);
        warpgroup_sync(half);                       // the staging of the round before has been read
#pragma unroll
        for (int j = 0; j < 4; ++j) {               // 16 rows each
            const float* v = d + q * 32 + j * 8;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pair[i] = pack_pair(v[i * 2] * alpha, v[i * 2 + 1] * alpha);
            if (ALONG_ROWS) store_blocks(straight + (((j * 2 + high) ^ line) << 4), pair[0], pair[1], pair[2], pair[3]);
            else store_transposed(turn + j * 16 * 128, pair[0], pair[1], pair[2], pair[3]);
        }
        warpgroup_sync(half);
        const int rows = min(t.rows - r0, 64);
        if (ALONG_ROWS) {
#pragma unroll
            for (int c = 0; c < 64; c += 4 * AT_ONCE)
                store_rows(to.out + r0 * 2, to.row_step, staging, c + warp, 0, to.cols, rows, max(skip - r0, 0));
        } else if (l.vector_out) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + (tid >> 3), chunk = tid & 7;
                if (row < rows && r0 + row >= skip && chunk * 8 < to.cols) {
                    const uint4 v = load_shared16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
                    char* at = to.out + (r0 + row) * to.row_step + chunk * 16;
                    if (chunk * 8 + 8 <= to.cols) *(uint4*)at = v;
                    else store_first(at, v, to.cols - chunk * 8);
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < 64; row += 4 * AT_ONCE)
                store_rows(to.out + r0 * to.row_step, to.row_step, staging, row + warp, skip - r0, rows, to.cols);
        }
    }
}
#endif
#elif !GATE
// Any epilogue: 32 rows at a time as they were summed, then element by element with lanes along whichever direction is
// contiguous in the result: for jagged n stored by rows that is the one that the pieces cut.
__device__ __forceinline__ void finish_tile(const Given& p, const Launch& l, const Tile& t, u32 rank, int half, u32 staging, Sum (&d)[ACCUMULATORS]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
#if FUSED
    const FusedGroup g = resolve_fused(p, t.group, ELEMENT);
#else
    const Group g = resolve(p, t.group, ELEMENT);
#endif
    const int skip = rows_to_skip(p, t), lead = !X_K && !LISTED && !RAGGED_K ? t.extra : 0;
    const int size = size_of(p.out_type);
    const bool down = l.swapped ? g.out_col == 1 && g.out_row != 1 : g.out_row == 1 && g.out_col != 1;
    const u32 mine = staging + own_column((lane & 3) * 2 * PITCH, warp, lane) * 4;
#pragma unroll 1
    for (int q = 0; q < ACCUMULATORS / 16; ++q) {   // 16 registers each: 32 rows of 64 columns
        const int r0 = q % (ROWS / 32) * 32, right = q >= ROWS / 32 ? 64 : 0;
        const i64 col = first_column(t, rank, PINGPONG ? 0 : half) + right;
        const int cols = int(min64((l.swapped ? g.m : g.n) - col, 64));
        if (r0 >= t.rows) continue;
        warpgroup_sync(half);
#pragma unroll
        for (int c = 0; c < ACCUMULATORS / 16; ++c) {
            if (q == c) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) store_shared(mine + ((j * 8 + (i & 1)) * PITCH + (i >> 1) * NEXT_COLUMN) * 4, d[(c * 4 + j) * 4 + i]);
            }
        }
        warpgroup_sync(half);
        const int rows = min(t.rows - r0, 32);
#pragma unroll 1
        for (int e = tid; e < (down ? 32 : rows) * 64; e += 128) {
            const int row = down ? e & 31 : e >> 6, c = down ? e >> 5 : e & 63;
            if (row < rows && c < cols && r0 + row >= skip) {
                const i64 r = t.row0 + r0 + row - lead, i = l.swapped ? col + c : r, j = l.swapped ? r : col + c;
                Sum sum;
                load_shared(sum, staging + (row * PITCH + c) * 4);
                const Sum v = finish<Sum>(p, g, i, j, sum);
                store_as<Sum>(g.out + (i * g.out_row + j * g.out_col) * size, p.out_type, v);
            }
        }
    }
}
#endif

#if GATE
#include "gated.cuh"
#endif

#if ROW_SCALED
// Each row of a tile times its number, where the results are otherwise plain.
template <class Load> __device__ __forceinline__ void scale_rows(const Tile& t, float (&d)[ACCUMULATORS], Load load) {
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        if (i * 8 >= t.rows) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = i * 8 + (threadIdx.x & 3) * 2 + e;
            const float scale = row < t.rows ? load(row) : 0.0f;
            d[i * 4 + e] *= scale, d[i * 4 + 2 + e] *= scale;
            if constexpr (PINGPONG) d[ROWS / 2 + i * 4 + e] *= scale, d[ROWS / 2 + i * 4 + 2 + e] *= scale;
        }
    }
}
__device__ __forceinline__ void scale_rows(const Given& p, const Tile& t, float (&d)[ACCUMULATORS]) {
    const Fused& f = p.fused;
    const i64 first = t.group * f.scale_group + (p.jagged == JAG_M ? t.x_row : t.row0);
    if (f.scale_type == F32) scale_rows(t, d, [&](int row) { return ((const float*)f.row_scale)[first + row]; });
    else scale_rows(t, d, [&](int row) { return load_as<float>(f.row_scale + (first + row) * 2, f.scale_type); });
}
#endif

// ---- Multiplying, and both together ----

// Warpgroups that share their tiles: the second one starts its first tile a little after the first one, and keeps that
// distance, so that one of them multiplies while the other stores its results. (Not if results leave late: then the
// distance would only hold stages back.) Warpgroups that take turns: each lets the other begin when its last block is
// under way; only then are the ring's barriers less than one lap ahead of that one.
constexpr bool APART = !PINGPONG && !LATE;
__device__ __forceinline__ void let_other(int half) { asm volatile("bar.arrive %0, 256;" ::"r"(6 - half) : "memory"); }
__device__ __forceinline__ void wait_for_other(int half) { asm volatile("bar.sync %0, 256;" ::"r"(5 + half) : "memory"); }

// All k-blocks of a tile: four products of k = 16 per block, one block in flight while the next is awaited. A warpgroup
// multiplies 64 columns of a tile, or both halves of it (the second accumulates in the upper half of `d`). `beside` runs
// while a block is multiplied, for as many blocks as there is `more` of it.
template <int N, class More, class Beside>
__device__ __forceinline__ void multiply(Shared& s, u32 stages, Ring& ring, int blocks, u32 bytes, int half, Sum (&d)[ACCUMULATORS], bool first, More more, Beside beside) {
    constexpr u32 W_STEP = W_K ? 32 : 2048, X_STEP = X_K ? 32 : 2048;     // bytes from one k = 16 to the next
    const int lane = threadIdx.x & 31;
    int last = -1, kb = 0;
    const auto begin = [&] {
        barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
#if GATHER
        show_to_copy_engine();                                  // what copies of other threads wrote, to the tensor cores
#endif
        const u32 stage = stages + ring.at;
        const u64 w = smem_descriptor(stage + (PINGPONG ? 0 : half * BLOCK), BLOCK, 1024);
        const u64 x = smem_descriptor(stage + W_BYTES, BLOCK, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Mma<N, 0>::run(d, w + k * (W_STEP >> 4), x + k * (X_STEP >> 4));
            if constexpr (PINGPONG) Mma<N, ROWS / 2>::run(d, w + (BLOCK >> 4) + k * (W_STEP >> 4), x + k * (X_STEP >> 4));
        }
        wgmma_commit();
        if (PINGPONG && kb == blocks - 1) let_other(half);
    };
    const auto end = [&] {
        wgmma_wait<1>();
        if (APART && first && half == 0 && kb == min(1, blocks - 1)) let_other(half);
        if (last >= 0 && lane < CLUSTER) barrier_arrive(shared_address(&s.empty[last]), lane);
        last = ring.place;
        ring.next(bytes);
    };
    if (APART && first && half == 1) wait_for_other(half);
#pragma unroll 1
    for (; more() && kb < blocks; ++kb) {
        begin();
        beside();
        end();
    }
#pragma unroll 1
    for (; kb < blocks; ++kb) {
        begin();
        end();
    }
    wgmma_wait<0>();
    if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[last]), lane);
}

#if WORD_RESULTS && !W_K
// The same with weights that come in registers: those of a block are read while the block before is multiplied.
template <int N> __device__ __forceinline__ void multiply_turned(Shared& s, u32 stages, Ring& ring, int blocks, u32 bytes, int half, Sum (&d)[ACCUMULATORS], bool first) {
    const int lane = threadIdx.x & 31;
    u32 even[TURNED_WORDS], odd[TURNED_WORDS];
    const auto read = [&](u32 (&w)[TURNED_WORDS]) {
        barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
        read_turned(w, stages + ring.at, half);
    };
    const auto block = [&](const u32 (&w)[TURNED_WORDS], u32 (&next)[TURNED_WORDS], int kb) {
        const u64 x = smem_descriptor(stages + ring.at + W_BYTES, BLOCK, 1024);
        const int place = ring.place;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) MmaFragment<N>::run(d, w + k * 4, x + k * (32 >> 4));
        wgmma_commit();
        if (first && half == 0 && kb == 0) let_other(half);
        ring.next(bytes);
        if (kb + 1 < blocks) read(next);
        wgmma_wait<0>();
        if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[place]), lane);
    };
    if (first && half == 1) wait_for_other(half);
    read(even);
#pragma unroll 1
    for (int kb = 0; kb < blocks; kb += 2) {
        block(even, odd, kb);
        if (kb + 1 < blocks) block(odd, even, kb + 1);
    }
}
#endif

// The accumulators are defined anew for each tile: otherwise the compiler would keep the last tile's values alive.
template <int COUNT> __device__ __forceinline__ void clear(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}
template <int COUNT> __device__ __forceinline__ void clear(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("mov.s32 %0, 0;" : "=r"(d[i]));
}

// From here on the compiler may use the first `count` registers, which products have been written to, or must have done with them.
template <int COUNT> __device__ __forceinline__ void settle(float (&d)[COUNT], int count) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < count) asm volatile("" : "+f"(d[i])::"memory");
}

// A tile's products by the narrowest instruction that covers its rows.
#define BY_WIDTH(rows, ...) \
    switch (((rows) + STEP - 1) / STEP) { CASES((__VA_ARGS__)) }
#define CASE(width, products) \
    case width / STEP: \
        if constexpr (width <= ROWS) { constexpr int WIDTH = width; products; } \
        break;

__device__ __forceinline__ void consume(const Given& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
    Ring ring;
    bool first = true;
#if LATE
    Late late;
    const auto more = [&] { return late.to.rows > 0; };
    const auto beside = [&] { late.send(maps, half, staging); };
#else
    const auto more = [] { return false; };
    const auto beside = [] {};
#endif
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
        if (PINGPONG && (number & 1) != half) {
#pragma unroll 1
            for (int kb = 0; kb < blocks; ++kb) ring.next(bytes);
            continue;
        }
        if (PINGPONG && number > 0) wait_for_other(half);
#if BIASED
        Bias bias;
        bias.load(p, t, rank, half);
#endif
        Sum d[ACCUMULATORS];
        clear(d);
        if (blocks > 0) {
#if WORD_RESULTS && !W_K
            BY_WIDTH(t.n, multiply_turned<WIDTH>(s, stages, ring, blocks, bytes, half, d, first));
#else
            BY_WIDTH(t.n, multiply<WIDTH>(s, stages, ring, blocks, bytes, half, d, first, more, beside));
#endif
            first = false;
        } else if (PINGPONG) {
            let_other(half);
        }
#if BIASED
        bias.add(p, t, d);
#endif
#if ROW_SCALED
        scale_rows(p, t, d);
#endif
#if GATE
        finish_gated(p, t, rank, half, staging, d);
#elif LATE
#pragma unroll 1
        while (more()) beside();            // fewer blocks than there were rows to store
        late.keep(p, t, first_column(t, rank, half), d);
#elif SEND
        send_tile(p, maps, t, rank, half, staging, d);
#else
        finish_tile(p, l, t, rank, half, staging, d);
#endif
    }
#if LATE
#pragma unroll 1
    while (more()) beside();
#endif
#if SEND
    wait_until_written();
#endif
}
