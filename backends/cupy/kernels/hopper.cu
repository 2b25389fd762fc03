// The fast kernel for Hopper (sm_90a): 16-bit operands that TMA can read. See README.md for one tile's way.
//
// C^T = W^T X^T: the weight side (columns of the result) lies on wgmma's M side, the rows on its n side,
// which comes in steps of 8. A thread block owns 128 columns, 64 for each of two consumer warpgroups,
// times n <= ROWS rows; a cluster of two blocks shares the rows, and each loads half of them for both.
//
// Compile-time choices: BFLOAT, X_K and W_K (is k the contiguous direction of the row side, of the weight
// side), RAGGED_K (the jagged extent is k), LISTED (a tensor map per group), PLAIN (the result is
// alpha * acc in the operands' type; else any epilogue), ROWS, STAGES, CLUSTER, STEP (of n), TALL (see is_tall).
#include "consume.cuh"

// One thread per block. The leader's also takes tiles from the counter and announces them.
__device__ __forceinline__ void produce(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank) {
    const int clusters = gridDim.x / CLUSTER;
    const bool one_each = rank == 0 && s.schedule.total <= clusters;       // then nobody needs the counter
    Ring ring;
    int next = blockIdx.x / CLUSTER;
    for (int number = 0;; ++number) {
        Tile t;
        if (rank == 0) {
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, ROWS, COLUMNS * CLUSTER);
            announce(s, number, t);
        } else {
            expect_tile(s, number);
            t = take_tile(s, number, true);
        }
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (LISTED && blocks > 0) refresh_map(l.listed + 2 * t.group), refresh_map(l.listed + 2 * t.group + 1);
        if (one_each) next = s.schedule.total;
        else if (blocks == 0 && rank == 0) next = clusters + atomicAdd(l.counter, 1);
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            if (rank == 0 && !one_each && kb == max(blocks - 4, 0)) next = clusters + atomicAdd(l.counter, 1);  // asked early, used late
            barrier_wait(shared_address(&s.empty[ring.index]), ring.parity ^ 1);
            load_stage(p, l, maps, t, rank, stages + ring.index * STAGE_BYTES, shared_address(&s.full[ring.index]), kb);
        }
    }
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (rank == 0 && !one_each) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps) {
    extern __shared__ char raw[];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const u32 staging = stages + STAGES * STAGE_BYTES;
    Shared& s = *(Shared*)(raw + (staging - shared_address(raw)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = threadIdx.x >> 5, warpgroup = warp >> 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), CLUSTER * CONSUMERS * 4);       // one arrival per consumer warp
        }
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(shared_address(&s.tile_full[i]), 1);
            barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * CONSUMERS + CLUSTER - 1);  // warpgroups, other producers
        }
        barrier_init_fence();
    }
    else if (threadIdx.x >= 32 && threadIdx.x < 48 && !LISTED) {
        prefetch_map(&maps.x[X_K ? threadIdx.x - 32 : 0]);
        if (threadIdx.x == 32) prefetch_map(&maps.w);
    }
    start_next_launch();
    wait_for_last_launch();
    if (rank == 0) build_schedule(p, s.schedule, l.swapped, ROWS, COLUMNS * CLUSTER, l.busy_rows);
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warpgroup == CONSUMERS) {
        if (warp == CONSUMERS * 4 + 3 && p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
        registers_down<56>();
        if (threadIdx.x == CONSUMERS * 128) produce(p, l, maps, s, stages, rank);
        __syncwarp();
    } else {
        registers_up<224>();
        consume(p, l, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
