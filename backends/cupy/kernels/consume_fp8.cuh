// What the two consumer warpgroups of hopper_fp8.cu do with a tile: products of 128 of k at a time, whose sums the tensor cores
// keep in 14 bits, are promoted: multiplied by their scales, and added to the tile's sums in float32.
#pragma once
#include "consume.cuh"
#include "mma_fp8.cuh"

// Columns that share a scale, and how many scales those of a tile have.
constexpr int SCALED_COLUMNS = W_LINES ? 1 : COLUMNS == 128 ? 128 : 64, COLUMN_SCALES = COLUMNS / SCALED_COLUMNS;
// The scales of a stage: those of its rows, in the order of `row_slot`, and those of its columns.
constexpr int STAGE_SCALES = ROWS + COLUMNS;

// A thread has rows j * 8 + c * 2 and the one after it, for every j and one c: of two neighbouring j they lie together.
__device__ __forceinline__ int row_slot(int row) {
    return (row & ~15) + ((row >> 1) & 3) * 4 + ((row >> 3) & 1) * 2 + (row & 1);
}

__device__ __forceinline__ float4 load_shared_scales(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
    return v;
}

// The lower half of a descriptor, in which operands differ, and a whole one. The shuffle makes it a value of the whole warp that
// the compiler keeps: else it works the base out anew for each block.
__device__ __forceinline__ u32 low_descriptor(u32 address) { return __shfl_sync(~0u, u32(smem_descriptor(address, BLOCK, 1024)), 0); }
__device__ __forceinline__ u64 descriptor(u32 low) { return smem_descriptor(0, 0, 1024) | low; }

// Registers j * 4 + i hold row j * 8 + (lane % 4) * 2 + i % 2 and column (i / 2) * 8 + lane / 4 of a warp's 16: `scales` are
// this thread's own, `column` those of its two columns.
template <int N> struct RowScales {
    static constexpr int PAIRS = (N / 8 + 1) / 2;       // of eights of rows
    float of[PAIRS][4];

    // Where one column's scale is that of all, each is multiplied by it at once.
    __device__ __forceinline__ void load(u32 scales, float low) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const float4 row = load_shared_scales(scales + j * 16 * 4);
            const float x[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) of[j][e] = W_LINES ? x[e] : low * x[e];
        }
    }
    template <class Promote> __device__ __forceinline__ void each(float low, float high, Promote promote) const {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = (j * 2 + (e >> 1)) * 4 + (e & 1);
                if (at >= N / 2) continue;              // an odd number of eights
                promote(at, W_LINES ? low * of[j][e] : of[j][e]);
                promote(at + 2, W_LINES ? high * of[j][e] : of[j][e]);
            }
    }
};

// All k-blocks of a tile. Little lies between the promotion of one block and the first products of the next one: where operands
// lie is known before, and whether the next stage is full is asked before the promotion. `beside` runs while a block is
// multiplied, for as many blocks as there is `more` of it. The second warpgroup asks for its first products behind those of the
// first one, and stays behind: each promotes its sums while the tensor cores work for the other one.
template <int N, class More, class Beside>
__device__ __forceinline__ void multiply_fp8(Shared& s, u32 stages, u32 scales, Ring& ring, int blocks, u32 bytes, int half, float (&total)[ACCUMULATORS], bool first, More more, Beside beside) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    const u32 row_scales = scales + (lane & 3) * 16, column_scales = scales + (ROWS + (W_LINES ? half * 64 + warp * 16 + (lane >> 2) : 0)) * 4;
    const u32 w = low_descriptor(stages + half * BLOCK), x = low_descriptor(stages + W_BYTES);
    if (first && half == 1) wait_for_other(half);
    barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
    if (first && half == 0) let_other(half);
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
        float part[N / 2];
        const u32 from = ring.at >> 4, at = ring.place * STAGE_SCALES * 4, empty = shared_address(&s.empty[ring.place]);
        wgmma_fence();
        MmaFp8<N>::start(part, descriptor(w + from), descriptor(x + from));
#pragma unroll
        for (int k = 1; k < 4; ++k) MmaFp8<N>::add(part, descriptor(w + from + k * (32 >> 4)), descriptor(x + from + k * (32 >> 4)));
        wgmma_commit();
        if (more()) beside();
        const bool scaled = BLOCK_SCALES || kb == blocks - 1;
        float low = 1.0f, high = 1.0f;
        if (scaled) low = load_shared(column_scales + at), high = W_LINES ? load_shared(column_scales + at + 8 * 4) : low;
        // Where registers allow it the scales are there before the products: the shorter the way from these to the next ones,
        // the less the other warpgroup has to fill.
        constexpr bool EARLY = BLOCK_SCALES && N <= 144;
        const auto hand_back = [&] {
            __syncwarp();                               // all lanes have their scales: what follows lets others write over them
            if (lane < CLUSTER) barrier_arrive(empty, lane);
        };
        RowScales<N> rows;
        if (EARLY) rows.load(row_scales + at, low);
        ring.next(bytes);
        const u32 full = shared_address(&s.full[ring.place]);
        wgmma_wait<0>();
        settle(part, N / 2);
        if (EARLY) hand_back();
        const bool there = barrier_test(full, ring.parity);
        if (BLOCK_SCALES && !EARLY) rows.load(row_scales + at, low);
        if (BLOCK_SCALES) {
            rows.each(low, high, [&](int i, float scale) { total[i] = fmaf(scale, part[i], total[i]); });
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) total[i] += part[i];
            if (scaled) {
                rows.load(row_scales + at, low);
                rows.each(low, high, [&](int i, float scale) { total[i] *= scale; });
            }
        }
        settle(total, N / 2);
        if (!EARLY) hand_back();
        if (!there && kb + 1 < blocks) barrier_wait(full, ring.parity);
    }
}

// ---- Rows on wgmma's first side ----
//
// Every warp reads the scale of every row that it has, into registers that take 128 bytes a cycle: with rows on the side of n
// all eight warps read those of all rows, which takes half as long as the products do. So where columns share their scale,
// tiles of many rows trade sides: a thread has two rows then. A warpgroup has 64 rows of all columns, or of at
// most 64 rows its part of the columns.
#define TRADES_SIDES (SEND && BLOCK_SCALES && !W_LINES && ROWS == 128)
static_assert(COLUMNS == 128 || TRADES_SIDES, "tiles of more columns have their rows on the first side");
constexpr int SUMS = TRADES_SIDES ? COLUMNS / 2 : ACCUMULATORS;        // registers of a thread
constexpr int FIRST_PART = COLUMNS == 128 ? 64 : 128;                  // columns of the first warpgroup, of a tile of at most 64 rows
constexpr int MOST_UNTRADED = COLUMNS == 128 ? 32 : 0;         // rows of a tile, at most, that stay on the side of n

#if SEND
// Results of a tile that traded sides, of 64 columns: a thread holds neighbouring columns, so they need not turn.
__device__ __forceinline__ void lay_rows(u32 staging, const u32* pair) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    const u32 straight = staging + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) store_blocks(straight + (((j * 2 + (lane >> 4)) ^ (lane & 7)) << 4), pair[j * 4], pair[j * 4 + 1], pair[j * 4 + 2], pair[j * 4 + 3]);
}

// Packed results that leave 64 x 64 at a time, while the next tile is multiplied.
struct LateTile {
    u32 pair[SUMS / 2];
    Results to;
    int left = 0, traded = 0;

    __device__ __forceinline__ void keep(const Problem& p, const Tile& t, u32 rank, int half, bool trades, const float (&d)[SUMS]) {
#pragma unroll
        for (int q = 0; q < SUMS / 32; ++q) pack_rows(pair + q * 16, d + q * 32, float(p.alpha));
        const bool wide = trades && t.n > 64;
        to = results_of(p, t, first_column(t, rank, 0) + (wide ? 0 : half * FIRST_PART));
        if (wide) to.rows -= half * 64;
        traded = trades;
        left = to.rows <= 0 ? 0 : !trades ? (to.rows + 63) / 64 : (wide ? COLUMNS : half ? COLUMNS - FIRST_PART : FIRST_PART) / 64;
    }
    __device__ __forceinline__ void send(const Maps& maps, int half, u32 staging) {
        const int tid = threadIdx.x & 127;
        if (tid < 32) wait_until_read();
        warpgroup_sync(half);
        if (traded) lay_rows(staging, pair);
        else turn_rows(staging, pair);
        show_to_copy_engine();
        warpgroup_sync(half);
        send_box(tid == 0, staging, &maps.out, to.col, int(FAR) - to.rows, to.end, int(FAR), to.group);
        if (traded) to.col += 64;
        else to.rows -= 64;
        --left;
#pragma unroll
        for (int i = 0; i + 16 < SUMS / 2; ++i) pair[i] = pair[i + 16];
    }
#if BROAD
    // All at once: there is staging for it, so that nothing waits for a store of the same tile.
    __device__ __forceinline__ void send_all(const Maps& maps, int half, u32 staging) const {
        const int tid = threadIdx.x & 127;
        if (tid < 32) wait_until_read();
        warpgroup_sync(half);
#pragma unroll
        for (int i = 0; i < SUMS / 32; ++i) lay_rows(staging + i * 8192, pair + i * 16);
        show_to_copy_engine();
        warpgroup_sync(half);
#pragma unroll
        for (int i = 0; i < SUMS / 32; ++i) send_box(tid == 0 && i < left, staging + i * 8192, &maps.out, to.col + i * 64, int(FAR) - to.rows, to.end, int(FAR), to.group);
    }
#endif
};
#endif

// WIDTH columns from `first_column` on, of 64 rows from `first_row` on.
template <int WIDTH, class More, class Beside>
__device__ __forceinline__ void multiply_traded(Shared& s, u32 stages, u32 scales, Ring& ring, int blocks, u32 bytes, int half, int first_row, int first_column, float (&total)[SUMS], bool first, More more, Beside beside) {
    constexpr int PARTS = COLUMN_SCALES == 1 ? 1 : WIDTH / SCALED_COLUMNS;          // of the columns, with a scale each
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, row = first_row + warp * 16 + (lane >> 2);
    u32 upper = scales + row_slot(row) * 4;
    keep_in_register(upper);
    const u32 lower = upper + 8, column = scales + (ROWS + first_column / SCALED_COLUMNS) * 4;
    const u32 x = low_descriptor(stages + W_BYTES + first_row * LINE_BYTES), w = low_descriptor(stages + first_column * LINE_BYTES);
    if (first && half == 1) wait_for_other(half);
    barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
    if (first && half == 0) let_other(half);
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
        float part[WIDTH / 2], scale[PARTS][2];
        const u32 from = ring.at >> 4, at = ring.place * STAGE_SCALES * 4, empty = shared_address(&s.empty[ring.place]);
        wgmma_fence();
        MmaFp8<WIDTH>::start_traded(part, descriptor(x + from), descriptor(w + from));
#pragma unroll
        for (int k = 1; k < 4; ++k) MmaFp8<WIDTH>::add_traded(part, descriptor(x + from + k * (32 >> 4)), descriptor(w + from + k * (32 >> 4)));
        wgmma_commit();
        const float of_upper = load_shared(upper + at), of_lower = load_shared(lower + at);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float of_column = load_shared(column + at + i * 4);
            scale[i][0] = of_column * of_upper, scale[i][1] = of_column * of_lower;
        }
        ring.next(bytes);
        const u32 full = shared_address(&s.full[ring.place]);
        if (more()) beside();
        wgmma_wait<0>();
        settle(part, WIDTH / 2);
        __syncwarp();                                   // all lanes have their scales
        if (lane < CLUSTER) barrier_arrive(empty, lane);
        const bool there = barrier_test(full, ring.parity);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) total[i] = fmaf(scale[PARTS == 1 ? 0 : i / 32][i >> 1 & 1], part[i], total[i]);
        settle(total, WIDTH / 2);
        if (!there && kb + 1 < blocks) barrier_wait(full, ring.parity);
    }
}

__device__ __forceinline__ void consume_fp8(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 scales, u32 staging, u32 rank, int half) {
    Ring ring;
    bool first = true;
#if LATE
    LateTile late;
    const auto more = [&] { return late.left > 0; };
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
        float total[SUMS];
        clear(total);
        const bool trades = TRADES_SIDES && t.n > MOST_UNTRADED;
        if (blocks > 0) {
#if TRADES_SIDES
#define TRADED(width, row, column) multiply_traded<width>(s, stages, scales, ring, blocks, bytes, half, row, column, total, first, more, beside)
            if (t.n > 64) TRADED(COLUMNS, half * 64, 0);
            else if (COLUMNS != 128 && half == 0) TRADED(FIRST_PART, 0, 0);
            else if (trades) TRADED(64, 0, half * FIRST_PART);
#undef TRADED
#if !BROAD
            else if (t.n > 16) multiply_fp8<32>(s, stages, scales, ring, blocks, bytes, half, total, first, more, beside);
            else multiply_fp8<16>(s, stages, scales, ring, blocks, bytes, half, total, first, more, beside);
#endif
#else
            BY_WIDTH(t.n, multiply_fp8<WIDTH>(s, stages, scales, ring, blocks, bytes, half, total, first, more, beside));
#endif
            first = false;
        }
#if LATE
#pragma unroll 1
        while (more()) beside();            // fewer blocks than there were rows to store
        late.keep(p, t, rank, half, trades, total);
#elif SEND
#if BROAD
        LateTile now;
        now.keep(p, t, rank, half, trades, total);
        now.send_all(maps, half, staging);
#else
        send_tile(p, maps, t, rank, half, staging, total);
#endif
#else
        finish_tile(p, l, t, rank, half, staging, total);
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
