// The Hopper kernel for weights that TMA cannot read: odd leading dimensions, addresses that are no
// multiple of 16 bytes.
//
// The rows come by TMA, as in hopper.cu. The aligned bytes round a line of the weights come by cp.async
// into a raw slot, and two warps shift it into the swizzled stage that wgmma reads. So weights
// are read once, where copying them first would read, write and read them again.
//
// Compile-time choices as in hopper.cu, with RAGGED_K and TALL 0.
#include "consume.cuh"

constexpr int RAW_SLOTS = 2, LINES = W_K ? COLUMNS : BK, LINE = W_K ? BK : COLUMNS;   // lines of a stage, elements in a line
constexpr int PIECES = LINE / 8 + 1, RAW_PITCH = PIECES * 16, RAW_BYTES = LINES * RAW_PITCH;
constexpr int FETCH = 1, SHIFT = 2, SHIFT_WARPS = 2;        // warps of the third warpgroup; warp 0 loads the rows

struct Raw { u64 full[RAW_SLOTS], empty[RAW_SLOTS]; };
static_assert(SHARED_BYTES + RAW_SLOTS * RAW_BYTES + (int)sizeof(Raw) <= 232448, "more shared memory than a thread block may have");

// The weights of one tile: where its first line starts, and how far lines may be read.
struct Weights {
    u64 at, end;          // first element of the tile; past the group's last element
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
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Arrives at a barrier once all copies that this thread has asked for are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

struct RawRing {
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == RAW_SLOTS) index = 0, parity ^= 1;
    }
};

// One piece of a line; unless all are known to be INSIDE, only as far as the line exists and the operand reaches.
template <bool INSIDE>
__device__ __forceinline__ void copy_piece(const Weights& w, u64 line_at, bool exists, int piece, u32 to) {
    const u64 from = (line_at & ~15ull) + piece * 16;
    if (INSIDE) {
        copy16(to, from, 16);
    } else {
        const u32 bytes = exists && from < w.end ? u32(min(w.end - from, u64(16))) : 0;
        copy16(to, bytes ? from : w.end & ~15ull, bytes);
    }
}

// All lines of a stage: a few lines at a time, each by as many lanes as it has pieces, then the odd last pieces.
template <bool INSIDE>
__device__ __forceinline__ void copy_lines(const Weights& w, u64 first, int lines, u32 to) {
    constexpr int ABREAST = 32 / (PIECES - 1);
    const int lane = threadIdx.x & 31, piece = lane % (PIECES - 1), mine = lane / (PIECES - 1);
    u64 at = first + mine * w.pitch;
#pragma unroll (INSIDE ? 4 : 1)
    for (int line = mine; line < LINES; line += ABREAST, at += ABREAST * w.pitch)
        copy_piece<INSIDE>(w, at, line < lines, piece, to + line * RAW_PITCH + piece * 16);
    at = first + lane * w.pitch;
#pragma unroll 1
    for (int line = lane; line < LINES; line += 32, at += 32 * w.pitch)
        copy_piece<INSIDE>(w, at, line < lines, PIECES - 1, to + line * RAW_PITCH + (PIECES - 1) * 16);
}

// One warp: asks for the lines of every stage, as far ahead as there are raw slots.
__device__ __forceinline__ void fetch(const Problem& p, const Launch& l, Shared& s, Raw& raw, u32 slots, u32 rank) {
    const int lane = threadIdx.x & 31;
    RawRing ring;
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, lane == 0);
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (blocks == 0) continue;
        const Weights w = weights_of(p, l, t, rank);
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            const int lines = min(W_K ? w.cols : t.k_len - kb * BK, LINES);
            const u64 first = w.at + (W_K ? u64(kb) * BK * 2 : u64(kb) * BK * w.pitch);
            const u32 full = shared_address(&raw.full[ring.index]), to = slots + ring.index * RAW_BYTES;
            barrier_wait(shared_address(&raw.empty[ring.index]), ring.parity ^ 1);
            const bool inside = lines == LINES && ((first + (LINES - 1) * w.pitch) & ~15ull) + RAW_PITCH <= w.end;
            if (inside) copy_lines<true>(w, first, lines, to);
            else copy_lines<false>(w, first, lines, to);
            arrive_after_copies(full);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void store_shared16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The first `count` of eight 16-bit values, zeros after them.
__device__ __forceinline__ uint4 first_of(uint4 v, int count) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = count >= i * 2 + 2 ? w[i] : count == i * 2 + 1 ? w[i] & 0xFFFF : 0;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// SHIFT_WARPS warps: from raw lines to the swizzled stage. What lies past the end of k becomes zero; columns
// that do not exist may hold anything, for their results are never stored.
__device__ __forceinline__ void shift(const Problem& p, const Launch& l, Shared& s, Raw& raw, u32 slots, u32 stages, u32 rank) {
    constexpr int CHUNKS = LINE / 8, THREADS_HERE = SHIFT_WARPS * 32, EACH = LINES * CHUNKS / THREADS_HERE;
    const int tid = threadIdx.x - (CONSUMERS * 128 + SHIFT * 32), lane = tid & 31;
    Ring ring;
    RawRing from;
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, lane == 0);
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (blocks == 0) continue;
        const Weights w = weights_of(p, l, t, rank);
        for (int kb = 0; kb < blocks; ++kb, ring.next(), from.next()) {
            const int left = t.k_len - kb * BK;
            const u32 start = u32(w.at) + (W_K ? u32(kb) * BK * 2 : u32(kb) * BK * u32(w.pitch));
            const u32 slot = slots + from.index * RAW_BYTES, stage = stages + ring.index * STAGE_BYTES;
            barrier_wait(shared_address(&raw.full[from.index]), from.parity);
            barrier_wait(shared_address(&s.empty[ring.index]), ring.parity ^ 1);
#pragma unroll 4
            for (int i = 0; i < EACH; ++i) {
                const int item = tid + i * THREADS_HERE, line = item / CHUNKS, chunk = item % CHUNKS;
                const u32 at = slot + line * RAW_PITCH + chunk * 16;
                uint4 v = shifted(load_shared16(at), load_shared16(at + 16), (start + line * u32(w.pitch)) & 15);
                if (left < BK) v = first_of(v, W_K ? left - chunk * 8 : line < left ? 8 : 0);
                const u32 to = W_K ? line * 128 + ((chunk ^ (line & 7)) << 4) : (chunk >> 3) * BLOCK + line * 128 + (((chunk & 7) ^ (line & 7)) << 4);
                store_shared16(stage + to, v);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");      // wgmma reads what was just written
            __syncwarp();
            if (lane == 0) {
                barrier_arrive_here(shared_address(&s.full[ring.index]));
                barrier_arrive_here(shared_address(&raw.empty[from.index]));
            }
        }
    }
}

// The rows of one stage by TMA: as load_stage of pipeline.cuh, without the weights.
__device__ __forceinline__ void load_rows(const Problem& p, const Launch& l, const Maps& maps, const Tile& t, u32 rank, u32 stage, u32 full, int kb) {
    const int k = kb * BK, box = t.extra;
    const int xg = p.table || p.jagged == JAG_M || p.jagged == JAG_N || (l.swapped ? p.b.group : p.a.group) == 0 ? 0 : t.group;
    const u64 hint = l.keep_rows ? EVICT_LAST : EVICT_NORMAL;
    const u32 rows = stage + W_BYTES;
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

// One thread per block: takes tiles from the counter, announces them, and loads their rows.
__device__ __forceinline__ void produce(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank) {
    const int clusters = gridDim.x / CLUSTER;
    Ring ring;
    int next = blockIdx.x / CLUSTER;
    for (int number = 0;; ++number) {
        Tile t;
        if (rank == 0) {
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, ROWS, COLUMNS * CLUSTER);
            announce(s, number, t);
            if (t.n != STOP) next = clusters + atomicAdd(l.counter, 1);
        } else {
            expect_tile(s, number);
            t = take_tile(s, number, true);
        }
        if (t.n == STOP) break;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        if (LISTED && blocks > 0) refresh_map(l.listed + 2 * t.group + 1);
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            barrier_wait(shared_address(&s.empty[ring.index]), ring.parity ^ 1);
            load_rows(p, l, maps, t, rank, stages + ring.index * STAGE_BYTES, shared_address(&s.full[ring.index]), kb);
        }
    }
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (rank == 0) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps) {
    extern __shared__ char bytes[];
    const u32 stages = (shared_address(bytes) + 1023) & ~1023u;
    const u32 staging = stages + STAGES * STAGE_BYTES, slots = staging + CONSUMERS * STAGING_BYTES;
    char* const after = bytes + (slots + RAW_SLOTS * RAW_BYTES - shared_address(bytes));
    Raw& raw = *(Raw*)after;
    Shared& s = *(Shared*)(after + sizeof(Raw));
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = threadIdx.x >> 5, warpgroup = warp >> 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1 + SHIFT_WARPS);
            barrier_init(shared_address(&s.empty[i]), CLUSTER * CONSUMERS * 4);
        }
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(shared_address(&s.tile_full[i]), 1);
            barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * (CONSUMERS + 1 + SHIFT_WARPS) + CLUSTER - 1);  // and those who fetch and shift
        }
        for (int i = 0; i < RAW_SLOTS; ++i) {
            barrier_init(shared_address(&raw.full[i]), 32);
            barrier_init(shared_address(&raw.empty[i]), SHIFT_WARPS);
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
        if (threadIdx.x == CONSUMERS * 128) produce(p, l, maps, s, stages, rank);
        else if (warp >= CONSUMERS * 4 + SHIFT) shift(p, l, s, raw, slots, stages, rank);
        else if (warp == CONSUMERS * 4 + FETCH) {
            fetch(p, l, s, raw, slots, rank);
            if (p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
        }
        __syncwarp();
    } else {
        registers_up<216>();
        consume(p, l, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
