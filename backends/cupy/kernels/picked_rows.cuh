// Rows that are picked by index, on their way into the stages of hopper.cu. Where k is contiguous in them, 64 of k of a row are
// one line of 128 bytes; where rows are tokens of a jagged k, 64 columns of a row are. An index that means no row gives a line
// of zeros, and so do the up to 7 rows past a piece's end, and tokens past a group's.
#pragma once
#include "load.cuh"

static_assert(CLUSTER <= 2 && !(CLUSTER == 2 && PICKS_W), "copies reach no other block: a cluster's blocks have rows of their own, and share weights");

#if RAGGED_K
// Two warps copy 16 bytes per lane, each half of a stage's 64 tokens; the swizzle is done by the address. PICKS_W: they are rows
// of the weight side, and the first warp also says when the next tile is wanted, as load_weights does.
__device__ __forceinline__ void copy_picked_tokens(const Given& p, const Launch& l, Shared& s, u32 stages, int which) {
    constexpr int AHEAD = 8;
    const Fused& f = p.fused;
    const int lane = threadIdx.x & 31, chunk = lane & 7, line = which * 32 + (lane >> 3);
    const bool of_a = PICKS_W == (l.swapped != 0);
    const char* const base = of_a ? p.a.ptr : p.b.ptr;
    const i64 pitch = (of_a ? p.a.col : p.b.row) * 2, columns = of_a ? p.m : p.n, extent = of_a ? f.a_extent : f.b_extent;
    const void* const rows = of_a ? f.a_rows : f.b_rows;
    const int is64 = of_a ? f.a64 : f.b64;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        const i64 first = (PICKS_W ? t.col0 : t.x_row) + chunk * 8;
        const int left = int(max64(min64(columns - first, 1024), 0)), wide = PICKS_W ? COLUMNS / 64 : (t.n + 63) / 64;
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        const auto picked_at = [&](int k) { return k < t.k_len ? int(picked_row(rows, is64, t.extra + k, extent)) : -1; };
        const int ask_at = PICKS_W && which == 0 ? max(blocks - AHEAD, 0) : -1;
        if (PICKS_W && which == 0 && blocks == 0 && elected()) barrier_arrive_here(shared_address(&s.ask));
        const u32 bytes = stage_bytes(t);
        if (blocks > 0) ring.fit(bytes);
        int coming = picked_at(which * 32 + lane);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            const int picked = coming;
            coming = picked_at((kb + 1) * BK + which * 32 + lane);      // asked early, used late
            const u32 to = stages + ring.at + (PICKS_W ? 0 : W_BYTES) + line * LINE_BYTES;
            room.take(s, s.begins[which ? 2 : PICKS_W ? 0 : 1], ring, bytes);
            int found[8];                                   // all numbers first: a copy is a barrier to the compiler
#pragma unroll
            for (int i = 0; i < 8; ++i) found[i] = __shfl_sync(~0u, picked, i * 4 + (lane >> 3));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const char* const from = base + max(found[i], 0) * pitch + first * 2;
                const u32 at = to + i * 4 * LINE_BYTES + ((chunk ^ ((line + i * 4) & 7)) << 4);
#pragma unroll
                for (int b = 0; b < (PICKS_W ? COLUMNS : ROWS + 63) / 64; ++b) {
                    const int count = found[i] < 0 ? 0 : max(min(left - b * 64, 8), 0) * 2;
                    if (b < wide) copy_async(at + b * BLOCK, count ? from + b * LINE_BYTES : base, count);
                }
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
            if (kb == ask_at && lane == 0) barrier_arrive_here(shared_address(&s.ask));
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}
#else
// A row's number, or -1.
__device__ __forceinline__ int picked_of(const Given& p, const Tile& t, int row) {
    const Fused& f = p.fused;
    return row < t.rows ? int(picked_row(f.a_rows, f.a64, t.x_row + row, f.a_extent)) : -1;
}

// Two warps copy 16 bytes per lane, each four of eight rows; the swizzle is done by the address. Their
// numbers wait in shared memory, of which each lane reads what its own warp wrote: there are too many for registers.
__device__ __forceinline__ void copy_picked_rows(const Given& p, Shared& s, u32 stages, int which) {
    constexpr int BATCH = 8;
    const int lane = threadIdx.x & 31, chunk = lane & 7, line = which * 4 + (lane >> 3);
    const i64 pitch = p.a.row * 2;
    const u32 place = W_BYTES + line * LINE_BYTES + ((chunk ^ line) << 4);
    const int* const picked = s.picked + line;               // of every eighth row
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        __syncwarp();                                       // the numbers of the tile before have been read
#pragma unroll 1
        for (int i = lane; i < t.n / 2; i += 32) {
            const int row = (i >> 2) * 8 + which * 4 + (i & 3);
            s.picked[row] = picked_of(p, t, row);
        }
        __syncwarp();
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        const u32 bytes = stage_bytes(t);
        if (blocks > 0) ring.fit(bytes);
        const char* from = p.a.ptr + chunk * 16;
        int left = t.k_len - chunk * 8;
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes), from += LINE_BYTES, left -= BK) {
            const u32 to = stages + ring.at + place;
            const int count = max(min(left, 8), 0) * 2;
            room.take(s, s.begins[1 + which], ring, bytes);
#pragma unroll 1
            for (int r = 0; r < t.n; r += 8 * BATCH) {      // all numbers first: a copy is a barrier to the compiler
                int found[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) found[i] = picked[min(r + i * 8, ROWS - 8)];
#pragma unroll
                for (int i = 0; i < BATCH; ++i)             // what does not exist reads no bytes of the first row
                    if (r + i * 8 < t.n) copy_async(to + (r + i * 8) * LINE_BYTES, from + max(found[i], 0) * pitch, found[i] < 0 ? 0 : count);
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}
#endif
