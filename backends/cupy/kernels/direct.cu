// The Hopper kernel for weights that TMA cannot read: odd leading dimensions, addresses that are no
// multiple of 16 bytes.
//
// The rows come by TMA, as in hopper.cu. The aligned bytes round each line of the weights come by cp.async, as they
// are; the consumers shift them on their way into registers, from where wgmma takes its first operand. So weights
// are read once, where copying them first would read, write and read them again.
//
// Compile-time choices as in hopper.cu, with RAGGED_K and PINGPONG 0 and STEP 32.
#include "consume.cuh"
#include "fragments.cuh"
#include "load.cuh"
#include "weights.cuh"

constexpr int STAGE_ALL = RAW_BYTES + X_BYTES;
static_assert(STAGES * STAGE_ALL + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024 <= 232448, "more shared memory than a thread block may have");

struct Position {               // in the ring of stages: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// Four warps: all k-blocks of all tiles. The first thread also takes tiles from the counter, announces them, and
// asks for their rows.
__device__ __forceinline__ void load(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank, bool copied) {
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
            const u32 stage = stages + ring.index * STAGE_ALL, full = shared_address(&s.full[ring.index]);
            if (leads && rank == 0 && kb == max(blocks - 4, 0)) next = clusters + atomicAdd(l.counter, 1);  // asked early, used late
            barrier_wait(shared_address(&s.empty[ring.index]), ring.parity ^ 1);
            if (leads && copied) wait_for_last_launch(), copied = false;              // of all operands only rows are copies
            if (leads) x.load(stage + RAW_BYTES, full, rank, kb * BK, 0);
            copy_pieces(pieces, w, stage, kb * BK, t.k_len - kb * BK);
            arrive_after_copies(full);
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

// One block of k: its products, and meanwhile the next block's weights on their way into registers.
template <int N>
__device__ __forceinline__ bool multiply_block(Shared& s, const Place& place, u32 stages, Position& ring, bool more, u32 (&w)[FRAGMENT], u32 (&next)[FRAGMENT], float (&d)[ROWS / 2]) {
    constexpr u32 X_STEP = X_K ? 32 : 2048;             // bytes from one k = 16 to the next
    const int last = ring.index, lane = threadIdx.x & 31;
    const u64 x = smem_descriptor(stages + last * STAGE_ALL + RAW_BYTES, BLOCK, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) MmaFragment<N>::run(d, w + k * 4, x + k * (X_STEP >> 4));
    wgmma_commit();
    ring.next();
    if (more) {
        barrier_wait(shared_address(&s.full[ring.index]), ring.parity);
        read_fragment(next, place, stages + ring.index * STAGE_ALL);
    }
    wgmma_wait<0>();
    if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[last]), lane);
    return more;
}

template <int N>
__device__ __forceinline__ void multiply_shifted(Shared& s, const Place& place, u32 stages, Position& ring, int blocks, int half, float (&d)[ROWS / 2], bool first) {
    u32 even[FRAGMENT], odd[FRAGMENT];
    if (first && half == 1) wait_for_other(half);
    barrier_wait(shared_address(&s.full[ring.index]), ring.parity);
    read_fragment(even, place, stages + ring.index * STAGE_ALL);
    if (first && half == 0) let_other(half);
#pragma unroll 1
    for (int kb = 0;; kb += 2) {
        if (!multiply_block<N>(s, place, stages, ring, kb + 1 < blocks, even, odd, d)) break;
        if (!multiply_block<N>(s, place, stages, ring, kb + 2 < blocks, odd, even, d)) break;
    }
}

__device__ __forceinline__ void consume_shifted(const Problem& p, const Launch& l, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
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
            BY_WIDTH(t.n, multiply_shifted<WIDTH>(s, place, stages, ring, blocks, half, d, first));
            first = false;
        }
        finish_tile(p, l, t, rank, half, staging, d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps, const int copied) {
    extern __shared__ char bytes[];
    const u32 stages = (shared_address(bytes) + 1023) & ~1023u;
    const u32 staging = stages + STAGES * STAGE_ALL;
    Shared& s = *(Shared*)(bytes + (staging - shared_address(bytes)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x >> 7;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1 + LOADERS);                    // the rows, and each loader's pieces
            barrier_init(shared_address(&s.empty[i]), CLUSTER * CONSUMERS * 4);
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
        load(p, l, maps, s, stages, rank, copied);
    } else {
        registers_up<216>();
        consume_shifted(p, l, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
