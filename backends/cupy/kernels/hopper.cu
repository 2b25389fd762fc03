// The fast kernel for Hopper (sm_90a): operands that TMA can read, of 16 bits, tf32, int8 or float64. See README.md for one tile's way.
//
// C^T = W^T X^T: the weight side (columns of the result) lies on wgmma's M side, the rows on its n side,
// which comes in steps of 8. A thread block owns 128 columns, 64 for each of two consumer warpgroups,
// times n <= ROWS rows; a cluster of two blocks shares the rows, and each loads half of them for both.
// float64 is multiplied by mma.sync instead (consume_f64.cuh).
//
// Compile-time choices: BFLOAT, X_K and W_K (is k the contiguous direction of the row side, of the weight
// side), RAGGED_K (the jagged extent is k), LISTED (a tensor map per group), PLAIN (the result is
// alpha * acc in the operands' type, BIASED: + bias; else any epilogue), ROWS, STAGES, CLUSTER, STEP (of n), PINGPONG, SHARED. Of fused problems
// FUSED, and what they ask for: GATHER (rows are picked by index), GATE with ACT and PREACT.
#define HALVES_LAST (CLUSTER == 2)
#ifndef GATHER
#define GATHER 0        // rows are picked by index (picked_rows.cuh)
#endif
#define SPLIT_ROWS (GATHER && CLUSTER == 2)
#ifndef COPIED_SIDES
#define COPIED_SIDES 0  // hopper.copied_sides: the launch before this one copies operands, and began when all others were over
#endif
#include "announce.cuh"
#if DOUBLE
#include "consume_f64.cuh"
#else
#include "consume.cuh"
#endif
#include "load.cuh"
#if GATHER
#include "picked_rows.cuh"
#endif

// Of a thread; all warpgroups begin with a third of what a block of three has.
constexpr int CONSUMER_REGISTERS = DOUBLE ? 216 : 224, LOADER_REGISTERS = DOUBLE ? 72 : 56;
static_assert(CONSUMERS * CONSUMER_REGISTERS + LOADER_REGISTERS <= 3 * 168, "a warpgroup would wait for registers for ever");
static_assert(SHARED_BYTES <= SHARED, "a launch asks for less shared memory than the layout takes");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper(const __grid_constant__ Given p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps) {
    extern __shared__ char raw[];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const u32 staging = stages + RING_BYTES;
    Shared& s = *(Shared*)(raw + (staging - shared_address(raw)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;      // known to be the same for a whole warp

    make_ready(s, maps, warp, GATHER ? 1 + 2 * 32 : 2);        // weights, and rows or each lane that copies them
    __syncwarp();
    start_next_launch();
    if (!COPIED_SIDES) wait_for_last_launch();
    if (CLUSTER > 1) cluster_arrive();
    build_schedule(p, s.schedule, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS, l.busy_rows);
    __syncthreads();
    if (CLUSTER > 1) cluster_wait();

    if (warpgroup == CONSUMERS) {
        registers_down<LOADER_REGISTERS>();
        const int role = warp - CONSUMERS * 4;
        if ((COPIED_SIDES & 2 && role == 0) || (COPIED_SIDES & 1 && role == 1)) wait_for_last_launch();
#if GATHER
        if (role == (PICKS_W ? 0 : 1) || role == 3) {
#if RAGGED_K
            copy_picked_tokens(p, l, s, stages, role == 3);
#else
            copy_picked_rows(p, s, stages, role == 3);
#endif
        }
        __syncwarp();
        if (role == 0 && !PICKS_W) load_weights(p, l, maps, s, stages, rank);
        else if (role == 1 && PICKS_W) load_rows(p, l, maps, s, stages, rank);
#else
        if (role == 0) load_weights(p, l, maps, s, stages, rank);
        else if (role == 1) load_rows(p, l, maps, s, stages, rank);
#endif
        else if (role == 2) {
            if ((threadIdx.x & 31) == 0) announce_tiles(p, l, s, rank);
        } else if (!GATHER || role == 3) {
#if GATE
            if (p.zero_unowned) {
                Problem result = p;
                result.n = p.n / 2;
                zero_unowned(result, blockIdx.x, gridDim.x);
            }
#else
            if (p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
#endif
#if RAGGED_K && PLAIN
            zero_idle_groups(p, l, s.schedule);
#endif
        }
        __syncwarp();
        if (COPIED_SIDES) wait_for_last_launch();         // whoever waits for this launch relies on the copies' end as well
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(p, l, maps, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
}
