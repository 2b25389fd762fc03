// Which tile comes next, for clusters that take tiles from one counter.
//
// A tile is COLUMNS columns of the weight side by at most ROWS rows of the row side. A group of R rows
// is cut into ceil(R / ROWS) equal pieces, rounded up to 8 rows, so that a ragged group wastes at most
// 7 rows per piece. Groups fall into two queues: those with so many rows that arithmetic bounds them,
// and those whose weights bound them by memory. The order mixes the queues evenly, so that at any time
// some clusters stream weights while others keep the tensor cores busy.
#pragma once
#include "ptx.cuh"

#ifndef PINGPONG
#define PINGPONG 0      // hopper.cu: the two warpgroups take turns, a tile each, instead of sharing every tile
#endif

#ifndef HALVES_LAST
#define HALVES_LAST 0   // hopper.cu: the last of an odd number of blocks of columns is halved by its rows
#endif

#ifndef SPLIT_ROWS
#define SPLIT_ROWS 0    // hopper.cu: every tile is, and its weights are shared
#endif

#ifndef JAGGED_W
#define JAGGED_W 0      // hopper_shift_b.cu: the weight side is cut into groups, not the rows
#endif

#ifndef MOST_GROUPS
#define MOST_GROUPS (PINGPONG ? 448 : 960)
#endif
constexpr int MAX_GROUPS = MOST_GROUPS;    // as config.groups_at_most
constexpr int BUSY_K = 288;                // from this k on a tile's products take longer than its results need to leave
constexpr int BAND = 8;                    // pieces that share a weight tile while it is in the L2 cache

// What the roles of a thread block need to know of a tile. `n` = STOP: no more tiles; 0: an empty one.
constexpr int STOP = -1;
// Added to an announced tile's group. ONCE: no other tile of it reads these weights. HALVES: its columns are one block's,
// so the blocks of a cluster take half of its rows each.
constexpr int ONCE = 1 << 30, HALVES = 1 << 29, MARKS = ONCE | HALVES;

struct Tile {
    int group, n, rows, row0;      // rows of the piece (n: rounded up to 8), first row within the group
    int col0, k_len, x_row;        // first column, extent of k, first row in the operand's own coordinates
    int extra;                     // jagged k: first k; a jagged weight side: first line; a list: height of its boxes; else
                                   // rows before the group (lead)
};

struct Schedule {
    int start[MAX_GROUPS], length[MAX_GROUPS];   // span of each group along the jagged extent
    int busy[MAX_GROUPS], lean[MAX_GROUPS];      // tiles before this group in each of the queues
    u64 warp_sum[16];
    int busy_all, lean_all, total;
};

struct Shape { int rows, cols, k, lead; };

// TMA takes its first coordinate in steps of 16 bytes. Where that is the jagged one, a group's tiles
// begin up to 7 rows early, at a multiple of 8, and those `lead` rows are never stored.
__device__ __forceinline__ Shape group_extents(const Problem& p, int g, int swapped, int start, int span) {
    Shape s;
    s.lead = 0;
    if (p.table) {
        const i64* t = p.table + i64(g) * T_COLUMNS;
        s.rows = int(__ldg(t + T_M)), s.cols = int(__ldg(t + T_N)), s.k = int(__ldg(t + T_K));
    } else {
        const bool along_rows = p.jagged == JAG_M || p.jagged == JAG_N;
        s.rows = p.valid ? span : along_rows ? span : int(swapped ? p.n : p.m);
        if (!X_K && along_rows && span > 0) s.lead = start & 7, s.rows += s.lead;
        s.cols = int(swapped ? p.m : p.n);
        s.k = p.jagged == JAG_K ? span : int(p.k);
        if (JAGGED_W) s.rows = int(swapped ? p.n : p.m), s.cols = span, s.lead = 0;
    }
    if (p.table && swapped) { const int r = s.rows; s.rows = s.cols, s.cols = r; }
    return s;
}

// Height of a group's pieces, and their number (rounding the height up can make one superfluous).
__device__ __forceinline__ int piece_rows(int rows, int most) {
    if (rows <= most) return max((rows + 7) & ~7, 8);           // the first tile waits for this: spare it the division
    const int pieces = (rows + most - 1) / most;
    return max(((rows + pieces - 1) / pieces + 7) & ~7, 8);
}
__device__ __forceinline__ int pieces_of(int rows, int height) { return rows <= height ? rows > 0 : (rows + height - 1) / height; }

__device__ __forceinline__ int tiles_across(const Shape& e, int columns) { return (e.cols + columns - 1) / columns; }

// Tiles of group g, in the upper half for the busy queue, in the lower half for the lean one.
__device__ __forceinline__ u64 count_tiles(const Problem& p, Schedule& s, int g, int swapped, int most, int columns, int busy_rows) {
    i64 start = 0, end = 0;
    if (p.jagged != JAG_NONE) jagged_span(p, g, start, end);
    else if (p.valid) end = valid_rows(p, g);
    s.start[g] = int(start), s.length[g] = int(end - start);
    const Shape e = group_extents(p, g, swapped, int(start), int(end - start));
    if (RAGGED_K && PLAIN && e.k == 0) return 0;      // zero_idle_groups
    const u64 tiles = u64(pieces_of(e.rows, piece_rows(e.rows, most))) * u64(tiles_across(e, columns));
    return (RAGGED_K ? e.k >= BUSY_K : e.rows >= busy_rows) ? tiles << 32 : tiles;
}

__device__ __forceinline__ u64 warp_running_sum(u64 mine) {
    u64 sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u64 other = __shfl_up_sync(~0u, sum, d);
        if ((threadIdx.x & 31) >= d) sum += other;
    }
    return sum;
}

// All threads of the block: tile counts of all groups, and their running sums. The caller synchronises. Kept short, one copy
// of everything: a launch that follows another kernel finds none of this code in the caches.
__device__ __forceinline__ void build_schedule(const Problem& p, Schedule& s, int swapped, int most, int columns, int busy_rows) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, warps = blockDim.x >> 5;
    const bool alone = p.groups <= 32;                          // one warp does it alone
    if (alone && warp != 0) return;
    u64 all = 0;
#pragma unroll 1
    for (int base = 0; base < p.groups; base += blockDim.x) {
        const int g = base + tid;
        const u64 mine = g < p.groups ? count_tiles(p, s, g, swapped, most, columns, busy_rows) : 0;
        const u64 sum = warp_running_sum(mine);
        u64 before = all + sum - mine, these = __shfl_sync(~0u, sum, 31);
        if (!alone) {
            if (lane == 31) s.warp_sum[warp] = sum;
            __syncthreads();
            const u64 upto = warp_running_sum(lane < warps ? s.warp_sum[lane] : 0);
            const u64 lower = __shfl_sync(~0u, upto, max(warp - 1, 0));
            before += warp > 0 ? lower : 0, these = __shfl_sync(~0u, upto, 31);
            __syncthreads();                                    // all have read the sums
        }
        if (g < p.groups) s.busy[g] = int(before >> 32), s.lean[g] = int(before & 0xFFFFFFFFu);
        all += these;
    }
    if (tid == 0) s.busy_all = int(all >> 32), s.lean_all = int(all & 0xFFFFFFFFu), s.total = s.busy_all + s.lean_all;
}

// The last group whose first tile is at or before `tile`.
__device__ __forceinline__ int find_group(const int* first_tile, int groups, int tile) {
    int low = 0, high = groups;
    while (high - low > 1) {
        const int mid = (low + high) >> 1;
        if (first_tile[mid] <= tile) low = mid;
        else high = mid;
    }
    return low;
}

// Rows that each block of a cluster loads at once from a list's matrix; as arguments.list_box.
__device__ __forceinline__ int list_box(int rows, int most) {
    return (piece_rows(rows, most) / 8 + CLUSTER - 1) / CLUSTER * 8;
}

// Tile `t` of all is which one of the lean queue, or of the busy one? Where there are both kinds, lean ones are spread evenly,
// but as many as run at once are kept for the end: they are short, so the clusters stop at about the same time.
__device__ __forceinline__ int place_in_queue(const Schedule& s, int t, bool& lean) {
    lean = s.busy_all == 0;
    if (s.busy_all == 0 || s.lean_all == 0) return t;           // spare the division
    const int kept = min(s.lean_all, int(gridDim.x) / CLUSTER), mixed = s.total - kept, spread = s.lean_all - kept;
    lean = true;
    if (t >= mixed) return s.lean_all - (s.total - t);
    const u64 share = u64(t) * spread;
    const int before = int(share / mixed);                      // lean ones among the first t
    lean = int(share - u64(before) * mixed) + spread >= mixed;  // one more among the first t + 1
    return lean ? before : t - before;
}

__device__ __forceinline__ Tile decode(const Problem& p, const Schedule& s, int t, int swapped, int most, int columns) {
    bool lean;
    const int index = place_in_queue(s, t, lean);
    const int* const queue = lean ? s.lean : s.busy;
    const int group = find_group(queue, p.groups, index), local = index - queue[group];
    const Shape e = group_extents(p, group, swapped, s.start[group], s.length[group]);
    const int height = piece_rows(e.rows, most), pieces = pieces_of(e.rows, height), across = tiles_across(e, columns);
    int piece = 0, column = local;
    if (pieces > 1) {
        const int band = local / (BAND * across), rest = local - band * BAND * across, in_band = min(BAND, pieces - band * BAND);
        piece = band * BAND + rest % in_band, column = rest / in_band;
    }
    Tile r;
    r.row0 = piece * height, r.rows = min(height, e.rows - r.row0);
    r.col0 = column * columns;
#if SPLIT_ROWS
    const bool halves = true;
#else
    const bool halves = HALVES_LAST && !p.table && e.cols - r.col0 <= columns / CLUSTER;
#endif
    r.group = group | (pieces == 1 && !halves ? ONCE : 0) | (halves ? HALVES : 0);
    r.n = (max(r.rows, 0) + 7) & ~7;
    const bool along_rows = p.jagged == JAG_M || p.jagged == JAG_N;
    r.x_row = r.row0 + (along_rows && !JAGGED_W ? s.start[group] - e.lead : 0);
    r.extra = p.jagged == JAG_K || JAGGED_W ? s.start[group] : p.table ? list_box(e.rows, most) : e.lead;
    r.k_len = p.read_ab ? e.k : 0;
    return r;
}
