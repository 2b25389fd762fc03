// Lists and batches of few tiles (sm_90a): 16-bit operands that TMA can read, plain results.
//
// hopper.cu would spend most of such a launch on finding out what to do. Here the host has laid out all: the groups'
// tensor maps and shapes and the table of tiles are the argument, and nothing is read from memory but operands. A tile is
// 128 columns by ROWS rows; each processor has one thread block, and each block its tiles. As in hopper.cu C^T = W^T X^T.
//
// Compile-time choices: BFLOAT, X_K and W_K (is k the contiguous direction), GROUPS at most, ROWS, and as many STAGES as fit:
// low tiles wait for memory, not for the tensor cores.
#include "mma.cuh"
#include "rows.cuh"

constexpr int LIST = GROUPS;                       // as small_list.SLOTS
constexpr int LISTED_TILES = 160;                  // as small_list.LISTED
constexpr int BK = 64, COLUMNS = 128, CONSUMERS = 2, THREADS = CONSUMERS * 128 + 32;
constexpr int LINES = X_K ? ROWS : (ROWS + 63) / 64 * 64;                          // rows of X that are loaded: whole boxes
constexpr int W_BYTES = COLUMNS * BK * 2, X_BYTES = LINES * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES, BLOCK = 64 * BK * 2;
constexpr int STAGED = ROWS <= 128 ? ROWS : 64;    // rows of results of a warpgroup that leave at once
constexpr int STAGING_BYTES = (STAGED + 31) / 32 * 32 * 64 * 2;             // odd results are read in turns of 32 rows
static_assert(ROWS % 16 == 0 && ROWS % STAGED == 0, "whole blocks of results");

struct Shape { int m, n; u64 out; i64 pitch; };    // a group's; bytes between rows of the result
struct alignas(16) Spot { int group, blocks, down, across; };      // a tile: its group, blocks of k, and place

struct Work {
    TensorMap w[LIST], x[LIST];
    Spot spot[LISTED_TILES];                       // the first tiles: those with the longest k
    Shape shape[LIST];
    const Spot* more;                              // the other ones, in device memory
    float alpha;
    int vector_out;                                // rows of all results are aligned to 16 bytes
    int tiles;
};

struct Ring {                                      // a place among the stages, and its parity
    int place = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++place == STAGES) place = 0, parity ^= 1;
    }
};

// Boxes of 64 k by all lines where k is contiguous, else of 64 lines by 64 k.
template <int LINES, bool CONTIG_K>
__device__ __forceinline__ void load_side(const TensorMap* map, int first, int k, u32 to, u32 full) {
    if (CONTIG_K) {
        load_box(to, map, full, k, first, 0, EVICT_NORMAL);
    } else {
#pragma unroll
        for (int i = 0; i < LINES / 64; ++i) load_box(to + i * BLOCK, map, full, first + i * 64, k, 0, EVICT_NORMAL);
    }
}

__device__ __forceinline__ void load_block(const Work& p, const Spot& t, int kb, u32 stages, u64* full, const Ring& ring) {
    const u32 stage = stages + ring.place * STAGE_BYTES, arrived = shared_address(&full[ring.place]);
    barrier_expect(arrived, STAGE_BYTES);
    load_side<COLUMNS, W_K>(&p.w[t.group], t.across * COLUMNS, kb * BK, stage, arrived);
    load_side<LINES, X_K>(&p.x[t.group], t.down * ROWS, kb * BK, stage + W_BYTES, arrived);
}

__device__ __forceinline__ Spot spot_of(const Work& p, int tile) { return tile < LISTED_TILES ? p.spot[tile] : p.more[tile - LISTED_TILES]; }

// The number of a block's tile: dealt there and back, so that who had a long one first gets a short one then.
__device__ __forceinline__ int tile_of(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// 64 columns of `rows` rows from the staging.
__device__ __forceinline__ void store_staged(const Work& p, char* out, i64 pitch, u32 staging, int rows, int cols) {
    const int tid = threadIdx.x & 127, chunk = tid & 7;
    if (!p.vector_out) {
#pragma unroll
        for (int r = 0; r < STAGED; r += 4 * AT_ONCE) store_rows(out, pitch, staging, r + (tid >> 5), 0, rows, min(cols, 64));
        return;
    }
#pragma unroll
    for (int i = 0; i < STAGED / 16; ++i) {
        const int r = i * 16 + (tid >> 3);
        if (r >= rows || chunk * 8 >= cols) continue;
        const uint4 v = load_shared16(staging + r * 128 + ((chunk ^ (r & 7)) << 4));
        char* const at = out + r * pitch + chunk * 16;
        if (chunk * 8 + 8 <= cols) *(uint4*)at = v;
        else store_first(at, v, cols - chunk * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_list(const __grid_constant__ Work p) {
    extern __shared__ char raw[];
    __shared__ u64 full[STAGES], empty[STAGES];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Ring ring;
    Spot t = spot_of(p, blockIdx.x);
    int kb = 0;
    if (threadIdx.x == CONSUMERS * 128) {
        prefetch_map(&p.w[t.group]), prefetch_map(&p.x[t.group]);
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&full[i]), 1), barrier_init(shared_address(&empty[i]), CONSUMERS * 4);
        barrier_init_fence();
        wait_for_last_launch();
        for (const int many = min(t.blocks, STAGES); kb < many; ++kb, ring.next()) load_block(p, t, kb, stages, full, ring);     // before anyone else is ready
    }
    __syncthreads();
    if (warp == CONSUMERS * 4) {
        if (lane != 0) return;
        for (int round = 1;; ++round) {
            for (; kb < t.blocks; ++kb, ring.next()) {
                barrier_wait(shared_address(&empty[ring.place]), ring.parity ^ 1);
                load_block(p, t, kb, stages, full, ring);
            }
            if (tile_of(round) >= p.tiles) break;
            t = spot_of(p, tile_of(round)), kb = 0;
        }
        start_next_launch();                           // not before: its blocks would be in the way
        return;
    }
    wait_for_last_launch();                            // even results without a single k must not overtake it
    const int half = warp >> 2;
    // Rows leave through shared memory: a thread holds neighbouring rows of one column.
    const u32 staging = stages + STAGES * STAGE_BYTES + half * STAGING_BYTES;
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    constexpr u32 W_STEP = W_K ? 32 : 2048, X_STEP = X_K ? 32 : 2048;             // bytes from one k = 16 to the next
#pragma unroll 1
    for (int round = 0;;) {
        const bool another = tile_of(round + 1) < p.tiles;
        Spot next = t;
        if (another) next = spot_of(p, tile_of(round + 1));
        // Everything that the way out needs, while the first loads are on their way.
        const Shape& shape = p.shape[t.group];
        int rows = min(shape.m - t.down * ROWS, ROWS), cols = shape.n - t.across * COLUMNS - half * 64;
        i64 pitch = shape.pitch;
        char* out = (char*)shape.out + t.down * ROWS * pitch + (t.across * COLUMNS + half * 64) * 2;
        asm volatile("" : "+r"(rows), "+r"(cols), "+l"(pitch), "+l"(out));
        float d[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));      // opaque: else products wait for each other
        int last = -1;
#pragma unroll 1
        for (int k = 0; k < t.blocks; ++k, ring.next()) {
            const u32 stage = stages + ring.place * STAGE_BYTES;
            barrier_wait(shared_address(&full[ring.place]), ring.parity);
            const u64 w = smem_descriptor(stage + half * BLOCK, BLOCK, 1024), x = smem_descriptor(stage + W_BYTES, BLOCK, 1024);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) Mma<ROWS, 0>::run(d, w + i * (W_STEP >> 4), x + i * (X_STEP >> 4));
            wgmma_commit();
            wgmma_wait<1>();
            if (last >= 0 && lane == 0) barrier_arrive_here(shared_address(&empty[last]));
            last = ring.place;
        }
        wgmma_wait<0>();
        if (last >= 0 && lane == 0) barrier_arrive_here(shared_address(&empty[last]));
#pragma unroll
        for (int r0 = 0; r0 < ROWS; r0 += STAGED) {
            if (r0 > 0 || round > 0) warpgroup_sync(half);                         // what was staged before has been read
#pragma unroll
            for (int j = 0; j < STAGED / 16; ++j) {
                const float* v = d + r0 / 2 + j * 8;
                u32 pair[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) pair[i] = pack_pair(v[i * 2] * p.alpha, v[i * 2 + 1] * p.alpha);
                store_transposed(turn + j * 16 * 128, pair[0], pair[1], pair[2], pair[3]);
            }
            warpgroup_sync(half);
            store_staged(p, out + r0 * pitch, pitch, staging, rows - r0, cols);
        }
        if (!another) break;
        t = next, ++round;
    }
}
