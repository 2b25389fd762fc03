// The Hopper kernel for weights that TMA cannot read: odd leading dimensions, addresses that are no
// multiple of 16 bytes.
//
// The rows come by TMA, as in hopper.cu. The aligned bytes round each line of the weights come by cp.async, as they
// are; the consumers shift them on their way into registers, from where wgmma takes its first operand. So weights
// are read once, where copying them first would read, write and read them again.
//
// Compile-time choices as in hopper.cu, with RAGGED_K and PINGPONG 0, and MOST_GROUPS that the schedule holds.
#include "consume.cuh"
#include "fragments.cuh"
#include "load.cuh"
#include "weights.cuh"

constexpr int X_AT = STAGES * RAW_BYTES, RINGS_BYTES = X_AT + STAGES * X_BYTES;       // the weights' stages, then those of the rows
static_assert(RINGS_BYTES + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024 <= SHARED, "a launch asks for less shared memory than the layout takes");

// Weights and rows have a ring each: a stage of weights is free as soon as they are in registers, a block of k before its
// rows have been multiplied. One ring, held until then, waited for memory most of the time.
struct Rings {
    u64 w_full[STAGES], w_empty[STAGES], x_full[STAGES], x_empty[STAGES];
};

struct Position {               // in both rings: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// Four warps: all k-blocks of all tiles. The first thread also takes tiles from the counter, announces them, and
// asks for their rows.
__device__ __forceinline__ void load(const Problem& p, const Launch& l, const Maps& maps, Shared& s, Rings& r, u32 stages, u32 rank, bool copied) {
    const int clusters = gridDim.x / CLUSTER;
    const bool leads = threadIdx.x == CONSUMERS * 128;
    Position ring;
    int next = blockIdx.x / CLUSTER;
    for (int number = 0;; ++number) {
        if (leads && rank == 0) {
            Tile t;
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, ROWS, COLUMNS * CLUSTER);
            announce(s, number, t);
        } else if (leads) {
            expect_tile(s, number);
        }
        __syncwarp();
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (blocks == 0) {
            if (leads && rank == 0) next = clusters + atomicAdd(l.counter, 1);
            continue;
        }
        const Weights w = weights_of(p, l, t, rank);
        Pieces pieces = pieces_of(w);
        RowBoxes x;
        x.begin(p, l, maps, t, rank);
        if (leads && LISTED) refresh_map(x.map);
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            const u32 raw = stages + ring.index * RAW_BYTES;
            if (leads && rank == 0 && kb == max(blocks - 4, 0)) next = clusters + atomicAdd(l.counter, 1);  // asked early, used late
            barrier_wait(shared_address(&r.w_empty[ring.index]), ring.parity ^ 1);
            copy_pieces(pieces, w, raw, kb * BK, t.k_len - kb * BK);
            arrive_after_copies(shared_address(&r.w_full[ring.index]));
            if (leads) {
                barrier_wait(shared_address(&r.x_empty[ring.index]), ring.parity ^ 1);
                if (copied) wait_for_last_launch(), copied = false;                   // of all operands only rows are copies
                x.load(stages + X_AT + ring.index * X_BYTES, shared_address(&r.x_full[ring.index]), rank, kb * BK, 0);
            }
        }
    }
    if (leads && copied) wait_for_last_launch();         // whoever waits for this launch relies on the copies' end as well
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (leads && rank == 0) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (p.zero_unowned) zero_unowned(p, blockIdx.x * (LOADERS / 32) + (threadIdx.x - CONSUMERS * 128) / 32, gridDim.x * (LOADERS / 32));
}

// A block's weights into registers; then their place is free.
__device__ __forceinline__ void take_weights(Rings& r, const Place& place, u32 stages, const Position& ring, u32 (&w)[FRAGMENT]) {
    barrier_wait(shared_address(&r.w_full[ring.index]), ring.parity);
    read_fragment(w, place, stages + ring.index * RAW_BYTES);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive_here(shared_address(&r.w_empty[ring.index]));
}

// A block's products. Nothing is on its way when it ends: whoever reads the next weights may use the same registers.
template <int N> __device__ __forceinline__ void multiply_block(float (&d)[ROWS / 2], const u32 (&w)[FRAGMENT], u64 x) {
    constexpr u32 X_STEP = X_K ? 32 : 2048;             // bytes from one k = 16 to the next
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) MmaFragment<N>::run(d, w + k * 4, x + k * (X_STEP >> 4));
    wgmma_commit();
    wgmma_wait<0>();
}

// All k-blocks of a tile. While one warpgroup takes its weights, the other one multiplies.
__device__ __forceinline__ void multiply_shifted(Rings& r, const Place& place, u32 stages, Position& ring, int blocks, int half, int rows, float (&d)[ROWS / 2], bool first) {
    const int lane = threadIdx.x & 31;
    if (first && half == 1) wait_for_other(half);
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb, ring.next()) {
        u32 w[FRAGMENT];
        take_weights(r, place, stages, ring, w);
        if (first && half == 0 && kb == 0) let_other(half);
        barrier_wait(shared_address(&r.x_full[ring.index]), ring.parity);
        const u64 x = smem_descriptor(stages + X_AT + ring.index * X_BYTES, BLOCK, 1024);
        BY_WIDTH(rows, multiply_block<WIDTH>(d, w, x));
        if (lane < CLUSTER) barrier_arrive(shared_address(&r.x_empty[ring.index]), lane);
    }
}

__device__ __forceinline__ void consume_shifted(const Problem& p, const Launch& l, Shared& s, Rings& r, u32 stages, u32 staging, u32 rank, int half) {
    Position ring;
    bool first = true;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        float d[ROWS / 2];
        clear(d);
        if (blocks > 0 && t.n > 0) {
            const Place place = place_of(weights_of(p, l, t, rank), half);
            multiply_shifted(r, place, stages, ring, blocks, half, t.n, d, first);
            first = false;
        }
        finish_tile(p, l, t, rank, half, staging, d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps, const int copied) {
    extern __shared__ char bytes[];
    __shared__ Rings r;
    const u32 stages = (shared_address(bytes) + 1023) & ~1023u;
    const u32 staging = stages + RINGS_BYTES;
    Shared& s = *(Shared*)(bytes + (staging - shared_address(bytes)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x >> 7;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&r.w_full[i]), LOADERS), barrier_init(shared_address(&r.w_empty[i]), CONSUMERS * 4);
            barrier_init(shared_address(&r.x_full[i]), 1), barrier_init(shared_address(&r.x_empty[i]), CLUSTER * CONSUMERS * 4);
        }
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(shared_address(&s.tile_full[i]), 1);
            barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * (CONSUMERS * 4 + LOADERS / 32));
        }
        barrier_init_fence();
    }
    start_next_launch();
    if (!copied) wait_for_last_launch();      // else the launch before this one is that of the copies, and began when all others were over
    if (rank == 0) build_schedule(p, s.schedule, l.swapped, ROWS, COLUMNS * CLUSTER, l.busy_rows);
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warpgroup == CONSUMERS) {
        registers_down<72>();
        load(p, l, maps, s, r, stages, rank, copied);
    } else {
        registers_up<216>();
        consume_shifted(p, l, s, r, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
