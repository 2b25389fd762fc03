// The Hopper kernel for weights that TMA cannot read as they are: odd leading dimensions, addresses that are no multiple
// of 16 bytes.
//
// The rows come by TMA, as in hopper.cu; rows that TMA cannot read are copied first. The aligned bytes round each line of
// the weights come by TMA as well, through eight maps; two warps shift them within their stage into the places where wgmma
// looks for them, while the warpgroups multiply. So weights are read once, where copying them first would read, write and
// read them again.
//
// Compile-time choices as in hopper.cu, with RAGGED_K and PINGPONG 0, MOST_GROUPS that the schedule holds, and JAGGED_W: the
// rows of a jagged m are the weight side, along k, and what they are multiplied with has few columns, which are the rows here.
#define SHIFTING 2              // warps
#define LATE 0                  // no registers to keep a tile's results in
#define HALVES_LAST (CLUSTER == 2 && !JAGGED_W)
#include "announce.cuh"
#include "consume.cuh"
#include "load.cuh"

// ---- Weights at any address, read by TMA ----
//
// TMA wants addresses, pitches and places in a line that are multiples of 16 bytes. Lines eight apart are such a multiple
// apart, whatever the pitch: so eight maps read any matrix, one for the lines of each residue modulo 8, each from the
// aligned address before its first line on (arguments.weight_maps). The aligned bytes round each line of a block arrive,
// residue by residue.

constexpr int W_PITCH = ((W_K ? BK : COLUMNS) + 8) * 2, W_LINES = (W_K ? COLUMNS : BK) / 8;      // bytes of a line, and lines of a residue, in a stage
constexpr int W_BOX = W_LINES * W_PITCH;
static_assert(W_BOX % 128 == 0 && W_BYTES == 8 * W_BOX && W_BYTES % 1024 == 0, "where boxes and rows may begin");

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

// A warp takes tiles from the counter, announces them, and asks for their rows. The first tiles are announced before the rows'
// copies are there: weights need not wait for these.
__device__ __forceinline__ void feed_rows(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank, bool copied) {
    constexpr int AHEAD = 4;                    // blocks of k before the end: the next tile is asked for early, and used late
    const int clusters = gridDim.x / CLUSTER, lane = threadIdx.x & 31;
    const bool leads = lane == 0 && rank == 0;
    Ring ring;
    Room room;
    int next = blockIdx.x / CLUSTER;
#pragma unroll 1
    for (int number = 0;; ++number) {
        if (leads) {
            Tile t = {};
            t.n = STOP;
            if (next < s.schedule.total) t = decode(p, s.schedule, next, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS);
            announce(s, number, t);
        } else if (lane == 0) {
            expect_tile(s, number);
        }
        __syncwarp();
        int marks;
        const Tile t = take_tile(s, number, ~0u, &marks);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        if (copied && blocks > 0) wait_for_last_launch(), copied = false;
        const u32 bytes = ring.begin(t, blocks);
        RowBoxes x;
        x.begin(p, l, maps, t, rank, marks & HALVES);
        if (LISTED && blocks > 0 && elected()) refresh_map(x.map);   // the lane that loads
        if (leads && blocks == 0) next = clusters + atomicAdd(l.counter, 1);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            if (leads && kb == max(blocks - AHEAD, 0)) next = clusters + atomicAdd(l.counter, 1);
            room.take(s, s.begins[1], ring, bytes);
            if (elected()) x.load(stages + W_BYTES + ring.at, shared_address(&s.full[ring.place]), rank, kb * BK, 0);
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
__device__ __forceinline__ void feed_weights(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, Shared& s, u32 stages, u32 rank) {
    const int residue = threadIdx.x & 31;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t), col = int(first_column(t, rank, 0));
        const u32 bytes = ring.begin(t, blocks);
        if (blocks == 0) continue;
        const Lines lines = lines_of(p, l, e, maps, t);
        const int line = lines.first + (W_K ? col : 0) + residue;
        const TensorMap* const map = lines.maps + (line & 7);
        if (LISTED && residue < 8) refresh_map(map);
        int x = W_K ? 0 : col, y = line >> 3;
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            const u32 raw = shared_address(&s.raw[ring.place]);
            room.take(s, s.begins[0], ring, bytes);
            if (elected()) barrier_expect(raw, W_BYTES);
            if (residue < 8) load_box(stages + ring.at + residue * W_BOX, map, raw, x, y, 0, EVICT_NORMAL);
            if (W_K) x += BK;
            else y += BK / 8;
        }
    }
}

// ---- From the lines as they came to the places where wgmma looks for them ----
//
// A thread takes two pieces of 128 bytes: of two lines along k, or of one across it. Word by word, so that shifts by whole words
// are no work. Lines of a residue lie 4 banks apart; two residues whose lines begin in the same bank differ by an odd number
// where the pitch is odd, so that they read lines which are 4 apart. Of eight lanes that are served at once each stores
// another residue, into banks of its own.

constexpr int PIECE = 32;                       // words
__device__ __forceinline__ void sync_shifters() { asm volatile("bar.sync 3, %0;" ::"n"(SHIFTING * 32) : "memory"); }

// Two pieces of a stage, from `from` on and shifted by `bits` more, to `to`. CUT: those of a line behind the end become zeros.
template <bool CUT> __device__ __forceinline__ void shift_pieces(u32 from, u32 to, int residue, int bits, bool exists) {
    u32 w[2][PIECE + 1];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i <= PIECE; ++i) w[half][i] = load_shared_word(from + half * (W_K ? 8 * W_PITCH : LINE_BYTES) + i * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            w[half][i] = __funnelshift_r(w[half][i], w[half][i + 1], bits);
            if (CUT && !exists) w[half][i] = 0;
        }
    sync_shifters();                                // all have read
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < PIECE; i += 4)
            store_shared16(to + half * BLOCK + (((i >> 2) ^ residue) << 4), make_uint4(w[half][i], w[half][i + 1], w[half][i + 2], w[half][i + 3]));
}

__device__ __forceinline__ void shift_weights(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, Shared& s, u32 stages) {
    const int tid = threadIdx.x & 63, residue = tid & 7, line = ((tid >> 3) & 3) + (((tid >> 5) ^ residue) & 1) * 4;
    const u32 from = stages + residue * W_BOX + line * W_PITCH, to = stages + (line * 8 + residue) * LINE_BYTES;
    Ring ring;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
        if (blocks == 0) continue;
        const Lines lines = lines_of(p, l, e, maps, t);
        const int shift = lines.shift(lines.first + residue), bits = (shift & 1) * 16;
        const u32 first = from + (shift >> 1) * 4;
#pragma unroll 1
        for (int left = t.k_len; left > 0; left -= BK, ring.next(bytes)) {
            barrier_wait(shared_address(&s.raw[ring.place]), ring.parity);
            // What lies behind the end of k along the lines are zeros already; lines across k are another group's.
            if (W_K || left >= BK) shift_pieces<false>(first + ring.at, to + ring.at, residue, bits, true);
            else shift_pieces<true>(first + ring.at, to + ring.at, residue, bits, line * 8 + residue < left);
            show_to_copy_engine();                  // and to the tensor cores
            __syncwarp();
            if ((tid & 31) == 0) barrier_arrive_here(shared_address(&s.full[ring.place]));
        }
    }
}

// ---- The kernel ----

// Of a thread; all warpgroups begin with a third of what a block of three has.
constexpr int CONSUMER_REGISTERS = 200, OTHER_REGISTERS = 104;
static_assert(CONSUMERS * CONSUMER_REGISTERS + OTHER_REGISTERS <= 3 * 168, "a warpgroup would wait for registers for ever");
static_assert(SHARED_BYTES <= SHARED, "a launch asks for less shared memory than the layout takes");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_shift_b(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ Maps maps, const __grid_constant__ WeightMaps weights, const __grid_constant__ Eighths e) {
    extern __shared__ char raw[];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const u32 staging = stages + RING_BYTES;
    Shared& s = *(Shared*)(raw + (staging - shared_address(raw)) + CONSUMERS * STAGING_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;      // known to be the same for a whole warp

    make_ready(s, maps, warp, 1 + SHIFTING);    // rows, and warps that shift weights
    __syncwarp();
    start_next_launch();
    if (!e.copied) wait_for_last_launch();      // else the launch before this one is that of the copies, and began when all others were over
    if (CLUSTER > 1) cluster_arrive();
    build_schedule(p, s.schedule, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS, l.busy_rows);
    __syncthreads();
    if (CLUSTER > 1) cluster_wait();

    if (warpgroup == CONSUMERS) {
        registers_down<OTHER_REGISTERS>();
        const int role = warp - CONSUMERS * 4;
        if (role == 0 && e.copied & 2) wait_for_last_launch();
        if (role == 0) feed_weights(p, l, e, weights, s, stages, rank);
        else if (role == 1) feed_rows(p, l, maps, s, stages, rank, e.copied & 1);
        else shift_weights(p, l, e, weights, s, stages);
        __syncwarp();
        if (e.copied) wait_for_last_launch();         // whoever waits for this launch relies on the copies' end as well
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(p, l, maps, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
    if (CLUSTER > 1) cluster_sync();      // a block must not leave while others still arrive at its barriers
}
