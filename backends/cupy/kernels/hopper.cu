// The fast kernel for Hopper (sm_90a): 16-bit operands that TMA can read. See README.md for one tile's way.
//
// C^T = W^T X^T: the weight side (columns of the result) lies on wgmma's M side, the rows on its n side,
// which comes in steps of 8. A thread block owns 128 columns, 64 for each of two consumer warpgroups,
// times n <= ROWS rows; a cluster of two blocks shares the rows, and each loads half of them for both.
//
// Compile-time choices: BFLOAT, X_K and W_K (is k the contiguous direction of the row side, of the weight
// side), RAGGED_K (the jagged extent is k), LISTED (a tensor map per group), PLAIN (the result is
// alpha * acc in the operands' type; else any epilogue), ROWS, STAGES, CLUSTER, STEP (of n), TALL (see is_tall).
#include "epilogue.cuh"
#include "mma.cuh"
#include "schedule.cuh"

constexpr int BK = 64, COLUMNS = 128, CONSUMERS = 2, THREADS = 384;
constexpr int W_BYTES = COLUMNS * BK * 2, X_BYTES = ROWS * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int BLOCK = 64 * BK * 2;                     // 64 x 64 elements, one box of an operand with contiguous mn
constexpr int SLOTS = 4;                               // tiles announced ahead
[[maybe_unused]] constexpr int PITCH = 68;              // floats per row of the general epilogue's staging
constexpr int STAGING_BYTES = PLAIN ? 64 * 128 : 9216; // per consumer warpgroup
constexpr i64 FAR = 1 << 30;                           // ragged maps: see tensor_maps.py

struct Maps { TensorMap w, x[16]; };                   // x[i]: boxes of 8 * (i + 1) rows

struct Launch {
    const TensorMap* listed;    // per group: weight side, row side
    int* counter;               // next tile, finished clusters
    int swapped, busy_rows, vector_out, keep_rows;   // keep_rows: the row side should stay in the L2 cache
};

struct Shared {
    u64 full[STAGES], empty[STAGES], tile_full[SLOTS], tile_empty[SLOTS];
    alignas(16) Tile tiles[SLOTS];
    Schedule schedule;
};
// Stages (1024-byte aligned), staging of results, and the struct above.
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024;
static_assert(!TALL || ROWS == 256, "a tall tile and its rows fill the same stage");
static_assert(SHARED_BYTES <= 232448, "more shared memory than a thread block may have");

struct Ring {                   // position in the ring of stages: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// The next tile, as every role reads it; frees its slot as soon as the copy is in registers.
__device__ __forceinline__ Tile take_tile(Shared& s, int number, bool one_thread) {
    const int slot = number % SLOTS;
    barrier_wait(shared_address(&s.tile_full[slot]), (number / SLOTS) & 1);
    const Tile t = s.tiles[slot];
    if (one_thread) barrier_arrive(shared_address(&s.tile_empty[slot]), 0);
    return t;
}

// Each block's producer thread, before the slot is filled: 32 bytes will come.
__device__ __forceinline__ void expect_tile(Shared& s, int number) { barrier_expect(shared_address(&s.tile_full[number % SLOTS]), sizeof(Tile)); }

__device__ __forceinline__ void announce(Shared& s, int number, const Tile& t) {
    const int slot = number % SLOTS;
    const u32 to = shared_address(&s.tiles[slot]), full = shared_address(&s.tile_full[slot]);
    barrier_wait(shared_address(&s.tile_empty[slot]), ((number / SLOTS) & 1) ^ 1);
    if (CLUSTER == 1) {                              // st.async exists in clusters only
        s.tiles[slot] = t;
        barrier_arrive(full, 0);
        return;
    }
    expect_tile(s, number);
#pragma unroll
    for (u32 rank = 0; rank < CLUSTER; ++rank) {
        store_remote(to, full, rank, make_int4(t.group, t.n, t.rows, t.row0));
        store_remote(to + 16, full, rank, make_int4(t.col0, t.k_len, t.x_row, t.extra));
    }
}

// Tall tiles (see is_tall) have 256 columns per block instead of 128.
__device__ __forceinline__ bool is_tall(const Tile& t) { return TALL && (t.col0 & 1); }
__device__ __forceinline__ int columns_of(const Tile& t) { return is_tall(t) ? 2 * COLUMNS : COLUMNS; }
__device__ __forceinline__ i64 first_column(const Tile& t, u32 rank, int half) {
    return (t.col0 & ~1) + i64(rank) * columns_of(t) + half * (columns_of(t) / 2);
}

// Fills one stage: this block's weights, and its part of the rows, which goes to all of the cluster.
__device__ __forceinline__ void load_stage(const Problem& p, const Launch& l, const Maps& maps, const Tile& t, u32 rank, u32 stage, u32 full, int kb) {
    const TensorMap* w = LISTED ? l.listed + 2 * t.group : &maps.w;
    const int col = int(first_column(t, rank, 0)), blocks = columns_of(t) / 64, k = kb * BK, left = t.k_len - k;
    const int wg = p.table || (l.swapped ? p.a.group : p.b.group) == 0 ? 0 : t.group;
    const int xg = p.table || p.jagged == JAG_M || p.jagged == JAG_N || (l.swapped ? p.b.group : p.a.group) == 0 ? 0 : t.group;
    const u64 x_hint = l.keep_rows ? EVICT_LAST : EVICT_NORMAL;
    const int box = t.extra;                       // a list's row boxes have one height per group
    barrier_expect(full, blocks * BLOCK + (!X_K ? (t.n + 63) / 64 * BLOCK : (LISTED ? box * CLUSTER : t.n) * BK * 2));
    if (W_K) {
#pragma unroll 1
        for (int i = 0; i < blocks; i += 2) load_box(stage + i * BLOCK, w, full, k, col + i * 64, wg, EVICT_NORMAL);
    } else {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            if (RAGGED_K) load_box(stage + i * BLOCK, w, full, col + i * 64, int(FAR) - left, t.extra + t.k_len, int(FAR), EVICT_NORMAL);
            else load_box(stage + i * BLOCK, w, full, col + i * 64, k, wg, EVICT_NORMAL);
        }
    }
    const u32 rows = stage + blocks * BLOCK;
    const u16 all = (1 << CLUSTER) - 1;
    if (X_K && LISTED) {
        const TensorMap* x = l.listed + 2 * t.group + 1;
        if (CLUSTER > 1) multicast_box(rows + rank * box * BK * 2, x, full, all, k, t.x_row + rank * box, 0, x_hint);
        else load_box(rows, x, full, k, t.x_row, 0, x_hint);
    } else if (X_K) {
        const int part = (t.n / 8 + CLUSTER - 1) / CLUSTER * 8, first = rank * part, height = min(part, t.n - first);
#pragma unroll 1
        for (int at = first; at < first + height; at += 128) {
            const int h = min(128, first + height - at);
            const TensorMap* x = &maps.x[h / 8 - 1];
            if (CLUSTER > 1) multicast_box(rows + at * BK * 2, x, full, all, k, t.x_row + at, xg, x_hint);
            else load_box(rows + at * BK * 2, x, full, k, t.x_row + at, xg, x_hint);
        }
    } else {
        const TensorMap* x = LISTED ? l.listed + 2 * t.group + 1 : &maps.x[0];
#pragma unroll 1
        for (int b = rank; b < (t.n + 63) / 64; b += CLUSTER) {
            const u32 to = rows + b * BLOCK;
            if (RAGGED_K) {
                if (CLUSTER > 1) multicast_box(to, x, full, all, t.x_row + b * 64, int(FAR) - left, t.extra + t.k_len, int(FAR), x_hint);
                else load_box(to, x, full, t.x_row + b * 64, int(FAR) - left, t.extra + t.k_len, int(FAR), x_hint);
            } else {
                if (CLUSTER > 1) multicast_box(to, x, full, all, t.x_row + b * 64, k, xg, x_hint);
                else load_box(to, x, full, t.x_row + b * 64, k, xg, x_hint);
            }
        }
    }
}

__device__ __forceinline__ int k_blocks(const Tile& t) { return (t.k_len + BK - 1) / BK; }

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

// The second warpgroup starts its first tile a little after the first one, and keeps that distance:
// so one of them multiplies while the other stores its results.
__device__ __forceinline__ void let_follow() { asm volatile("bar.arrive 5, 256;" ::: "memory"); }
__device__ __forceinline__ void follow() { asm volatile("bar.sync 5, 256;" ::: "memory"); }

// All k-blocks of a tile: four products of k = 16 per block, one block in flight while the next is awaited.
// TWICE: a tall tile, whose second 64 columns per warpgroup accumulate in the upper half of `d`.
template <int N, bool TWICE>
__device__ __forceinline__ void multiply(Shared& s, u32 stages, Ring& ring, int blocks, int half, float (&d)[ROWS / 2], bool first) {
    constexpr u32 W_STEP = W_K ? 32 : 2048, X_STEP = X_K ? 32 : 2048;     // bytes from one k = 16 to the next
    const int lane = threadIdx.x & 31;
    int last = -1;
    if (first && half == 1) follow();
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
        barrier_wait(shared_address(&s.full[ring.index]), ring.parity);
        const u32 stage = stages + ring.index * STAGE_BYTES;
        constexpr int BLOCKS = TWICE ? 2 : 1;
        const u64 w = smem_descriptor(stage + half * BLOCKS * BLOCK, BLOCK, 1024);
        const u64 x = smem_descriptor(stage + CONSUMERS * BLOCKS * BLOCK, BLOCK, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Mma<N, 0>::run(d, w + k * (W_STEP >> 4), x + k * (X_STEP >> 4));
            if constexpr (TWICE) Mma<N, ROWS / 4>::run(d, w + (BLOCK >> 4) + k * (W_STEP >> 4), x + k * (X_STEP >> 4));
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (first && half == 0 && kb == min(1, blocks - 1)) let_follow();
        if (last >= 0 && lane < CLUSTER) barrier_arrive(shared_address(&s.empty[last]), lane);
        last = ring.index;
        ring.next();
    }
    wgmma_wait<0>();
    if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[last]), lane);
}

// Rows at the start of a piece that belong to the group before (see Shape::lead).
__device__ __forceinline__ int rows_to_skip(const Problem& p, const Tile& t) {
    return !X_K && !LISTED && !RAGGED_K && t.row0 == 0 ? t.extra : 0;
}

// Where a warpgroup's 64 columns of a tile go.
struct Target {
    char* out;          // first row of the piece, first column
    i64 row_step;       // bytes
    int cols;           // columns left, at most 64
};

__device__ __forceinline__ Target target_of(const Problem& p, const Launch& l, const Tile& t, i64 col) {
    Target r;
    i64 cols;
    if (LISTED) {
        const i64* g = p.table + i64(t.group) * T_COLUMNS;
        r.out = (char*)__ldg(g + T_OUT), r.row_step = __ldg(g + (l.swapped ? T_OUT_COL : T_OUT_ROW)) * 2, cols = __ldg(g + (l.swapped ? T_M : T_N));
        r.out += t.row0 * r.row_step;
    } else {
        r.row_step = (l.swapped ? p.out.col : p.out.row) * 2, cols = l.swapped ? p.m : p.n;
        const bool along_rows = p.jagged == JAG_M || p.jagged == JAG_N;
        r.out = p.out.ptr + i64(t.group) * p.out.group * 2 + i64(along_rows ? t.x_row : t.row0) * r.row_step;
    }
    r.out += col * 2, r.cols = int(min64(cols - col, 64));
    return r;
}

// The first `count` of eight 16-bit values, at the ragged right edge of a result.
__device__ __forceinline__ void store_first(char* at, uint4 v, int count) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 7; ++i)
        if (i < count) *(u16*)(at + 2 * i) = u16(word[i >> 1] >> (16 * (i & 1)));
}

#if PLAIN
// alpha * acc in the operands' type: 64 rows at a time turn in shared memory and leave as 16-byte pieces.
__device__ __forceinline__ void finish_tile(const Problem& p, const Launch& l, const Tile& t, u32 rank, int half, u32 staging, float (&d)[ROWS / 2]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const float alpha = float(p.alpha);
    const int skip = rows_to_skip(p, t);
    const i64 col = first_column(t, rank, half);
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
    for (int q = 0; q < ROWS / 64; ++q) {           // 32 registers each: 64 rows of 64 columns
        const int r0 = (is_tall(t) ? q % (ROWS / 128 + !TALL) : q) * 64, right = is_tall(t) && q >= ROWS / 128 ? 64 : 0;
        if (r0 >= t.rows) continue;
        const Target to = target_of(p, l, t, col + right);
        warpgroup_sync(half);                       // the staging of the round before has been read
#pragma unroll
        for (int j = 0; j < 4; ++j) {               // 16 rows each
            const float* v = d + q * 32 + j * 8;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pair[i] = BFLOAT ? pack_bf16(v[i * 2] * alpha, v[i * 2 + 1] * alpha) : pack_f16(v[i * 2] * alpha, v[i * 2 + 1] * alpha);
            store_transposed(turn + j * 16 * 128, pair[0], pair[1], pair[2], pair[3]);
        }
        warpgroup_sync(half);
        const int rows = min(t.rows - r0, 64);
        if (l.vector_out) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + (tid >> 3), chunk = tid & 7;
                if (row < rows && r0 + row >= skip && chunk * 8 < to.cols) {
                    const uint4 v = load_shared16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
                    char* at = to.out + (r0 + row) * to.row_step + chunk * 16;
                    if (chunk * 8 + 8 <= to.cols) *(uint4*)at = v;
                    else store_first(at, v, to.cols - chunk * 8);
                }
            }
        } else {
#pragma unroll 1
            for (int e = tid; e < rows * 64; e += 128) {
                const int row = e >> 6, c = e & 63;
                u16 v;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(staging + row * 128 + (((c >> 3) ^ (row & 7)) << 4) + (c & 7) * 2));
                if (c < to.cols && r0 + row >= skip) *(u16*)(to.out + (r0 + row) * to.row_step + c * 2) = v;
            }
        }
    }
}
#else
// Any epilogue: 32 rows at a time in float32, then element by element with lanes along the columns.
__device__ __forceinline__ void finish_tile(const Problem& p, const Launch& l, const Tile& t, u32 rank, int half, u32 staging, float (&d)[ROWS / 2]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const Group g = resolve(p, t.group, 2);
    const int skip = rows_to_skip(p, t), lead = !X_K && !LISTED && !RAGGED_K ? t.extra : 0;
    const int size = size_of(p.out_type);
    const u32 mine = staging + ((lane & 3) * 2 * PITCH + warp * 16 + (lane >> 2)) * 4;
#pragma unroll 1
    for (int q = 0; q < ROWS / 32; ++q) {           // 16 registers each: 32 rows of 64 columns
        const int r0 = (is_tall(t) ? q % (ROWS / 64) : q) * 32;
        const i64 col = first_column(t, rank, half) + (is_tall(t) && q >= ROWS / 64 ? 64 : 0);
        const int cols = int(min64((l.swapped ? g.m : g.n) - col, 64));
        if (r0 >= t.rows) continue;
        warpgroup_sync(half);
#pragma unroll
        for (int c = 0; c < ROWS / 32; ++c) {
            if (q == c) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) store_shared(mine + ((j * 8 + (i & 1)) * PITCH + (i >> 1) * 8) * 4, d[(c * 4 + j) * 4 + i]);
            }
        }
        warpgroup_sync(half);
        const int rows = min(t.rows - r0, 32);
#pragma unroll 1
        for (int e = tid; e < rows * 64; e += 128) {
            const int row = e >> 6, c = e & 63;
            if (c < cols && r0 + row >= skip) {
                const i64 r = t.row0 + r0 + row - lead, i = l.swapped ? col + c : r, j = l.swapped ? r : col + c;
                const float v = finish<float>(p, g, i, j, load_shared(staging + (row * PITCH + c) * 4));
                store_as<float>(g.out + (i * g.out_row + j * g.out_col) * size, p.out_type, v);
            }
        }
    }
}
#endif

__device__ __forceinline__ void consume(const Problem& p, const Launch& l, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
    Ring ring;
    bool first = true;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, (threadIdx.x & 127) == 0);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        // Defined anew for each tile: otherwise the compiler would keep the last tile's values alive.
        float d[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
        if (blocks > 0 && t.n > 0) {
            if (is_tall(t)) {
                switch ((t.n + STEP - 1) / STEP) {
#define CASE(n) case n / STEP: if constexpr (TALL && n <= ROWS / 2) multiply<n, true>(s, stages, ring, blocks, half, d, first); break;
                    CASES
#undef CASE
                }
            } else {
                switch ((t.n + STEP - 1) / STEP) {
#define CASE(n) case n / STEP: if constexpr (n <= ROWS) multiply<n, false>(s, stages, ring, blocks, half, d, first); break;
                    CASES
#undef CASE
                }
            }
            first = false;
        }
        finish_tile(p, l, t, rank, half, staging, d);
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
