// What the two consumer warpgroups of hopper_fp8.cu do with a tile: products of 128 of k at a time, whose sums the tensor cores
// keep in 14 bits, are promoted: multiplied by their scales, and added to the tile's sums in float32.
#pragma once
#include "consume.cuh"
#include "mma_fp8.cuh"

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

// From here on the compiler may use registers that products have been written to, or must have done with them.
template <int COUNT> __device__ __forceinline__ void settle(float (&d)[COUNT], int count) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < count) asm volatile("" : "+f"(d[i])::"memory");
}

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

// All k-blocks of a tile. `beside` runs while a block is multiplied, for as many blocks as there is `more` of it. The second
// warpgroup asks for its first products behind those of the first one, and stays behind: each promotes its sums while the tensor
// cores work for the other one.
template <int N, class More, class Beside>
__device__ __forceinline__ void multiply_fp8(Shared& s, u32 stages, u32 scales, Ring& ring, int blocks, u32 bytes, int half, float (&total)[ACCUMULATORS], bool first, More more, Beside beside) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    const u32 row_scales = scales + (lane & 3) * 16, column_scales = scales + (ROWS + (W_LINES ? half * 64 + warp * 16 + (lane >> 2) : 0)) * 4;
    if (first && half == 1) wait_for_other(half);
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
        float part[N / 2];
        barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
        const u32 stage = stages + ring.at;
        const u64 w = smem_descriptor(stage + half * BLOCK, BLOCK, 1024), x = smem_descriptor(stage + W_BYTES, BLOCK, 1024);
        wgmma_fence();
        MmaFp8<N>::start(part, w, x);
#pragma unroll
        for (int k = 1; k < 4; ++k) MmaFp8<N>::add(part, w + k * (32 >> 4), x + k * (32 >> 4));
        wgmma_commit();
        if (first && half == 0 && kb == 0) let_other(half);
        if (more()) beside();
        const u32 at = ring.place * STAGE_SCALES * 4;
        const bool scaled = BLOCK_SCALES || kb == blocks - 1;
        float low = 1.0f, high = 1.0f;
        if (scaled) low = load_shared(column_scales + at), high = W_LINES ? load_shared(column_scales + at + 8 * 4) : low;
        // Where registers allow it the scales are there before the products: the shorter the way from these to the next ones,
        // the less the other warpgroup has to fill.
        constexpr bool EARLY = BLOCK_SCALES && N <= 144;
        const auto hand_back = [&] {
            __syncwarp();                               // all lanes have their scales: what follows lets others write over them
            if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[ring.place]), lane);
        };
        RowScales<N> rows;
        if (EARLY) rows.load(row_scales + at, low);
        wgmma_wait<0>();
        settle(part, N / 2);
        if (EARLY) hand_back();
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
        ring.next(bytes);
    }
}

__device__ __forceinline__ void consume_fp8(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 scales, u32 staging, u32 rank, int half) {
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
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        const u32 bytes = stage_bytes(t);
        if (blocks > 0) ring.fit(bytes);
        float total[ACCUMULATORS];
        clear(total);
        if (blocks > 0) {
            BY_WIDTH(t.n, multiply_fp8<WIDTH>(s, stages, scales, ring, blocks, bytes, half, total, first, more, beside));
            first = false;
        }
#if LATE
#pragma unroll 1
        while (more()) beside();            // fewer blocks than there were rows to store
        late.keep(p, t, first_column(t, rank, half), total);
#elif SEND
        send_tile(p, maps, t, rank, half, staging, total);
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
