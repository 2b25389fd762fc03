// The Hopper kernel for weights that TMA cannot read as they are: odd leading dimensions, addresses that are no multiple
// of 16 bytes.
//
// The rows come by TMA, as in hopper.cu; rows that TMA cannot read are copied first. The aligned bytes round each line of
// the weights come by TMA as well, through eight maps; the consumers shift them on their way into registers (below),
// from where wgmma takes its first operand. So weights are read once, where copying them first would read, write and read
// them again.
//
// Compile-time choices as in hopper.cu, with RAGGED_K and PINGPONG 0, WSTAGES of weights beside STAGES of rows, MOST_GROUPS
// that the schedule holds, and JAGGED_W: the rows of a jagged m are the weight side, along k, and what they are multiplied with
// has few columns, which are the rows here.
#include "consume.cuh"
#include "fragments.cuh"
#include "load.cuh"

// ---- Weights at any address, read by TMA ----
//
// TMA wants addresses, pitches and places in a line that are multiples of 16 bytes. Lines eight apart are such a multiple
// apart, whatever the pitch: so eight maps read any matrix, one for the lines of each residue modulo 8, each from the
// aligned address before its first line on (arguments.weight_maps). The aligned bytes round each line of a block arrive,
// residue by residue, and are shifted on their way into registers, in the order in which wgmma takes its first operand.

constexpr int SKEW = 4;                         // pairs of residues lie 16 bytes apart, in other banks
constexpr int W_PITCH = ((W_K ? BK : COLUMNS) + 8 * SKEW) * 2, W_LINES = (W_K ? COLUMNS : BK) / 8;      // bytes of a line, and lines of a residue, in a stage
constexpr int W_BOX = W_LINES * W_PITCH, W_STAGE = 8 * W_BOX;
constexpr int FRAGMENT = 16;                    // registers of a thread for a stage's weights
static_assert(W_BOX % 128 == 0 && W_STAGE % 1024 == 0, "where boxes and stages may begin");

struct WeightMaps { TensorMap map[8]; };

struct Eighths {
    const TensorMap* listed;                    // a list's: eight for each group
    u32 at, pitch;                              // else: the first line's address and the pitch, in bytes, modulo 2^32
    int lines;                                  // from group to group
    int copied;                                 // 1: the rows are copies, 2: the weights
};

// A group's lines.
struct Lines {
    const TensorMap* maps;
    u32 at, pitch;
    int first;                                  // number of the group's first line
    // By how many elements a line begins after the aligned address before it.
    __device__ __forceinline__ int shift(int line) const { return int((at + (line & 7) * pitch) & 15) >> 1; }
};

__device__ __forceinline__ Lines lines_of(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, const Tile& t) {
    if (!LISTED) return {maps.map, e.at, e.pitch, JAGGED_W ? t.extra : t.group * e.lines};
    const i64* g = p.table + i64(t.group) * T_COLUMNS;
    return {e.listed + 8 * t.group, u32(__ldg(g + (l.swapped ? T_A : T_B))), 2 * u32(__ldg(g + (l.swapped ? (W_K ? T_A_ROW : T_A_COL) : (W_K ? T_B_COL : T_B_ROW)))), 0};
}

__device__ __forceinline__ int skew(int residue) { return residue >> 1 & (SKEW - 1); }

// One lane's box of each stage of a tile.
struct WeightBox {
    const TensorMap* map;
    int x, y, to;

    __device__ __forceinline__ void begin(const Lines& lines, int col) {
        const int residue = threadIdx.x & 7, line = lines.first + (W_K ? col : 0) + residue;
        map = lines.maps + (line & 7), x = (W_K ? 0 : col) - 8 * skew(residue), y = line >> 3, to = residue * W_BOX;
        if (LISTED) refresh_map(map);
    }
    __device__ __forceinline__ void load(u32 stage, u32 full) {
        const int lane = threadIdx.x & 31;
        if (lane == 0) barrier_expect(full, W_STAGE);
        if (lane < 8) load_box(stage + to, map, full, x, y, 0, EVICT_NORMAL);
        if (W_K) x += BK;
        else y += BK / 8;
    }
};

// Where a thread's elements of the weights lie in a stage. It holds columns m and m + 8 at k = 2c, 2c + 1, 2c + 8 and
// 2c + 9 of each 16 (m and c: a quarter of its lane, and the rest).
struct Place {
    u32 at[2];            // contiguous k: the word of the first pair; else the first elements at k = 2c and 2c + 1
    u32 bits;             // contiguous k: by how much a pair lies across words
};


__device__ __forceinline__ Place place_of(const Lines& lines, int col, int half) {
    const int lane = threadIdx.x & 31, m = half * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2), c = lane & 3;
    Place r;
    if (W_K) {
        const int residue = lane >> 2, shift = lines.shift(lines.first + col + residue);
        r.at[0] = r.at[1] = residue * W_BOX + skew(residue) * 16 + (m >> 3) * W_PITCH + ((shift >> 1) + c) * 4, r.bits = (shift & 1) * 16;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int residue = c * 2 + i;
            r.at[i] = residue * W_BOX + skew(residue) * 16 + (m + lines.shift(lines.first + residue)) * 2;
        }
        r.bits = 0;
    }
    keep_in_register(r.at[0]), keep_in_register(r.at[1]), keep_in_register(r.bits);
    return r;
}

// 64 columns by 64 k, of which `left` exist: lines after them may be another group's.
__device__ __forceinline__ void read_fragment(u32 (&w)[FRAGMENT], const Place& place, u32 stage, int left) {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int eight = i >> 1, more = (i & 1) * (W_K ? W_PITCH : 16) + eight * (W_K ? 16 : W_PITCH);      // which 8 of k
        if (W_K) w[i] = __funnelshift_r(load_shared_word(stage + place.at[0] + more), load_shared_word(stage + place.at[0] + more + 4), place.bits);
        else w[i] = __byte_perm(load_shared_half(stage + place.at[0] + more), load_shared_half(stage + place.at[1] + more), 0x5410);
    }
    if (W_K || left >= BK) return;
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int k = (i >> 1) * 8 + (threadIdx.x & 3) * 2;
        w[i] = k + 1 < left ? w[i] : k < left ? w[i] & 0xFFFF : 0;
    }
}

// ---- The kernel ----

constexpr int W_AT = STAGES * X_BYTES, RINGS_BYTES = W_AT + WSTAGES * W_STAGE;        // the rows' stages, then those of the weights
constexpr int LOADING_WARPS = 2;
static_assert(RINGS_BYTES + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024 <= SHARED, "a launch asks for less shared memory than the layout takes");

// Weights and rows have a ring each: a stage of weights is free as soon as they are in registers, before its rows have
// been multiplied.
struct Rings {
    u64 w_full[WSTAGES], w_empty[WSTAGES], x_full[STAGES], x_empty[STAGES];
};

template <int COUNT> struct Position {      // in a ring: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == COUNT) index = 0, parity ^= 1;
    }
};

// A warp takes tiles from the counter, announces them, and asks for their rows.
__device__ __forceinline__ void feed_rows(const Problem& p, const Launch& l, const Maps& maps, Shared& s, Rings& r, u32 stages, u32 rank, bool copied) {
    const int clusters = gridDim.x / CLUSTER, lane = threadIdx.x & 31;
    const bool leads = lane == 0 && rank == 0;
    Position<STAGES> ring;
    int next = blockIdx.x / CLUSTER;
    if (copied) wait_for_last_launch();
#pragma unroll 1
    for (int number = 0;; ++number) {
        if (leads) {
            Tile t;
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, ROWS, COLUMNS * CLUSTER);
            announce(s, number, t);
        } else if (lane == 0) {
            expect_tile(s, number);
        }
        __syncwarp();
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        RowBoxes x;
        x.begin(p, l, maps, t, rank);
        if (LISTED && blocks > 0 && lane == 0) refresh_map(x.map);
        if (leads && blocks == 0) next = clusters + atomicAdd(l.counter, 1);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            if (leads && kb == max(blocks - 4, 0)) next = clusters + atomicAdd(l.counter, 1);       // asked early, used late
            barrier_wait(shared_address(&r.x_empty[ring.index]), ring.parity ^ 1);
            if (lane == 0) x.load(stages + ring.index * X_BYTES, shared_address(&r.x_full[ring.index]), rank, kb * BK, 0);
        }
    }
    // The last cluster to stop leaves the counter as it found it, for the next launch.
    if (leads) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == clusters - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
    __syncwarp();
    if (p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
}

// A warp asks for this block's columns of the weights, eight of its lanes for the lines of a residue each.
__device__ __forceinline__ void feed_weights(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, Shared& s, Rings& r, u32 stages, u32 rank) {
    Position<WSTAGES> ring;
    if (e.copied & 2) wait_for_last_launch();
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        WeightBox w;
        if (blocks > 0) w.begin(lines_of(p, l, e, maps, t), int(first_column(t, rank, 0)));
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next()) {
            barrier_wait(shared_address(&r.w_empty[ring.index]), ring.parity ^ 1);
            w.load(stages + W_AT + ring.index * W_STAGE, shared_address(&r.w_full[ring.index]));
        }
    }
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

// A consumer's places in both rings.
struct Taker {
    Position<WSTAGES> w_ring;
    Position<STAGES> x_ring;
    bool first = true;

    // All k-blocks of a tile. While one warpgroup takes its weights, the other one multiplies.
    __device__ __forceinline__ void multiply(Rings& r, const Place& place, u32 stages, const Tile& t, int half, float (&d)[ROWS / 2]) {
        const int lane = threadIdx.x & 31;
        if (first && half == 1) wait_for_other(half);
#pragma unroll 1
        for (int left = t.k_len; left > 0; left -= BK, w_ring.next(), x_ring.next()) {
            u32 w[FRAGMENT];
            barrier_wait(shared_address(&r.w_full[w_ring.index]), w_ring.parity);
            read_fragment(w, place, stages + W_AT + w_ring.index * W_STAGE, left);
            __syncwarp();
            if (lane == 0) barrier_arrive_here(shared_address(&r.w_empty[w_ring.index]));
            if (first && half == 0 && left == t.k_len) let_other(half);
            barrier_wait(shared_address(&r.x_full[x_ring.index]), x_ring.parity);
            const u64 x = smem_descriptor(stages + x_ring.index * X_BYTES, BLOCK, 1024);
            BY_WIDTH(t.n, multiply_block<WIDTH>(d, w, x));
            if (lane < CLUSTER) barrier_arrive(shared_address(&r.x_empty[x_ring.index]), lane);
        }
        first = false;
    }
};

__device__ __forceinline__ void consume_shifted(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, Shared& s, Rings& r, u32 stages, u32 staging, u32 rank, int half) {
    Taker taker;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
#if BIASED
        Bias bias;
        bias.load(p, t, rank, half);
#endif
        float d[ROWS / 2];
        clear(d);
        if (t.n > 0 && t.k_len > 0) taker.multiply(r, place_of(lines_of(p, l, e, maps, t), int(first_column(t, rank, 0)), half), stages, t, half, d);
#if BIASED
        bias.add(p, t, d);
#endif
        finish_tile(p, l, t, rank, half, staging, d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_shift_b(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps, const __grid_constant__ WeightMaps weights, const __grid_constant__ Eighths e) {
    extern __shared__ char bytes[];
    __shared__ Rings r;
    const u32 stages = (shared_address(bytes) + 1023) & ~1023u;
    const u32 staging = stages + RINGS_BYTES;
    Shared& s = *(Shared*)(bytes + (staging - shared_address(bytes)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3;

    if (threadIdx.x == 0) {
        for (int i = 0; i < WSTAGES; ++i) barrier_init(shared_address(&r.w_full[i]), 1), barrier_init(shared_address(&r.w_empty[i]), CONSUMERS * 4);
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&r.x_full[i]), 1), barrier_init(shared_address(&r.x_empty[i]), CLUSTER * CONSUMERS * 4);
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(shared_address(&s.tile_full[i]), 1);
            barrier_init(shared_address(&s.tile_empty[i]), CLUSTER * (CONSUMERS * 4 + LOADING_WARPS));
        }
        barrier_init_fence();
    }
    start_next_launch();
    if (!e.copied) wait_for_last_launch();      // else the launch before this one is that of the copies, and began when all others were over
    if (rank == 0) build_schedule(p, s.schedule, l.swapped, ROWS, COLUMNS * CLUSTER, l.busy_rows);
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warpgroup == CONSUMERS) {
        registers_down<72>();
        if (warp == 0) feed_rows(p, l, maps, s, r, stages, rank, e.copied & 1);
        if (warp == 1) feed_weights(p, l, e, weights, s, r, stages, rank);
        if (e.copied) wait_for_last_launch();         // whoever waits for this launch relies on the copies' end as well
    } else {
        registers_up<216>();
        consume_shifted(p, l, e, weights, s, r, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
