// Two warps keep the copy engine busy, one with the weights, one with the rows. What a tile fixes is worked out
// before its loop over k: these loops' own instructions are what bounded the loads of tiles with few rows.
#pragma once
#include "pipeline.cuh"

// The next tile, in the same registers of all lanes: values that the compiler may hold once per warp.
__device__ __forceinline__ Tile take_tile_together(Shared& s, int number, int& marks) {
    Tile t = take_tile(s, number, ~0u, &marks);
    marks = __shfl_sync(~0u, marks, 0);
    int* const word = (int*)&t;
#pragma unroll
    for (int i = 0; i < int(sizeof(Tile) / 4); ++i) word[i] = __shfl_sync(~0u, word[i], 0);
    return t;
}

// What a loading warp knows of the ring's room. It waits for the stages in their order, and for no more of them than the
// next one needs: those that begin a ring's length or more before its end. Distances count as if the ring were endless.
struct Room {
    u32 begin = 0, at = 0;      // the last stage's begin, in the endless ring and in the true one
    u32 oldest = 0, parity = 0; // begin of the oldest stage that may still be full; its barriers
    int place = 0;

    __device__ __forceinline__ void take(Shared& s, u32* begins, const Ring& ring, u32 bytes) {
        begin += ring.at >= at ? ring.at - at : ring.at + RING_BYTES - at;
        at = ring.at;
        begins[ring.place] = begin;
        while (int(begin + bytes - RING_BYTES - oldest) > 0) {
            barrier_wait(shared_address(&s.empty[place]), parity);
            if (++place == PLACES) place = 0, parity ^= 1;
            oldest = begins[place];
        }
    }
    // Until all stages have been handed back. Stages of one size can fill all places, and only the parity tells that from none.
    __device__ __forceinline__ void wait_for_all(Shared& s, const Ring& ring) {
        while (place != ring.place || (EVEN && parity != ring.parity)) {
            barrier_wait(shared_address(&s.empty[place]), parity);
            if (++place == PLACES) place = 0, parity ^= 1;
        }
    }
};

#if SPLIT_ROWS
constexpr u16 ALL_BLOCKS = (1 << CLUSTER) - 1;
#endif

// Asks for the next tile, as a whole warp.
#if LOW
__device__ __forceinline__ void ask_for_tile(Shared&) { asm volatile("bar.arrive 7, 64;" ::: "memory"); }
__device__ __forceinline__ void wait_for_ask() { asm volatile("bar.sync 7, 64;" ::: "memory"); }
#else
__device__ __forceinline__ void ask_for_tile(Shared& s) {
    if (elected()) barrier_arrive_here(shared_address(&s.ask));
}
#endif

// This block's columns of the weights. Of the leader block this warp also says when the next tile is wanted.
__device__ __forceinline__ void load_weights(const Given& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank) {
    constexpr int AHEAD = 8, BOXES = W_K ? W_BOXES : COLUMNS / ACROSS;     // blocks of k before the end; boxes of a stage
    // Weights read once leave the L2 cache first. It does not pay with a long k, which under few rows begins at 1 KiB of a column.
    constexpr int SHORT_K = LOW ? 1024 << W_SHIFT : 3584;
    const bool one_for_all = p.table || (l.swapped ? p.a.group : p.b.group) == 0;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        const u64 hint = (marks & ONCE) && !one_for_all && t.k_len <= SHORT_K ? EVICT_FIRST : EVICT_NORMAL;
        if (t.n == STOP) break;
        const u32 bytes = stage_bytes(t);
        const int blocks = k_blocks(t), col = int(first_column(t, rank, 0)), group = one_for_all ? 0 : t.group;
        const TensorMap* const w = LISTED ? l.listed + 2 * t.group : &maps.w;
        if (LISTED && blocks > 0) refresh_map(w);
        int k = first_k(t, W_K), ask_at = rank == 0 ? max(blocks - AHEAD, 0) : -1;
        if (rank == 0 && blocks == 0) ask_for_tile(s);
        if (blocks > 0) ring.fit(bytes);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, k += BK, ring.next(bytes)) {
            const u32 full = shared_address(&s.full[ring.place]), to = stages + ring.at;
            room.take(s, s.begins[0], ring, bytes);
            if (elected()) {
                barrier_expect(full, W_BYTES);
#if GATE == IN_TWO_BOXES
                // 64 columns of g, then those of u, through a map with an axis for which of the two (arguments.gate_map).
#pragma unroll
                for (int i = 0; i < COLUMNS / 64; ++i) {
                    const int which = i ^ p.fused.up_first, feature = col / 2;
                    const int x = W_K ? k : feature, y = W_K ? which : k, z = W_K ? feature : which;
#if SPLIT_ROWS
                    if (i == rank) multicast_box(to + i * BLOCK, w, full, ALL_BLOCKS, x, y, z, group, hint);
#else
                    load_box(to + i * BLOCK, w, full, x, y, z, group, hint);
#endif
                }
#elif SPLIT_ROWS
                // Each block loads 64 of the columns, for both.
                const u32 half = to + rank * BLOCK;
                const int first = col + int(rank) * 64;
                if (RAGGED_K) multicast_box(half, w, full, ALL_BLOCKS, first, k, t.extra + t.k_len, int(FAR), hint);
                else multicast_box(half, w, full, ALL_BLOCKS, W_K ? k : first, W_K ? first : k, group, hint);
#else
#pragma unroll
                for (int i = 0; i < BOXES; ++i) {
                    if (W_K) load_box(to + i * (W_BYTES / W_BOXES), w, full, (k + i * (BK / W_BOXES)) >> W_SHIFT, col, group, hint);
                    else if (RAGGED_K) load_box(to + i * ACROSS_BYTES, w, full, col + i * ACROSS, k, t.extra + t.k_len, int(FAR), hint);
                    else load_box(to + i * ACROSS_BYTES, w, full, col + i * ACROSS, k, group, hint);
                }
#endif
#if !LOW
                if (kb == ask_at) barrier_arrive_here(shared_address(&s.ask));
#endif
            }
#if LOW
            if (kb == ask_at) ask_for_tile(s);
#endif
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);            // no block leaves while others will still arrive at its barriers
}

// A tile's boxes of rows: this block's part, which goes to all blocks of the cluster; or all of its half of a tile.
struct RowBoxes {
    const TensorMap *map, *second;
    u64 hint;
    u32 coming;                 // bytes of a stage, from all blocks
    int first, upper, lower;    // where k is contiguous: one box, or two of at most 128 rows if there is no other block to load the second
    int boxes, group, row;      // else: boxes of ACROSS rows, every CLUSTER-th of them here
    bool alone;                 // all of them, for this block only
    u16 blocks;                 // a bit for each block that they go to

    __device__ __forceinline__ void begin(const Problem& p, const Launch& l, const Maps& maps, const Tile& t, u32 rank, bool halves = false) {
        const bool one_for_all = p.table || (!JAGGED_W && (p.jagged == JAG_M || p.jagged == JAG_N)) || (l.swapped ? p.b.group : p.a.group) == 0;
        // A list has one map, and thus one height of box, per matrix.
        alone = CLUSTER == 1 || halves, blocks = alone ? 1 << rank : (1 << CLUSTER) - 1;
        const int part = LISTED ? t.extra : alone ? t.n : (t.n / 8 + CLUSTER - 1) / CLUSTER * 8;
        first = alone ? 0 : rank * part, boxes = (t.n + ACROSS - 1) / ACROSS, group = one_for_all ? 0 : t.group, row = t.x_row;
        const int height = LISTED ? part : min(part, t.n - first);
        upper = LISTED ? height : min(height, 128), lower = height - upper;
        map = LISTED ? l.listed + 2 * t.group + 1 : &maps.x[X_K ? max(upper, 8) / 8 - 1 : 0];
        second = CLUSTER == 1 && !LISTED ? &maps.x[max(lower, 8) / 8 - 1] : map;
        coming = !X_K ? boxes * ACROSS_BYTES : (LISTED ? part * CLUSTER : t.n) * LINE_BYTES;
        hint = l.keep_rows ? EVICT_LAST : EVICT_NORMAL;
    }
    __device__ __forceinline__ void one(u32 to, const TensorMap* from, u32 full, int x, int y, int z, int w) const {
        if (RAGGED_K && !X_K && CLUSTER > 1) multicast_box(to, from, full, blocks, x, y, z, w, hint);
        else if (RAGGED_K && !X_K) load_box(to, from, full, x, y, z, w, hint);
        else if (CLUSTER > 1) multicast_box(to, from, full, blocks, x, y, z, hint);
        else load_box(to, from, full, x, y, z, hint);
    }
    // One stage, by one thread: DEEP pieces of k, each `apart` behind the one before; `ragged`: the third coordinate of a ragged
    // map (arguments.py).
    __device__ __forceinline__ void load(u32 to, u32 full, u32 rank, int k, int ragged, u32 apart = 0) const {
        barrier_expect(full, coming * DEEP);
#pragma unroll
        for (int d = 0; d < DEEP; ++d, to += apart, k += BK / DEEP) {
            if (X_K) {
                if (upper > 0) one(to + first * LINE_BYTES, map, full, k, row + first, group, 0);
                if (CLUSTER == 1 && !LISTED && lower > 0) one(to + 128 * LINE_BYTES, second, full, k, row + 128, group, 0);
            } else {
#pragma unroll
                for (int b = 0; b < (ROWS + ACROSS - 1) / ACROSS; ++b) {
                    if (b < boxes && (alone || b % CLUSTER == rank)) one(to + b * ACROSS_BYTES, map, full, row + b * ACROSS, k, RAGGED_K ? ragged : group, int(FAR));
                }
            }
        }
    }
};

// What else the warp with the rows loads into a stage.
struct NothingElse {
    __device__ __forceinline__ void begin(const Tile&) {}
    __device__ __forceinline__ void load(Shared&, int) {}
};

template <class Beside = NothingElse>
__device__ __forceinline__ void load_rows(const Problem& p, const Launch& l, const Maps& maps, Shared& s, u32 stages, u32 rank, Beside beside = {}) {
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 rows = stages + W_BYTES, bytes = stage_bytes(t);
        RowBoxes x;
        x.begin(p, l, maps, t, rank, marks & HALVES);
        if (LISTED && blocks > 0) refresh_map(x.map);
        if (blocks > 0) ring.fit(bytes);
        if (LOW && blocks > 0) beside.begin(t);
        int k = first_k(t, X_K);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, k += BK, ring.next(bytes)) {
#if LOW
            const u32 full = shared_address(&s.rows_full[ring.place]), to = rows + ring.at;
#else
            const u32 full = shared_address(&s.full[ring.place]), to = rows + ring.at;
#endif
            room.take(s, s.begins[1], ring, bytes);
            if (elected()) x.load(to, full, rank, k, t.extra + t.k_len, (LOW ? t.n : ROWS) * LINE_BYTES);
            if (LOW) beside.load(s, kb);
        }
    }
}
