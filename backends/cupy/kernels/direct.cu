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

constexpr int LINES = W_K ? COLUMNS : BK, CHUNKS = (W_K ? BK : COLUMNS) / 8;      // lines of a stage, 16 bytes each in a line
constexpr int PITCH_RAW = (CHUNKS + 1) * 16, RAW_BYTES = LINES * PITCH_RAW;       // in shared memory a line has one piece more
constexpr int STAGE_ALL = RAW_BYTES + X_BYTES;
constexpr int LOADERS = THREADS - CONSUMERS * 128, ABREAST = LOADERS / CHUNKS;    // lines that the loaders take at once
constexpr int FRAGMENT = 16;                                                      // registers of a thread for a stage's weights
static_assert(RAW_BYTES % 1024 == 0 && ABREAST % 8 == 0, "stages keep the swizzle; lines 8 apart have one offset, for pitches are even");
static_assert(STAGES * STAGE_ALL + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024 <= 232448, "more shared memory than a thread block may have");

// A tile's weights: its first line at the first k, and how far may be read.
struct Weights {
    u64 at, end;          // first element; past the group's last element
    i64 pitch;            // bytes between lines
    int cols;             // columns that exist from the tile's first one on
};

__device__ __forceinline__ Weights weights_of(const Problem& p, const Launch& l, const Tile& t, u32 rank) {
    const int col = int(first_column(t, rank, 0));
    Weights w;
    if (LISTED) {
        const i64* g = p.table + i64(t.group) * T_COLUMNS;
        w.at = u64(__ldg(g + (l.swapped ? T_A : T_B))), w.cols = int(__ldg(g + (l.swapped ? T_M : T_N)));
        w.pitch = 2 * __ldg(g + (l.swapped ? (W_K ? T_A_ROW : T_A_COL) : (W_K ? T_B_COL : T_B_ROW)));
    } else {
        const Strided& s = l.swapped ? p.a : p.b;
        w.at = u64(s.ptr) + i64(t.group) * s.group * 2, w.cols = int(l.swapped ? p.m : p.n);
        w.pitch = 2 * (l.swapped ? (W_K ? s.row : s.col) : (W_K ? s.col : s.row));
    }
    const i64 lines = W_K ? w.cols : t.k_len, along = W_K ? t.k_len : w.cols;
    w.end = w.at + (lines - 1) * w.pitch + along * 2;
    w.at += W_K ? col * w.pitch : col * 2;
    w.cols -= col;
    return w;
}

// 16 bytes, of which the first `bytes` are read and the others become zero.
__device__ __forceinline__ void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same as far as `limit`.
__device__ __forceinline__ void copy_before(u32 to, u64 from, u64 limit, u64 readable) {
    const u32 bytes = from < limit ? u32(min(limit - from, u64(16))) : 0;
    copy16(to, bytes ? from : readable, bytes);
}
// Arrives at a barrier once all copies that this thread has asked for are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

struct Position {               // in the ring of stages: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// What one loader copies of each stage: piece `piece` of lines `line`, line + ABREAST, ..., and the last piece of one more.
struct Pieces {
    u64 from, extra_from;             // aligned addresses in the next stage
    i64 stride, step;                 // bytes between its lines, between stages
    int line, extra;                  // its first line; the line whose last piece it copies, if there is one
    u32 to, extra_to;                 // from the start of a stage
};

__device__ __forceinline__ Pieces pieces_of(const Weights& w) {
    const int tid = threadIdx.x - CONSUMERS * 128, piece = tid % CHUNKS;
    Pieces r;
    r.line = tid / CHUNKS, r.extra = tid;
    r.from = ((w.at + r.line * w.pitch) & ~15ull) + piece * 16, r.extra_from = ((w.at + tid * w.pitch) & ~15ull) + CHUNKS * 16;
    r.stride = ABREAST * w.pitch, r.step = W_K ? BK * 2 : BK * w.pitch;
    r.to = r.line * PITCH_RAW + piece * 16, r.extra_to = tid * PITCH_RAW + CHUNKS * 16;
    return r;
}

// One thread's pieces of one stage. What lies past the end of k becomes zero; columns that do not exist may hold
// anything, for their results are never stored.
__device__ __forceinline__ void copy_pieces(Pieces& r, const Weights& w, u32 stage, int k, int left) {
    const bool inside = W_K ? left >= BK + 8 && w.cols >= COLUMNS : left >= BK && w.at + (k + BK - 1) * w.pitch + (COLUMNS + 8) * 2 <= w.end;
    u64 from = r.from;
    if (inside) {
#pragma unroll
        for (int i = 0; i < LINES / ABREAST; ++i, from += r.stride) copy16(stage + r.to + i * ABREAST * PITCH_RAW, from);
        if (LINES == LOADERS || r.extra < LINES) copy16(stage + r.extra_to, r.extra_from);
    } else {
        // Lines end where k does, or where the operand does; lines that do not exist hold nothing.
        const int lines = W_K ? w.cols : left;
        const u64 readable = w.at & ~15ull;
#pragma unroll 1
        for (int i = 0; i < LINES / ABREAST; ++i, from += r.stride) {
            const int line = r.line + i * ABREAST;
            copy_before(stage + r.to + i * ABREAST * PITCH_RAW, from, line >= lines ? 0 : W_K ? w.at + line * w.pitch + (k + left) * 2 : w.end, readable);
        }
        if (r.extra < LINES) copy_before(stage + r.extra_to, r.extra_from, r.extra >= lines ? 0 : W_K ? w.at + r.extra * w.pitch + (k + left) * 2 : w.end, readable);
    }
    r.from += r.step, r.extra_from += r.step;
}

// The rows of one stage by TMA: as load_stage of pipeline.cuh, without the weights.
__device__ __forceinline__ void load_rows(const Problem& p, const Launch& l, const Maps& maps, const Tile& t, u32 rank, u32 stage, u32 full, int kb) {
    const int k = kb * BK, box = t.extra;
    const int xg = p.table || p.jagged == JAG_M || p.jagged == JAG_N || (l.swapped ? p.b.group : p.a.group) == 0 ? 0 : t.group;
    const u64 hint = l.keep_rows ? EVICT_LAST : EVICT_NORMAL;
    const u32 rows = stage + RAW_BYTES;
    const u16 all = (1 << CLUSTER) - 1;
    barrier_expect(full, !X_K ? (t.n + 63) / 64 * BLOCK : (LISTED ? box * CLUSTER : t.n) * BK * 2);
    const TensorMap* x = LISTED ? l.listed + 2 * t.group + 1 : &maps.x[0];
    if (X_K && LISTED) {
        if (CLUSTER > 1) multicast_box(rows + rank * box * BK * 2, x, full, all, k, t.x_row + rank * box, 0, hint);
        else load_box(rows, x, full, k, t.x_row, 0, hint);
    } else if (X_K) {
        const int part = (t.n / 8 + CLUSTER - 1) / CLUSTER * 8, first = rank * part, height = min(part, t.n - first);
#pragma unroll 1
        for (int at = first; at < first + height; at += 128) {
            const int h = min(128, first + height - at);
            if (CLUSTER > 1) multicast_box(rows + at * BK * 2, &maps.x[h / 8 - 1], full, all, k, t.x_row + at, xg, hint);
            else load_box(rows + at * BK * 2, &maps.x[h / 8 - 1], full, k, t.x_row + at, xg, hint);
        }
    } else {
#pragma unroll 1
        for (int b = rank; b < (t.n + 63) / 64; b += CLUSTER) {
            if (CLUSTER > 1) multicast_box(rows + b * BLOCK, x, full, all, t.x_row + b * 64, k, xg, hint);
            else load_box(rows + b * BLOCK, x, full, t.x_row + b * 64, k, xg, hint);
        }
    }
}

// Four warps: all k-blocks of all tiles. The first thread also takes tiles from the counter, announces them, and
// asks for their rows.
__device__ __forceinline__ void load(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank) {
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
        const Tile t = take_tile(s, number, (threadIdx.x & 31) == 0);
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (blocks == 0) {
            if (leads && rank == 0) next = clusters + atomicAdd(l.counter, 1);
            continue;
        }
        if (leads && LISTED) refresh_map(l.listed + 2 * t.group + 1);
        const Weights w = weights_of(p, l, t, rank);
        Pieces pieces = pieces_of(w);
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            const u32 stage = stages + ring.index * STAGE_ALL, full = shared_address(&s.full[ring.index]);
            if (leads && rank == 0 && kb == max(blocks - 4, 0)) next = clusters + atomicAdd(l.counter, 1);  // asked early, used late
            barrier_wait(shared_address(&s.empty[ring.index]), ring.parity ^ 1);
            if (leads) load_rows(p, l, maps, t, rank, stage, full, kb);
            copy_pieces(pieces, w, stage, kb * BK, t.k_len - kb * BK);
            arrive_after_copies(full);
        }
    }
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (leads && rank == 0) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (p.zero_unowned) zero_unowned(p, blockIdx.x * (LOADERS / 32) + (threadIdx.x - CONSUMERS * 128) / 32, gridDim.x * (LOADERS / 32));
}

// Where a thread's elements of the weights lie in a stage. It holds columns m and m + 8 at k = 2c, 2c + 1, 2c + 8 and
// 2c + 9 of each 16 (m and c: a quarter of its lane, and the rest). Lines 8 apart have one offset.
struct Place {
    u32 at[2];            // contiguous k: the word of the first pair; else the first elements at k = 2c and 2c + 1
    u32 bits;             // contiguous k: by how much a pair lies across words
};

__device__ __forceinline__ Place place_of(const Weights& w, int half) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, m = half * 64 + warp * 16 + (lane >> 2), c = lane & 3;
    Place r;
    if (W_K) {
        const u32 offset = u32(w.at + m * w.pitch) & 15;
        r.at[0] = r.at[1] = m * PITCH_RAW + (offset & ~3u) + c * 4, r.bits = (offset & 2) * 8;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) r.at[i] = (c * 2 + i) * PITCH_RAW + (u32(w.at + (c * 2 + i) * w.pitch) & 15) + m * 2;
        r.bits = 0;
    }
    return r;
}

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void read_fragment(u32 (&w)[FRAGMENT], const Place& place, u32 stage) {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int k = (i >> 2) * 16 + (i >> 1 & 1) * 8, m = (i & 1) * 8;
        if (W_K) {
            const u32 at = stage + place.at[0] + m * PITCH_RAW + k * 2;
            w[i] = __funnelshift_r(load_word(at), load_word(at + 4), place.bits);
        } else {
            const u32 more = k * PITCH_RAW + m * 2;
            w[i] = __byte_perm(load_half(stage + place.at[0] + more), load_half(stage + place.at[1] + more), 0x5410);
        }
    }
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
        const Tile t = take_tile(s, number, (threadIdx.x & 127) == 0);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        float d[ROWS / 2];                    // defined anew for each tile, as in consume.cuh
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
        if (blocks > 0 && t.n > 0) {
            const Place place = place_of(weights_of(p, l, t, rank), half);
            switch ((t.n + STEP - 1) / STEP) {
#define CASE(n) case n / STEP: if constexpr (n <= ROWS) multiply_shifted<n>(s, place, stages, ring, blocks, half, d, first); break;
                CASES
#undef CASE
            }
            first = false;
        }
        finish_tile(p, l, t, rank, half, staging, d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps) {
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
            barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * (CONSUMERS + LOADERS / 32));
        }
        barrier_init_fence();
    }
    start_next_launch();
    wait_for_last_launch();
    if (rank == 0) build_schedule(p, s.schedule, l.swapped, ROWS, COLUMNS * CLUSTER, l.busy_rows);
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warpgroup == CONSUMERS) {
        registers_down<72>();
        load(p, l, maps, s, stages, rank);
    } else {
        registers_up<216>();
        consume_shifted(p, l, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
