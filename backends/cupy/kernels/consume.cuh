// What the two consumer warpgroups do with a tile, however its operands came into shared memory.
#pragma once
#include "mma.cuh"
#include "store.cuh"

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
__device__ __forceinline__ void multiply(Shared& s, u32 stages, Ring& ring, int blocks, u32 bytes, int half, float (&d)[ACCUMULATORS], bool first, More more, Beside beside) {
    constexpr u32 W_STEP = W_K ? 32 : 2048, X_STEP = X_K ? 32 : 2048;     // bytes from one k = 16 to the next
    const int lane = threadIdx.x & 31;
    int last = -1, kb = 0;
    const auto begin = [&] {
        barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
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

// The accumulators are defined anew for each tile: otherwise the compiler would keep the last tile's values alive.
template <int COUNT> __device__ __forceinline__ void clear(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}

// A tile's products by the narrowest instruction that covers its rows.
#define BY_WIDTH(rows, ...) \
    switch (((rows) + STEP - 1) / STEP) { CASES((__VA_ARGS__)) }
#define CASE(width, products) \
    case width / STEP: \
        if constexpr (width <= ROWS) { constexpr int WIDTH = width; products; } \
        break;

__device__ __forceinline__ void consume(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
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
        if (PINGPONG && (number & 1) != half) {
#pragma unroll 1
            for (int kb = 0; kb < blocks; ++kb) ring.next(bytes);
            continue;
        }
        if (PINGPONG && number > 0) wait_for_other(half);
        float d[ACCUMULATORS];
        clear(d);
        if (blocks > 0) {
            BY_WIDTH(t.n, multiply<WIDTH>(s, stages, ring, blocks, bytes, half, d, first, more, beside));
            first = false;
        } else if (PINGPONG) {
            let_other(half);
        }
#if LATE
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
