// How a resident cluster starts, and who tells all its roles which tile comes next: hopper.cu, hopper_fp8.cu, hopper_weights.cu.
#pragma once
#include "pipeline.cuh"

// By one thread, as one after the other is faster than side by side: their addresses are the same for a whole warp.
__device__ __forceinline__ void make_barriers(Shared& s, int arrivals) {
    for (int i = 0; i < PLACES; ++i) {
#if LOW
        barrier_init(shared_address(&s.rows_full[i]), 1);
#endif
#if SHIFTING
        barrier_init(shared_address(&s.raw[i]), 1);
#endif
        barrier_init(shared_address(&s.full[i]), arrivals);
        barrier_init(shared_address(&s.empty[i]), CLUSTER * (PINGPONG ? 1 : CONSUMERS) * 4);   // one arrival per warp that reads it
    }
    for (int i = 0; i < SLOTS; ++i) {
        barrier_init(shared_address(&s.tile_full[i]), 1);
        // Warps that multiply, those that load or arrange, and the threads that expect.
        barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * (CONSUMERS * 4 + LOADERS + LOW + SHIFTING) + (SHIFTING ? 0 : CLUSTER - 1));
    }
    barrier_init(shared_address(&s.ask), 1);
#if LOW
    for (int i = 0; i < 2; ++i) {
        barrier_init(shared_address(&s.numbers_full[i]), 32);
        barrier_init(shared_address(&s.numbers_empty[i]), CONSUMERS * 4);
    }
#endif
    barrier_init_fence();
}

// `arrivals`: how many fill a stage. The last warps do it, so that the first ones come to the sizes at once: those are what the
// first load waits for.
__device__ __forceinline__ void make_ready(Shared& s, const Maps& maps, int warp, int arrivals) {
    if (warp == THREADS / 32 - 1) {
        if (elected()) make_barriers(s, arrivals);
    } else if (warp == THREADS / 32 - 2 && !LISTED) {
        if (elected()) {
            if (!SHIFTING) prefetch_map(&maps.w);
#pragma unroll
            for (int i = 0; i < (X_K && !GATHER ? 16 : 1); ++i) prefetch_map(&maps.x[i]);
        }
    }
}

// The jagged k up to which a tile ends before the next one would be found. Tall tiles of single blocks take up to 1.05 of the
// time if their next ones are found early.
constexpr int EARLY_K = !RAGGED_K || (CLUSTER == 1 && ROWS > 128) ? 0 : 512;

// One thread of the cluster's first block takes tiles from the counter and announces them: apart from those who load,
// because the counter's answer and the search for the group take as long as several blocks of k. Its counterpart in the
// other block tells each slot what is to come. The first tile follows from the cluster's number: each block finds it itself.
__device__ __forceinline__ void announce_tiles(const Problem& p, const Launch& l, Shared& s, u32 rank) {
    const int clusters = gridDim.x / CLUSTER;
    const bool one_each = s.schedule.total <= clusters;       // then nobody needs the counter
    int next = blockIdx.x / CLUSTER, number = 0;
    bool early = false;                                       // the next tile is found before it is wanted, not after
#pragma unroll 1
    for (;; ++number) {
        if (rank == 0 || number == 0) {
            Tile t = {};
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS);
            if (early) barrier_wait(shared_address(&s.ask), ~number & 1);
            early = EARLY_K > 0 && t.k_len <= EARLY_K;
            announce(s, number, t, number == 0);
            if (rank == 0 && t.n == STOP) break;
        } else {
            expect_tile(s, number);
        }
        if (rank == 0) {
            // Not too early: who is late shall take fewer.
            if (!early) barrier_wait(shared_address(&s.ask), number & 1);
            next = one_each ? s.schedule.total : clusters + atomicAdd(l.counter, 1);
        } else if (take_tile(s, number, 1).n == STOP) {
            break;
        }
    }
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (rank == 0 && !one_each) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
    if (CLUSTER > 1 && rank == 0) wait_until_taken(s, number);
}
