// Lists and batches that one wave of thread blocks can hold (sm_90a): 16-bit operands that TMA can read, plain results.
//
// hopper.cu would spend most of such a launch on finding out what to do. Here the host has laid out all: the groups'
// tensor maps and shapes are the argument, each thread block has one tile of 128 columns by ROWS rows, and nothing is
// read from memory but operands. As in hopper.cu C^T = W^T X^T.
//
// Compile-time choices: BFLOAT, X_K and W_K (is k the contiguous direction), GROUPS at most, ROWS, and as many STAGES as fit: low tiles wait for
// memory, not for the tensor cores.
#include "mma.cuh"
#include "rows.cuh"

constexpr int LIST = GROUPS;                       // as wave.SLOTS
constexpr int BK = 64, COLUMNS = 128, CONSUMERS = 2, THREADS = CONSUMERS * 128 + 32;
constexpr int LINES = X_K ? ROWS : (ROWS + 63) / 64 * 64;                          // rows of X that are loaded: whole boxes
constexpr int W_BYTES = COLUMNS * BK * 2, X_BYTES = LINES * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES, BLOCK = 64 * BK * 2;
constexpr int STAGING_BYTES = ROWS * 64 * 2;       // results of a warpgroup; they take the place of the stages
static_assert(ROWS % 32 == 0 && CONSUMERS * STAGING_BYTES <= STAGES * STAGE_BYTES, "whole atoms, and room for the results");

struct Shape {                                     // a group's; in one piece, for each piece of an argument is fetched when it is first read
    int across, m, n, k;                           // tiles side by side; the extents
    u64 out;
    i64 pitch;                                     // bytes between rows of the result
};

struct Work {
    TensorMap w[LIST], x[LIST];
    int first[LIST];                               // number of the group's first tile; past the last group: never reached
    Shape shape[LIST];
    float alpha;
    int vector_out;                                // rows of all results are aligned to 16 bytes
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

__device__ __forceinline__ void load_block(const Work& p, int g, int row, int col, int kb, u32 stages, u64* full) {
    const u32 stage = stages + kb % STAGES * STAGE_BYTES, arrived = shared_address(&full[kb % STAGES]);
    barrier_expect(arrived, STAGE_BYTES);
    load_side<COLUMNS, W_K>(&p.w[g], col, kb * BK, stage, arrived);
    load_side<LINES, X_K>(&p.x[g], row, kb * BK, stage + W_BYTES, arrived);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) wave(const __grid_constant__ Work p) {
    extern __shared__ char raw[];
    __shared__ u64 full[STAGES], empty[STAGES];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x;
    int g = -1;
#pragma unroll
    for (int i = 0; i < LIST; ++i) g += tile >= p.first[i];
    const Shape& shape = p.shape[g];
    const int local = tile - p.first[g], down = local / shape.across, row = down * ROWS, col = (local - down * shape.across) * COLUMNS;
    const int blocks = (shape.k + BK - 1) / BK;
    if (threadIdx.x == CONSUMERS * 128) {
        prefetch_map(&p.w[g]), prefetch_map(&p.x[g]);
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&full[i]), 1), barrier_init(shared_address(&empty[i]), CONSUMERS * 4);
        barrier_init_fence();
        wait_for_last_launch();
        for (int kb = 0; kb < min(blocks, STAGES); ++kb) load_block(p, g, row, col, kb, stages, full);     // before anyone else is ready
    }
    __syncthreads();
    if (warp == CONSUMERS * 4) {
        if (lane != 0) return;
        for (int kb = STAGES; kb < blocks; ++kb) {
            barrier_wait(shared_address(&empty[kb % STAGES]), (kb / STAGES & 1) ^ 1);
            load_block(p, g, row, col, kb, stages, full);
        }
        start_next_launch();                           // not before: its blocks would be in the way
        return;
    }
    wait_for_last_launch();                            // even results without a single k must not overtake it
    // Everything that the way out needs, while the first loads are on their way.
    const int half = warp >> 2, tid = threadIdx.x & 127, chunk = tid & 7;
    int rows = min(shape.m - row, ROWS), cols = shape.n - col - half * 64;
    i64 pitch = shape.pitch;
    char* out = (char*)shape.out + row * pitch + (col + half * 64) * 2;
    asm volatile("" : "+r"(rows), "+r"(cols), "+l"(pitch), "+l"(out));
    constexpr u32 W_STEP = W_K ? 32 : 2048, X_STEP = X_K ? 32 : 2048;             // bytes from one k = 16 to the next
    float d[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));      // opaque: else products wait for each other
    for (int kb = 0; kb < blocks; ++kb) {
        const int at = kb % STAGES;
        const u32 stage = stages + at * STAGE_BYTES;
        barrier_wait(shared_address(&full[at]), kb / STAGES & 1);
        const u64 w = smem_descriptor(stage + half * BLOCK, BLOCK, 1024), x = smem_descriptor(stage + W_BYTES, BLOCK, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma<ROWS, 0>::run(d, w + k * (W_STEP >> 4), x + k * (X_STEP >> 4));
        wgmma_commit();
        wgmma_wait<1>();
        if (kb > 0 && lane == 0) barrier_arrive_here(shared_address(&empty[(kb - 1) % STAGES]));
    }
    wgmma_wait<0>();
    asm volatile("bar.sync 3, 256;" ::: "memory");                                 // both warpgroups are done with the stages

    // Rows leave through shared memory: a thread holds neighbouring rows of one column.
    const u32 staging = stages + half * STAGING_BYTES, swizzled = lane & 7;
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((((warp & 3) * 2 + ((lane >> 3) & 1)) ^ swizzled) << 4);
#pragma unroll
    for (int j = 0; j < ROWS / 16; ++j) {
        const float* v = d + j * 8;
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = BFLOAT ? pack_bf16(v[i * 2] * p.alpha, v[i * 2 + 1] * p.alpha) : pack_f16(v[i * 2] * p.alpha, v[i * 2 + 1] * p.alpha);
        store_transposed(turn + j * 16 * 128, pair[0], pair[1], pair[2], pair[3]);
    }
    warpgroup_sync(half);
    if (p.vector_out) {
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) {
            const int r = i * 16 + (tid >> 3);
            if (r >= rows || chunk * 8 >= cols) continue;
            const uint4 v = load_shared16(staging + r * 128 + ((chunk ^ (r & 7)) << 4));
            char* const at = out + r * pitch + chunk * 16;
            if (chunk * 8 + 8 <= cols) *(uint4*)at = v;
            else store_first(at, v, cols - chunk * 8);
        }
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; r += 4 * AT_ONCE) store_rows(out, pitch, staging, r + (warp & 3), 0, rows, min(cols, 64));
    }
}
